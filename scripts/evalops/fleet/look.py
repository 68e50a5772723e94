"""What can be seen of a fleet from outside: its manifest, its control document and its stored events, put together.

For commands that only look (`list`, `status`); nothing here writes, and nothing asks a worker.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalops.ec2.machines import Spending, spending
from evalops.ec2.machines import read as read_book
from evalops.fleet.ledger import Ledger
from evalops.fleet.ownership import controller_gone
from evalops.fleet.stream import read_events
from evalworker.contract import layout
from evalworker.contract.documents import Control, MachineBook, Manifest
from evalworker.contract.ids import BadId, check_run_id
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Missing, Storage

RATE_S = 300.0
"""The rate of samples is that of so many last seconds."""


@dataclass
class WorkerRow:
    """One worker as the events tell of it."""

    instance_id: str
    lifecycle: str
    slots: int
    since: datetime
    state: str = "online"
    instance_type: str = ""


@dataclass
class Sight:
    """A fleet as it stands in storage."""

    manifest: Manifest
    control: Control
    ledger: Ledger
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    last_event: datetime | None = None
    results: list[datetime] = field(default_factory=list)
    book: MachineBook | None = None

    @property
    def spending(self) -> Spending | None:
        """What its EC2 machines have cost up to now; None for a fleet that has none."""
        if self.book is None:
            return None
        over = self.last_event if self.control.state == "ended" else None
        return spending(self.book.machines, self.book.as_of, over or now())

    @property
    def minutes_left(self) -> float | None:
        """How long the open samples will take at the present rate; None when nothing moves."""
        done = self.ledger.samples
        left, rate = done.total - done.completed - done.errored, self.samples_per_minute
        return left / rate if rate > 0 and self.control.state != "ended" else None

    @property
    def state(self) -> str:
        """See `state_of`."""
        return state_of(self.control)

    @property
    def beat_age_s(self) -> float:
        """Seconds since the controller's last sign of life."""
        return (now() - self.control.beat).total_seconds()

    @property
    def samples_per_minute(self) -> float:
        """Results of the last five minutes, per minute."""
        recent = [moment for moment in self.results if (now() - moment).total_seconds() < RATE_S]
        if not recent:
            return 0.0
        return len(recent) / max(1.0, (now() - min(recent)).total_seconds()) * 60

    @property
    def waiting_for(self) -> str | None:
        """One phrase that says why nothing happens, None when something does or all has ended."""
        if self.control.state == "ended":
            return None
        if self.state == "unattended":
            return f"no controller for {self.beat_age_s:.0f} s: `ct fleet attach {self.manifest.fleet_id}` drives it on"
        if self.state == "past its deadline":
            return f"its deadline has passed: `ct fleet stop {self.manifest.fleet_id}` writes its summary"
        if not any(worker.state == "online" for worker in self.workers.values()):
            return self.control.waiting_for or "a worker to come online"
        return self.control.waiting_for


def state_of(control: Control) -> str:
    """running, stopping, ended …; `unattended` when its controller has gone without having ended it."""
    gone = control.state != "ended" and controller_gone(control)
    if (control.state == "running" or gone) and now() > control.deadline:
        return "past its deadline"
    return "unattended" if gone else control.state


def look(storage: Storage, fleet_id: str) -> Sight:
    """Read one fleet. Raises Missing when there is none, StorageError, Unreadable."""
    manifest = Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
    control = Control.from_json(storage.get(layout.control(fleet_id)).body)
    sight = Sight(manifest, control, Ledger(manifest.jobs, control.round), book=read_book(storage, fleet_id))
    for event in read_events(storage, fleet_id):
        sight.ledger.replay(event)
        _note(sight, event)
    return sight


def _note(sight: Sight, event: dict[str, Any]) -> None:
    moment = datetime.fromisoformat(event["ts"])
    sight.last_event = moment
    name = event.get("instance_id", "")
    if event["type"] == "worker_online":
        sight.workers[name] = WorkerRow(
            name, event["lifecycle"], event["slots"], moment, instance_type=event["instance_type"]
        )
    elif event["type"] in ("worker_lost", "worker_draining") and name in sight.workers:
        sight.workers[name].state = "lost" if event["type"] == "worker_lost" else f"left ({event['reason']})"
    elif event["type"] == "result":
        if (now() - moment).total_seconds() < RATE_S:
            sight.results.append(moment)
    elif event["type"] == "fleet_summary":
        sight.summary = event
    elif event["type"] == "fleet_start":
        sight.summary = None


def fleets(storage: Storage, limit: int) -> list[tuple[str, Manifest | None, Control | None]]:
    """The newest fleets under the root, newest first; None where a document is missing or unreadable."""
    names = []
    for name in storage.list_dirs(""):
        try:
            names.append(check_run_id(name))
        except BadId:
            continue
    return [(name, *_documents(storage, name)) for name in sorted(names, reverse=True)[:limit]]


def _documents(storage: Storage, fleet_id: str) -> tuple[Manifest | None, Control | None]:
    try:
        manifest = Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
        return manifest, Control.from_json(storage.get(layout.control(fleet_id)).body)
    except (Missing, Unreadable):
        return None, None
