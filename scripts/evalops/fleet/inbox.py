"""What comes out of the events queue: receive, read, keep aside what is not ours, delete what is stored.

A message is deleted only after the segment that tells of it is stored. What a message means is the controller's business.
"""

import time
from collections.abc import Callable

from evalops.fleet import standing
from evalops.fleet.fleet import Fleet
from evalops.fleet.pump import Pump
from evalworker.contract import layout
from evalworker.contract.messages import AttemptDone, FromWorker, SampleDone, read_from_worker
from evalworker.contract.wire import Unreadable

ASLEEP_S = 20.0
"""A cycle that took longer: this process was suspended or hung, so the silence was its own."""

LATE_S = 2.0
"""How long the end of an attempt waits for its last samples, which another thread may have in its hand, or SQS."""

LOOK_S = 0.1
"""Between two looks whether they have come."""


class Inbox:
    """The events queue of one fleet.

    Order is not kept, and an end before its last samples would mean reading the log: such ends wait for them a little, unsettled.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pump = Pump(fleet.events)
        self._heard: float | None = None
        self._ends: list[tuple[AttemptDone, str, float]] = []
        self._show_every_s = standing.WRITE_EVERY_S

    def receive(self, apply: Callable[[FromWorker], None]) -> None:
        """Take what has come, in no order. Whoever could not be heard is not silent: the roster is told when that was our doing."""
        fleet = self._fleet
        begun = time.monotonic()
        if self._heard is not None and begun - self._heard > ASLEEP_S:
            fleet.roster.deaf(begun)
        self._heard = begun
        if fleet.stream.full:  # what is not taken is safe in the queue
            fleet.roster.deaf(begun)
            return
        with fleet.surviving("the event queue"):
            messages, heard_all = self._pump.take(LOOK_S) if self._ends else self._pump.take()
            for received in messages:
                message, kept = self.read(received.body)
                if not kept:
                    continue
                if isinstance(message, AttemptDone):
                    self._ends.append((message, received.receipt, begun))
                    continue
                if message is not None:
                    apply(message)
                fleet.stream.settle(received.receipt)
            ends, self._ends = self._ends, []
            try:
                while ends:
                    end, receipt, since = ends[0]
                    if self._is_early(end) and begun - since < LATE_S:
                        self._ends.append(ends[0])
                    else:
                        apply(end)
                        fleet.stream.settle(receipt)
                    del ends[0]
            finally:  # what could not be concluded now is tried again
                self._ends = ends + self._ends
            if heard_all:
                return
        fleet.roster.deaf(time.monotonic())

    def _is_early(self, done: AttemptDone) -> bool:
        """Whether a job has completed of which not all samples have been heard of yet; one without a digest is not compared."""
        job = self._fleet.ledger.jobs.get(done.job_id)
        if job is None or job.done is not None or not done.ended or done.status != "completed":
            return False
        return done.log is not None and done.digest is not None and len(job.said) < done.samples.total

    def read(self, body: str) -> tuple[FromWorker | None, bool]:
        """One message, None for what cannot be read or is another fleet's; and False for such a one that could not be kept aside.

        That one must not be deleted: it comes again.
        """
        try:
            message = read_from_worker(body)
        except Unreadable as error:
            return None, self.keep_aside(error)
        if message.fleet_id != self._fleet.fleet_id:
            return None, self._keep_foreign(message)
        return message, True

    def _keep_foreign(self, message: FromWorker) -> bool:
        """A late message of the fleet that had this lane before: kept with that fleet, whose stream has ended."""
        if not isinstance(message, SampleDone | AttemptDone):
            return True
        text = f"a message of the fleet {message.fleet_id} came late and was kept with that fleet"
        return self._keep(layout.late(message.fleet_id), message.to_bytes(), text)

    def keep_aside(self, error: Unreadable) -> bool:
        """An unreadable message is stored for whoever wants to know what it was; whether it is, else it must not be deleted."""
        key = layout.unreadable(self._fleet.fleet_id)
        text = f"a message could not be read ({error}); it is kept as {key}"
        return self._keep(key, error.text.encode("utf-8", "backslashreplace"), text)

    def _keep(self, key: str, body: bytes, text: str) -> bool:
        with self._fleet.surviving("storage"):
            self._fleet.storage.put(key, body)
            self._fleet.warn(text)
            return True
        return False

    def store(self) -> None:
        """Store the stream's next segment if it is time to, and delete the messages that it tells of."""
        if self._fleet.stream.due:
            with self._fleet.surviving("storage"):
                self._pump.delete(self._fleet.stream.store())
                if self._fleet.every("standing", self._show_every_s):
                    self.show()

    def show(self) -> None:
        """Write how the fleet stands, right after `store`: what waits to be stored would be counted twice. Raises StorageError."""
        fleet, begun = self._fleet, time.monotonic()
        standing.write(
            fleet.storage, standing.of(fleet.fleet_id, fleet.ledger, fleet.stream.noted, fleet.stream.segment)
        )
        self._show_every_s = max(standing.WRITE_EVERY_S, (time.monotonic() - begun) / standing.SHARE)

    def store_all(self) -> None:
        """Store what there is and see its messages deleted. Raises ServiceError: call again."""
        self._pump.delete(self._fleet.stream.store())
        self._pump.flush()

    def stop(self) -> None:
        """Receive no more. What has been received and not been stored comes again, for whoever drives the fleet on."""
        self._pump.stop(wait=False)

    def discard(self) -> None:
        """Receive no more of a fleet that has ended, and leave nothing received behind in a lane that others will use."""
        left = [received.receipt for received in self._pump.stop(wait=True)] + [receipt for _, receipt, _ in self._ends]
        self._ends = []
        if left:
            self._fleet.events.delete(left)
