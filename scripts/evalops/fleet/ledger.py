"""What a fleet has done so far, and what each message changes: pure state, no clock, no AWS, no files.

The controller feeds it the workers' messages in any order, duplicates included, and writes the events that come out. Replaying the
stream of an earlier controller brings a ledger to the same state. Design, section 5.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.contract.events import Event, of_sample
from evalworker.contract.failures import Category
from evalworker.contract.ids import SampleId, sample_key
from evalworker.contract.jsonio import canonical
from evalworker.contract.messages import AttemptDone, SampleCounts, SampleDone

Key = tuple[str, int]
Pair = tuple[str, str]
"""A task's name and a model's."""


@dataclass
class Said:
    """The last result of one sample that stands in the stream."""

    uuid: str | None
    attempt: int
    errored: bool
    cost_usd: float | None = None
    tokens: int = 0


@dataclass
class Spend:
    """What all samples have cost, those that were run again among them. `unpriced`: models whose tokens have no price."""

    usd: float = 0.0
    tokens: int = 0
    unpriced: set[str] = field(default_factory=set)

    def add(self, model_usage: dict[str, dict[str, Any]]) -> None:
        """Count one execution of a sample."""
        for model, usage in model_usage.items():
            tokens, cost = int(usage.get("total_tokens") or 0), usage.get("total_cost")
            self.tokens += tokens
            self.usd += cost or 0.0
            if cost is None and tokens:
                self.unpriced.add(model)


@dataclass
class JobState:
    """One job. `attempt` is the newest one known, `base` the last one of earlier rounds; `done` its end, None while it goes on.

    `failed_on`: the worker on which an attempt failed that is tried again.
    """

    spec: JobSpec
    attempt: int = 1
    base: int = 0
    redone: int = 0
    spent_s: float = 0.0
    said: dict[Key, Said] = field(default_factory=dict)
    paid: set[tuple[Key, str | None]] = field(default_factory=set)
    results_said: set[tuple[Key, str | None]] = field(default_factory=set)
    retries_said: set[str] = field(default_factory=set)
    done: AttemptDone | None = None
    ending: AttemptDone | None = None
    failed_on: str | None = None

    @property
    def pair(self) -> Pair:
        """Its task and model."""
        return self.spec.name, self.spec.model

    @property
    def status(self) -> str:
        """`open`, or how it ended: completed, failed, cancelled."""
        return "open" if self.done is None else self.done.status


@dataclass(frozen=True)
class Retry:
    """A new attempt is due after `delay_s`."""

    job_id: str
    attempt: int
    delay_s: float


@dataclass
class Outcome:
    """What one message leads to: events to write, an attempt to send, a log to compare with the stream."""

    events: list[Event] = field(default_factory=list)
    retry: Retry | None = None
    compare: AttemptDone | None = None


class Ledger:
    """The state of one fleet in one round.

    Attributes:
        ended: this round's ends, in the order in which they came.
        passed: the (task, model) whose canary passed in this round.
        spend: of all rounds.
    """

    def __init__(self, jobs: Iterable[JobSpec], round_: int = 1) -> None:
        self.round = round_
        self.jobs = {spec.job_id: JobState(spec) for spec in jobs}
        self.ended: list[AttemptDone] = []
        self.passed: set[Pair] = set()
        self.spend = Spend()

    # What came from the workers

    def sample(self, done: SampleDone) -> Outcome:
        """A sample ended."""
        job = self.jobs.get(done.job_id)
        if job is None:
            return Outcome()
        self._pay(job, done.sample_id, done.epoch, done.uuid, done.model_usage)
        if job.done is not None or done.round != self.round:
            return Outcome()
        if done.will_retry:
            identity = canonical([done.sample_id, done.epoch, done.uuid])
            if identity in job.retries_said:
                return Outcome()
            job.retries_said.add(identity)
            return Outcome([of_sample(done)])
        if (sample_key(done.sample_id, done.epoch), done.uuid) in job.results_said:
            return Outcome()  # a duplicate, perhaps of one that has been replaced since
        if (event := self._result(job, done)) is None:
            return Outcome()
        return Outcome([event])

    def _pay(
        self, job: JobState, sample_id: SampleId, epoch: int, uuid: str | None, usage: dict[str, dict[str, Any]]
    ) -> None:
        """Count what one execution of a sample has cost, once."""
        execution = (sample_key(sample_id, epoch), uuid)
        if execution not in job.paid:
            job.paid.add(execution)
            self.spend.add(usage)

    def _result(self, job: JobState, done: SampleDone) -> Event | None:
        """The `result` event, None if it stands already or comes from an attempt that has been superseded."""
        key = sample_key(done.sample_id, done.epoch)
        known = job.said.get(key)
        if known is not None and (known.uuid == done.uuid or done.attempt < known.attempt):
            return None
        tokens = sum(int(usage.get("total_tokens") or 0) for usage in done.model_usage.values())
        job.said[key] = Said(done.uuid, done.attempt, done.status == "errored", done.cost_usd, tokens)
        job.results_said.add((key, done.uuid))
        if known is not None:
            job.redone += 1
            return of_sample(done, replaces=known.uuid or "")
        return of_sample(done)

    def attempt(self, done: AttemptDone) -> Outcome:
        """An attempt ended: a retry is due, or the job's log is to be compared with the stream."""
        job = self.jobs.get(done.job_id)
        if job is None or job.done is not None or done.round != self.round or job.ending is not None:
            return Outcome()
        if done.ended:
            job.ending = done
            return Outcome(compare=done)
        if done.attempt < job.attempt:
            return Outcome()
        job.attempt = done.attempt + 1
        job.spent_s += done.duration_s
        if done.canary and done.status == "completed":
            self._canary_passed(job, done.attempt)
            return Outcome([self._attempt_event(job, done, None)])
        job.failed_on = done.instance_id
        delay = done.retry_after_s or 0.0
        return Outcome([self._attempt_event(job, done, delay)], Retry(done.job_id, job.attempt, delay))

    def _canary_passed(self, job: JobState, attempt: int) -> None:
        """The next attempt, which is sent when all canaries have passed, is the first that counts."""
        self.passed.add(job.pair)
        job.attempt = max(job.attempt, attempt + 1)
        job.base = attempt

    def _attempt_event(self, job: JobState, done: AttemptDone, delay_s: float | None) -> Event:
        """An attempt that ends without ending its job, or that ends it after something was kept or run again."""
        redone, job.redone = job.redone, 0
        event: Event = {
            "type": "job_attempt",
            "job_id": done.job_id,
            "task": job.spec.name,
            "model": job.spec.model,
            "attempt": done.attempt,
            "failure_category": done.failure_category,
            "error_summary": done.error_summary,
            "kept": done.kept,
            "redone": redone,
            "retry_in_s": delay_s,
            "duration_s": done.duration_s,
            "instance_id": done.instance_id,
        }
        return event | {"canary": True} if done.canary else event

    def matches(self, done: AttemptDone, digest_of: Any) -> bool:
        """Whether the stream holds exactly the executions of the log that ended the job."""
        job = self.jobs[done.job_id]
        return done.digest is None or digest_of(job) == done.digest

    def conclude(self, done: AttemptDone, missing: Iterable[SampleDone] = ()) -> list[Event]:
        """The job's last events: results that the stream lacked, `job_attempt` if anything was redone, then `job_done`."""
        job = self.jobs[done.job_id]
        if job.done is not None:
            return []
        events: list[Event] = []
        for sample in missing:
            known = job.said.get(sample_key(sample.sample_id, sample.epoch))
            if known is not None:
                known.attempt = sample.attempt  # the log that ended the job decides
            self._pay(job, sample.sample_id, sample.epoch, sample.uuid, sample.model_usage)
            if (event := self._result(job, sample)) is not None:
                events.append(event)
        if job.redone or done.kept:
            events.append(self._attempt_event(job, done, None))
        job.done, job.ending = done, None
        job.spent_s += done.duration_s
        job.attempt = max(job.attempt, done.attempt)
        self._ended(job, done)
        events.append(
            {
                "type": "job_done",
                "job_id": done.job_id,
                "task": job.spec.name,
                "model": job.spec.model,
                "status": done.status,
                "instance_id": done.instance_id,
                "duration_s": round(job.spent_s, 3),
                "failure_category": done.failure_category,
                "error_summary": done.error_summary,
                "attempts": done.attempt,
                "samples": done.samples.model_dump(),
                "log": layout.job_log(done.fleet_id, done.job_id) if done.log else None,
                "log_name": done.log_name,
                "metrics": done.metrics,
                "round": self.round,
            }
        )
        return events

    def _ended(self, job: JobState, done: AttemptDone) -> None:
        self.ended.append(done)
        if done.status == "completed":
            self.passed.add(job.pair)

    # What it comes to

    @property
    def open_jobs(self) -> list[JobState]:
        """Jobs that have not ended."""
        return [job for job in self.jobs.values() if job.done is None]

    def count(self, status: str) -> int:
        """Jobs with a status."""
        return sum(1 for job in self.jobs.values() if job.status == status)

    @property
    def samples(self) -> SampleCounts:
        """Samples of the whole fleet: of ended jobs from their logs, of open ones from the stream."""
        total = completed = errored = 0
        for job in self.jobs.values():
            if job.done is not None:
                counts = job.done.samples
            else:
                bad = sum(said.errored for said in job.said.values())
                counts = SampleCounts(total=job.spec.samples, completed=len(job.said) - bad, errored=bad)
            total, completed, errored = total + counts.total, completed + counts.completed, errored + counts.errored
        return SampleCounts(total=total, completed=completed, errored=errored)

    @property
    def token_cost(self) -> float | None:
        """Dollars for the tokens of all samples, also of those that were run again; None as soon as a price is missing."""
        return None if self.spend.unpriced else self.spend.usd

    @property
    def tokens(self) -> int:
        """Tokens of all samples, also of those that were run again."""
        return self.spend.tokens

    def failure_categories(self) -> set[Category | None]:
        """Why jobs failed, of those that have ended so."""
        return {job.done.failure_category for job in self.jobs.values() if job.done and job.done.status == "failed"}

    # Replaying a stream

    def replay(self, event: dict[str, Any]) -> None:
        """Take over one line of an earlier controller's stream."""
        if event["type"] == "fleet_start":
            self.new_round(event["round"])
        job = self.jobs.get(event.get("job_id", ""))
        if job is None:
            return
        if event["type"] in ("result", "sample_retry"):
            self._pay(job, event["sample_id"], event["epoch"], event["uuid"], event.get("model_usage") or {})
        if event["type"] == "result":
            usage = (event.get("model_usage") or {}).values()
            tokens = sum(int(entry.get("total_tokens") or 0) for entry in usage)
            key = sample_key(event["sample_id"], event["epoch"])
            errored = event["status"] == "errored"
            job.said[key] = Said(event["uuid"], event["attempt"], errored, event.get("cost_usd"), tokens)
            job.results_said.add((key, event["uuid"]))
            job.redone += "replaces" in event
        elif event["type"] == "sample_retry":
            job.retries_said.add(canonical([event["sample_id"], event["epoch"], event["uuid"]]))
        elif event["type"] == "job_attempt":
            self._replay_attempt(job, event)
        elif event["type"] == "job_done":
            if event["status"] == "completed" or event["round"] == self.round:
                job.done = _done_of(event)
                self._ended(job, job.done)
            job.attempt = max(job.attempt, event["attempts"])
            job.spent_s = event["duration_s"]

    def _replay_attempt(self, job: JobState, event: dict[str, Any]) -> None:
        job.redone = 0
        passed = event.get("canary") and event["failure_category"] is None
        if passed or event["retry_in_s"] is not None:
            job.spent_s += event["duration_s"]
        if passed:
            self._canary_passed(job, event["attempt"])
        elif event["retry_in_s"] is not None:
            job.attempt = max(job.attempt, event["attempt"] + 1)
            job.failed_on = event["instance_id"]

    def new_round(self, round_: int) -> list[JobState]:
        """Go on after a replay as round `round_`: what has not completed is open again. Returns the open jobs.

        The first round has no attempts before it.
        """
        self.round = round_
        self.ended.clear()
        self.passed.clear()
        if round_ == 1:
            return self.open_jobs
        for job in self.jobs.values():
            if job.done is not None and job.done.status != "completed":
                job.done = None
            if job.done is None:
                job.base = job.attempt
                job.attempt += 1
        return self.open_jobs


def _done_of(event: dict[str, Any]) -> AttemptDone:
    """The end that a `job_done` event tells of."""
    return AttemptDone(
        fleet_id=event["fleet_id"],
        instance_id=event["instance_id"],
        ts=event["ts"],
        round=event["round"],
        job_id=event["job_id"],
        attempt=event["attempts"],
        status=event["status"],
        ended=True,
        failure_category=event["failure_category"],
        error_summary=event["error_summary"],
        duration_s=event["duration_s"],
        samples=event["samples"],
        log=event["log"],
        log_name=event.get("log_name"),
        metrics=event.get("metrics") or {},
    )
