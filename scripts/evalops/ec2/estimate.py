"""What a run will take: workers, hours and dollars, by today's prices and by what earlier runs of the same jobs took.

`ct run eval --ec2 --estimate` prints it. Nothing is launched and nothing written. What is not known is said to be unknown.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evalops import ui
from evalops.ec2.prices import Prices
from evalops.fleet import look
from evalops.infra.estate import Estate
from evalworker.contract.documents import JobSpec, Machines
from evalworker.contract.wire import Unreadable
from evalworker.storage import Missing, Storage

FLEETS_MOST = 30
"""How many of the newest fleets are looked through for the same jobs."""


@dataclass(frozen=True)
class Past:
    """What a job took in an earlier run. `usd`: of its tokens, None where no price was known."""

    fleet_id: str
    duration_s: float
    usd: float | None


@dataclass(frozen=True)
class Rate:
    """What one worker costs an hour; `usd` is None where no price is known."""

    instance_type: str
    market: str
    usd: float | None
    source: str


@dataclass(frozen=True)
class Estimate:
    """Hours are of wall-clock time; None: earlier runs do not tell."""

    workers: int
    rates: list[Rate]
    hours: float | None
    tokens_usd: float | None
    fleets: list[str]

    @property
    def machines_usd(self) -> float | None:
        """At the price of the market that is asked first."""
        rate = self.rates[0].usd if self.rates else None
        return None if rate is None or self.hours is None else self.hours * self.workers * rate

    def record(self) -> dict[str, Any]:
        """For --json."""
        return {
            "hours": self.hours,
            "machines_usd": self.machines_usd,
            "tokens_usd": self.tokens_usd,
            "rates": [vars(rate) for rate in self.rates],
            "earlier_fleets": self.fleets,
        }

    def lines(self) -> list[str]:
        """For people."""
        found = []
        for rate in self.rates:
            price = f"{ui.money_text(rate.usd)} an hour ({rate.source})" if rate.usd is not None else "price not known"
            found.append(f"a worker: {rate.instance_type} {rate.market}, {price}")
        if self.hours is None:
            return [*found, "hours and cost: not known, no earlier run of all these jobs was found under this root"]
        machines = ui.money_text(self.machines_usd) or "not known"
        tokens = ui.money_text(self.tokens_usd) or "not known"
        basis = ", ".join(self.fleets[:3])
        return [
            *found,
            f"about {ui.seconds_text(self.hours * 3600)}, machines {machines}, tokens {tokens} (as in {basis})",
        ]


def estimate(
    storage: Storage, estate: Estate, machines: Machines, jobs: list[JobSpec], workers: int, slots: int
) -> Estimate:
    """The estimate of a run with `slots` jobs at once on each worker. Raises StorageError."""
    past = earlier(storage, {spec.job_id for spec in jobs})
    known = [past[spec.job_id] for spec in jobs if spec.job_id in past]
    whole = bool(jobs) and len(known) == len(jobs)
    costs = [job.usd for job in known]
    return Estimate(
        workers=workers,
        rates=rates(Prices(estate.region), machines),
        hours=wall_s([job.duration_s for job in known], workers * slots) / 3600 if whole else None,
        tokens_usd=sum(cost for cost in costs if cost is not None) if whole and None not in costs else None,
        fleets=sorted({job.fleet_id for job in known}, reverse=True),
    )


def wall_s(durations: Iterable[float], slots: int) -> float:
    """How long jobs take in so many slots of workers, the longest first, each in the slot that is free first."""
    loads = [0.0] * max(1, slots)
    for duration in sorted(durations, reverse=True):
        loads[loads.index(min(loads))] += duration
    return max(loads)


def earlier(storage: Storage, wanted: set[str]) -> dict[str, Past]:
    """What the newest completed run of each of these jobs took."""
    found: dict[str, Past] = {}
    for fleet_id, manifest, _ in look.fleets(storage, FLEETS_MOST):
        if manifest is None or not {spec.job_id for spec in manifest.jobs} & (wanted - found.keys()):
            continue
        try:
            ledger = look.look(storage, fleet_id).ledger
        except (Missing, Unreadable):
            continue
        for job_id, job in ledger.jobs.items():
            if job_id in wanted and job_id not in found and job.done is not None and job.status == "completed":
                found[job_id] = Past(fleet_id, job.done.duration_s, job.cost_usd)
    return found


def rates(prices: Prices, machines: Machines) -> list[Rate]:
    """What a worker of the preferred type costs in each market that is asked."""
    preferred = next(type_ for types in machines.instance_types.values() for type_ in types)
    found = []
    for market in machines.markets:
        if market == "spot":
            found.append(Rate(preferred, market, prices.cheapest_spot(preferred), "today's cheapest zone"))
        else:
            quote = prices.on_demand(preferred)
            found.append(Rate(preferred, market, quote.usd_per_hour if quote else None, quote.source if quote else ""))
    return found
