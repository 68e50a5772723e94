"""What the guards remember of one fleet while its controller runs: told marks, silence, what workers say they wait for.

The controller feeds it and asks for a verdict once a cycle; the rules themselves are `evalops.fleet.guards`. It writes nothing: events
are returned.
"""

from datetime import datetime

from evalops.fleet import guards
from evalops.fleet.guards import Verdict
from evalops.fleet.ledger import JobState, Ledger
from evalworker.contract.documents import Control
from evalworker.contract.events import Event
from evalworker.contract.messages import Heartbeat


class Watch:
    """The guards of one fleet. `at` is always seconds of one monotonic clock."""

    def __init__(self, ledger: Ledger, at: float) -> None:
        self._ledger = ledger
        self._budget = guards.Budget()
        self._stall = guards.Stall(at)
        self._hung = guards.HungSamples()
        self._waits: dict[str, dict[str, str]] = {}
        self._pressure: dict[str, int] = {}
        self._unpriced: set[str] = set()
        self._holding = False

    # What is heard

    def replay(self, event: Event) -> None:
        """Take over one line of an earlier controller's stream."""
        if event["type"] == "budget":
            self._budget.replay(event)

    def happened(self, at: float) -> None:
        """A result, an end, a sample that got on, a worker that came or went, an attempt that was sent."""
        self._stall.happened(at)

    def heard(self, beat: Heartbeat) -> list[Event]:
        """Take a worker's heartbeat; returns events about hung samples."""
        self._waits[beat.instance_id] = beat.waits
        self._pressure[beat.instance_id] = beat.rate_limited
        events = []
        for hung in beat.hung:
            job = self._ledger.jobs.get(hung.job_id)
            if job is not None and job.done is None:
                events.append(self._hung.event(hung, *job.pair, beat.instance_id))
        return [event for event in events if event is not None]

    def gone(self, instance_id: str) -> None:
        """A worker has left: what it waited for no longer counts."""
        self._waits.pop(instance_id, None)
        self._pressure.pop(instance_id, None)

    @property
    def rate_limited(self) -> int:
        """Rate-limited model calls of what runs."""
        return sum(self._pressure.values())

    @property
    def pressure(self) -> dict[str, int]:
        """The same by worker, of those that have any."""
        return {name: count for name, count in sorted(self._pressure.items()) if count}

    @property
    def waits(self) -> str:
        """What the running jobs are in, as their workers last said; empty when nothing runs."""
        return guards.waiting_text(phrase for waits in self._waits.values() for phrase in waits.values())

    # The canary

    def canaries(self, control: Control) -> list[JobState]:
        """The jobs that run one sample before anything else runs; none once all have passed."""
        if not control.guards.canary:
            return []
        return guards.canary_jobs(self._ledger.open_jobs, self._ledger.passed)

    def hold(self, control: Control) -> None:
        """Begin, or go on, to hold back what waits for canaries."""
        self._holding = bool(self.canaries(control))

    def held(self, control: Control) -> set[str]:
        """Jobs that wait until the canaries have passed."""
        if not self._holding:
            return set()
        running = {job.spec.job_id for job in self.canaries(control)}
        return {job.spec.job_id for job in self._ledger.open_jobs} - running

    def release(self, control: Control) -> list[JobState]:
        """The jobs to send now because the last canary has passed, once."""
        if not self._holding or self.canaries(control) or guards.canary(self._ledger.jobs.values()):
            return []
        self._holding = False
        return self._ledger.open_jobs

    # The verdict

    def marks(self, control: Control) -> list[Event]:
        """Events about money: marks of the budget, and models whose tokens it cannot count."""
        events = self._budget.marks(control.guards, self._ledger.spend)
        if control.guards.budget_usd is not None:
            for model in sorted(self._ledger.spend.unpriced - self._unpriced):
                self._unpriced.add(model)
                events.append(
                    {
                        "type": "warning",
                        "text": f"the budget does not count {model}: its price is not in --model-cost-config",
                    }
                )
        return events

    def stalled(self, control: Control, at: float, waiting_for: str) -> Event | None:
        """A `stalled` event when nothing has happened for long."""
        return self._stall.event(at, control.guards.stall_after_s, waiting_for)

    def verdict(
        self, control: Control, moment: datetime, at: float, waiting_for: str, *, patient: bool = False
    ) -> Verdict | None:
        """Why the fleet should stop, if it should. `patient`: not for being silent."""
        if self._holding and (found := guards.canary(self._ledger.jobs.values())):
            return found
        if not self._ledger.open_jobs:
            return None
        return (
            guards.deadline(moment, control.deadline)
            or guards.refused_key(self._ledger.ended)
            or guards.over_budget(control.guards, self._ledger.spend)
            or guards.failure_rate(self._ledger.ended, control.guards.max_failed_share)
            or self._stall.verdict(at, control.guards.stall_after_s, waiting_for, patient=patient)
        )
