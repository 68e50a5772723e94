"""Everything that is known of a run, gathered: its logs, plan, owner, and the jobs that have no log yet.

Called by status, retries and the report. A few listings and small documents, then the headers; one that cannot be read
is said, and the rest goes on.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

from evalops.batch import living
from evalops.fleet.ownership import runs_on
from evalops.logs import cost
from evalops.logs import rows as state
from evalops.logs.cache import FactsCache
from evalops.logs.choose import Chosen, choose
from evalops.logs.events import Progress
from evalops.logs.places import Place
from evalops.logs.promote import Promoted
from evalops.logs.reading import THREADS, Directory, Listed, list_directory, read_all
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, Control, JobDone, JobSpec, Manifest, wholes
from evalworker.contract.wire import Unreadable, Wire, now
from evalworker.storage import Denied, Info, Missing, Storage, StorageError

D = TypeVar("D", bound=Wire)


@dataclass(frozen=True)
class Current:
    """What a run's living owner runs now.

    Attributes:
        round: job ends of older rounds are not its; None where it records none (`ies run local`).
        jobs: their ids, None for all of the run.
        in_place: one `eval_set` writes into the run's own log directory, since `begun`.
    """

    round: int | None
    jobs: frozenset[str] | None = None
    in_place: bool = False
    begun: datetime | None = None


@dataclass(frozen=True)
class Survey:
    """A run as it is now. `current`: what its owner runs, None when none is known to live."""

    place: Place
    directory: Directory
    chosen: list[Chosen]
    rows: list[state.Row]
    around: state.Surroundings
    manifest: Manifest | None
    control: Control | None
    current: Current | None
    problems: list[str]

    @property
    def headline(self) -> str:
        """The line on top of the table."""
        return state.headline(self.rows, self.around, self.place.run_id)


def survey(
    place: Place,
    price_of: cost.PriceOf,
    *,
    cached: bool = True,
    clock: Callable[[], datetime] = now,
    started: Callable[[int], Callable[[], None]] = lambda count: lambda: None,
) -> Survey:
    """Look at a run, or at a log directory without one.

    Args:
        price_of: a model's prices.
        cached: whether headers that were read before may be taken from this machine's memory.
        started: called with the number of logs, returns what is called for each that was read (a progress bar).
    """
    problems: list[str] = []
    directory = list_directory(place.storage, place.prefix)
    cache = FactsCache(place.url) if cached else None
    logs = [*directory.logs, *_promoted(place, directory, problems)]
    listed = read_all(place.storage, logs, cache, started(len(logs)))
    manifest = control = None
    jobs: list[state.Job] = []
    if place.run_id is not None:
        manifest = document(place.storage, layout.manifest(place.run_id), Manifest, problems)
        control = document(place.storage, layout.control(place.run_id), Control, problems)
    alive, owner = state.owner(control, clock(), process_alive(control.controller) if control else None)
    chosen = choose(listed)
    current: Current | None = None
    if manifest is not None and place.run_id is not None and not alive and _open_on_batch(manifest, chosen):
        on_batch = living.on_batch(place.storage, place.run_id)
        alive, owner = (alive, owner) if on_batch.alive is None else (on_batch.alive, on_batch.clause)
        current = _of_batch(manifest, on_batch.round) if on_batch.alive and on_batch.round else None
    unattended = control is not None and not alive and _runs_on(place.storage, control, problems)
    if current is None and control is not None and (alive or unattended):
        here = control.begun is not None
        current = Current(None if here else control.round, in_place=here, begun=control.begun or _begun(control))
    if place.run_id is not None and manifest is not None:
        jobs = _jobs(place.storage, place.run_id, manifest, control, current, chosen, problems)
    around = state.Surroundings(
        now=clock(),
        alive=None if unattended else alive,  # its workers write, or not: the logs' ages tell
        owner=owner,
        unattended=unattended,
        planned=jobs,
        writes=_writes(directory.others),
        backend=manifest.backend if manifest else "",
    )
    rows = state.rows(chosen, around, price_of)
    return Survey(place, directory, chosen, rows, around, manifest, control, current, problems)


def _promoted(place: Place, directory: Directory, problems: list[str]) -> list[Info]:
    """The run's logs that were promoted away: a mark in the directory names each. Where there is none, this asks for nothing."""
    if place.run_id is None or place.prefix != layout.working(place.run_id):
        return []  # the keys of a plain directory are not the root's
    there = {f"{info.key}{layout.PROMOTED_SUFFIX}" for info in directory.logs}
    marks = [key for key in directory.others if key.endswith(layout.PROMOTED_SUFFIX) and key not in there]

    def find(key: str) -> Info | None:
        mark = document(place.storage, key, Promoted, problems)
        info = place.storage.head(mark.log) if mark is not None else None
        if mark is not None and info is None:
            problems.append(
                f"{key.removesuffix(layout.PROMOTED_SUFFIX)} was promoted to {mark.log}, which is not there"
            )
        return info

    with ThreadPoolExecutor(THREADS) as pool:
        return [info for info in pool.map(find, marks) if info is not None]


def _runs_on(storage: Storage, control: Control, problems: list[str]) -> bool:
    try:
        return runs_on(storage, control)
    except StorageError as error:
        problems.append(str(error))
        return False


def _open_on_batch(manifest: Manifest, chosen: list[Chosen]) -> bool:
    """Whether a run went to AWS Batch and its logs alone do not tell that it is over: what failed may be running again."""
    return manifest.backend == "batch" and not all(map(_succeeded, state.match(wholes(manifest.jobs), chosen)))


def _succeeded(one: Chosen | None) -> bool:
    return one is not None and one.log.facts.status == "success" and not one.log.facts.hollow


def _of_batch(manifest: Manifest, round_: BatchRound) -> Current:
    jobs = frozenset(manifest.jobs[place].job_id for place in round_.jobs)
    return Current(round_.number, jobs, in_place=not round_.array, begun=round_.begun)


def document(storage: Storage, key: str, kind: type[D], problems: list[str]) -> D | None:
    """A document, None when there is none; what is wrong with it goes to `problems`. A 403 is not a 404."""
    try:
        return kind.from_json(storage.get(key).body)
    except Missing:
        return None
    except Denied as error:
        problems.append(str(error))
    except Unreadable as error:
        problems.append(f"{storage.url(key)} cannot be read: {error}")
    return None


def process_alive(controller: str) -> bool | None:
    """Whether the owner's process lives, when it is one of this machine's (`<host>:<pid>`); None when that is not known."""
    host, _, pid = controller.rpartition(":")
    if not pid.isdigit() or host != socket.gethostname():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return None  # a process of that number lives, but it may be another by now: the heartbeat decides


def _writes(others: Mapping[str, Info]) -> dict[str, datetime]:
    """When something was last written into a log's shared buffer (`.buffer/<its name>/` beside it): the log's key → the time."""
    found: dict[str, datetime] = {}
    for key, info in others.items():
        parts = key.split("/")
        at = parts.index(".buffer") if ".buffer" in parts else len(parts)
        if at + 2 < len(parts):
            log = "/".join([*parts[:at], f"{parts[at + 1]}.eval"])
            found[log] = max(found.get(log, info.modified), info.modified)
    return found


def _jobs(
    storage: Storage,
    run_id: str,
    manifest: Manifest,
    control: Control | None,
    current: Current | None,
    chosen: list[Chosen],
    problems: list[str],
) -> list[state.Job]:
    """The planned jobs; of those that have no log, or are run again, what the run's own objects say of them."""
    specs = wholes(manifest.jobs)
    logs = {spec.job_id: one for spec, one in zip(specs, state.match(specs, chosen), strict=True) if one is not None}
    failed = {job_id for job_id, one in logs.items() if not _succeeded(one)} if current is not None else set()
    jobs = [state.Job(spec) for spec in specs]
    if len(logs) == len(specs) and not failed:
        return jobs
    try:
        ends = layout.job_ends(run_id, (info.key for info in storage.list(f"{run_id}/")))
        progress = Progress()
        if manifest.backend in ("local", "ec2") and len(logs) < len(specs):
            progress = Progress.now(storage, run_id, control.round if control else None, problems)
        told: list[state.Job] = []
        open_: dict[int, state.Job] = {}
        for place, job in enumerate(jobs):
            job_id = job.spec.job_id
            log, end = logs.get(job_id), ends.get(job_id)
            if current is not None and (log is None or job_id in failed) and _again(job_id, log, current, end):
                job, end = replace(job, again=True, going=_going(log, current)), None
            if end is not None and (log is None or (job_id in failed and log.log.facts.status == "started")):
                job = _end(storage, run_id, job, end, progress, problems)
            if job.ended is None and (log is None or (job.again and current is not None and not current.in_place)):
                open_[place] = job
            told.append(job)
        kept = _unfinished(storage, run_id, list(open_.values()), current)
        for place, job in open_.items():
            told[place] = _tell(job, kept, progress, bare=job.spec.job_id not in logs)
    except StorageError as error:
        problems.append(str(error))
        return jobs
    return told


def _again(job_id: str, log: Chosen | None, current: Current, end: int | None) -> bool:
    """Whether a job that has not succeeded is the owner's to run, and what is there of its end is older than this round."""
    if current.jobs is not None and job_id not in current.jobs:
        return False
    if log is not None and current.in_place and _since(log.log, current):
        return False
    return current.round is None or (end or 0) < current.round


def _going(log: Chosen | None, current: Current) -> bool:
    """Whether an `eval_set` in the run's directory has begun with it: the new log counts once it is as far as the old one."""
    logs = log.superseded if log is not None and current.in_place else ()
    return any(one.facts.status == "started" and _since(one, current) for one in logs)


def _since(log: Listed, current: Current) -> bool:
    """Whether a log is of this round: Inspect gives whole seconds."""
    created = log.facts.created
    return current.begun is None or created is None or created >= current.begun.replace(microsecond=0)


def _begun(control: Control) -> datetime | None:
    """When a fleet's round began, as far as its deadline tells."""
    given = control.limits.deadline_s
    return None if given is None else control.deadline - timedelta(seconds=given)


def _end(
    storage: Storage, run_id: str, job: state.Job, round_: int, progress: Progress, problems: list[str]
) -> state.Job:
    """A job that ended in this round, with how it did."""
    spec = job.spec
    done = document(storage, layout.job_done(run_id, spec.job_id, round_), JobDone, problems)
    if done is None:
        return job
    said = done.attempt_done
    why = said.failure_category if said.failure_category != said.status else said.error_summary
    unmerged = progress.together(spec.merges) if said.log is None else None
    counts = unmerged or said.samples
    ended = f"{said.status}: {why or said.error_summary or 'no log'}"
    return replace(job, ended=ended, completed=counts.completed, errored=counts.errored)


def _tell(job: state.Job, kept: Mapping[str, Chosen], progress: Progress, *, bare: bool) -> state.Job:
    """What is known of a job that has not ended, beside its log. `bare`: it has none."""
    spec = job.spec
    shards = [kept[shard] for shard in spec.merges if shard in kept]
    going = job.going or any(one.log.facts.status == "started" for one in shards)
    job = replace(job, partial=kept.get(spec.job_id), going=going)
    seen = progress.together([spec.job_id, *spec.merges]) if bare else None
    return replace(job, completed=seen.completed, errored=seen.errored, last=seen.last) if seen else job


def _unfinished(storage: Storage, run_id: str, jobs: Sequence[state.Job], current: Current | None) -> dict[str, Chosen]:
    """The unfinished logs that workers keep of these jobs and their shards, by job; of what is run again, those of this round.

    One listing for all of them.
    """
    if not jobs:
        return {}
    since: dict[str, datetime | None] = {}
    for job in jobs:
        begun = current.begun if current is not None and job.again else None
        since |= dict.fromkeys([job.spec.job_id, *job.spec.merges], begun)
    prefix = layout.partials(run_id)
    logs: dict[str, list[Info]] = {}
    for info in list_directory(storage, prefix).logs:
        job_id = info.key.removeprefix(prefix).partition("/")[0]
        if job_id in since and ((begun := since[job_id]) is None or info.modified >= begun):
            logs.setdefault(job_id, []).append(info)
    read = iter(read_all(storage, [info for some in logs.values() for info in some]))
    listed = {job_id: list(islice(read, len(some))) for job_id, some in logs.items()}
    return {job_id: best[0] for job_id, some in listed.items() if (best := choose(some))}


def away(found: Survey) -> set[str]:
    """The ids of jobs whose logs were promoted out of the run's directory: what runs there would run them again."""
    done = (row for row in found.rows if row.state in state.GOOD and layout.is_promoted(row.log or ""))
    return {row.job_id for row in done if row.job_id is not None}


def promoted(found: Survey, jobs: Sequence[JobSpec]) -> str:
    """Those of these jobs that are `away`, as the start of a sentence that says why they are not to run; "" for none."""
    gone = away(found)
    again = [job for job in jobs if job.job_id in gone]
    if not again:
        return ""
    more = f" and {len(again) - 1} more" if len(again) > 1 else ""
    return f"{again[0].task} with {again[0].model}{more}: it has completed, and its log was promoted, so "


def as_json(found: Survey) -> dict[str, Any]:
    """The survey for programs."""
    return {
        "run_id": found.place.run_id,
        "log_dir": found.place.url,
        "headline": found.headline,
        "rows": [row.as_json() for row in found.rows],
        "problems": found.problems,
    }
