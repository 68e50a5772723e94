"""Puts a fleet together for its controller: the stream, its pool of workers and where its live files are.

Called by `submit` for a fleet that starts and by `takeover` for one that goes on; it starts nothing.
"""

import os
from pathlib import Path
from typing import Any

from evalops.fleet.fleet import Fleet, Plan
from evalops.fleet.ledger import Ledger
from evalops.fleet.request import Request, workers_of
from evalops.fleet.stream import EventStream
from evalops.fleet.view import ProgressLine
from evalops.fleet.workers import LocalPool, Pool, default_slots
from evalops.settings import Settings
from evalworker.contract.documents import Control, Lane, Manifest, total_samples
from evalworker.storage import Storage


def fleet_folder(fleet_id: str) -> Path:
    """Where the controller keeps a fleet's live files on its own disk."""
    return Path("logs", "fleet", fleet_id).absolute()


def fleet_of(
    settings: Settings,
    storage: Storage,
    request: Request,
    manifest: Manifest,
    control: Control,
    etag: str,
    ledger: Ledger,
    lane: Lane,
    pool: Pool | None = None,
) -> Fleet:
    """The fleet as a controller needs it. `pool`: in place of the one that its backend has."""
    folder = fleet_folder(manifest.fleet_id)
    view = ProgressLine(quiet=request.quiet)
    tell = None
    if manifest.machines is not None:
        from evalops.ec2 import backend

        tell = backend.teller(manifest.machines, view.note)
        pool = pool or backend.pool(manifest, manifest.machines, control, lane, storage, view.note)
    if pool is None:
        slots = request.slots or default_slots(min(workers_of(request, manifest), max(1, len(manifest.jobs))))
        work = Path(manifest.work_dir or folder / "work")
        pool = LocalPool(settings.root, manifest.fleet_id, lane.name, work, slots, os.environ)
    return Fleet(
        manifest=manifest,
        control=control,
        control_etag=etag,
        storage=storage,
        lane=lane,
        ledger=ledger,
        stream=EventStream(storage, manifest.fleet_id, folder / "events.jsonl"),
        pool=pool,
        view=view,
        plan=Plan(workers=workers_of(request, manifest), replacements=max(10, workers_of(request, manifest))),
        tell=tell,
    )


def fleet_start(fleet: Fleet, workers: int) -> dict[str, Any]:
    """The first event of a round."""
    jobs = fleet.manifest.jobs
    return {
        "type": "fleet_start",
        "expected": len(fleet.ledger.jobs),
        "workers": workers,
        "total_samples": total_samples(jobs),
        "tasks": list(dict.fromkeys(spec.name for spec in jobs)),
        "models": list(dict.fromkeys(spec.model for spec in jobs)),
        "backend": fleet.manifest.backend,
        "resumed": fleet.control.round > 1,
        "round": fleet.control.round,
    }
