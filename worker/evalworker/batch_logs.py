"""What lies in the log directory of a Batch job: which samples had finished before an attempt, and how each job of the run ended.

Called by `evalworker.batch_job` inside the container. Logs are read where they are (S3), headers and summaries alone; what Inspect had
only copied to its shared buffer counts too, because `eval_set` recovers it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from evalworker.batch_buffer import finished, summaries_of
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.contract.ids import sample_key, task_file
from evalworker.contract.jsonio import canonical
from evalworker.results import StoredLog, read_log
from evalworker.storage import Missing, Storage, StorageError

Sample = tuple[str, str, str, str, tuple[str, int]]
"""A log's task, its file, model and arguments, and the sample's key in it."""


@dataclass
class Earlier:
    """What an attempt finds: finished samples by their executions' uuid, and those that were in the middle."""

    finished: dict[Sample, str | None] = field(default_factory=dict)
    begun: set[Sample] = field(default_factory=set)

    def kept(self, later: "Earlier") -> set[Sample]:
        """The finished samples that are still the same executions; one without a uuid was recovered."""
        return {
            sample
            for sample, uuid in self.finished.items()
            if sample in later.finished and (None in (uuid, later.finished[sample]) or uuid == later.finished[sample])
        }

    def redone(self, later: "Earlier") -> int:
        """How many samples ran again although they had finished or had begun."""
        return len(((set(self.finished) | self.begun) - self.kept(later)) & set(later.finished))


@dataclass(frozen=True)
class Found:
    """A readable log of the directory."""

    key: str
    log: StoredLog

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What tells its job from others: the task without its package, its file, the model, the arguments."""
        spec = self.log.header.eval
        return spec.task.rsplit("/", 1)[-1], task_file(spec.task_file), spec.model, canonical(spec.task_args)

    def fits(self, job: JobSpec) -> bool:
        """Whether it is a log of this job: a job knows the arguments that were given, a log all of them."""
        task, file, model, _ = self.identity
        given, has = job.task_args, self.log.header.eval.task_args
        same = all(name in has and canonical(has[name]) == canonical(value) for name, value in given.items())
        return same and task == job.name.rsplit("/", 1)[-1] and model == job.model and job.same_file(file)


def read_directory(storage: Storage, prefix: str) -> list[Found]:
    """The logs directly below a prefix that can be read; Inspect keeps superseded ones beside the new."""
    found = []
    for info in list(storage.list(prefix)):
        if not info.key.endswith(".eval") or "/" in info.key[len(prefix) :]:
            continue
        try:
            found.append(Found(info.key, read_log(storage.url(info.key))))
        except Exception:  # noqa: S112 - a killed attempt leaves logs broken in many ways
            continue
    return found


def samples_in(storage: Storage, logs: Iterable[Found]) -> Earlier:
    """The finished and the begun samples of these logs and of their shared buffers."""
    seen = Earlier()
    for found in logs:
        for summary in found.log.completed:
            if summary.completed_at is None and not summary.scores:
                continue  # a recovery found it in the middle
            seen.finished[(*found.identity, sample_key(summary.id, summary.epoch))] = summary.uuid
        if found.log.header.status != "started":
            continue
        for entry in buffered(storage, found.key):
            sample = (*found.identity, sample_key(entry["id"], entry["epoch"]))
            if not finished(entry):
                seen.begun.add(sample)
            elif not entry.get("error"):
                seen.finished[sample] = entry.get("uuid")
    seen.begun -= set(seen.finished)
    return seen


def buffered(storage: Storage, log: str) -> list[dict[str, Any]]:
    """The sample summaries that the shared buffer of an unfinished log holds; [] when there is none."""
    try:
        return list(summaries_of(storage.get(layout.buffer_of(log)).body))
    except (Missing, StorageError, ValueError):
        return []


def read_one(storage: Storage, key: str) -> Found | None:
    """One log, None when it is not there or cannot be read."""
    try:
        return Found(key, read_log(storage.url(key)))
    except Exception:
        return None


def progress(storage: Storage, found: Found | None) -> tuple[bool, int]:
    """How far a log is, for comparison with another of the same job: whether it succeeded, and its finished samples."""
    if found is None:
        return False, -1
    return found.log.header.status == "success", len(samples_in(storage, [found]).finished)


def copy(storage: Storage, source: str, target: str) -> None:
    """A log to another key, with the shared buffer that stands beside it while it is unfinished. Raises Missing, StorageError."""
    buffers = [layout.buffer_of(key).removesuffix("manifest.json") for key in (source, target)]
    for info in list(storage.list(buffers[0])):
        storage.copy(info.key, buffers[1] + info.key.removeprefix(buffers[0]))
    storage.copy(source, target)


def best(logs: Iterable[Found], job: JobSpec) -> Found | None:
    """The log that stands for a job: success first, then most completed samples, then the latest."""
    own = [found for found in logs if found.fits(job)]
    return max(
        own,
        key=lambda found: (
            found.log.header.status == "success",
            len(found.log.completed),
            found.log.header.eval.created,
            found.key,
        ),
        default=None,
    )
