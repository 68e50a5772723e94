"""What can be seen of a fleet from outside: its manifest, its control document and its stored events, put together.

For commands that only look (`list`, `status`); nothing here writes, and nothing asks a worker.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalops.fleet import standing
from evalops.fleet.ledger import Ledger
from evalops.fleet.ownership import controller_gone, lost
from evalops.fleet.spending import Spending, spending
from evalops.fleet.spending import read as read_book
from evalops.fleet.standing import Noted, WorkerRow
from evalops.fleet.stream import read_events, read_newer
from evalops.hints import resume
from evalworker.contract import layout
from evalworker.contract.documents import Control, MachineBook, Manifest
from evalworker.contract.ids import BadId, check_run_id
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Missing, Storage


@dataclass
class Sight:
    """A fleet as it stands in storage. `lost`: it was of one machine, and its queues have gone with it."""

    manifest: Manifest
    control: Control
    ledger: Ledger
    noted: Noted = field(default_factory=Noted)
    book: MachineBook | None = None
    lost: bool = False

    @property
    def workers(self) -> dict[str, WorkerRow]:
        """Every worker that has come online, by its name."""
        return self.noted.workers

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its `fleet_summary`; None while it has none."""
        return self.noted.summary

    @property
    def last_event(self) -> datetime | None:
        """When the stream's last line was written."""
        return self.noted.last_event

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
        return self.noted.samples_per_minute

    @property
    def waiting_for(self) -> str | None:
        """One phrase that says why nothing happens, None when something does or all has ended."""
        if self.control.state == "ended":
            return None
        if self.lost:
            return f"nothing any more, its queues have gone: `{resume(self.manifest.fleet_id, self.manifest.backend)}` goes on"
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
    """Read one fleet: its documents, and the segments since its `standing.json`; all of them when there is none of this round.

    Raises Missing when there is no such fleet, StorageError, Unreadable.
    """
    manifest = Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
    control = Control.from_json(storage.get(layout.control(fleet_id)).body)
    book = read_book(storage, fleet_id)
    known = standing.read(storage, fleet_id, control.round)
    if known is None:
        sight = Sight(manifest, control, Ledger(manifest.jobs, control.round), book=book)
        events = read_events(storage, fleet_id)
    else:
        sight = Sight(manifest, control, standing.ledger_of(known, manifest.jobs), standing.noted_of(known), book)
        events = read_newer(storage, fleet_id, known.segment)
    for event in events:
        sight.ledger.replay(event)
        sight.noted.note(event, datetime.fromisoformat(event["ts"]))
    sight.lost = sight.state == "unattended" and lost(storage, control)
    return sight


def fleet_ids(storage: Storage) -> list[str]:
    """All runs under the root, newest first."""
    names = []
    for name in storage.list_dirs(""):
        try:
            names.append(check_run_id(name))
        except BadId:
            continue
    return sorted(names, reverse=True)


def fleets(storage: Storage, limit: int) -> list[tuple[str, Manifest | None, Control | None]]:
    """The newest fleets under the root, newest first; None where a document is missing or unreadable."""
    return [(name, *_documents(storage, name)) for name in fleet_ids(storage)[:limit]]


def _documents(storage: Storage, fleet_id: str) -> tuple[Manifest | None, Control | None]:
    try:
        manifest = Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
        return manifest, Control.from_json(storage.get(layout.control(fleet_id)).body)
    except (Missing, Unreadable):
        return None, None
