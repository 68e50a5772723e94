"""Who drives a fleet: one process, by its name and its last sign of life in control.json.

Asked by whoever wants to drive a fleet, and by commands that only look.
"""

import os
import socket
from pathlib import Path

from evalops.fleet import lanes
from evalops.ui import fail
from evalworker.contract.documents import Control
from evalworker.contract.wire import now
from evalworker.storage import Storage

CONTROLLER_ALIVE_S = 60.0
"""A controller whose last sign of life is younger is taken for alive."""


def controller_name() -> str:
    """Which process drives a fleet: `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def refuse_if_driven(fleet_id: str, control: Control) -> None:
    """One controller a fleet: a second one is refused with the name of the first."""
    if not controller_gone(control):
        age = (now() - control.beat).total_seconds()
        fail(f"the fleet {fleet_id} is driven by {control.controller} (last seen {age:.0f} s ago); stop that one first")


def controller_gone(control: Control) -> bool:
    """Whether nobody drives the fleet: its controller was of this machine and is no more, or has been silent for long."""
    return (
        not control.controller
        or _is_dead(control.controller)
        or (now() - control.beat).total_seconds() > CONTROLLER_ALIVE_S
    )


def runs_on(storage: Storage, control: Control) -> bool:
    """Whether a fleet's workers and messages are there whatever became of its controller: until its end is written, or its queues end.

    Raises StorageError.
    """
    if control.state == "ended" or (lane := lanes.find(storage, control.fleet_id)) is None:
        return False
    return lane.endpoint is None or lanes.answers(lane)


def lost(storage: Storage, control: Control) -> bool:
    """Whether nothing is left of a fleet that nobody drives: it has no lane, or its queues were on this machine and have gone.

    Of queues on another machine's loopback nothing is known here. Raises StorageError.
    """
    if control.state == "ended" or not controller_gone(control):
        return False
    lane = lanes.find(storage, control.fleet_id)
    if lane is None or lane.endpoint is None:
        return lane is None
    return _process_here(control.controller) is not None and not lanes.answers(lane)


def _is_dead(controller: str) -> bool:
    """Whether a controller of this machine has gone; of another machine nothing is known."""
    pid = _process_here(controller)
    return pid is not None and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _process_here(controller: str) -> str | None:
    """A controller's process id, None if it is of another machine."""
    host, _, pid = controller.rpartition(":")
    return pid if host == socket.gethostname() else None
