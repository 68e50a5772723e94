"""The runs below a root: one delimited listing, and a look into those that are shown.

Called by `ies status list` and by what publishes finished runs.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from evalops.logs.places import Place, of_run
from evalops.logs.rows import bare
from evalops.logs.survey import Survey, survey
from evalworker.contract import layout
from evalworker.contract.ids import BadId, check_run_id
from evalworker.storage import Storage

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Newest:
    """The newest runs, and how many there are."""

    shown: list[Place]
    total: int


@dataclass(frozen=True)
class Glance:
    """A run in one line."""

    run_id: str
    logs: int
    tasks: str
    models: str
    states: str
    counts: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"run_id": self.run_id, "logs": self.logs, "states": self.counts}


def run_ids(storage: Storage) -> list[str]:
    """All runs that have logs, newest first. What is no run id is somebody else's and left out."""
    found = []
    for name in storage.list_dirs(layout.WORKING):
        try:
            found.append(check_run_id(name))
        except BadId:
            continue
    return sorted(found, key=stamp, reverse=True)


def stamp(run_id: str) -> str:
    """When a run was submitted, as text that sorts: the older form's T counts as a dash."""
    return run_id[:19].replace("T", "-") + run_id[19:]


def newest(storage: Storage, number: int) -> Newest:
    """The newest runs; nothing of any run is read."""
    found = run_ids(storage)
    return Newest([of_run(run_id, storage) for run_id in found[:number]], len(found))


def look_at(places: Sequence[Place]) -> list[Glance]:
    """Some runs, each as a line, several at once."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(look, places))


def look(place: Place) -> Glance:
    """One run's headers (remembered by ETag) as a line."""
    seen = survey(place, lambda model: None)
    return glance(place.run_id or "", seen)


def glance(run_id: str, seen: Survey) -> Glance:
    """A survey as one line."""
    counts: Counter[str] = Counter(row.state for row in seen.rows)
    return Glance(
        run_id=run_id,
        logs=len(seen.directory.logs),
        tasks=_some({bare(row.task) for row in seen.rows}),
        models=_some({row.model for row in seen.rows if row.model}),
        states=", ".join(f"{count} {state}" for state, count in counts.most_common()),
        counts=dict(counts),
    )


def _some(names: set[str]) -> str:
    ordered = sorted(names)
    more = f" +{len(ordered) - _NAMES_SHOWN}" if len(ordered) > _NAMES_SHOWN else ""
    return ", ".join(ordered[:_NAMES_SHOWN]) + more
