"""One fleet as its controller holds it: documents, ledger, stream, queues, workers, and how an AWS error is borne.

Made by `evalops.fleet.assemble` and passed to every part of the controller; it decides nothing itself.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evalops.fleet.connections import Connections
from evalops.fleet.guards import Verdict
from evalops.fleet.ledger import Ledger
from evalops.fleet.roster import Roster
from evalops.fleet.stream import EventStream
from evalops.fleet.view import ProgressLine
from evalops.fleet.watch import Watch
from evalops.fleet.workers import Pool
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract.documents import Control, Lane, Manifest
from evalworker.contract.events import Event
from evalworker.contract.messages import Job
from evalworker.queues import Queue
from evalworker.storage import Storage

INSIST_S = 60.0
"""How long the end of a fleet is tried to be stored."""


@dataclass
class Plan:
    """What a controller is told to do.

    Attributes:
        workers: how many workers to keep while there is work for them.
        replacements: how many lost workers may be replaced without a sample completed in between.
    """

    workers: int
    replacements: int = 10


class Left(RuntimeError):
    """The controller goes, the fleet stays; the text says why."""


@dataclass
class Due:
    """A job message to be sent at a time (monotonic seconds)."""

    at: float
    message: Job


@dataclass
class Fleet:
    """See the module. `tell` sends a subject and a text to whoever waits for the fleet's end.

    Attributes:
        started: when the round began (monotonic).
        due: job messages that are sent later.
        verdict: how the fleet is to end, once something has decided that; `stopping_since` when workers were told (monotonic).
    """

    manifest: Manifest
    control: Control
    control_etag: str
    storage: Storage
    lane: Lane
    ledger: Ledger
    stream: EventStream
    pool: Pool
    view: ProgressLine
    plan: Plan
    started: float = field(default_factory=time.monotonic)
    tell: Callable[[str, str], None] | None = None
    roster: Roster = field(default_factory=Roster)
    due: list[Due] = field(default_factory=list)
    verdict: Verdict | None = None
    stopping_since: float | None = None

    def __post_init__(self) -> None:
        client = aws.sqs(self.lane)
        self.jobs = Queue(client, self.lane.jobs)
        self.events = Queue(client, self.lane.events)
        self.dead = Queue(client, self.lane.dead)
        self.watch = Watch(self.ledger, time.monotonic())
        self.connections = Connections(self.control.limits.fleet_connections)
        self._last: dict[str, float] = {}
        self._troubles: set[str] = set()

    @property
    def fleet_id(self) -> str:
        """The fleet's id."""
        return self.manifest.fleet_id

    def began(self, ago_s: float) -> None:
        """The round began so long ago, under another controller."""
        self.started = time.monotonic() - max(0.0, ago_s)
        self.view.began(ago_s)

    @property
    def stopping(self) -> bool:
        """Whether the workers have been told to hand over."""
        return self.stopping_since is not None

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """An AWS error in the loop is said once, and the loop goes on after a pause. Raises Left when credentials have expired."""
        try:
            yield
        except ServiceError as error:
            if error.credentials:
                raise Left(str(error)) from error
            sentence = f"{what}: {error}"
            if sentence not in self._troubles:
                self._troubles.add(sentence)
                self.view.note(f"{sentence}; going on")
            time.sleep(random.uniform(0.5, 1.5))  # noqa: S311

    def insist(self, what: str, call: Callable[[], object]) -> None:
        """The same for what must be done before the controller ends: tried for a minute, then the error is raised."""
        end = time.monotonic() + INSIST_S
        while time.monotonic() < end:
            with self.surviving(what):
                call()
                return
        call()

    def every(self, what: str, seconds: float) -> bool:
        """Whether it is time for something again."""
        due = time.monotonic() - self._last.get(what, float("-inf")) >= seconds
        if due:
            self._last[what] = time.monotonic()
        return due

    def warn(self, text: str, **about: str) -> None:
        """Write a warning into the stream; `about` says what it concerns, such as `job_id`."""
        event: Event = {"type": "warning", **about, "text": text}
        self.stream.append([event])

    def announce(self, what: str, text: str) -> None:
        """Tell whoever waits elsewhere."""
        if self.tell is not None:
            self.tell(f"fleet {self.fleet_id} {what}", text)

    def waiting_for(self) -> str | None:
        """One phrase when nothing seems to happen."""
        if self.stopping:
            return "stopping"
        if not self.roster.any_online:
            return self.pool.waiting_for or "waiting for the first worker"
        if self.watch.held(self.control):
            left = len(self.watch.canaries(self.control))
            return f"{left} canar{'y' if left == 1 else 'ies'} before all else"
        if self.due and all(
            job.spec.job_id in {due.message.job_id for due in self.due} for job in self.ledger.open_jobs
        ):
            return f"retrying in {max(0, round(min(due.at for due in self.due) - time.monotonic()))} s"
        return self.pool.waiting_for
