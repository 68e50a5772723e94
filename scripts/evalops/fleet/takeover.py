"""A fleet without a controller is driven on (`attach`), or ended because its deadline has passed (`close_abandoned`).

Called by commands, by `submit` when a run is resumed or a lane is needed, and by the reaper.
"""

import time
from datetime import datetime, timedelta

from evalops.fleet import lanes
from evalops.fleet.assemble import fleet_of, fleet_start
from evalops.fleet.controller import Controller
from evalops.fleet.fleet import Fleet
from evalops.fleet.heartbeat import BEAT_S, still_here
from evalops.fleet.ledger import Ledger
from evalops.fleet.ownership import controller_gone, controller_name, lost, refuse_if_driven
from evalops.fleet.request import Request, as_begun, workers_of
from evalops.fleet.stream import Fenced
from evalops.fleet.workers import NoPool, Pool
from evalops.settings import Settings
from evalops.ui import fail, note
from evalworker.contract import layout
from evalworker.contract.documents import Control, Lane, Manifest
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Missing, Storage

CLAIM_TRIES = 5
"""Readings of the stream by a new controller; the one before it can write a segment at most once after each."""

HANDING_OVER = timedelta(minutes=5)
"""How long after its deadline a fleet with a living controller is left to end by itself: workers hand over, messages come back."""

NO_LANE = Lane(name="", jobs="", events="", dead="")
"""In place of the lane of a fleet that owns none."""

PAST_DEADLINE = "its deadline passed while nobody drove it"


def attach(settings: Settings, storage: Storage, request: Request, manifest: Manifest) -> Controller:
    """Drive a fleet on whose controller has gone; refused while that one lives. One without a lane can only be ended."""
    fleet_id = manifest.fleet_id
    stored = storage.get(layout.control(fleet_id))
    control = Control.from_json(stored.body)
    if control.state == "ended":
        fail(f"the fleet {fleet_id} has ended; --run-id {fleet_id} runs again what did not complete")
    refuse_if_driven(fleet_id, control)
    lane, why = lanes.find(storage, fleet_id), "owns no lane"
    if lane is not None and lane.endpoint is not None and not lanes.answers(lane):
        if not lost(storage, control):
            fail(
                f"the queues of the fleet {fleet_id} are on the machine of its controller, {control.controller}: attach there; if that "
                f"machine has gone, --run-id {fleet_id} runs again what did not complete"
            )
        lane, why = None, "has lost its queues, which were on this machine"
    if lane is None and control.state != "stopping":
        fail(f"the fleet {fleet_id} {why}; --run-id {fleet_id} runs again what did not complete")
    controller = _take_over(settings, storage, request, manifest, lane or NO_LANE)
    alive = controller.fleet.pool.adopt()
    if control.state == "running" and alive == 0:
        controller.staff.start()
    elif control.state in ("stopping", "draining"):
        controller.go_on_stopping()
    if lane is None:  # nothing can be heard: it never had a lane, or another fleet has it
        controller.ending.cancel_open()
    return controller


def close_abandoned(settings: Settings, storage: Storage, lane: Lane, why: str = PAST_DEADLINE) -> None:
    """Write the end of a fleet that is past its deadline (or dead) and has no controller, and release its lane.

    What its workers had said goes to its own segments first, so its summary is true. A controller that lives ends it itself: then
    nothing is done. Raises Fenced, Changed when somebody else does the same and is faster.
    """
    assert lane.fleet_id is not None
    try:
        manifest = Manifest.from_json(storage.get(layout.manifest(lane.fleet_id)).body)
        control = Control.from_json(storage.get(layout.control(lane.fleet_id)).body)
    except (Missing, Unreadable) as error:
        note(f"the fleet {lane.fleet_id} has left no readable record ({error}): its lane {lane.name} is freed")
        lanes.release(storage, lane)
        return
    if control.state == "ended":  # killed between its last word and the release
        lanes.release(storage, lane)
        return
    if not controller_gone(control) and lane.until is not None and now() < lane.until + HANDING_OVER:
        return
    pool = NoPool() if manifest.machines is None else None  # of a fleet on EC2, machines that still run are ended too
    controller = _take_over(settings, storage, Request(quiet=True), manifest, lane, pool)
    controller.close(why)


def _take_over(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, lane: Lane, pool: Pool | None = None
) -> Controller:
    """A controller in the state that the stored stream tells of, known to the workers as theirs.

    Its first act is a segment of its own: from then on a controller that was displaced while it slept cannot write any. If that one
    was faster by a segment, the stream is read again.
    """
    stored = storage.get(layout.control(manifest.fleet_id))
    control = Control.from_json(stored.body).model_copy(update={"beat": now(), "controller": controller_name()})
    etag = storage.replace(layout.control(manifest.fleet_id), control.to_bytes(), stored.etag)
    request = as_begun(request, control.limits)
    for turn in range(CLAIM_TRIES):
        ledger = Ledger(manifest.jobs, control.round)
        fleet = fleet_of(settings, storage, request, manifest, control, etag, ledger, lane, pool)
        if not _replay(fleet):  # the controller was killed before its first segment
            ledger.new_round(control.round)
            fleet.stream.append([fleet_start(fleet, workers_of(request, manifest))])
        fleet.stream.append([{"type": "attached", "controller": control.controller}])
        try:
            fleet.stream.store()
            return Controller(fleet)
        except Fenced:
            fleet.stream.close()
            control, etag = fleet.control, fleet.control_etag
            if turn == CLAIM_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _replay(fleet: Fleet) -> bool:
    """Bring a fleet to the state that its stream tells of; whether that tells of the present round at all."""
    begun = False
    for event in fleet.stream.restore():
        fleet.ledger.replay(event)
        fleet.watch.replay(event)
        if fleet.manifest.machines is not None:  # those of this machine are known by their processes
            fleet.roster.replay(event, time.monotonic())
        if event["type"] == "fleet_start" and event["round"] == fleet.control.round:
            begun = True
            fleet.began((now() - datetime.fromisoformat(event["ts"])).total_seconds())
        if fleet.every("beat", BEAT_S):
            still_here(fleet)
    fleet.watch.hold(fleet.control)
    return begun
