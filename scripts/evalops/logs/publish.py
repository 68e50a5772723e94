"""Summarise and promote every run that has finished: what cron does. Quiet when there is nothing to do.

One lock below the root keeps two of them apart, on one machine or on two. A run is looked at again only when its logs have changed:
what was refused once is said once, and a person decides. What only the store refused is tried again each time.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from evalops.logs import promote
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.places import Place, of_run
from evalops.logs.reading import Directory, list_directory
from evalops.logs.runs import run_ids, stamp
from evalops.logs.summarise import Result, Work, summarise
from evalops.logs.survey import Survey, survey
from evalworker.contract import layout
from evalworker.contract.jsonio import canonical
from evalworker.contract.wire import Unreadable, Wire, now
from evalworker.storage import AlreadyExists, Changed, Missing, Storage, StorageError

SETTLED = timedelta(minutes=2)
"""A run whose last write is younger may go on at any moment."""

LOCKED_FOR = timedelta(hours=1)
"""After this a lock's owner is taken for dead; a living one renews it when half of the time has gone."""

RECENT = timedelta(days=30)


class Lock(Wire):
    """Who publishes, until when."""

    owner: str
    until: datetime


class Published(Wire):
    """What a run's logs were when it was looked at last."""

    digest: str


class Busy(RuntimeError):
    """Another one is publishing; the text says who."""


@dataclass
class Outcome:
    """What was done, a line each, and what a person must decide."""

    done: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)


@contextmanager
def lock(storage: Storage, clock: Callable[[], datetime] = now) -> Iterator[Callable[[], None]]:
    """Hold the lock of publishing. Gives what is to be called now and then so that it stays ours; both raise Busy."""
    mine = Lock(owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}", until=clock() + LOCKED_FOR)
    try:
        etag = storage.create(layout.PUBLISH_LOCK, mine.to_bytes())
    except AlreadyExists:
        etag = _take_over(storage, mine, clock)

    def renew() -> None:
        nonlocal mine, etag
        if mine.until - clock() > LOCKED_FOR / 2:
            return
        mine = mine.model_copy(update={"until": clock() + LOCKED_FOR})
        try:
            etag = storage.replace(layout.PUBLISH_LOCK, mine.to_bytes(), etag)
        except (Missing, Changed):
            raise Busy("another one has taken over the lock of publishing") from None

    try:
        yield renew
    finally:
        try:
            if storage.get(layout.PUBLISH_LOCK).etag == etag:
                storage.delete(layout.PUBLISH_LOCK)
        except Missing:
            pass


def _take_over(storage: Storage, mine: Lock, clock: Callable[[], datetime]) -> str:
    try:
        stored = storage.get(layout.PUBLISH_LOCK)
        theirs = Lock.from_json(stored.body)
        if clock() < theirs.until:
            raise Busy(f"{theirs.owner} is publishing, until {theirs.until:%H:%M} UTC at the latest")
        return storage.replace(layout.PUBLISH_LOCK, mine.to_bytes(), stored.etag)
    except Unreadable:
        raise Busy(
            f"the lock {storage.url(layout.PUBLISH_LOCK)} cannot be read; remove it if nobody publishes"
        ) from None
    except (Missing, Changed):
        raise Busy("another one has just begun or ended publishing; try again") from None


def publish_all(
    storage: Storage, models: Models, evaluations: Evaluations, environment: str = "stage", *,
    again: bool = False, replace: bool = False, clock: Callable[[], datetime] = now, renew: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Publish every recent run that has finished and whose logs are not those of the last time.

    `renew` is called now and then; when it raises Busy, the pass ends there.
    `replace`: a newer run takes the place of an older one of the same task and model by itself.
    """
    outcome = Outcome()
    oldest = f"{clock() - RECENT:%Y-%m-%d-%H-%M-%S}"
    for run_id in run_ids(storage):
        if stamp(run_id) < oldest:
            break  # newest first
        work = Work(storage, models, evaluations, read=lambda _: renew())
        try:
            renew()
            _publish(of_run(run_id, storage), work, environment, outcome, again, replace, clock)
        except Busy:
            break  # the other one does the rest
        except (StorageError, promote.PromoteError) as error:
            outcome.todo.append(f"{run_id}: {error}")
    return outcome


def _publish(
    place: Place, work: Work, environment: str, outcome: Outcome, again: bool, replace: bool, clock: Callable[[], datetime]
) -> None:  # fmt: skip
    storage, run_id = place.storage, place.run_id
    assert run_id is not None
    directory = list_directory(storage, place.prefix)
    digest = _digest(directory)
    if not directory.logs or (not again and _last(storage, run_id) == digest) or not _settled(directory, clock()):
        return
    seen = survey(place, work.models.price, clock=clock)
    if not finished(seen):
        return
    results = summarise(work, seen.directory, seen.chosen)
    _say(run_id, results, outcome)
    moves, problems = promote.plan(place, environment)
    blocked = [
        move
        for move in moves
        if move.instead_of and not (replace and all(stamp(old) < stamp(run_id) for old in move.instead_of))
    ]
    going = [move for move in moves if move not in blocked]
    promote.carry_out(storage, going)
    outcome.done += [f"{run_id}: promoted {move.task} {move.model} to {environment}" for move in going]
    outcome.todo += [f"{run_id}: {problem}" for problem in problems]
    outcome.todo += [
        f"{run_id}: {move.task} {move.model}: {', '.join(move.instead_of)} is in {environment} already; "
        f"`ies promote --run-id {run_id} --to {environment} --replace` puts this run in its place"
        for move in blocked
    ]
    store_failed = any(isinstance(problem, StorageError) for problem in problems)
    if store_failed or any(item.kind == "storage" for result in results for item in result.refusals):
        return  # the next pass tries again
    # of the logs that were looked at: one that came meanwhile is the next pass's
    storage.put(layout.published(run_id), Published(digest=_digest(seen.directory)).to_bytes())


def finished(seen: Survey) -> bool:
    """Nobody will write this run's logs any more by itself."""
    live = seen.around.alive is True
    return not live and not any(row.state == "running" for row in seen.rows)


def _settled(directory: Directory, moment: datetime) -> bool:
    return max(info.modified for info in directory.logs) < moment.astimezone(UTC) - SETTLED


def _digest(directory: Directory) -> str:
    return hashlib.sha256(canonical([[info.key, info.etag] for info in directory.logs]).encode("ascii")).hexdigest()[
        :32
    ]


def _last(storage: Storage, run_id: str) -> str | None:
    try:
        return Published.from_json(storage.get(layout.published(run_id)).body).digest
    except (Missing, Unreadable):
        return None


def _say(run_id: str, results: list[Result], outcome: Outcome) -> None:
    for result in results:
        name = f"{run_id}: {result.task or result.log} {result.model}".rstrip()
        if result.outcome == "refused":
            reasons = "; ".join(f"{item.kind}: {item.text}" for item in result.refusals)
            outcome.todo.append(f"{name}: not published ({reasons})")
        elif result.outcome == "written":
            outcome.done.append(f"{name}: summarised")
