"""Drives one fleet from its first message to its summary: what happens when, and what each message of a worker leads to.

One thread, one loop over its parts: `inbox` (what workers say), `dispatch` (jobs that are sent), `staff` (how many workers),
`heartbeat` (what workers are told), `ending` (why and how it is over). No AWS error ends a healthy fleet. Design, section 7.
"""

import contextlib
import random
import time

from evalops.fleet import guards, job_ends
from evalops.fleet.dispatch import Dispatch
from evalops.fleet.ending import STOPPED, FleetEnding
from evalops.fleet.fleet import Fleet, Left
from evalops.fleet.guards import Verdict
from evalops.fleet.heartbeat import BEAT_S, Heartbeat
from evalops.fleet.inbox import Inbox
from evalops.fleet.ledger import Outcome
from evalops.fleet.staff import Staff
from evalworker.aws import ServiceError
from evalworker.contract.events import Event
from evalworker.contract.messages import (
    AttemptDone,
    BootstrapFailed,
    FromWorker,
    SampleDone,
    Warning_,
    WorkerDraining,
    WorkerOnline,
)
from evalworker.contract.messages import (
    Heartbeat as Alive,
)
from evalworker.contract.wire import now


class Controller:
    """See the module. Make one, then `run` it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.inbox = Inbox(fleet)
        self.dispatch = Dispatch(fleet, self.inbox)
        self.heartbeat = Heartbeat(fleet)
        self.ending = FleetEnding(fleet, self.heartbeat, self.inbox)
        self.staff = Staff(fleet, self.ending)

    def run(self) -> Verdict:
        """Follow the fleet to its end, or leave it. Raises `Fenced` when another controller has taken over."""
        try:
            with self.ending.signals():
                while self.fleet.ledger.open_jobs:
                    self._cycle()
                return self.ending.finish()
        except Left as left:
            return self.ending.leave(str(left))
        finally:
            with contextlib.suppress(ServiceError):
                self.dispatch.delete_dead_letters()
            self.inbox.stop()

    def close(self, reason: str) -> Verdict:
        """End a fleet that nobody drives any more: take what its workers have said, cancel what is open, write the summary."""
        self.fleet.roster.workers.clear()  # those of its stream are gone; who still lives says so
        self.ending.begin(Verdict("stopped", reason))
        return self.run()

    def go_on_stopping(self) -> None:
        """Take over a fleet that was being stopped when its controller went."""
        self.ending.begin(STOPPED)

    def _cycle(self) -> None:
        fleet = self.fleet
        self.inbox.receive(self.apply)
        self.inbox.store()
        self.staff.look_after()
        self.dispatch.cycle()
        divided = fleet.connections.look(fleet.roster.workers, time.monotonic())
        if fleet.every("beat", BEAT_S) or divided or fleet.roster.draining != fleet.control.draining:
            self.heartbeat.beat()
        self._react()
        fleet.view.show(fleet.ledger, fleet.pool.alive, fleet.waiting_for(), fleet.watch.rate_limited)

    def _react(self) -> None:
        """Begin to end when something says so, and drive an end that has begun."""
        self.ending.react(self._guard() if self.fleet.verdict is None else None)

    def _guard(self) -> Verdict | None:
        """Ask the guards, and write what they have to tell."""
        fleet, at = self.fleet, time.monotonic()
        waiting_for = fleet.waiting_for() or fleet.watch.waits or "a free worker"
        told = fleet.watch.marks(fleet.control)
        if (stalled := fleet.watch.stalled(fleet.control, at, waiting_for)) is not None:
            told.append(stalled)
            fleet.announce("has stalled", guards.sentence(stalled))
        self._tell(told)
        no_capacity = fleet.pool.alive == 0 and fleet.pool.waiting_for is not None
        return fleet.watch.verdict(fleet.control, now(), at, waiting_for, patient=no_capacity)

    def _tell(self, events: list[Event]) -> None:
        """Write what a guard has to tell, and show it."""
        self.fleet.stream.append(events)
        for event in events:
            self.fleet.view.note(guards.sentence(event))

    # Messages

    def apply(self, message: FromWorker) -> None:
        """Turn one message into events."""
        fleet, at = self.fleet, time.monotonic()
        fleet.roster.heard(message.instance_id, at)
        if message.moved if isinstance(message, Alive) else not isinstance(message, Warning_):
            fleet.watch.happened(at)
        if isinstance(message, SampleDone):
            self._write(fleet.ledger.sample(message))
        elif isinstance(message, AttemptDone):
            self._write(fleet.ledger.attempt(job_ends.as_recorded(fleet, message)))
        elif isinstance(message, Alive):
            self._tell(fleet.watch.heard(message))
            fleet.roster.beat(message)
            fleet.pool.online(message.instance_id)
        else:
            self._lifecycle(message)

    def _write(self, outcome: Outcome) -> None:
        self.fleet.stream.append(outcome.events)
        if outcome.retry is not None:
            spread = random.uniform(1.0, 1.5)  # noqa: S311 - jobs that were refused together shall not come back together
            job = self.fleet.ledger.jobs[outcome.retry.job_id]
            self.dispatch.schedule(job, outcome.retry.delay_s * spread)
            self.fleet.roster.ended(outcome.retry.job_id)
        if outcome.compare is not None:
            job_ends.conclude(self.fleet, outcome.compare)

    def _lifecycle(self, message: WorkerOnline | WorkerDraining | BootstrapFailed | Warning_) -> None:
        fleet = self.fleet
        event: Event = {"type": message.type, "instance_id": message.instance_id}
        if isinstance(message, WorkerOnline):
            fleet.pool.online(message.instance_id)
            if not fleet.roster.online(message):
                return
            event |= {
                "bootstrap_s": message.bootstrap_s,
                "instance_type": message.instance_type,
                "lifecycle": message.lifecycle,
                "slots": message.slots,
            }
        elif isinstance(message, WorkerDraining):
            if not self.staff.goodbye(message):
                return
            event |= {"reason": message.reason, "handed_over": message.handed_over}
        elif isinstance(message, BootstrapFailed):
            if not fleet.roster.failed(message.instance_id):
                return
            event |= {"lines": message.lines}
        else:
            event |= {"text": message.text, "job_id": message.job_id}
            fleet.view.note(message.text)
        fleet.stream.append([event])
