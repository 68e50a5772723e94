"""How a fleet ends: on a signal, on `ct fleet stop`, by a guard, when all jobs have ended; and how a controller leaves one running.

`begin` decides, `react` drives the stop, once a cycle, until nothing is open; `finish` writes the summary and gives the lane back.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from evalops.fleet import job_ends, lanes, placement
from evalops.fleet.fleet import INSIST_S, Fleet, Left
from evalops.fleet.guards import Verdict
from evalops.fleet.heartbeat import Heartbeat
from evalops.fleet.inbox import Inbox
from evalops.fleet.stream import Fenced
from evalworker.aws import ServiceError
from evalworker.contract.failures import Category
from evalworker.storage import Changed

CHANGE_MIND_S = 3.0
"""After a first Ctrl-C that leaves workers running: how long a second one stops them instead."""

STOP_PATIENCE_S = 60.0
"""How long stopping workers may take to hand over before what is open is called cancelled."""

FAR_S = 30.0
"""How much longer those of other machines may take: they look less often whether to stop."""

EVENTS_RETURN_S = 75.0
"""How long messages that a killed controller had received stay away: the events queue's visibility timeout, and some more."""

RELEASE_TRIES = 3
"""How often the lane is given back: nobody else has it until the deadline otherwise."""

DRAIN_S = 30.0
"""The longest that the end of a fleet spends on emptying its lane."""

STOPPED = Verdict("stopped", "stopped by `ct fleet stop`")
HANDING_OVER = "stopping: workers hand over what they have (again to end them at once)"


class FleetEnding:
    """The end of one fleet.

    Attributes:
        signal_number: of the last signal that this process was sent.
    """

    def __init__(self, fleet: Fleet, heartbeat: Heartbeat, inbox: Inbox) -> None:
        self._fleet = fleet
        self._heartbeat = heartbeat
        self._inbox = inbox
        self._interrupts = 0
        self._stopped_at_once = False
        self.signal_number: int | None = None

    # Why

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the fleet cleanly; a second one ends its workers at once."""
        before = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupted(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        self.signal_number = number

    def asked_to_stop(self) -> bool:
        """Look whether `ct fleet stop` was called, and obey."""
        self._heartbeat.beat()
        self._obey()
        return self._fleet.stopping

    def _obey(self) -> None:
        if self._heartbeat.asked_to_stop and self._fleet.verdict is None:
            self.begin(STOPPED)

    def begin(self, verdict: Verdict) -> None:
        """Tell the workers to hand over: the fleet is to end like this."""
        self._fleet.verdict = verdict
        self._fleet.stopping_since = time.monotonic()
        self._fleet.due.clear()
        self._heartbeat.beat("stopping")

    # Stopping

    def react(self, guard: Verdict | None) -> None:
        """Notice why the fleet should end and drive what has begun to end. `guard`: what a guard says. Raises Left."""
        fleet = self._fleet
        self._obey()
        if self._interrupts and fleet.verdict is None and fleet.pool.stays:
            self._stop_or_leave()
        elif self._interrupts and fleet.verdict is None:
            fleet.view.note(HANDING_OVER)
            self.begin(Verdict("cancelled", "interrupted"))
        elif fleet.verdict is None and guard is not None:
            fleet.view.note(f"stopping: {guard.reason}")
            self.begin(guard)
            fleet.announce("is being stopped", guard.reason or "")
        if fleet.stopping_since is not None:
            self._drive(time.monotonic() - fleet.stopping_since)

    def _stop_or_leave(self) -> None:
        """Workers of other machines go on without us: a first Ctrl-C leaves them, a second one soon after it stops them."""
        view = self._fleet.view
        if self.signal_number == signal.SIGINT:
            view.note(f"leaving the fleet running (Ctrl-C again within {CHANGE_MIND_S:.0f} s stops it)")
            end = time.monotonic() + CHANGE_MIND_S
            while self._interrupts < 2 and time.monotonic() < end:
                time.sleep(0.05)
        if self._interrupts < 2:
            raise Left("interrupted")
        view.note(HANDING_OVER)
        self.begin(Verdict("cancelled", "interrupted"))

    @property
    def _at_once(self) -> bool:
        """Whether who waits has lost patience with workers that hand over."""
        return self._interrupts > (2 if self._fleet.pool.stays else 1)

    def _drive(self, waited: float) -> None:
        """Wait until the workers have handed over, then call what is open cancelled."""
        fleet = self._fleet
        if self._at_once and not self._stopped_at_once:
            self._stopped_at_once = True
            with fleet.surviving("the workers"):
                fleet.pool.stop(now=True)
        handing_over = fleet.roster.any_online if fleet.pool.stays else fleet.pool.alive
        if handing_over and not self._at_once and waited < STOP_PATIENCE_S + FAR_S * fleet.pool.stays:
            return
        with fleet.surviving("storage"):
            self._inbox.store_all()
        with fleet.surviving("the event queue"):
            if fleet.events.counts().total and waited < STOP_PATIENCE_S + EVENTS_RETURN_S:
                return  # what an earlier controller had received and not stored comes back first
        self.cancel_open()

    def cancel_open(self) -> None:
        """Call cancelled what is open; what storage refuses now is tried again."""
        fleet = self._fleet
        why = (fleet.verdict and fleet.verdict.reason) or "cancelled"
        with fleet.surviving("storage"):
            for job in fleet.ledger.open_jobs:
                job_ends.end_job(fleet, job, "cancelled", Category.CANCELLED, why)

    # The end

    def leave(self, reason: str) -> Verdict:
        """Go: what was heard is stored if it can be, and the fleet runs on."""
        fleet = self._fleet
        try:
            self._inbox.store_all()
            self._heartbeat.fall_silent()
        except (ServiceError, Changed, Fenced):
            pass  # what is not stored comes again from the queue
        fleet.view.end()
        fleet.stream.close()
        return Verdict("left", reason)

    def finish(self) -> Verdict:
        """Summary, last segment, workers, lane: in an order in which being killed loses nothing."""
        fleet, verdict = self._fleet, self._verdict()
        fleet.stream.append([self._summary(verdict)])
        fleet.view.show(fleet.ledger, fleet.pool.alive, force=True)
        fleet.view.end()
        fleet.insist("storage", self._inbox.store_all)
        with fleet.surviving("storage"):
            self._inbox.show()
        with fleet.surviving("the timings"):
            placement.write(fleet.storage, fleet.ledger, fleet.fleet_id)
        end = time.monotonic() + INSIST_S
        self._heartbeat.beat("ended", verdict.ending)
        while fleet.control.state != "ended" and time.monotonic() < end:  # workers and queues wait for this word
            self._heartbeat.beat()
        with fleet.surviving("the workers"):  # what does not end here sees the end in control.json, or is reaped
            fleet.pool.stop(now=self._at_once)
        self._empty_lane()
        for _ in range(RELEASE_TRIES):  # past the deadline it is anybody's
            with fleet.surviving("the lane"):
                lanes.release(fleet.storage, fleet.lane)
                break
        fleet.stream.close()
        fleet.announce(f"has ended: {verdict.ending}", self._in_short(verdict))
        return verdict

    def _verdict(self) -> Verdict:
        fleet = self._fleet
        every = fleet.ledger.count("completed") == len(fleet.ledger.jobs)
        if every and fleet.verdict is not None and fleet.verdict.ending == "stopped":
            fleet.verdict = None  # all had completed before it could be stopped: abandoned fleets end so
        return fleet.verdict or Verdict("complete" if every else "failures")

    def _summary(self, verdict: Verdict) -> dict[str, Any]:
        fleet = self._fleet
        return {
            "type": "fleet_summary",
            "outcome": verdict.ending,
            "expected": len(fleet.ledger.jobs),
            "completed": fleet.ledger.count("completed"),
            "failed": fleet.ledger.count("failed"),
            "cancelled": fleet.ledger.count("cancelled"),
            "samples": fleet.ledger.samples.model_dump(),
            "cost_usd": {"tokens": fleet.ledger.token_cost, **self._machine_cost()},
            "elapsed_s": round(time.monotonic() - fleet.started, 3),
            "reason": verdict.reason,
            "round": fleet.ledger.round,
        }

    def _machine_cost(self) -> dict[str, Any]:
        """What the machines have cost, with what to know of the figure; None where it is not known."""
        with self._fleet.surviving("the prices"):
            usd, about = self._fleet.pool.cost()
            return {"machines": usd if usd is None else round(usd, 6)} | ({"note": about} if about else {})
        return {"machines": None}

    def _in_short(self, verdict: Verdict) -> str:
        """The end in one sentence."""
        ledger = self._fleet.ledger
        samples = ledger.samples
        counts = f"{ledger.count('completed')} of {len(ledger.jobs)} jobs and {samples.completed} of {samples.total}"
        return f"{counts} samples completed" + (f"; {verdict.reason}" if verdict.reason else "")

    def _owns_lane(self) -> bool:
        """Whether the lane is ours for certain: past the deadline another fleet may have taken it, or the next round of this one."""
        with self._fleet.surviving("the lane"):
            return lanes.held(self._fleet.storage, self._fleet.lane)
        return False

    def _empty_lane(self) -> None:
        """Leave nothing of this fleet in the queues of a lane that others will use; an embedded lane goes anyway."""
        fleet = self._fleet
        if fleet.lane.endpoint is not None or not self._owns_lane():
            return
        with fleet.surviving("the event queue"):
            self._inbox.discard()
        end = time.monotonic() + DRAIN_S
        for queue in (fleet.jobs, fleet.events, fleet.dead):
            with fleet.surviving(f"the queue {queue.name}"):
                while (received := queue.receive(10, 1)) and time.monotonic() < end:
                    queue.delete([message.receipt for message in received])
