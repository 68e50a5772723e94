"""From a submission to a controller that can run: a new fleet, or a new round of an old one.

Called by the commands after `preflight`. It writes manifest and control.json, takes a lane, sends the jobs and starts the workers.
Design, section 7.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from evalops import code, embedded, shipping
from evalops.fleet import lanes, running
from evalops.fleet.assemble import fleet_folder, fleet_of, fleet_start
from evalops.fleet.controller import Controller
from evalops.fleet.guards import over_budget
from evalops.fleet.heartbeat import BEAT_S, still_here
from evalops.fleet.ledger import Ledger
from evalops.fleet.merges import at_once
from evalops.fleet.ownership import controller_gone, controller_name, refuse_if_driven
from evalops.fleet.request import Request, budgeted, limits_of, workers_of
from evalops.fleet.stream import EventStream
from evalops.fleet.takeover import attach, close_abandoned
from evalops.fleet.workers import LocalPool
from evalops.hints import at_root
from evalops.settings import Settings
from evalops.ui import EXIT_STOPPED, fail, note
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Machines, Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import now
from evalworker.storage import Changed, Storage, Stored

LANE_WAIT_S = 15.0
"""Between two looks for a free lane."""

RELEASE_LOOK_S = 1.0
"""Between two looks whether a run's last round has given back its lane."""


def start(
    settings: Settings,
    storage: Storage,
    request: Request,
    jobs: list[JobSpec],
    arguments: dict[str, Any],
    models: list[Any],
    environment: dict[str, str],
    shipped: dict[str, Any],
    machines: Machines | None = None,
) -> Controller:
    """A new fleet with its messages sent and its workers starting.

    Args:
        arguments, models: encoded for the manifest.
        shipped: the manifest's fields about code, environment and secrets, as `shipping.ship` gives them.
        machines: what EC2 workers are launched from; None for workers of this machine.
    """
    fleet_id = new_run_id()
    moment = now()
    manifest = Manifest(
        fleet_id=fleet_id,
        created=moment,
        backend="local" if machines is None else "ec2",
        jobs=jobs,
        arguments=arguments,
        models=models,
        environment=environment,
        git=code.state(Path.cwd()),
        owner=settings.owner,
        work_dir=str(fleet_folder(fleet_id) / "work") if machines is None else None,
        machines=machines,
        **shipped,
    )
    shipping.check_no_secret(manifest)
    control = Control(
        fleet_id=fleet_id,
        round=1,
        state="running",
        deadline=moment + request.deadline,
        beat=moment,
        controller=controller_name(),
        budgeted=budgeted(request.guards),
        limits=limits_of(request, manifest.backend),
        guards=request.guards,
    )
    storage.create(layout.manifest(fleet_id), manifest.to_bytes())
    etag = storage.create(layout.control(fleet_id), control.to_bytes())
    return _begin(settings, storage, request, manifest, control, etag, Ledger(jobs))


def resume(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, shipped: dict[str, Any]
) -> Controller | None:
    """A new round of a run that has ended: what has not completed runs again. None when everything has completed.

    `shipped`: the manifest's fields that change, as `shipping` gives them.
    A run that goes on without a controller is driven on instead, with what of this it can still take; one whose queues are gone has ended
    without saying so.
    """
    stored = storage.get(layout.control(manifest.fleet_id))
    control = Control.from_json(stored.body)
    if control.state == "ended":
        _wait_for_release(storage, control)
    else:
        refuse_if_driven(manifest.fleet_id, control)
        lane = lanes.find(storage, manifest.fleet_id)
        if lane is not None and lanes.answers(lane):
            wish = running.told(request, manifest, control, shipped)
            storage.replace(layout.control(manifest.fleet_id), wish.to_bytes(), stored.etag)
            return attach(settings, storage, request, manifest)
        if manifest.machines is None:
            _end_workers(settings, manifest)
    ledger = Ledger(manifest.jobs, control.round)
    stream = EventStream(storage, manifest.fleet_id, fleet_folder(manifest.fleet_id) / "events.jsonl")
    for event in stream.restore():
        ledger.replay(event)
    stream.close()
    if not ledger.new_round(control.round + 1):
        return None
    if (spent := over_budget(request.guards, ledger.spend)) is not None:
        fail(f"{manifest.fleet_id}: {spent.reason}; resume it with a larger one")
    control = control.model_copy(
        update={
            "round": control.round + 1,
            "state": "running",
            "at_once": False,
            "outcome": None,
            "begun": None,
            "deadline": now() + request.deadline,
            "beat": now(),
            "controller": controller_name(),
            "budgeted": budgeted(request.guards),
            "limits": limits_of(request, manifest.backend),
            "guards": request.guards,
        }
    )
    manifest = manifest.model_copy(update=shipped)
    shipping.check_no_secret(manifest)
    etag = _next_round(storage, manifest, control, stored)
    return _begin(settings, storage, request, manifest, control, etag, ledger)


def _next_round(storage: Storage, manifest: Manifest, control: Control, before: Stored) -> str:
    """Write a round's manifest, then its control document; returns its tag. Raises Changed when somebody else resumes the run too.

    Of two resumes one goes on at most, with its own manifest: each claims the run, and replaces the manifest that it then found. Workers
    that see the new round find its manifest there.
    """
    key = layout.control(manifest.fleet_id)
    claim = Control.from_json(before.body).model_copy(update={"controller": control.controller, "beat": control.beat})
    etag = storage.replace(key, claim.to_bytes(), before.etag)
    found = storage.get(layout.manifest(manifest.fleet_id))
    storage.replace(layout.manifest(manifest.fleet_id), manifest.to_bytes(), found.etag)
    return storage.replace(key, control.to_bytes(), etag)


def _wait_for_release(storage: Storage, control: Control) -> None:
    """Wait for the controller that has just ended the run's last round: it still ends machines, and empties and frees the lane."""
    told = False
    while not controller_gone(control) and lanes.find(storage, control.fleet_id) is not None:
        if not told:
            told = True
            note(f"waiting for {control.controller}, which is about to end the run's last round")
        time.sleep(RELEASE_LOOK_S)


def _end_workers(settings: Settings, manifest: Manifest) -> None:
    """End the workers of this machine that a dead controller and a dead queue have left behind."""
    if manifest.work_dir is not None:
        pool = LocalPool(settings.root, manifest.fleet_id, "", Path(manifest.work_dir), 1, os.environ)
        pool.adopt()
        pool.stop()


def _begin(
    settings: Settings,
    storage: Storage,
    request: Request,
    manifest: Manifest,
    control: Control,
    etag: str,
    ledger: Ledger,
) -> Controller:
    """Take a lane, write `fleet_start`, send what is open, start the workers."""
    try:
        lane, control, etag = _lane(settings, storage, request, manifest, control, etag)
        fleet = fleet_of(settings, storage, request, manifest, control, etag, ledger, lane)
        for event in fleet.stream.restore():
            fleet.watch.replay(event)
            if fleet.every("beat", BEAT_S):
                still_here(fleet)
        workers = min(workers_of(request, manifest), at_once(ledger))
        fleet.stream.append([fleet_start(fleet, workers)])
        fleet.stream.store()
        controller = Controller(fleet)
    except BaseException:
        with contextlib.suppress(ServiceError):
            _give_up(storage, control)
        raise
    try:
        controller.staff.start()
        controller.dispatch.send_open_jobs()
    except (ServiceError, OSError) as error:
        controller.close("it could not be started")
        fail(f"the fleet {manifest.fleet_id} could not be started: {error}")
    except BaseException as error:  # workers would run on with nobody to drive them
        interrupted = isinstance(error, KeyboardInterrupt)
        controller.close("interrupted while it was started" if interrupted else "it could not be started")
        raise
    return controller


def _give_up(storage: Storage, control: Control) -> None:
    """Write that a fleet has ended that has not begun, unless it is somebody else's by now. Raises ServiceError."""
    key = layout.control(control.fleet_id)
    stored = storage.get(key)
    found = Control.from_json(stored.body)
    if found.controller != control.controller:
        return
    storage.replace(key, found.model_copy(update={"state": "ended"}).to_bytes(), stored.etag)
    if (lane := lanes.find(storage, control.fleet_id)) is not None:  # else nobody could use it until the deadline
        lanes.release(storage, lane)


def _lane(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, control: Control, etag: str
) -> tuple[Lane, Control, str]:
    """The fleet's queues: one of the estate's lanes, or a lane of this machine for this fleet alone.

    Who waits for a lane waits outside of his deadline: the control document comes back with what counts now.
    """
    if request.queues == "local":
        return _embedded_lane(settings, storage, manifest, control), control, etag
    key, told = layout.control(manifest.fleet_id), ""
    while True:
        try:
            lane = lanes.take(
                storage,
                manifest.fleet_id,
                manifest.owner,
                control.deadline,
                lambda lane: close_abandoned(settings, storage, lane),
            )
        except lanes.NoLane as error:
            if not request.wait:
                stop = at_root("ct fleet stop RUN_ID", settings.bucket)
                fail(f"{error}; wait for one to end (--wait does), or stop one with {stop}")
            if str(error) != told:
                told = str(error)
                note(f"waiting for a lane: {told}")
            time.sleep(LANE_WAIT_S)
            control = control.model_copy(update={"deadline": now() + request.deadline, "beat": now()})
            try:
                etag = storage.replace(key, control.to_bytes(), etag)
            except Changed:
                fail(f"the fleet {manifest.fleet_id} was stopped while it waited for a lane", EXIT_STOPPED)
            continue
        return lane, control, etag


def _embedded_lane(settings: Settings, storage: Storage, manifest: Manifest, control: Control) -> Lane:
    """Queues on this machine for this fleet alone; they end with it."""
    log = fleet_folder(manifest.fleet_id) / "queues.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        served = embedded.start(settings.root, manifest.fleet_id, log, control.limits.visibility_s)
    except embedded.EmbeddedError as error:
        fail(f"the queues on this machine did not start: {error}")
    return lanes.register(storage, served.lane, manifest.fleet_id, manifest.owner, control.deadline)
