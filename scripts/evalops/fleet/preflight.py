"""What is checked before a fleet starts or goes on and money is spent; each failure is one sentence.

Called by the commands, in the order in which things are needed. What only EC2 needs is checked by `evalops.ec2.preflight`.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evalops.fleet import lanes
from evalops.fleet.ownership import lost
from evalops.hints import at_root
from evalops.settings import Settings
from evalops.ui import EXIT_USAGE, fail
from evalworker import prices
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Manifest, wholes
from evalworker.contract.wire import Unreadable
from evalworker.storage import Denied, Missing, Storage, StorageError, open_storage

NO_MODEL = "none/none"
"""Inspect's name for no model at all."""


def open_root(settings: Settings) -> Storage:
    """The root's store, proved to be usable; ends with one sentence if it is not."""
    try:
        storage = open_storage(settings.root)
        storage.probe()
    except StorageError as error:
        fail(f"the root {settings.root} cannot be used: {error}")
    return storage


def live_folder() -> Path:
    """Where fleets keep their live files, below the current directory; ends with one sentence if nothing can be written there."""
    folder = Path("logs", "fleet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(
            f"{folder.absolute()} cannot be written ({error.strerror}), and a fleet's live events are kept there: "
            "start from a directory of yours"
        )
    return folder


def read_manifest(storage: Storage, settings: Settings, fleet_id: str) -> Manifest:
    """A run's manifest; 403 and 404 are different sentences."""
    try:
        return Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
    except Missing:
        fail(f"there is no run {fleet_id} under {settings.root}: check the id and S3_BUCKET_NAME")
    except Denied as error:
        fail(f"the run {fleet_id} cannot be read: {error}")
    except Unreadable as error:
        fail(f"the manifest of {fleet_id} cannot be read by this version: {error}")


def check_same(manifest: Manifest, jobs: list[JobSpec]) -> None:
    """A run is resumed with its own tasks and models, all of them; anything else is refused with the difference."""
    jobs, planned = wholes(jobs), wholes(manifest.jobs)  # in what shards the run goes on is decided already
    known = {spec.job_id for spec in planned}
    strange = [spec for spec in jobs if spec.job_id not in known]
    if strange:
        named = ", ".join(f"{spec.name} with {spec.model}" for spec in strange[:3])
        same_names = {(spec.name, spec.model) for spec in planned}
        hint = " (same task and model, other arguments)" if (strange[0].name, strange[0].model) in same_names else ""
        fail(
            f"the run {manifest.fleet_id} does not hold {named}{hint}: resume it with its own arguments or start a new one",
            EXIT_USAGE,
        )
    missing = [spec for spec in planned if spec.job_id not in {spec.job_id for spec in jobs}]
    if missing:
        fail(
            f"the run {manifest.fleet_id} also holds {missing[0].name} with {missing[0].model}: --run-id runs all that has not "
            "completed; name all tasks and models, or none",
            EXIT_USAGE,
        )


def check_not_running(storage: Storage, jobs: list[JobSpec], settings: Settings) -> None:
    """Refuse to pay twice: a fleet of the same owner that runs exactly these jobs is named instead of doubled."""
    wanted = {spec.job_id for spec in wholes(jobs)}
    for lane, _ in lanes.lanes(storage):
        if lane.fleet_id is None or lane.owner != settings.owner or lanes.expired(lane):
            continue
        try:
            manifest = Manifest.from_json(storage.get(layout.manifest(lane.fleet_id)).body)
            control = Control.from_json(storage.get(layout.control(lane.fleet_id)).body)
        except (Missing, Unreadable):
            continue
        if control.state != "running" or {spec.job_id for spec in wholes(manifest.jobs)} != wanted:
            continue
        if not lost(storage, control):  # as one of this machine is after a reboot
            watch = at_root(f"ct fleet status {lane.fleet_id}", settings.bucket)
            fail(
                f"the fleet {lane.fleet_id} is running the same jobs: watch it with `{watch}`, or add --new-fleet to run them again"
            )


def check_prices(models: Iterable[str], arguments: dict[str, Any]) -> None:
    """Refuse a budget that could not be counted: every model of the run, also those of roles, must have a price."""
    names = [*models, *prices.role_models(arguments.get("model_roles"))]
    missing = prices.unpriced((name for name in names if name != NO_MODEL), prices.read(arguments.get(prices.ARGUMENT)))
    if missing:
        fail(
            f"--budget needs the price of {', '.join(missing)}: add it to a file for --model-cost-config ({prices.FORMAT}), "
            "or use --token-budget"
        )
