"""The state of each (task, model) of a run, and the one line that says why nothing is happening. Pure.

Facts about logs, the manifest's plan, the control document and the clock go in; rows come out. A `started` log without a living owner
is dead: nobody writes it any more, and a retry continues from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from evalops.hints import resume, unattended
from evalops.logs import cost
from evalops.logs.choose import Chosen
from evalops.logs.facts import Facts, Score
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec
from evalworker.contract.ids import task_file
from evalworker.contract.jsonio import canonical

State = Literal["waiting", "running", "success", "partial", "error", "cancelled", "dead", "unreadable"]

BEAT_FRESH_S = 180.0
"""An owner whose last sign of life is younger than this is alive; the slowest beats every 30 s."""

STALE_S = 900.0
"""Without an owner's word: a log that nobody has written for so long is dead. Shared logs are written every minute."""

GOOD: frozenset[State] = frozenset({"success", "partial"})
"""What Inspect counts as done, with the errors that the run's options allow: it runs none of it again, on no backend."""

RETRYABLE: frozenset[State] = frozenset({"error", "cancelled", "dead", "unreadable", "waiting"})


@dataclass(frozen=True)
class Job:
    """What is known of one planned job beside its log.

    Attributes:
        ended: how it ended without a log, or with one that does not say so (`failed: oom`); None if it has not, or its log says it.
        partial: the unfinished log that a worker keeps for it.
        again: a living owner runs it once more, so the end that its log tells of is not the last word; `going`: it has begun to.
        completed, errored: counted from the event stream.
    """

    spec: JobSpec
    ended: str | None = None
    partial: Chosen | None = None
    again: bool = False
    going: bool = False
    completed: int = 0
    errored: int = 0
    last: datetime | None = None


@dataclass(frozen=True)
class Surroundings:
    """What stands around the logs.

    Attributes:
        alive: the owner lives (True), has gone (False), or nothing is known of it (None).
        unattended: the run is a fleet that runs on although its controller has gone.
    """

    now: datetime
    alive: bool | None = None
    owner: str = ""
    unattended: bool = False
    planned: Sequence[Job] = ()
    writes: Mapping[str, datetime] = field(default_factory=dict)
    backend: str = ""


@dataclass(frozen=True)
class Row:
    """One (task, model) as status shows it. `age_s`: seconds since the last write; None where nothing was written. `job_id`: as planned."""

    task: str
    model: str
    args: dict[str, Any]
    state: State
    completed: int | None
    errored: int | None
    total: int | None
    scores: list[Score]
    headline: tuple[int, int] | None
    tokens: int | None
    cost_usd: float | None
    age_s: float | None
    superseded: int
    log: str | None
    remark: str
    file: str = ""
    job_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; metrics as {scorer: {metric: value}}."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        body["scores"] = [score.model_dump(mode="json") for score in self.scores]
        body["headline"] = self.headline_text()
        return body

    def headline_text(self) -> str | None:
        """The headline metric for people: `accuracy 0.93`; None without one."""
        if self.headline is None:
            return None
        metric = self.scores[self.headline[0]].metrics[self.headline[1]]
        return f"{metric.name} {metric.text if metric.value is None else number(metric.value)}"


def number(value: float) -> str:
    """A metric for people: three significant digits at least, no exponent for ordinary ones."""
    return (
        f"{value:.0f}"
        if value == int(value) and abs(value) >= 1000
        else f"{value:.3f}"
        if abs(value) < 100
        else f"{value:.4g}"
    )


def owner(control: Control | None, now: datetime, process_alive: bool | None = None) -> tuple[bool | None, str]:
    """Whether a run's owner lives, and a clause about it.

    `process_alive`: what this machine says of the owner's process, when it is one of this machine's.
    """
    if control is None:
        return None, ""
    if control.state == "ended":
        return False, "it has ended"
    if process_alive is False:
        return False, "its process is gone"
    if now >= control.deadline:
        return False, f"its deadline passed {ago(control.deadline, now)}"
    if not control.controller:
        return None, f"its controller left it {ago(control.beat, now)}"
    if (now - control.beat).total_seconds() <= BEAT_FRESH_S:
        return True, f"last sign of life {ago(control.beat, now)}"
    return None, f"its controller's last sign of life was {ago(control.beat, now)}"


def ago(then: datetime, now: datetime) -> str:
    """How long ago, for people."""
    seconds = max(0.0, (now - then).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def rows(chosen: Sequence[Chosen], around: Surroundings, price_of: cost.PriceOf) -> list[Row]:
    """A row for each log that counts and for each planned job that has none yet."""
    own = match([job.spec for job in around.planned], chosen)
    job_of = {one.log.info.key: job for job, one in zip(around.planned, own, strict=True) if one is not None}
    found = [_of_log(one, around, price_of, job_of.get(one.log.info.key)) for one in chosen]
    found += [_of_job(job, around, price_of) for job, one in zip(around.planned, own, strict=True) if one is None]
    return sorted(found, key=lambda row: (row.task, row.model, canonical(row.args), row.file))


def match(specs: Sequence[JobSpec], chosen: Sequence[Chosen]) -> list[Chosen | None]:
    """The log of each planned job, None where it has none; a log is one job's alone."""
    free: dict[tuple[str, str], list[Chosen]] = {}  # of ten thousand jobs few have one task and model
    for one in chosen:
        free.setdefault((bare(one.log.facts.task), one.log.facts.model), []).append(one)
    found = []
    for spec in specs:
        same = free.get((bare(spec.name), spec.model), [])
        index = next((index for index, one in enumerate(same) if fits(spec, one.log.facts)), None)
        found.append(None if index is None else same.pop(index))
    return found


def fits(spec: JobSpec, facts: Facts) -> bool:
    """Whether a log is of a planned job: a job knows the arguments that were given, a log all of them."""
    same = bare(spec.name) == bare(facts.task) and spec.model == facts.model and spec.same_file(facts.file)
    return same and all(
        name in facts.task_args and canonical(facts.task_args[name]) == canonical(value)
        for name, value in spec.task_args.items()
    )


def file_beside(row: Row, found: Sequence[Row]) -> str:
    """The file of a row's task where another file has a task of that name with that model; "" where nothing need be told apart."""
    others = (other for other in found if other.file != row.file)
    return row.file if any((other.task, other.model) == (row.task, row.model) for other in others) else ""


def bare(task: str) -> str:
    """A task's name without its package."""
    return task.rsplit("/", 1)[-1]


def _of_log(one: Chosen, around: Surroundings, price_of: cost.PriceOf, job: Job | None = None) -> Row:
    facts, info = one.log.facts, one.log.info
    written = max(filter(None, (info.modified, around.writes.get(info.key))))
    age = (around.now - written).total_seconds()
    state, remark = state_of(facts, age, around)
    unfinished = facts.status == "started"  # in an earlier round, when it is to run again
    if job is not None and job.ended is not None and unfinished:
        state, remark = _ended(job.ended), job.ended
    elif job is not None and job.again and (unfinished or state in RETRYABLE):
        before = f"retrying; before: {': '.join(filter(None, ('dead' if unfinished else state, remark)))}"
        partial = job.partial
        if partial is not None and partial.log.facts.status == "started":  # another one is of an attempt that failed
            row = _of_log(partial, around, price_of)
            return replace(row, state="running", remark=before, job_id=job.spec.job_id)
        state, remark = ("running" if job.going else "waiting"), before
    if layout.is_promoted(info.key):
        remark = "; ".join(filter(None, (f"promoted to {info.key.rpartition('/')[0]}", remark)))
    completed = facts.completed
    if completed is None and facts.status == "started":
        completed = facts.logged
    return Row(
        task=facts.task or one.log.name,
        model=facts.model,
        args=facts.task_args,
        state=state,
        completed=completed,
        errored=facts.errored,
        total=facts.total,
        scores=facts.scores,
        headline=facts.headline,
        tokens=cost.token_sum(facts.usage) if facts.usage else None,
        cost_usd=cost.total(facts.usage, price_of) if facts.usage else None,
        age_s=max(0.0, age),
        superseded=len(one.superseded),
        log=info.key,
        remark=remark,
        file=facts.file,
        job_id=job.spec.job_id if job else None,
    )


def state_of(facts: Facts, age_s: float, around: Surroundings) -> tuple[State, str]:
    """A log's state in a word, and what there is to say about it."""
    if facts.status == "unreadable":
        return ("running" if facts.replaced else "unreadable"), facts.reason or ""
    if facts.status == "started":
        alive = around.alive if around.alive is not None else age_s <= STALE_S
        if alive:
            return "running", ""
        return (
            "dead",
            around.owner or f"nobody has written it for {ago(around.now - timedelta(seconds=age_s), around.now)[:-4]}",
        )
    if facts.status in ("error", "cancelled"):
        return facts.status, shorten(facts.error or "")
    if facts.hollow:
        return "error", f"it says success, but {'no sample completed' if not facts.completed else 'it has no results'}"
    remarks = [facts.limited] if facts.limited else []
    if facts.invalidated:
        remarks.append("invalidated")
    missing = facts.total is not None and facts.completed is not None and facts.completed < facts.total
    return ("partial" if missing else "success"), "; ".join(remarks)


def _of_job(job: Job, around: Surroundings, price_of: cost.PriceOf) -> Row:
    if job.partial is not None:
        row = replace(_of_log(job.partial, around, price_of), job_id=job.spec.job_id)
        if row.state not in GOOD:
            return row
        alive = around.alive if around.alive is not None else (row.age_s or 0) <= STALE_S
        return replace(
            row, state="running" if alive else "dead", remark="it has ended well, and its log is not published yet"
        )
    state: State = "waiting"
    remark = ""
    begun = job.completed + job.errored > 0
    if job.ended is not None:
        remark = job.ended
        state = _ended(remark)
    elif begun:
        state = "dead" if around.alive is False else "running"
        remark = around.owner if state == "dead" else ""
    return Row(
        task=job.spec.name,
        model=job.spec.model,
        args=job.spec.task_args,
        state=state,
        completed=job.completed,
        errored=job.errored,
        total=job.spec.samples or None,
        scores=[],
        headline=None,
        tokens=None,
        cost_usd=None,
        age_s=(around.now - job.last).total_seconds() if job.last else None,
        superseded=0,
        log=None,
        remark=remark,
        file=task_file(job.spec.task.rpartition("@")[0]),
        job_id=job.spec.job_id,
    )


def _ended(how: str) -> State:
    ends: dict[str, State] = {"completed": "success", "cancelled": "cancelled"}
    return ends.get(how.partition(":")[0], "error")


def shorten(text: str, limit: int = 120) -> str:
    """The first line of a text, cut."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def headline(found: Sequence[Row], around: Surroundings, run_id: str | None) -> str:
    """The line on top: what is going on, and when nothing is, why and what to do."""
    if not found:
        return (
            "No logs and no plan here: nothing was run under this id, or it was run with another root (S3_BUCKET_NAME)."
        )
    count = {state: sum(row.state == state for row in found) for state in {row.state for row in found}}
    tally = ", ".join(f"{count[state]} {state}" for state in _ORDER if state in count)
    running, waiting = count.get("running", 0), count.get("waiting", 0)
    bad = [row for row in found if row.state in RETRYABLE]
    if around.unattended and run_id is not None and (running or bad):
        return f"Nobody drives this fleet: {around.owner} ({tally}). {unattended(run_id)}."
    if running:
        ages = [row.age_s for row in found if row.state == "running" and row.age_s is not None]
        return f"Running ({tally})." + _quiet(min(ages, default=None))
    if waiting and around.alive:
        return f"Waiting for a worker to start, {around.owner} ({tally})."
    if around.alive:
        return f"It has not ended yet: {around.owner} ({tally})."
    retry = f" To go on: {_retry_command(run_id, around.backend)}" if run_id else ""
    if not bad:
        return f"Finished: {tally}.{_allowed(found)}"
    if count.get("dead") or waiting:
        why = around.owner or "its owner has gone"
        return f"Nothing is running: {why} ({tally}).{retry}"
    return f"Finished, not all well: {tally}.{retry}"


_ORDER: tuple[State, ...] = ("running", "waiting", "success", "partial", "error", "cancelled", "dead", "unreadable")


def _allowed(found: Sequence[Row]) -> str:
    """What `partial` means, where something is: nobody should wait for a retry to heal it."""
    missing = sum((row.total or 0) - (row.completed or 0) for row in found if row.state == "partial")
    samples = "1 sample" if missing == 1 else f"{missing} samples"
    return f" {samples} did not complete, which the run's options allow: a retry runs none again." if missing else ""


def _quiet(age_s: float | None) -> str:
    if age_s is None or age_s < 120:
        return ""
    return (
        f" Nothing has been written for {age_s / 60:.0f} min: samples may be long, or the provider slow; see the log."
    )


def _retry_command(run_id: str, backend: str) -> str:
    here = f"`ies run local --run-id {run_id}`"
    return f"`{resume(run_id, backend)}` or {here}" if backend else here
