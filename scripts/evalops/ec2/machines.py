"""Which instances a fleet has had, from when to when, and what they have cost: the book behind `status`, `cost` and the summary.

The pool enters them, the controller stores the book (`machines.json`), so whoever drives the fleet on knows of machines that are gone.
`evalops.fleet.spending` reads it and adds it up.
"""

from collections.abc import Iterable
from datetime import datetime

from evalops.ec2.prices import Prices
from evalops.fleet.spending import Spending, read, spending
from evalworker.contract import layout
from evalworker.contract.documents import MachineBook, MachineRecord, Market
from evalworker.contract.wire import now
from evalworker.storage import Storage


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
        stored = read(storage, fleet_id)
        return cls(fleet_id, prices) if stored is None else cls(fleet_id, prices, stored.machines, stored.as_of)

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
