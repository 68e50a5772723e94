"""What a log says of itself: the facts that status, choice, summarize and the report work with.

Pure. `of_header` takes a header as Inspect wrote it (any version that today's Inspect can read) and keeps what is small; the whole
header is kept by nobody. Times are aware UTC, zero is a value, a metric that is not finite is told apart from one that is missing.
"""

import hashlib
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from evalworker.contract.ids import task_file
from evalworker.contract.jsonio import canonical

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSpec

Status = Literal["started", "success", "error", "cancelled", "unreadable"]

_SAMPLING = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "system_message", "reasoning_effort", "reasoning_tokens",
)  # fmt: skip
"""Generate options that make another experiment of the same task and model; transport options do not."""


class Metric(BaseModel):
    """One metric's value; None when it is not finite (`text` then says what it was)."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: float | None
    text: str = ""


class Score(BaseModel):
    """One scorer's (or one key of a scorer's) metrics. `reducer` None is the mean."""

    model_config = ConfigDict(frozen=True)

    name: str
    scorer: str
    reducer: str | None = None
    metrics: list[Metric] = []
    scored: int | None = None
    unscored: int | None = None


class Facts(BaseModel):
    """A log as seen from its header and directory.

    Attributes:
        identity: of the experiment; logs of one task, model and arguments share it (retries, reruns).
        file: of the task, as `ids.task_file` has it; two tasks of one name differ in it.
        total, completed, errored: samples × epochs; None is "not known from the header". `logged` counts stored samples.
        dataset: samples in the dataset, without epochs; `selected`: how many of them this run was to do.
        reason: why the log cannot be read, when `status` is `unreadable`.
        retry: the log was being replaced while it was read.
    """

    model_config = ConfigDict(frozen=True)

    status: Status
    reason: str | None = None
    replaced: bool = False
    identity: str = ""
    task: str = ""
    file: str = ""
    task_args: dict[str, Any] = {}
    task_id: str = ""
    task_version: int | str = 0
    model: str = ""
    run_id: str = ""
    eval_id: str = ""
    created: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    inspect_version: str = ""
    epochs: int = 1
    dataset: int | None = None
    selected: int | None = None
    limited: str | None = None
    total: int | None = None
    completed: int | None = None
    errored: int | None = None
    logged: int | None = None
    has_results: bool = False
    scores: list[Score] = []
    headline: tuple[int, int] | None = None
    usage: dict[str, dict[str, Any]] = {}
    error: str | None = None
    error_type: str = ""
    invalidated: bool = False

    @property
    def hollow(self) -> bool:
        """It says `success`, but no sample completed or there are no results."""
        return self.status == "success" and (not self.has_results or not self.completed)


def unreadable(reason: str, *, replaced: bool = False) -> Facts:
    """The facts of a log that cannot be read."""
    return Facts(status="unreadable", reason=reason, replaced=replaced)


def of_header(log: "EvalLog", *, logged: int | None, errored: int | None = None) -> Facts:
    """The facts of a header.

    Args:
        log: the header (no samples).
        logged: samples stored in the log, None where its directory was not read whole.
        errored: samples with an error, None where the summaries were not read.
    """
    spec, results = log.eval, log.results
    epochs = spec.config.epochs or 1
    selected = len(spec.dataset.sample_ids) if spec.dataset.sample_ids is not None else spec.dataset.samples
    total = results.total_samples if results else (selected * epochs if selected is not None else None)
    completed = results.completed_samples if results else None
    if completed is None and logged is not None and errored is not None:
        completed = logged - errored
    if errored is None and completed is not None:
        errored = _errored(log, total, completed, logged)
    scores, headline = _scores(log)
    return Facts(
        status=log.status,
        identity=identity(spec),
        task=spec.task,
        file=task_file(spec.task_file),
        task_args=spec.task_args,
        task_id=spec.task_id,
        task_version=spec.task_version,
        model=spec.model,
        run_id=spec.run_id,
        eval_id=spec.eval_id,
        created=moment(spec.created),
        started_at=moment(log.stats.started_at) or moment(spec.created),
        completed_at=moment(log.stats.completed_at),
        inspect_version=spec.packages.get("inspect_ai", ""),
        epochs=epochs,
        dataset=spec.dataset.samples,
        selected=selected,
        limited=_limited(spec, selected),
        total=total,
        completed=completed,
        errored=errored,
        logged=logged,
        has_results=results is not None,
        scores=scores,
        headline=headline,
        usage={model: usage.model_dump(exclude_none=True) for model, usage in log.stats.model_usage.items()},
        error=log.error.message if log.error else None,
        error_type=_error_type(log),
        invalidated=log.invalidated,
    )


def identity(spec: "EvalSpec") -> str:
    """What makes two logs tries of the same experiment: task, arguments, model and what changes its answers.

    Not the directory that the run was in (a container's is another) and not `task_id` (a fresh attempt gets a new one).
    """
    config = spec.model_generate_config.model_dump(exclude_none=True)
    roles = {name: _role(role) for name, role in (spec.model_roles or {}).items()}
    parts = {
        "task": spec.task,
        "file": task_file(spec.task_file),
        "args": spec.task_args,
        "model": spec.model,
        "model_args": spec.model_args,
        "base_url": spec.model_base_url,
        "roles": roles,
        "solver": [spec.solver, spec.solver_args],
        "sampling": {name: config[name] for name in _SAMPLING if name in config},
    }
    return hashlib.sha256(canonical(parts).encode("ascii")).hexdigest()[:16]


def _role(role: Any) -> Any:
    return [_role(item) for item in role] if isinstance(role, list) else getattr(role, "model", str(role))


def moment(text: Any) -> datetime | None:
    """A header's time as aware UTC (old versions wrote other offsets, or none); None when there is none."""
    if not text:
        return None
    try:
        parsed = text if isinstance(text, datetime) else datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)


def _errored(log: "EvalLog", total: int | None, completed: int, logged: int | None) -> int | None:
    if logged is not None:
        return max(0, logged - completed)
    if log.status == "success" and total is not None:
        return max(0, total - completed)  # a finished run has tried all of them
    return None


def _limited(spec: "EvalSpec", selected: int | None) -> str | None:
    """How the run was cut to a part of its dataset, None when it was not."""
    config, available = spec.config, spec.dataset.samples
    if selected is None or available is None or selected >= available:
        return None
    if config.limit is not None:
        return f"limited to {selected} of {available} samples"
    if config.sample_id is not None or selected < available:
        return f"{selected} of {available} samples were selected"
    return None


def _scores(log: "EvalLog") -> tuple[list[Score], tuple[int, int] | None]:
    from inspect_ai.log import headline_metric

    scores = [
        Score(
            name=score.name,
            scorer=score.scorer,
            reducer=score.reducer,
            metrics=[_metric(name, metric.value) for name, metric in score.metrics.items()],
            scored=score.scored_samples,
            unscored=score.unscored_samples,
        )
        for score in (log.results.scores if log.results else [])
    ]
    resolved = headline_metric(log)
    if resolved is not None and log.results is not None:
        index = next(i for i, score in enumerate(log.results.scores) if score is resolved.score)
        return scores, (index, list(resolved.score.metrics).index(resolved.name))
    first = next(((i, 0) for i, score in enumerate(scores) if score.metrics), None)  # an empty score may stand first
    return scores, first


def _metric(name: str, value: Any) -> Metric:
    number = float(value) if isinstance(value, int | float) else math.nan
    finite = math.isfinite(number)
    return Metric(name=name, value=number if finite else None, text="" if finite else str(value))


def _error_type(log: "EvalLog") -> str:
    from evalworker.contract.failures import exception_type

    return exception_type(log.error.traceback or "", log.error.message) if log.error else ""
