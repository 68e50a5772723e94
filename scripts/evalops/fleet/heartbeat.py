"""The controller's word to the workers: control.json, written every few seconds by one controller alone.

`ct fleet stop` writes it too; what it asks for is noticed here and left to `evalops.fleet.ending`. Another controller's name in it means
that this one has been displaced.
"""

import contextlib

from evalops.fleet.fleet import Fleet
from evalops.fleet.stream import Fenced
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, ControlState
from evalworker.contract.wire import now
from evalworker.storage import Changed

BEAT_S = 10.0
"""Between two signs of life in control.json."""


def still_here(fleet: Fleet) -> None:
    """A sign of life of one who has claimed a fleet and still reads its stream. What others have written is for the first beat."""
    control = fleet.control.model_copy(update={"beat": now()})
    with contextlib.suppress(ServiceError, Changed):
        fleet.control_etag = fleet.storage.replace(
            layout.control(fleet.fleet_id), control.to_bytes(), fleet.control_etag
        )
        fleet.control = control


class Heartbeat:
    """Writes one fleet's control.json.

    Attributes:
        asked_to_stop: `ct fleet stop` has written into it.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._state: ControlState | None = None
        self._outcome: str | None = None
        self.asked_to_stop = False

    def beat(self, state: ControlState | None = None, outcome: str | None = None) -> None:
        """Write it, from now on with this state; a write that fails is made good by the next beat. Raises Fenced."""
        self._state, self._outcome = state or self._state, outcome or self._outcome
        fleet = self._fleet
        said = {
            "beat": now(),
            "state": self._state or fleet.control.state,
            "rate_limited": fleet.watch.rate_limited,
            "outcome": self._outcome,
            "waiting_for": fleet.waiting_for() or fleet.watch.waits or None,
            "connections": fleet.connections.shares,
            "pressure": fleet.watch.pressure,
            "draining": fleet.roster.draining,
        }
        control = fleet.control.model_copy(update=said)
        with fleet.surviving("storage"):
            try:
                fleet.control_etag = fleet.storage.replace(
                    layout.control(fleet.fleet_id), control.to_bytes(), fleet.control_etag
                )
                fleet.control = control
            except Changed:
                self._obey()

    def _obey(self) -> None:
        """Somebody else has written it: see what he wants, and say again what has been decided since."""
        fleet = self._fleet
        stored = fleet.storage.get(layout.control(fleet.fleet_id))
        control = Control.from_json(stored.body)
        if control.controller != fleet.control.controller:
            raise Fenced(
                f"the fleet {fleet.fleet_id} is driven by {control.controller} now; this controller has stopped"
            )
        fleet.control, fleet.control_etag = control, stored.etag
        if self._state is not None:
            self.beat()
        elif control.state in ("stopping", "draining"):
            self.asked_to_stop = True

    def fall_silent(self) -> None:
        """Whoever attaches need not wait for us to be forgotten. Raises Changed, StorageError."""
        fleet = self._fleet
        control = fleet.control.model_copy(update={"controller": "", "beat": now()})
        fleet.storage.replace(layout.control(fleet.fleet_id), control.to_bytes(), fleet.control_etag)
