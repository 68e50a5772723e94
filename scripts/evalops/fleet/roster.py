"""Which workers a fleet has heard of, and what follows from it: lost ones, failed boots, whether more would help. Pure.

The controller feeds it the workers' messages and asks. Times are seconds of one monotonic clock, passed in. Where workers come from is
the pool's business.
"""

from dataclasses import dataclass, field
from typing import Literal

from evalworker.contract.events import Event
from evalworker.contract.messages import Heartbeat, WorkerOnline

LOST_AFTER_S = 90.0
"""Without a message for so long a worker counts as lost (its jobs come back by themselves)."""

Fate = Literal["done", "failed boot", "lost"]


@dataclass
class Seen:
    """What is known of one worker.

    `limited`: rate-limited model calls of what runs; `refused`: of all that it has run; `leaving`: why it drains, None while it does not.
    """

    online: bool = False
    beat: float = 0.0
    slots: int = 1
    running: frozenset[str] = frozenset()
    limited: int = 0
    refused: int = 0
    leaving: str | None = None


@dataclass
class Roster:
    """A fleet's workers.

    Attributes:
        workers: those that have been heard of and have not left.
        failed_boots: workers that never came online.
    """

    workers: dict[str, Seen] = field(default_factory=dict)
    failed_boots: int = 0
    _begun: dict[str, float] = field(default_factory=dict)
    _once_online: set[str] = field(default_factory=set)
    _left: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _deaf_until: float = 0.0

    # What is heard

    def heard(self, instance_id: str, at: float) -> None:
        """A message came. Queues keep no order: what a worker said before it left does not bring it back."""
        if instance_id not in self._left:
            self.workers.setdefault(instance_id, Seen()).beat = at

    def online(self, message: WorkerOnline) -> bool:
        """A worker has come online; False if that was known."""
        if (worker := self.workers.get(message.instance_id)) is not None:
            worker.online, worker.slots = True, message.slots
        known = message.instance_id in self._once_online
        self._once_online.add(message.instance_id)
        return not known

    def beat(self, message: Heartbeat) -> None:
        """What a worker runs."""
        if (worker := self.workers.get(message.instance_id)) is not None:
            worker.online = True  # it may have come online under an earlier controller
            worker.running, worker.limited = frozenset(message.running), message.rate_limited
            for job_id in message.running:
                self._begun.setdefault(job_id, worker.beat)
            worker.refused = max(worker.refused, message.refused)
            worker.leaving = worker.leaving or message.leaving  # queues keep no order

    def ended(self, job_id: str) -> None:
        """An attempt of this job has ended: the next one begins anew."""
        self._begun.pop(job_id, None)

    def busy_s(self, job_id: str, at: float) -> float:
        """How long ago a worker was first heard to run this job's present attempt; 0 for one that nobody runs."""
        return max(0.0, at - self._begun.get(job_id, at))

    def left(self, instance_id: str) -> bool:
        """A worker has said goodbye; False if it was known to be gone."""
        self.workers.pop(instance_id, None)
        known = instance_id in self._left
        self._left.add(instance_id)
        return not known

    def failed(self, instance_id: str) -> bool:
        """A worker could not start; False if that was known."""
        self.workers.pop(instance_id, None)
        if instance_id in self._failed:
            return False
        self._failed.add(instance_id)
        self.failed_boots += 1
        return True

    def replay(self, event: Event, at: float) -> None:
        """Take over one line of an earlier controller's stream: who is online counts as heard of now."""
        name = event.get("instance_id", "")
        if event["type"] == "worker_online":
            self.workers[name] = Seen(online=True, beat=at, slots=event["slots"])
            self._once_online.add(name)
        elif event["type"] == "worker_draining":
            self.left(name)
        elif event["type"] == "worker_lost":
            self.workers.pop(name, None)
            self._left.add(name)
        elif event["type"] == "fleet_start":  # the workers of an earlier round have gone
            self.workers.clear()

    # What follows

    def lost(self, instance_id: str, reason: str) -> Fate:
        """A worker's machine or process has ended: what that means. `reason` is `ended` for one that ended as it should."""
        worker = self.workers.pop(instance_id, None)
        if reason == "ended" or instance_id in self._left:
            return "done"
        self._left.add(instance_id)
        return "lost" if worker is not None and worker.online else "failed boot"

    def deaf(self, at: float) -> None:
        """Messages could not be read, or were not all read: silence up to now proves nothing."""
        self._deaf_until = at

    def silent(self, at: float) -> list[str]:
        """Workers that were online and of which nothing has been heard for too long."""
        return [
            name
            for name, worker in self.workers.items()
            if worker.online and at - max(worker.beat, self._deaf_until) > LOST_AFTER_S
        ]

    @property
    def any_online(self) -> bool:
        """Whether any worker is online."""
        return any(worker.online for worker in self.workers.values())

    @property
    def draining(self) -> dict[str, str]:
        """Workers that hand over what they run and have not gone yet, and why."""
        return {name: worker.leaving for name, worker in sorted(self.workers.items()) if worker.leaving is not None}

    def running(self, at: float) -> set[str]:
        """The jobs that living workers have named in their last heartbeats."""
        fresh = at - LOST_AFTER_S
        return {job for worker in self.workers.values() if worker.beat > fresh for job in worker.running}

    def more(self, *, alive: int, most: int, waiting: int) -> int:
        """How many workers to add: as many as have a job waiting, if all that there are are busy and none backs off.

        Args:
            alive: workers that run or start. most: at once. waiting: jobs that wait in the queue.
        """
        online = [worker for worker in self.workers.values() if worker.online]
        if not online or len(online) < alive:  # some are still starting: they may be enough
            return 0
        if any(worker.limited or len(worker.running) < worker.slots for worker in online):
            return 0
        return max(0, min(most - alive, waiting))
