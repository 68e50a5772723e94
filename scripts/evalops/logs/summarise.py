"""From a run's logs to the dashboard's files: one JSON and one zip beside each log that may be published.

Called by `ies summarize` and by what publishes finished runs. Each log stands for itself: what is refused is said with its reason and the
rest goes on. A second run writes nothing that is there already.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evalops.logs import dashboard, packing
from evalops.logs.archive import BadArchive
from evalops.logs.choose import Chosen
from evalops.logs.dashboard import Refusal
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.reading import Directory, read_header
from evalworker.contract import layout
from evalworker.storage import Info, Missing, Storage, StorageError

Outcome = Literal["written", "unchanged", "refused"]


@dataclass(frozen=True)
class Result:
    """What became of one log."""

    log: str
    task: str
    model: str
    outcome: Outcome
    refusals: tuple[Refusal, ...] = ()
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "log": self.log,
            "task": self.task,
            "model": self.model,
            "outcome": self.outcome,
            "refusals": [{"kind": item.kind, "text": item.text} for item in self.refusals],
            "remarks": list(self.remarks),
        }


@dataclass
class Work:
    """What summarising needs beside the logs."""

    storage: Storage
    models: Models
    evaluations: Evaluations
    forced: Collection[str] = ()
    max_error_rate: float = dashboard.MAX_ERROR_RATE
    read: Callable[[int], None] = field(default=lambda size: None)


def summarise(work: Work, directory: Directory, chosen: Sequence[Chosen]) -> list[Result]:
    """Write what each experiment's log in the directory deserves, and remove the files of logs that no longer count."""
    here = {info.key for info in directory.logs}
    results = [_one(work, directory, one) for one in chosen if one.log.info.key in here]  # the others are promoted
    counting = {one.log.info.key for one in chosen}
    for info in directory.logs:
        if info.key not in counting:
            _remove(work.storage, directory, info.key)
    return results


def derived(directory: Directory) -> list[str]:
    """The keys of all files that summarising made: what has to go before Inspect's `eval_set` may use the directory."""
    return [key for key in directory.others if layout.is_derived(key)]


def _one(work: Work, directory: Directory, one: Chosen) -> Result:
    facts, info = one.log.facts, one.log.info
    found = dashboard.refusals(facts, work.max_error_rate)
    standing = [item for item in found if item.kind not in work.forced or item.kind in dashboard.FINAL]
    ready: dashboard.Ready | None = None
    if not standing:
        try:
            log = read_header(work.storage, info)
            built = dashboard.build(
                log, facts, work.storage.url(info.key), work.models, work.evaluations, forced=work.forced
            )
        except (BadArchive, ValueError, KeyError) as error:
            built = [Refusal("unreadable", " ".join(str(error).split())[:300])]
        except StorageError as error:
            built = [Refusal("storage", str(error))]
        if isinstance(built, list):
            standing = built
        else:
            ready = built
    name, task, model = one.log.name, facts.task, facts.model
    if ready is None:
        _remove(work.storage, directory, info.key)
        return Result(name, task, model, "refused", tuple(standing))
    remarks = (*(f"forced: {item.text}" for item in found), *ready.remarks)
    try:
        changed = _write(work, directory, info, ready.body, one)
    except (packing.SourceChanged, BadArchive) as error:
        _remove(work.storage, directory, info.key)
        return Result(name, task, model, "refused", (Refusal("unreadable", str(error)),))
    except StorageError as error:
        return Result(name, task, model, "refused", (Refusal("storage", str(error)),))
    return Result(name, task, model, "written" if changed else "unchanged", (), remarks)


def _write(work: Work, directory: Directory, info: Info, body: bytes, one: Chosen) -> bool:
    """The zip first: a dashboard file that is there has its download. True when anything was written."""
    storage = work.storage
    target = info.key + layout.ZIP_SUFFIX
    changed = False
    if not packing.up_to_date(storage, directory.others.get(target), info):
        packing.pack(storage, info, target, one.log.facts.completed_at or one.log.facts.created, work.read)
        changed = True
    target = info.key + layout.DASHBOARD_SUFFIX
    try:
        there = storage.get(target).body if target in directory.others else None
    except Missing:
        there = None
    if there != body:
        storage.put(target, body)
        changed = True
    return changed


def _remove(storage: Storage, directory: Directory, log: str) -> None:
    """The files of a log that is not to be published (any more), so that promote cannot take stale ones. JSON first."""
    for key in (log + layout.DASHBOARD_SUFFIX, log + layout.ZIP_SUFFIX):
        if key in directory.others:
            storage.delete(key)
