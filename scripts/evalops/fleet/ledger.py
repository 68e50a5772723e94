"""What a fleet has done so far, and what each message changes: pure state, no clock, no AWS, no files.

The controller feeds it the workers' messages in any order, duplicates included, and writes the events that come out. Replaying the
stream of an earlier controller brings a ledger to the same state. Design, section 5.
"""

from array import array
from bisect import bisect_left
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
Execution = tuple[Key, str | None]
"""A sample and the uuid of one run of it."""

Pair = tuple[str, str]
"""A task's name and a model's."""


@dataclass(slots=True)
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


@dataclass(frozen=True)
class Sealed:
    """What is kept of the samples of a job that can never run again: what they came to, and eight bytes to know each execution again."""

    cost_usd: float | None
    tokens: int
    executions: "array[int]"

    @classmethod
    def without_samples(cls, cost_usd: float | None, tokens: int) -> "Sealed":
        """For a ledger that is only looked at."""
        return cls(cost_usd, tokens, array("q"))


@dataclass
class JobState:
    """One job. `attempt` is the newest one known, `base` the last one of earlier rounds; `done` its end, None while it goes on.

    Attributes:
        said: the results that stand in the stream; empty once they are sealed. `errored` counts those with an error.
        paid, repeated: other executions, whose cost was counted, or whose result was written and has been replaced.
        failed_on: the worker on which an attempt failed that is tried again.
        settled: it is a shard, and the merge of its task has completed.
        sealed: what is left of all that once no resume can open the job again.
        told: what a document says of its samples (`evalops.fleet.standing`), those of the stream since are in `said`; None otherwise.
    """

    spec: JobSpec
    attempt: int = 1
    base: int = 0
    redone: int = 0
    spent_s: float = 0.0
    said: dict[Key, Said] = field(default_factory=dict)
    errored: int = 0
    paid: set[Execution] = field(default_factory=set)
    repeated: set[Execution] = field(default_factory=set)
    retries_said: set[str] = field(default_factory=set)
    done: AttemptDone | None = None
    ending: AttemptDone | None = None
    failed_on: str | None = None
    sealed: Sealed | None = None
    settled: bool = False
    told: SampleCounts | None = None

    @property
    def pair(self) -> Pair:
        """Its task and model."""
        return self.spec.name, self.spec.model

    @property
    def status(self) -> str:
        """`open`, or how it ended: completed, failed, cancelled. How many errors are too many is asked of the whole task alone."""
        if self.settled:
            return "completed"
        return "open" if self.done is None else self.done.status

    @property
    def counts(self) -> SampleCounts:
        """Its samples: from its log once it has ended, from the stream before."""
        return self.streamed if self.done is None else self.done.samples

    @property
    def streamed(self) -> SampleCounts:
        """Its samples as the stream tells; nothing once they are sealed."""
        before = self.told or SampleCounts()
        completed = before.completed + len(self.said) - self.errored
        return SampleCounts(total=self.spec.samples, completed=completed, errored=before.errored + self.errored)

    def record(self) -> dict[str, Any]:
        """What programs are told of it: `--json` of a run and of its status."""
        return {
            "job_id": self.spec.job_id,
            "task": self.spec.name,
            "model": self.spec.model,
            "shard": self.shard,
            "status": self.status,
            "failure_category": self.done.failure_category if self.done else None,
            "error_summary": self.done.error_summary if self.done else None,
            "metrics": self.done.metrics if self.done else {},
        }

    @property
    def heard(self) -> bool:
        """Whether any of its samples has been heard of."""
        return bool(self.said if self.sealed is None else self.sealed.executions)

    @property
    def cost_usd(self) -> float | None:
        """Dollars for the tokens of its samples; None without samples or when a price is missing."""
        if self.sealed is not None:
            return self.sealed.cost_usd
        costs = [said.cost_usd for said in self.said.values()]
        return sum(cost for cost in costs if cost is not None) if costs and None not in costs else None

    @property
    def tokens(self) -> int:
        """Tokens of its samples."""
        return self.sealed.tokens if self.sealed is not None else sum(said.tokens for said in self.said.values())

    def is_paid(self, execution: Execution) -> bool:
        """Whether what this execution has cost is counted."""
        if self.sealed is not None:
            place = bisect_left(self.sealed.executions, _mark(execution))
            return place < len(self.sealed.executions) and self.sealed.executions[place] == _mark(execution)
        return execution in self.paid or self._stands(execution)

    def was_said(self, execution: Execution) -> bool:
        """Whether the stream has, or had, the result of this execution."""
        return execution in self.repeated or self._stands(execution)

    def _stands(self, execution: Execution) -> bool:
        known = self.said.get(execution[0])
        return known is not None and known.uuid == execution[1]

    def stand(self, key: Key, said: Said) -> None:
        """A result that counts from now on. It is in none of the sets, which so stay small."""
        if (known := self.said.get(key)) is not None:
            self.errored -= known.errored
            self.paid.add((key, known.uuid))
            self.repeated.add((key, known.uuid))
        self.errored += said.errored
        self.said[key] = said
        self.paid.discard((key, said.uuid))
        self.repeated.discard((key, said.uuid))

    def seal(self) -> None:
        """Forget the samples of a job that nothing can change any more: a fleet has any number of them."""
        if self.sealed is not None:
            return
        executions = {_mark((key, said.uuid)) for key, said in self.said.items()} | {_mark(one) for one in self.paid}
        self.sealed = Sealed(self.cost_usd, self.tokens, array("q", sorted(executions)))
        self.said, self.paid, self.repeated, self.retries_said = {}, set(), set(), set()
        self.errored = 0

    @property
    def shard(self) -> str | None:
        """Which shard of how many it is, as people count; None for a whole task."""
        shard = self.spec.shard
        return None if shard is None else f"{shard.index + 1}/{shard.of}"

    @property
    def name(self) -> str:
        """Its task, and which part of it."""
        return self.spec.name if self.shard is None else f"{self.spec.name} (shard {self.shard})"


def _mark(execution: Execution) -> int:
    """Eight bytes by which an execution is known in this process."""
    return hash(execution)


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
        if job.was_said((sample_key(done.sample_id, done.epoch), done.uuid)):
            return Outcome()  # a duplicate, perhaps of one that has been replaced since
        if (event := self._result(job, done)) is None:
            return Outcome()
        return Outcome([event])

    def _pay(
        self, job: JobState, sample_id: SampleId, epoch: int, uuid: str | None, usage: dict[str, dict[str, Any]]
    ) -> None:
        """Count what one execution of a sample has cost, once."""
        execution = (sample_key(sample_id, epoch), uuid)
        if not job.is_paid(execution):
            self.spend.add(usage)
            if job.sealed is None:
                job.paid.add(execution)

    def _result(self, job: JobState, done: SampleDone) -> Event | None:
        """The `result` event, None if it stands already or comes from an attempt that has been superseded."""
        key = sample_key(done.sample_id, done.epoch)
        known = job.said.get(key)
        if known is not None and (known.uuid == done.uuid or done.attempt < known.attempt):
            return None
        tokens = sum(int(usage.get("total_tokens") or 0) for usage in done.model_usage.values())
        job.stand(key, Said(done.uuid, done.attempt, done.status == "errored", done.cost_usd, tokens))
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
        if job.spec.merges and done.log is None:  # nothing was merged: its samples are what its shards have
            done = done.model_copy(update={"samples": self.counts_of(job)})
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
            | ({"shard": job.shard} if job.shard else {})
            | ({"merged": len(job.spec.merges)} if job.spec.merges else {})
        )
        return events

    def _ended(self, job: JobState, done: AttemptDone) -> None:
        self.ended.append(done)
        if done.status == "completed":
            self.passed.add(job.pair)
            if job.spec.shard is None or not done.samples.errored:  # the merge may find its errors too many
                job.seal()
            for shard in self.shards_of(job):
                shard.settled = True
                shard.seal()

    def shards_of(self, job: JobState) -> list[JobState]:
        """The shards whose logs a job merges; none for any other."""
        return [self.jobs[shard] for shard in job.spec.merges]

    @property
    def wholes(self) -> list[JobState]:
        """The jobs that stand for a (task, model): all but shards."""
        return [job for job in self.jobs.values() if job.spec.shard is None]

    def parts_of(self, job: JobState) -> list[JobState]:
        """A whole's shards and itself: what has been said and spent for it."""
        return [*self.shards_of(job), job]

    def counts_of(self, job: JobState) -> SampleCounts:
        """A job's samples; of one that merges, those of its shards."""
        if not job.spec.merges:
            return job.counts
        counts = [shard.counts for shard in self.shards_of(job)]
        completed, errored = sum(each.completed for each in counts), sum(each.errored for each in counts)
        return SampleCounts(total=job.spec.samples, completed=completed, errored=errored)

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
        """Samples of the whole fleet: of ended jobs from their logs, of open ones from the stream; of shards, not of their merge."""
        total = completed = errored = 0
        for job in self.jobs.values():
            if job.spec.merges:
                continue
            counts = job.counts
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
            # one that replaces a sample that only a document has counted is counted already
            if job.told is None or "replaces" not in event or key in job.said:
                job.stand(key, Said(event["uuid"], event["attempt"], errored, event.get("cost_usd"), tokens))
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
            if job.done is not None and job.status == "failed":
                self._reopen_errored(job)
        for job in self.jobs.values():
            if job.done is not None and job.status != "completed":
                job.done = None
            if job.done is None:
                job.base = job.attempt
                job.attempt += 1
        return self.open_jobs

    def _reopen_errored(self, job: JobState) -> None:
        """A merge that found too many errors in the whole: the shards that hold them run those samples again.

        One that failed for anything else (a gap, memory, storage) says nothing of errors that may be allowed.
        """
        assert job.done is not None
        samples, category = job.done.samples, job.done.failure_category
        missing = samples.total - samples.completed - samples.errored
        if job.done.log is None or category is not Category.TASK_ERROR or missing > 0:
            return
        for shard in self.shards_of(job):
            if shard.done is not None and shard.done.samples.errored:
                shard.done = None


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
