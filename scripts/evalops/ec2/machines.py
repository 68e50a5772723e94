"""Which instances a fleet has had, from when to when, and what they have cost: the book behind `status`, `cost` and the summary.

The pool enters them, the controller stores the book (`machines.json`), so whoever drives the fleet on knows of machines that are gone. Pure
apart from `Prices`, which asks AWS.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from evalops.ec2.prices import Prices
from evalworker.contract import layout
from evalworker.contract.documents import MachineBook, MachineRecord, Market
from evalworker.contract.wire import now
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


class Book:
    """One fleet's book. Entered by the pool, priced and stored by `store`.

    Attributes:
        as_of: when it was last stored; None for a new one.
    """

    def __init__(
        self, fleet_id: str, prices: Prices, records: Iterable[MachineRecord] = (), as_of: datetime | None = None
    ) -> None:
        self._fleet_id = fleet_id
        self._prices = prices
        self.as_of = as_of
        self.records = {record.instance_id: record for record in records}

    @classmethod
    def read(cls, storage: Storage, fleet_id: str, prices: Prices) -> "Book":
        """The book of a fleet that an earlier controller has left; empty for a new one. Raises StorageError, Unreadable."""
        try:
            stored = MachineBook.from_json(storage.get(layout.machines(fleet_id)).body)
        except Missing:
            return cls(fleet_id, prices)
        return cls(fleet_id, prices, stored.machines, stored.as_of)

    def launched(
        self, instance_id: str, instance_type: str, market: Market, at: datetime, zone: str | None = None
    ) -> None:
        """Enter an instance; what is known of it already is completed."""
        known = self.records.get(instance_id)
        if known is None:
            self.records[instance_id] = MachineRecord(
                instance_id=instance_id, instance_type=instance_type, market=market, zone=zone, launched=at
            )
        elif zone is not None and (known.zone != zone or known.launched != at):
            self.records[instance_id] = known.model_copy(update={"zone": zone, "launched": at})

    def ended(self, instance_id: str, at: datetime) -> None:
        """An instance runs no more; the first time said counts."""
        record = self.records.get(instance_id)
        if record is not None and record.ended is None:
            self.records[instance_id] = record.model_copy(update={"ended": max(at, record.launched)})

    def all_ended(self, at: datetime, but: Iterable[str] = ()) -> None:
        """The fleet is over: all its instances have been terminated, `but` those of which that is not known."""
        for instance_id in self.records.keys() - set(but):
            self.ended(instance_id, at)

    def reckon(self, at: datetime) -> Spending:
        """Price all instances up to now. Raises ServiceError for unusable credentials alone."""
        for instance_id, record in self.records.items():
            quote = self._prices.quote(record.market, record.instance_type, record.zone, record.launched)
            if quote is not None:
                self.records[instance_id] = record.model_copy(
                    update={
                        "usd": round(quote.cost(record.launched, record.ended or at), 6),
                        "usd_per_hour": quote.usd_per_hour,
                        "price_from": quote.source,
                    }
                )
        return spending(self.records.values(), at, at)

    def store(self, storage: Storage) -> None:
        """Price and write the book. Raises ServiceError."""
        if not self.records:
            return
        moment = now()
        self.reckon(moment)
        document = MachineBook(fleet_id=self._fleet_id, as_of=moment, machines=list(self.records.values()))
        storage.put(layout.machines(self._fleet_id), document.to_bytes())


def read(storage: Storage, fleet_id: str) -> MachineBook | None:
    """A fleet's stored book; None for a fleet without machines of its own. Raises StorageError, Unreadable."""
    try:
        return MachineBook.from_json(storage.get(layout.machines(fleet_id)).body)
    except Missing:
        return None
