"""From Inspect's samples and logs to our messages: what a job says of each sample, and what its stored log holds.

Runs inside a job process (and in the controller when a stream and a log differ); imports Inspect's public API. Only headers and
summaries are read, never whole samples.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from inspect_ai.log import (
    EvalLog,
    EvalSample,
    EvalSampleSummary,
    list_eval_logs,
    read_eval_log,
    read_eval_log_sample_summaries,
)

from evalworker import redact
from evalworker.contract.ids import SampleId, digest_of_keys, sample_key
from evalworker.contract.jsonio import portable
from evalworker.contract.messages import SampleCounts, SampleDone
from evalworker.contract.wire import now

TEXT_LIMIT = 1024
"""Characters kept of an explanation, an answer or an error in a message: what Inspect's own summaries keep."""


LABEL_LIMITS = (64, 40, 22)
"""Characters of a scorer's, a metric's and a reducer's name in a message."""


@dataclass(frozen=True)
class Origin:
    """Who reports: the job, its attempt and its worker."""

    fleet_id: str
    round: int
    job_id: str
    attempt: int
    task: str
    model: str
    instance_id: str


def sample_done(
    sample: EvalSample | EvalSampleSummary, origin: Origin, *, will_retry: bool = False, ts: datetime | None = None
) -> SampleDone:
    """The message about one sample that has ended."""
    error = sample.error if isinstance(sample.error, str | None) else sample.error.message
    error = None if error is None else redact.text(error)
    limit = sample.limit if isinstance(sample.limit, str | None) else sample.limit.type
    usage = {model: usage.model_dump(exclude_none=True) for model, usage in sample.model_usage.items()}
    scores, cut = _scores(sample)
    return SampleDone(
        fleet_id=origin.fleet_id,
        instance_id=origin.instance_id,
        ts=ts or now(),
        round=origin.round,
        job_id=origin.job_id,
        attempt=origin.attempt,
        task=portable(origin.task),
        model=portable(origin.model),
        sample_id=portable(sample.id),
        epoch=sample.epoch,
        uuid=sample.uuid,
        status="completed" if error is None else "errored",
        scores=scores,
        error=None if error is None else portable(error[: 4 * TEXT_LIMIT]),
        truncated=cut or (error is not None and len(error) > 4 * TEXT_LIMIT),
        limit=limit,
        duration_s=sample.total_time,
        model_usage=portable(usage),
        cost_usd=_cost(usage),
        will_retry=will_retry,
    )


def _scores(sample: EvalSample | EvalSampleSummary) -> tuple[dict[str, dict[str, Any]], bool]:
    """The sample's scores as a message holds them, and whether a text had to be cut."""
    scores: dict[str, dict[str, Any]] = {}
    cut = False
    for name, score in (sample.scores or {}).items():
        entry: dict[str, Any] = {"value": redact.json_values(portable(score.value))}
        for field in ("answer", "explanation"):
            if getattr(score, field):
                text = redact.text(str(getattr(score, field)))
                entry[field] = portable(text[:TEXT_LIMIT])
                cut = cut or len(text) > TEXT_LIMIT
        scores[str(portable(name))] = entry
    return scores, cut


def _cost(usage: dict[str, dict[str, Any]]) -> float | None:
    """The sample's cost in dollars as Inspect computed it; None as soon as one model has no price. Zero is a value."""
    costs: list[float] = [entry["total_cost"] for entry in usage.values() if entry.get("total_cost") is not None]
    return sum(costs) if costs and len(costs) == len(usage) else None


def digest(samples: Iterable[tuple[SampleId, int, str | None]]) -> str:
    """A fingerprint of a job's (id, epoch, uuid): equal when stream and log hold the same executions."""
    return digest_of_keys((sample_key(portable(id_), epoch), uuid) for id_, epoch, uuid in samples)


def label_of(scorer: str, metric: str, reducer: str | None = None) -> str:
    """`scorer/metric`, or `scorer/metric/reducer`, each part cut to its limit; different parts stay different.

    Any of them may hold a `/` (`package/scorer`), and a scorer's key may be a whole text.
    """
    parts = [scorer, metric] if reducer is None else [scorer, metric, reducer]
    return "/".join(_shortened(part, limit) for part, limit in zip(parts, LABEL_LIMITS, strict=False))


def _shortened(text: str, limit: int) -> str:
    """The text's beginning, and a digest of all of it, where it is longer than `limit`."""
    text = str(portable(text))
    if len(text) <= limit:
        return text
    return f"{text[: limit - 9]}…{hashlib.sha256(text.encode('ascii', 'backslashreplace')).hexdigest()[:8]}"


@dataclass(frozen=True)
class StoredLog:
    """A log as it lies in a directory: header and sample summaries."""

    path: Path
    header: EvalLog
    summaries: list[EvalSampleSummary]

    @property
    def completed(self) -> list[EvalSampleSummary]:
        """The samples that ended without an error."""
        return [summary for summary in self.summaries if summary.completed and summary.error is None]

    def counts(self, planned: int) -> SampleCounts:
        """Samples by how they ended, of `planned` ones: a sample that never ran counts in the total alone."""
        errored = sum(1 for summary in self.summaries if summary.error is not None)
        return SampleCounts(total=max(planned, len(self.summaries)), completed=len(self.completed), errored=errored)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The log's scores as `scorer/metric`, the first twenty; None for a number that JSON cannot hold."""
        found: dict[str, float | None] = {}
        for score in self.header.results.scores if self.header.results else []:
            for name, metric in score.metrics.items():
                found[label_of(score.name, name, score.reducer)] = portable(float(metric.value))
        return dict(list(found.items())[:20])

    @property
    def digest(self) -> str:
        """See `digest`."""
        return digest((summary.id, summary.epoch, summary.uuid) for summary in self.summaries)


def read_log(path: str | Path) -> StoredLog:
    """Read one log's header and summaries; raises what Inspect raises for a broken one."""
    location = str(path)
    header = read_eval_log(location, header_only=True)
    return StoredLog(Path(location), header, read_eval_log_sample_summaries(location))


def best_log(directory: Path) -> StoredLog | None:
    """The log that stands for the one task of this directory: success first, then most completed samples, then the latest.

    Inspect keeps a superseded log beside the new one. One that cannot be read is passed over.
    """
    found: list[StoredLog] = []
    for info in list_eval_logs(str(directory), recursive=False, formats=["eval"]):
        try:
            found.append(read_log(info.name.removeprefix("file://")))
        except Exception:  # noqa: S112 - a killed attempt leaves logs broken in many ways
            continue
    if not found:
        return None
    return max(
        found,
        key=lambda log: (log.header.status == "success", len(log.completed), log.header.eval.created, log.path.name),
    )
