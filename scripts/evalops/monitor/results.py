"""The results of a run's samples while it runs: read from its logs on S3 and from the buffers that Inspect copies beside them.

Called by the monitor every few seconds: a listing of the published logs and of what running children keep, then only what has changed.
Samples are told apart by execution, so one that a retry keeps is shown once, and one that ran again is counted.
"""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from evalops.logs.archive import BadArchive
from evalops.logs.reading import list_directory, read_facts, read_summaries
from evalworker.batch_buffer import finished, summaries_of
from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.contract.ids import sample_key
from evalworker.contract.jsonio import canonical
from evalworker.storage import Info, Storage, StorageError

LARGEST_SUMMARIES = 4_000_000
"""Bytes: a log whose summaries are larger is counted from its header when the run has ended."""

MOST_LISTED = 50
"""Running children of an array whose logs are listed at one look; more than so many have their turns."""

THREADS = 8


@dataclass(frozen=True)
class Result:
    """A sample that has ended."""

    task: str
    model: str
    sample_id: int | str
    epoch: int
    scores: dict[str, Any]
    error: str | None
    seconds: float | None

    def line(self) -> str:
        """The result for people."""
        shown = ", ".join(f"{name} {value}" for name, value in self.scores.items()) or "no score"
        said = f"error: {' '.join(self.error.split())[:160]}" if self.error is not None else shown
        number = f" epoch {self.epoch}" if self.epoch > 1 else ""
        return f"{self.task}  {self.model}  sample {self.sample_id}{number}  {said}" + (
            f"  {self.seconds:.1f} s" if self.seconds is not None else ""
        )


class LiveResults:
    """What has ended so far.

    Attributes:
        finished, errored: samples. again: executions that replaced a finished one. planned: samples of the run. jobs: the ids of its jobs,
            in the manifest's order.
    """

    def __init__(self, storage: Storage, manifest: Manifest, *, array: bool) -> None:
        self.storage = storage
        self._run_id = manifest.fleet_id
        self._array = array
        self._turns: dict[str, int] = {}
        self._looks = 0
        self.jobs = [job.job_id for job in manifest.jobs]
        self.planned = sum(job.samples for job in manifest.jobs)
        self._etags: dict[str, str] = {}
        self._names: dict[str, tuple[str, str, str]] = {}
        self._ended: dict[Any, tuple[str | None, bool]] = {}
        self.again = 0

    @property
    def finished(self) -> int:
        """Samples that ended without an error."""
        return sum(1 for _, errored in self._ended.values() if not errored)

    @property
    def errored(self) -> int:
        """Samples whose last execution ended with an error."""
        return sum(1 for _, errored in self._ended.values() if errored)

    def poll(self, running: Collection[str] | None = None) -> list[Result]:
        """What has ended since the last look. Raises StorageError when the run cannot be listed.

        Args:
            running: the manifest's jobs that an array's children run right now: of them alone the unfinished logs are looked at, and once
                more of each that has ended since. None looks at all that there are.
        """
        logs: dict[str, Info] = {}
        fresh: list[tuple[str, Info]] = []
        with ThreadPoolExecutor(THREADS) as pool:
            listed = list(pool.map(lambda prefix: list_directory(self.storage, prefix), self._prefixes(running)))
        for directory in listed:
            logs |= {info.key: info for info in directory.logs}
            buffers = {layout.buffer_of(info.key): info.key for info in directory.logs}
            changed = [(info.key, info) for info in directory.logs if self._changed(info)]
            changed += [
                (buffers[key], info) for key, info in directory.others.items() if key in buffers and self._changed(info)
            ]
            fresh += changed
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda each: self._read(logs[each[0]], each[1]), fresh))
        return [result for log, some in zip(fresh, found, strict=True) for result in self._new(log[0], some)]

    def _prefixes(self, running: Collection[str] | None) -> list[str]:
        """What is listed at this look."""
        found = [layout.working(self._run_id)]
        if self._array and running is None:
            found.append(layout.partials(self._run_id))
        elif self._array and running is not None:
            self._looks += 1
            ended = self._turns.keys() - set(running)
            waits = sorted(running, key=lambda job_id: self._turns.get(job_id, 0))
            chosen = [*sorted(ended), *waits][:MOST_LISTED]
            for job_id in chosen:
                self._turns[job_id] = self._looks
            for job_id in ended & set(chosen):
                del self._turns[job_id]
            found += [layout.partial(self._run_id, job_id) for job_id in chosen]
        return found

    def _changed(self, info: Info) -> bool:
        return self._etags.get(info.key) != info.etag

    def _read(self, log: Info, info: Info) -> list[dict[str, Any]]:
        """The ended samples of a log or of its buffer; what is just being replaced is read at the next look."""
        try:
            if log.key not in self._names:
                facts = read_facts(self.storage, log)
                if facts.status == "unreadable":
                    return []
                self._names[log.key] = (facts.task, facts.model, canonical([facts.file, facts.task_args]))
            if info is log:
                found = read_summaries(self.storage, log, LARGEST_SUMMARIES)
            else:
                found = list(summaries_of(self.storage.get(info.key).body))
        except (StorageError, BadArchive, ValueError, KeyError):
            return []
        self._etags[info.key] = info.etag
        return [entry for entry in found if finished(entry)]

    def _new(self, log: str, entries: list[dict[str, Any]]) -> Iterator[Result]:
        task, model, arguments = self._names.get(log, ("", "", ""))
        for entry in entries:
            key = (task, model, arguments, sample_key(entry["id"], entry["epoch"]))
            uuid, error = entry.get("uuid"), entry.get("error")
            before = self._ended.get(key)
            if before is not None and (uuid is None or before[0] in (None, uuid)):
                continue
            self.again += before is not None
            self._ended[key] = (uuid, error is not None)
            scores = {name: score.get("value") for name, score in (entry.get("scores") or {}).items()}
            yield Result(task, model, entry["id"], entry["epoch"], scores, error, entry.get("total_time"))
