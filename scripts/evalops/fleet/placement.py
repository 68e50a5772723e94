"""Which job is sent first: the one that will take the longest, so that the last worker does not finish alone.

What a task takes is known from earlier runs: one small document for each (task, model) under `timings/`, written when a fleet has ended.
Called by `dispatch` and `ending`. A document that cannot be read or written costs nothing but a better order.
"""

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from evalops.fleet.ledger import JobState, Ledger, Pair
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec, Timing
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Storage, StorageError

THREADS = 8
"""Documents that are read at once."""

UNKNOWN_S = 1.0
"""Seconds a sample where nothing has ever been run: then the number of samples decides."""


def read(storage: Storage, jobs: Iterable[JobState]) -> dict[Pair, float]:
    """Seconds a sample of each (task, model) that has been run before, as its job took them all together."""
    pairs = {(job.spec.task, job.spec.model): job.pair for job in jobs}

    def one(known: tuple[tuple[str, str], Pair]) -> tuple[Pair, float] | None:
        (task, model), pair = known
        with contextlib.suppress(StorageError, Unreadable):
            return pair, Timing.from_json(storage.get(layout.timing(task, model)).body).seconds_per_sample
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(found for found in pool.map(one, pairs.items()) if found is not None)


def longest_first(jobs: Sequence[JobState], seconds: dict[Pair, float]) -> list[JobState]:
    """The jobs by what they will take, the longest first; equal ones stay in the order of the plan.

    A task that has never been run is taken for one as the others are.
    """
    usual = statistics.median(seconds.values()) if seconds else UNKNOWN_S
    return sorted(jobs, key=lambda job: -job.spec.samples * seconds.get(job.pair, usual))


def timings(ledger: Ledger, fleet_id: str) -> list[tuple[JobSpec, Timing]]:
    """What this fleet's completed tasks took; only those all of whose samples it has run itself, in this round."""
    found = []
    for job in ledger.wholes:
        parts = ledger.shards_of(job) or [job]
        ends = [part.done for part in parts if part.done is not None and part.status == "completed"]
        if len(ends) < len(parts) or any(end.round != ledger.round or end.kept for end in ends) or not job.spec.samples:
            continue
        spent = sum(part.spent_s for part in parts) / job.spec.samples
        timing = Timing(
            task=job.spec.task,
            model=job.spec.model,
            seconds_per_sample=round(spent, 6),
            samples=job.spec.samples,
            fleet_id=fleet_id,
            as_of=now(),
        )
        found.append((job.spec, timing))
    return found


def write(storage: Storage, ledger: Ledger, fleet_id: str) -> None:
    """Keep them for later fleets. Raises StorageError."""
    found = timings(ledger, fleet_id)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda each: storage.put(layout.timing(each[0].task, each[0].model), each[1].to_bytes()), found))
