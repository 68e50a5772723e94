"""What a fleet's machines have cost, added up from the book that its pool keeps (`machines.json`). Asks AWS nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from evalworker.contract import layout
from evalworker.contract.documents import MachineBook, MachineRecord
from evalworker.storage import Missing, Storage


@dataclass(frozen=True)
class Spending:
    """What machines have cost.

    Attributes:
        usd: so far, None as soon as one instance has no known price.
        known_usd: the part that is known. per_hour: of those that run, None likewise. unpriced: `type market` without a price.
        sources: where the prices are from.
    """

    usd: float | None
    known_usd: float
    per_hour: float | None
    running: int
    unpriced: list[str]
    sources: list[str]

    @property
    def note(self) -> str | None:
        """What a reader must know of these figures; None when there is nothing."""
        said = [f"on-demand prices are of the {source}" for source in self.sources if source.startswith("table")]
        if self.unpriced:
            said.append(f"no price is known for {', '.join(self.unpriced)}")
        return "; ".join(said) or None


def spending(records: Iterable[MachineRecord], as_of: datetime, at: datetime) -> Spending:
    """What a book comes to at a time, its last prices going on for what still runs.

    Args:
        as_of: when the book was written.
    """
    known, rate, running = 0.0, 0.0, 0
    unpriced: dict[str, None] = {}
    sources: dict[str, None] = {}
    for record in records:
        if record.ended is None:
            running += 1
        if record.usd is None or record.usd_per_hour is None:
            unpriced[f"{record.instance_type} {record.market}"] = None
            continue
        sources[record.price_from or ""] = None
        known += record.usd
        if record.ended is None:
            known += max(0.0, (at - as_of).total_seconds()) * record.usd_per_hour / 3600
            rate += record.usd_per_hour
    whole = not unpriced
    return Spending(
        known if whole else None, known, rate if whole else None, running, list(unpriced), sorted(filter(None, sources))
    )


def read(storage: Storage, fleet_id: str) -> MachineBook | None:
    """A fleet's stored book; None for a fleet without machines of its own. Raises StorageError, Unreadable."""
    try:
        return MachineBook.from_json(storage.get(layout.machines(fleet_id)).body)
    except Missing:
        return None
