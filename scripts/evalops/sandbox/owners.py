"""Whether the runs whose sandboxes are on this machine live: by its processes, then by what the root says of them.

Called by `ies sandbox cleanup`. A worker here settles it for its run, of whatever root; the root, which may be on AWS, is asked only
for marks that no worker here explains.
"""

from collections.abc import Callable, Iterable

from evalops.fleet.look import fleet_ids
from evalops.fleet.workers import fleets_here
from evalops.logs.local_run import last_seen, living_owner
from evalops.ui import note
from evalworker.contract.labels import run_mark
from evalworker.contract.wire import Unreadable
from evalworker.storage import Storage, StorageError


def fates(marks: Iterable[str], run_id: str | None, root: Callable[[], Storage]) -> dict[str, str | None]:
    """Of each mark, a clause that says why its run lives, None if it is over. What cannot be found out is left out.

    Args:
        run_id: the run that all marks are of, if it is known.
        root: opens the root.
    """
    found: dict[str, str | None] = {}
    for fleet_id, pid in fleets_here().items():
        found[run_mark(fleet_id)] = f"the run {fleet_id} has a worker on this machine (process {pid})"
    if unclear := set(marks) - found.keys():
        try:
            storage = root()
            for fleet_id in [run_id] if run_id else fleet_ids(storage):
                if run_mark(fleet_id) in unclear:
                    found |= _fate(storage, fleet_id)
        except StorageError as error:
            note(f"what has become of the other runs is not known: {error}")
    return found


def _fate(storage: Storage, run_id: str) -> dict[str, str | None]:
    try:
        seen = last_seen(storage, run_id)
    except Unreadable as error:
        note(f"the control document of {run_id} cannot be read: {error}")
        return {}
    if seen is None:
        return {}
    busy = living_owner(storage, run_id, seen)
    return {run_mark(run_id): busy and f"the run {run_id} is not over: {busy}"}
