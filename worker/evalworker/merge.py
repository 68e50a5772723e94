"""The logs of a task's shards as one log, as if the task had never been sharded.

Samples are copied as they are packed; what stands around them is made anew: header, summaries, and the results, by Inspect's own functions
from all samples' scores. Called by the job that merges (`evalworker.merge_job`), in a process that has loaded the task's code. It reads and
writes local files alone.
"""

import json
import re
import uuid
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from inspect_ai.log import (
    EvalError,
    EvalLog,
    EvalSampleReductions,
    EvalSampleSummary,
    EvalStats,
    read_eval_log,
    read_eval_log_sample_summaries,
)
from inspect_ai.model import ModelUsage
from inspect_ai.scorer import Score

from evalworker import inspect_internals as internals
from evalworker import zipmembers
from evalworker.contract.ids import SampleId, sample_key
from evalworker.inspect_internals import LiveTask, ScoredSample

Key = tuple[str, int]

NAMED = 5
"""Samples that an error names."""


class CannotMerge(ValueError):
    """Logs that are not the shards of one task; the text is one sentence."""


@dataclass(frozen=True)
class Whole:
    """The task that was sharded.

    Attributes:
        ids: of all its samples, in the dataset's order. epochs: how often each runs.
        config: fields of the log's `EvalConfig` that the shards had to be given otherwise (`limit`, `sample_id`, `sample_shuffle`).
    """

    ids: list[SampleId]
    epochs: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Samples × epochs."""
        return len(self.ids) * self.epochs

    def order(self) -> dict[Key, tuple[int, int]]:
        """Each sample's place: by epoch, then in the dataset's order."""
        return {
            sample_key(sample_id, epoch): (epoch, rank)
            for epoch in range(1, self.epochs + 1)
            for rank, sample_id in enumerate(self.ids)
        }


@dataclass(frozen=True)
class Merged:
    """What came out: the log, its header, its samples' summaries, and the samples (id, epoch) that no shard had."""

    path: Path
    header: EvalLog
    summaries: list[EvalSampleSummary]
    missing: list[tuple[SampleId, int]]


@dataclass
class _Shard:
    """One source: its header, and its archive twice, for directories and unpacking, and for packed bytes."""

    path: Path
    header: EvalLog
    summaries: list[EvalSampleSummary]
    archive: zipfile.ZipFile
    raw: IO[bytes]
    members: dict[str, zipfile.ZipInfo]


@dataclass
class _Found:
    """A sample and where it lies."""

    summary: EvalSampleSummary
    shard: _Shard
    info: zipfile.ZipInfo


def merge(sources: Iterable[Path], folder: Path, whole: Whole, task: LiveTask) -> Merged:
    """Merge the logs of shards into one log in `folder`, which gets a name as Inspect gives them.

    The log's status is `error` when samples are missing, so that a retry runs them alone, and when more samples errored than
    `fail_on_error` allows of the whole.

    Raises:
        CannotMerge: there are no logs, they are of different tasks, one holds a sample that was not planned, or two hold the same.
        Exception: what Inspect raises for a log that it cannot read, or a metric for scores that it cannot measure.
    """
    with ExitStack() as stack:
        shards = [_open(path, stack) for path in sources]
        _check_alike(shards)
        order = whole.order()
        found = _collect(shards, order)
        placed = [found[key] for key in sorted(found, key=order.__getitem__)]
        path = folder / _name(shards[0].header)
        with zipfile.ZipFile(path, "w", compression=_compression()) as target:
            metadata: dict[str, dict[str, Any]] = {}
            scored = [_take(each, target, metadata) for each in placed]
            header, reductions = _header(shards, whole, task, scored, placed)
            _write(target, header, reductions, [each.summary for each in placed])
    return Merged(path, header, [each.summary for each in placed], _missing(shards, whole, found))


def _open(path: Path, stack: ExitStack) -> _Shard:
    archive = stack.enter_context(zipfile.ZipFile(path))
    return _Shard(
        path,
        read_eval_log(str(path), header_only=True),
        read_eval_log_sample_summaries(str(path)),
        archive,
        stack.enter_context(path.open("rb")),
        zipmembers.members(archive, "samples/"),
    )


def _check_alike(shards: list[_Shard]) -> None:
    """All must be of one task with one model and the same arguments."""
    if not shards:
        raise CannotMerge("there is no shard with a log to merge")
    first = shards[0].header.eval
    for shard in shards[1:]:
        spec = shard.header.eval
        for name in ("task", "model", "task_args"):
            if getattr(spec, name) != getattr(first, name):
                raise CannotMerge(
                    f"{shard.path.name} is no shard of {shards[0].path.name}: "
                    f"its {name} is {getattr(spec, name)!r}, not {getattr(first, name)!r}"
                )


def _collect(shards: list[_Shard], order: dict[Key, tuple[int, int]]) -> dict[Key, _Found]:
    """Where each sample lies. A record that was copied from one shard into another is one; two executions are an error."""
    found: dict[Key, _Found] = {}
    for shard in shards:
        for summary in shard.summaries:
            key = sample_key(summary.id, summary.epoch)
            info = shard.members.get(internals.member_name(summary.id, summary.epoch))
            if info is None or not (summary.completed or summary.error):
                continue  # it was never finished
            if key not in order:
                raise CannotMerge(
                    f"{shard.path.name} holds sample {summary.id!r}, epoch {summary.epoch}, which is not of the run"
                )
            other = found.setdefault(key, _Found(summary, shard, info))
            if other.shard is not shard and (other.info.CRC, other.info.file_size) != (info.CRC, info.file_size):
                raise CannotMerge(
                    f"sample {summary.id!r}, epoch {summary.epoch}, was run in two shards: "
                    f"{other.shard.path.name} and {shard.path.name}"
                )
    return found


def _take(each: _Found, target: zipfile.ZipFile, metadata: dict[str, dict[str, Any]]) -> ScoredSample:
    """Copy a sample, and read of it what its results need: summaries cut texts, so they will not do.

    `metadata` holds that of each sample's first epoch: it is mostly that of all, and may be large.
    """
    zipmembers.copy_member(each.shard.raw, each.info, target)
    head = zipmembers.head_of(each.shard.archive, each.info, {"scores", "metadata"})
    own = head.get("metadata") or {}
    first = metadata.setdefault(sample_key(each.summary.id, 1)[0], own)
    same = first is own or json.dumps(first) == json.dumps(own)  # as texts, or 1 were True
    return ScoredSample(
        id=each.summary.id,
        epoch=each.summary.epoch,
        scores={name: Score.model_validate(score) for name, score in (head.get("scores") or {}).items()},
        metadata=first if same else own,
        errored=each.summary.error is not None,
    )


def _missing(shards: list[_Shard], whole: Whole, found: dict[Key, _Found]) -> list[tuple[SampleId, int]]:
    """The samples that nothing is known of: neither run nor stopped early."""
    stopped = _stopped_early(shards)
    known = found.keys() | {sample_key(stop.id, stop.epoch) for stop in (stopped.early_stops if stopped else [])}
    epochs = range(1, whole.epochs + 1)
    return [(each, epoch) for epoch in epochs for each in whole.ids if sample_key(each, epoch) not in known]


def _stopped_early(shards: list[_Shard]) -> Any:
    """What the shards' early stopping came to together, None where there was none."""
    summaries = [
        shard.header.results.early_stopping
        for shard in shards
        if shard.header.results is not None and shard.header.results.early_stopping is not None
    ]
    if not summaries:
        return None
    stops = [stop for summary in summaries for stop in summary.early_stops]
    return summaries[0].model_copy(update={"early_stops": stops})


def _header(
    shards: list[_Shard], whole: Whole, task: LiveTask, scored: list[ScoredSample], placed: list[_Found]
) -> tuple[EvalLog, list[EvalSampleReductions] | None]:
    """The merged log's header and its reductions."""
    first = shards[0].header
    results, reductions = internals.results_of(first, task, scored, whole.total, _stopped_early(shards))
    missing = _missing(shards, whole, {sample_key(each.summary.id, each.summary.epoch): each for each in placed})
    errored = sum(sample.errored for sample in scored)
    failed = bool(missing) or internals.too_many_errors(errored, whole.total, first.eval.config.fail_on_error)
    if missing and results is not None:
        results.logged_samples = len(scored)
    header = EvalLog(
        version=first.version,
        status="error" if failed else "success",
        eval=_spec(first, whole),
        plan=first.plan,
        results=results,
        stats=_stats(shards),
        error=_gap(missing, whole) if missing else None,
        invalidated=any(shard.header.invalidated for shard in shards),
    )
    return header, reductions


def _spec(first: EvalLog, whole: Whole) -> Any:
    """The first shard's description of the eval, without what made it a shard, and with ids of its own."""
    shuffled = {"shuffled": True} if whole.config.get("sample_shuffle") else {}
    return first.eval.model_copy(
        update={
            "eval_id": _identity(),
            "run_id": _identity(),
            "task_id": _identity(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "dataset": first.eval.dataset.model_copy(update={"sample_ids": list(whole.ids)} | shuffled),
            "config": first.eval.config.model_copy(update=whole.config),
        }
    )


def _identity() -> str:
    """A fresh id, of 22 letters and digits as Inspect's are."""
    return uuid.uuid4().hex[:22]


def _name(header: EvalLog) -> str:
    """A file name as Inspect gives them; the time is that of the merge."""
    task = re.sub(r"[^A-Za-z0-9-]+", "-", header.eval.task.rsplit("/", 1)[-1])[:80]
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-00-00_{task}_{_identity()}.eval"


def _gap(missing: list[tuple[SampleId, int]], whole: Whole) -> EvalError:
    named = ", ".join(f"{sample_id!r} (epoch {epoch})" for sample_id, epoch in missing[:NAMED])
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    text = f"{len(missing)} of {whole.total} samples have not been run: {named}{more}"
    return EvalError(message=text, traceback=text, traceback_ansi=text)


def _stats(shards: list[_Shard]) -> EvalStats:
    """From the first start to the last end; usage of all, those samples among them that a shard took over from an earlier attempt."""
    stats = [shard.header.stats for shard in shards]
    return EvalStats(
        started_at=min((each.started_at for each in stats if each.started_at), default=""),
        completed_at=max((each.completed_at for each in stats if each.completed_at), default=""),
        model_usage=_sum(_fuller(s.header.stats.model_usage, [x.model_usage for x in s.summaries]) for s in shards),
        role_usage=_sum(_fuller(s.header.stats.role_usage, [x.role_usage for x in s.summaries]) for s in shards),
        connection_limit_history=sorted(
            (change for each in stats for change in each.connection_limit_history), key=lambda change: change.timestamp
        ),
    )


def _fuller(counted: dict[str, ModelUsage], samples: list[dict[str, ModelUsage]]) -> dict[str, ModelUsage]:
    """A log's own usage, which lacks what an earlier attempt has spent, or its samples', which lack what retries have: the larger."""
    summed = _sum(samples)
    tokens = [sum(usage.total_tokens for usage in each.values()) for each in (counted, summed)]
    return counted if tokens[0] >= tokens[1] else summed


def _sum(usages: Iterable[dict[str, ModelUsage]]) -> dict[str, ModelUsage]:
    total: dict[str, ModelUsage] = {}
    for usage in usages:
        for model, each in usage.items():
            total[model] = total[model] + each if model in total else each
    return total


def _write(
    target: zipfile.ZipFile,
    header: EvalLog,
    reductions: list[EvalSampleReductions] | None,
    summaries: list[EvalSampleSummary],
) -> None:
    """What stands around the samples, in Inspect's own order."""
    target.writestr("_journal/start.json", internals.log_json(internals.log_start(header)))
    target.writestr("summaries.json", internals.log_json(summaries))
    if reductions is not None:
        target.writestr("reductions.json", internals.log_json(reductions))
    target.writestr("header.json", internals.log_json(header))


def _compression() -> int:
    """What Inspect packs with, which it has taught `zipfile` where Python itself cannot."""
    return int(getattr(zipfile, "ZIP_ZSTANDARD", zipfile.ZIP_DEFLATED))
