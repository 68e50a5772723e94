"""What comes out of the events queue: receive, read, keep aside what is not ours, delete what is stored.

A message is deleted only after the segment that tells of it is stored. What a message means is the controller's business.
"""

import time
from collections.abc import Callable

from evalops.fleet.fleet import Fleet
from evalworker.contract import layout
from evalworker.contract.messages import AttemptDone, FromWorker, SampleDone, read_from_worker
from evalworker.contract.wire import Unreadable

RECEIVE_WAIT_S = 1
"""One long poll of the events queue; the rest of the loop runs at least so often."""

RECEIVE_MOST = 10
"""Messages that one call brings; as many as that, and there may be more."""

ASLEEP_S = 20.0
"""A cycle that took longer: this process was suspended or hung, so the silence was its own."""


class Inbox:
    """The events queue of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._heard: float | None = None

    def receive(self, apply: Callable[[FromWorker], None]) -> None:
        """Take what has come, in no order. Whoever could not be heard is not silent: the roster is told when that was our doing."""
        fleet = self._fleet
        begun = time.monotonic()
        if self._heard is not None and begun - self._heard > ASLEEP_S:
            fleet.roster.deaf(begun)
        self._heard = begun
        with fleet.surviving("the event queue"):
            messages = fleet.events.receive(RECEIVE_MOST, RECEIVE_WAIT_S)
            for received in messages:
                if (message := self.read(received.body)) is not None:
                    apply(message)
                fleet.stream.settle(received.receipt)
            if len(messages) < RECEIVE_MOST:
                return
        fleet.roster.deaf(time.monotonic())

    def read(self, body: str) -> FromWorker | None:
        """One message; None for what cannot be read or is another fleet's, which is kept aside."""
        try:
            message = read_from_worker(body)
        except Unreadable as error:
            self.keep_aside(error)
            return None
        if message.fleet_id != self._fleet.fleet_id:
            self._keep_foreign(message)
            return None
        return message

    def _keep_foreign(self, message: FromWorker) -> None:
        """A late message of the fleet that had this lane before: kept with that fleet, whose stream has ended."""
        if isinstance(message, SampleDone | AttemptDone):
            with self._fleet.surviving("storage"):
                self._fleet.storage.put(layout.late(message.fleet_id), message.to_bytes())
            self._fleet.warn(f"a message of the fleet {message.fleet_id} came late and was kept with that fleet")

    def keep_aside(self, error: Unreadable) -> None:
        """An unreadable message is stored for whoever wants to know what it was."""
        key = layout.unreadable(self._fleet.fleet_id)
        with self._fleet.surviving("storage"):
            self._fleet.storage.put(key, error.text.encode("utf-8", "backslashreplace"))
        self._fleet.warn(f"a message could not be read ({error}); it is kept as {key}")

    def store(self, *, at_once: bool = False) -> None:
        """Store the stream's next segment if it is time to, and delete the messages that it tells of."""
        if self._fleet.stream.due or at_once:
            with self._fleet.surviving("storage"):
                self._fleet.events.delete(self._fleet.stream.store())
