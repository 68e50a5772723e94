"""How many workers a fleet has: the first ones, more while jobs wait, another one for each that was lost.

Where workers come from is the pool's business, what is known of them the roster's; here it is decided what follows.
"""

import math
import time

from evalops.fleet.ending import FleetEnding
from evalops.fleet.fleet import Fleet
from evalops.fleet.guards import Verdict
from evalops.fleet.merges import at_once
from evalops.fleet.workers import CannotLaunch, Lost
from evalworker.aws import ServiceError
from evalworker.contract.messages import WorkerDraining

GROW_S = 20.0
"""Between two looks whether more workers would help."""

AS_IT_SHOULD = ("idle", "over", "drained", "stopped", "deadline", "outdated")
"""Why workers leave that nobody has to replace."""


class Staff:
    """The workers of one fleet."""

    def __init__(self, fleet: Fleet, ending: FleetEnding) -> None:
        self._fleet = fleet
        self._ending = ending
        self._first = fleet.plan.workers
        self._owed = 0
        self._replaced = 0
        self._done = 0

    def start(self) -> None:
        """Launch as many workers as there is work for."""
        fleet = self._fleet
        jobs = at_once(fleet.ledger)
        if fleet.pool.stays:  # those of other machines cost money: they come when there is something for them to do
            first = len(fleet.watch.canaries(fleet.control)) or jobs
            jobs = math.ceil(first / (fleet.control.limits.slots or 1))
        self._first = min(fleet.plan.workers, max(1, jobs))
        self._launch(self._first)

    def goodbye(self, message: WorkerDraining) -> bool:
        """A worker goes; False if that was known. One whose machine is taken from it is replaced before it is gone."""
        fleet = self._fleet
        if not fleet.roster.left(message.instance_id):
            return False
        fleet.watch.gone(message.instance_id)
        fleet.pool.left(message.instance_id)
        if message.reason not in AS_IT_SHOULD and fleet.pool.stays:
            self._owed += 1  # many may go at once: the next look asks for all of them together
        return True

    def look_after(self) -> None:
        """Notice who has gone, replace them, add some when that would help."""
        fleet = self._fleet
        missing, self._owed = self._missing() + self._owed, 0
        if missing and self._working:
            self._replace(missing)
        if not self._working or fleet.pool.waiting_for is not None:  # what is missing is being asked for already
            return
        if fleet.pool.alive == 0:
            # the workers may have obeyed `ct fleet stop` before this controller has read it
            if not self._ending.asked_to_stop():
                self._replace(1)
        elif fleet.pool.alive < fleet.plan.workers and fleet.every("growth", GROW_S) and self._left_to_replace() > 0:
            self._grow()

    @property
    def _working(self) -> bool:
        """Whether there is anything left for workers to do."""
        fleet = self._fleet
        return not fleet.stopping and fleet.verdict is None and bool(fleet.ledger.open_jobs)

    def _left_to_replace(self) -> int:
        """How many more workers may be replaced; counted anew when samples have completed: a fleet that gets on may lose as many again."""
        if (done := self._fleet.ledger.samples.completed) > self._done:
            self._done, self._replaced = done, 0
        return self._fleet.plan.replacements - self._replaced

    def _missing(self) -> int:
        """How many of those that have gone are to be replaced."""
        fleet, missing = self._fleet, 0
        with fleet.surviving("the workers"):
            try:
                missing += sum([self._lost(lost) for lost in fleet.pool.ended()])
            except CannotLaunch as error:
                self._ending.begin(Verdict("stopped", str(error)))
            for name in fleet.roster.silent(time.monotonic()):
                if (gone := fleet.pool.lose(name, "nothing was heard of it")) is not None:
                    missing += self._lost(gone)
        return missing

    def _lost(self, lost: Lost) -> bool:
        """Write that a worker has gone; whether it is to be replaced."""
        fleet = self._fleet
        fleet.watch.gone(lost.instance_id)
        fleet.watch.happened(time.monotonic())
        fate = fleet.roster.lost(lost.instance_id, lost.reason)
        if fate == "done":
            return False
        if fate == "lost":
            fleet.stream.append([{"type": "worker_lost", "instance_id": lost.instance_id, "reason": lost.reason}])
        elif fleet.roster.failed(lost.instance_id):
            lines = lost.last_lines or [lost.reason]
            fleet.stream.append([{"type": "bootstrap_failed", "instance_id": lost.instance_id, "lines": lines}])
        fleet.view.note(f"lost the worker {lost.instance_id}: {lost.reason}")
        # While none has ever come online, others that still boot are waited for: when all fail, so would their replacements.
        return fate == "lost" or fleet.roster.any_online or fleet.pool.alive == 0

    def _replace(self, count: int) -> None:
        """Ask for others in place of `count` workers, as far as the bound allows."""
        fleet = self._fleet
        if fleet.roster.failed_boots >= self._first and not fleet.roster.any_online:
            self._ending.begin(Verdict("stopped", "no worker could start; see the bootstrap_failed events"))
        elif (count := min(count, self._left_to_replace())) > 0:
            self._replaced += count
            self._launch(count)
        elif fleet.pool.alive == 0 and fleet.pool.waiting_for is None:
            self._ending.begin(Verdict("stopped", "too many workers were lost"))

    def _grow(self) -> None:
        """Add workers while jobs wait, all workers are busy and none backs off."""
        fleet = self._fleet
        with fleet.surviving("the job queue"):
            waiting = fleet.jobs.counts().visible
            if count := fleet.roster.more(alive=fleet.pool.alive, most=fleet.plan.workers, waiting=waiting):
                self._launch(count)

    def _launch(self, count: int) -> None:
        try:
            self._fleet.pool.start(count)
        except CannotLaunch as error:
            self._ending.begin(Verdict("stopped", str(error)))
        except ServiceError as error:  # the pool asks again by itself
            self._fleet.view.note(f"{error}; going on")
