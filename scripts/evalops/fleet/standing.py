"""How a fleet stands, in short: one document beside its stream, so that looking at a fleet costs the same however long it has run.

`Noted` gathers what the events tell beyond the ledger; the stream feeds it. The controller writes the document after a segment has been
stored; `evalops.fleet.look` reads it and adds the segments that are newer. It decides nothing: who drives a fleet on reads its stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from evalops.fleet.ledger import JobState, Ledger, Sealed, Spend
from evalworker import redact
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.contract.events import Event
from evalworker.contract.jsonio import dumps
from evalworker.contract.messages import AttemptDone, SampleCounts
from evalworker.contract.wire import Part, Unreadable, Wire, now
from evalworker.storage import Missing, Storage

WRITE_EVERY_S = 10.0
"""Between two documents of a fleet in which something happens: so old, and a few segments, is what is read beside it."""

SHARE = 0.05
"""The part of the controller's time that writing it may take: that of ten thousand jobs takes most of a second."""

RATE_S = 300
"""The rate of samples is that of so many last seconds."""

BUCKET_S = 5
"""Results are counted by so many seconds."""


class WorkerRow(Part):
    """One worker as the events tell of it."""

    instance_id: str
    lifecycle: str
    slots: int
    since: datetime
    state: str = "online"
    instance_type: str = ""


class JobStanding(Part):
    """One job; `counts` are those of the stream, which count while it has not ended."""

    attempt: int
    counts: SampleCounts
    tokens: int
    cost_usd: float | None
    done: AttemptDone | None = None
    settled: bool = False


class Standing(Wire):
    """A fleet in one round, up to the segment `segment`; jobs of which nothing is known are left out.

    `usd`, `tokens` and `unpriced` are those of the ledger's `Spend`, `results` counts by the second in which they begin.
    """

    type: Literal["standing"] = "standing"
    fleet_id: str
    round: int
    segment: int
    jobs: dict[str, JobStanding]
    workers: list[WorkerRow]
    usd: float
    tokens: int
    unpriced: list[str]
    results: dict[int, int]
    summary: dict[str, Any] | None = None
    last_event: datetime | None = None


@dataclass
class Noted:
    """What the events tell of workers, of the end, and of how fast results come."""

    workers: dict[str, WorkerRow] = field(default_factory=dict)
    summary: Event | None = None
    last_event: datetime | None = None
    results: dict[int, int] = field(default_factory=dict)

    def note(self, event: Event, moment: datetime) -> None:
        """Take one event of the stream, in order."""
        self.last_event = moment
        kind, name = event["type"], event.get("instance_id", "")
        if kind == "result":
            self._count(int(moment.timestamp()) // BUCKET_S * BUCKET_S)
        elif kind == "worker_online":
            self.workers[name] = WorkerRow(
                instance_id=name,
                lifecycle=event["lifecycle"],
                slots=event["slots"],
                since=moment,
                instance_type=event["instance_type"],
            )
        elif kind in ("worker_lost", "worker_draining") and name in self.workers:
            state = "lost" if kind == "worker_lost" else f"left ({event['reason']})"
            self.workers[name] = self.workers[name].model_copy(update={"state": state})
        elif kind == "fleet_summary":
            self.summary = event
        elif kind == "fleet_start":
            self.summary = None

    def _count(self, bucket: int) -> None:
        if bucket not in self.results:
            self.results = {begin: count for begin, count in self.results.items() if begin > bucket - RATE_S}
        self.results[bucket] = self.results.get(bucket, 0) + 1

    @property
    def samples_per_minute(self) -> float:
        """Results of the last five minutes, per minute."""
        at = now().timestamp()
        recent = {begin: count for begin, count in self.results.items() if begin > at - RATE_S}
        return sum(recent.values()) / max(BUCKET_S, at - min(recent)) * 60 if recent else 0.0


def of(fleet_id: str, ledger: Ledger, noted: Noted, segment: int) -> Standing:
    """The document of a fleet whose stream is stored up to this segment, and has nothing that waits to be stored."""
    return Standing(
        fleet_id=fleet_id,
        round=ledger.round,
        segment=segment,
        jobs={job_id: _standing_of(job) for job_id, job in ledger.jobs.items() if _is_known(job)},
        workers=list(noted.workers.values()),
        usd=ledger.spend.usd,
        tokens=ledger.spend.tokens,
        unpriced=sorted(ledger.spend.unpriced),
        results=noted.results,
        summary=noted.summary,
        last_event=noted.last_event,
    )


def _is_known(job: JobState) -> bool:
    return job.done is not None or job.heard or job.attempt > 1


def _standing_of(job: JobState) -> JobStanding:
    return JobStanding(
        attempt=job.attempt,
        counts=job.streamed,
        tokens=job.tokens,
        cost_usd=job.cost_usd,
        done=job.done,
        settled=job.settled,
    )


def write(storage: Storage, standing: Standing) -> None:
    """Put it beside the stream. Raises StorageError."""
    storage.put(layout.standing(standing.fleet_id), dumps(redact.json_values(standing.to_dict())).encode("ascii"))


def read(storage: Storage, fleet_id: str, round_: int) -> Standing | None:
    """The document of this round; None when there is none that can be used: then the whole stream tells. Raises StorageError."""
    try:
        found = Standing.from_json(storage.get(layout.standing(fleet_id)).body)
    except (Missing, Unreadable):
        return None
    return found if found.round == round_ else None


def ledger_of(standing: Standing, jobs: Iterable[JobSpec]) -> Ledger:
    """A ledger to look at, which newer events may be replayed into; it does not know single samples, so nobody can drive a fleet by it."""
    ledger = Ledger(jobs, standing.round)
    ledger.spend = Spend(standing.usd, standing.tokens, set(standing.unpriced))
    for job_id, told in standing.jobs.items():
        if (job := ledger.jobs.get(job_id)) is not None:
            job.attempt, job.done, job.settled = told.attempt, told.done, told.settled
            job.told, job.sealed = told.counts, Sealed.without_samples(told.cost_usd, told.tokens)
    return ledger


def noted_of(standing: Standing) -> Noted:
    """What had been noted when the document was written."""
    workers = {row.instance_id: row for row in standing.workers}
    last = standing.last_event
    return Noted(workers, standing.summary, last and last.astimezone(UTC), dict(standing.results))
