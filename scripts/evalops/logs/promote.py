"""Moving a run's dashboard files to where the dashboard reads them: first a plan, then steps that may be cut off anywhere.

Called by `ies promote` and by what publishes finished runs. For each log the zip is copied first and the JSON written last; each
is verified by size and checksum before its source goes, and the source JSON goes last of all: while it is there, the move is not
finished, and the same call again finishes it. Nothing else remembers progress. Before a `.eval` goes, a mark in its place says where
it is, so that its run is not taken for one that has never been run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evalops.logs.places import Place
from evalworker.contract import layout
from evalworker.contract.ids import BadId
from evalworker.contract.jsonio import dump_bytes
from evalworker.contract.wire import Wire
from evalworker.storage import Info, Missing, Storage, StorageError

PIECE_BYTES = 8 * 1024 * 1024

Kind = Literal["copy", "write", "rename", "delete"]


class PromoteError(RuntimeError):
    """A file that cannot be promoted; the text is one sentence."""


class Promoted(Wire):
    """The mark in the place of a working log that was promoted: the log's key now."""

    log: str


@dataclass(frozen=True)
class Step:
    """One change: of `source` (a key) to `target`; `body` is what is written. Doing it again changes nothing."""

    kind: Kind
    source: str
    target: str = ""
    body: bytes = b""


@dataclass(frozen=True)
class Move:
    """What promoting one log means: its steps in order, and other runs that stand in its place."""

    name: str
    task: str
    model: str
    target: str
    steps: tuple[Step, ...]
    instead_of: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "task": self.task,
            "model": self.model,
            "target": self.target,
            "steps": [{"kind": step.kind, "source": step.source, "target": step.target} for step in self.steps],
            "instead_of": list(self.instead_of),
        }


def plan(place: Place, environment: str, *, with_logs: bool = False) -> tuple[list[Move], list[Exception]]:
    """The moves of a run's summarised logs, and what is wrong with some files: one sentence each, StorageErrors may pass by themselves.

    What is already in the environment needs no move, so a second plan is empty. Files come from the working logs; for `prod`
    those that were staged come too.
    """
    assert place.run_id is not None
    storage = place.storage
    moves: list[Move] = []
    problems: list[Exception] = []
    for found in _sources(place, environment):
        names = {info.key for info in found}
        for info in found:
            if not info.key.endswith(f".eval{layout.DASHBOARD_SUFFIX}"):
                continue
            try:
                moves.append(_move(storage, info.key, names, environment, place.run_id, with_logs))
            except (PromoteError, BadId, StorageError) as error:
                problems.append(error)
    return moves, problems


def _sources(place: Place, environment: str) -> Iterable[list[Info]]:
    """The listings that hold files of the run which are not in the environment yet."""
    assert place.run_id is not None
    if environment == "prod":  # first, so that newer working files have the last word
        yield [info for info in place.storage.list(layout.promoted("stage")) if f"/{place.run_id}/" in info.key]
    yield list(place.storage.list(place.prefix))


def _move(storage: Storage, key: str, names: set[str], environment: str, run_id: str, with_logs: bool) -> Move:
    log = key.removesuffix(layout.DASHBOARD_SUFFIX)
    document = _document(storage, key)
    task, model = document["eval"]["task"], document["eval"]["model"]
    prefix = layout.promoted_run(environment, task, model, run_id)
    name = log.rsplit("/", 1)[-1]
    target = prefix + name
    sources: list[str] = []
    if log + layout.ZIP_SUFFIX in names:
        sources.append(log + layout.ZIP_SUFFIX)
    elif not storage.exists(target + layout.ZIP_SUFFIX):
        raise PromoteError(f"there is no {storage.url(log + layout.ZIP_SUFFIX)}; run `ies summarize` again")
    if (moved := _log_to_move(storage, log, target, names, run_id, with_logs)) is not None:
        sources.append(moved)
    steps = [Step("copy", source, prefix + source.rsplit("/", 1)[-1]) for source in sources]
    if moved is not None or storage.exists(target):
        document["location"] = storage.url(target)
    steps.append(Step("write", key, target + layout.DASHBOARD_SUFFIX, dump_bytes(document)))
    others = _others(storage, layout.promoted_pair(environment, task, model), run_id)
    steps += [
        Step("rename", other, other.removesuffix(layout.DASHBOARD_SUFFIX) + layout.REPLACED_SUFFIX) for other in others
    ]
    if moved is not None:
        mark = layout.working(run_id) + name + layout.PROMOTED_SUFFIX
        steps.append(Step("write", moved, mark, Promoted(log=target).to_bytes()))
    steps += [Step("delete", source) for source in (*sources, key)]
    return Move(name, task, model, prefix, tuple(steps), tuple(sorted({other.rsplit("/", 2)[-2] for other in others})))


def _log_to_move(storage: Storage, log: str, target: str, names: set[str], run_id: str, with_logs: bool) -> str | None:
    """The key of the `.eval` that goes along: when it is asked for, and always from where it was promoted to before."""
    if log in names:
        return log if with_logs or not log.startswith(layout.WORKING) else None
    if not with_logs or storage.exists(target):
        return None
    working = layout.working(run_id) + log.rsplit("/", 1)[-1]
    if storage.exists(working):
        return working
    raise PromoteError(f"there is no {storage.url(working)}, so the log cannot go along; leave --with-logs out")


def _document(storage: Storage, key: str) -> dict[str, Any]:
    try:
        document = json.loads(storage.get(key).body)
        if not all(isinstance(document["eval"][name], str) for name in ("task", "model")) or not document["results"]:
            raise KeyError("eval")
    except (ValueError, KeyError, TypeError):
        raise PromoteError(
            f"{storage.url(key)} is no dashboard file; remove it and run `ies summarize` again"
        ) from None
    return document  # type: ignore[no-any-return]


def _others(storage: Storage, pair: str, run_id: str) -> list[str]:
    """Dashboard files of other runs of the same task and model."""
    found = (info.key for info in storage.list(pair) if info.key.endswith(layout.DASHBOARD_SUFFIX))
    return [key for key in found if key[len(pair) :].split("/", 1)[0] != run_id]


def carry_out(
    storage: Storage, moves: Sequence[Move], done: Callable[[Move, Step], None] = lambda move, step: None
) -> None:
    """Do all steps of all moves, in order. Raises PromoteError or StorageError; what was done stays done."""
    for move in moves:
        for step in move.steps:
            _do(storage, step)
            done(move, step)


def _do(storage: Storage, step: Step) -> None:
    if step.kind == "copy":
        _copy(storage, step.source, step.target)
    elif step.kind == "write":
        storage.put(step.target, step.body)
        if storage.get(step.target).body != step.body:
            raise PromoteError(f"{storage.url(step.target)} does not give back what was written to it")
    elif step.kind == "rename":
        try:
            _copy(storage, step.source, step.target)
        except Missing:
            return  # done by a run that was cut off
        storage.delete(step.source)
    else:
        storage.delete(step.source)


def _copy(storage: Storage, source: str, target: str) -> None:
    """Copy and verify; a target that is the same already is left alone."""
    there = storage.head(target)
    if there is not None and same(storage, source, target):
        return
    storage.copy(source, target)
    if not same(storage, source, target):
        raise PromoteError(f"{storage.url(target)} is not the same as {storage.url(source)} after the copy; try again")


def same(storage: Storage, source: str, target: str) -> bool:
    """Whether two objects have the same size and checksum.

    S3's tag is the checksum of what was sent in one piece or in pieces of one size, which our copies are; where the tags differ (or
    are none, as for files) both are read and hashed. Raises Missing.
    """
    one, other = storage.head(source), storage.head(target)
    if one is None or other is None:
        raise Missing(f"there is no {storage.url(source if one is None else target)}")
    if one.size != other.size:
        return False
    return one.etag == other.etag or _digest(storage, one) == _digest(storage, other)


def _digest(storage: Storage, info: Info) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, info.size, PIECE_BYTES):
        digest.update(storage.read_range(info.key, start, min(PIECE_BYTES, info.size - start)))
    return digest.digest()
