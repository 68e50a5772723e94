"""A fleet's event stream, read back: counts of a job while it runs, and what the report draws.

The segments under the root are the durable truth; where this machine holds the live `events.jsonl`, that is one read instead of many.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalops.fleet import standing
from evalops.fleet.stream import read_newer, segment_keys
from evalworker.contract.jsonio import canonical
from evalworker.contract.messages import SampleCounts
from evalworker.storage import Missing, Storage, StorageError

THREADS = 16


def read_events(storage: Storage, run_id: str, problems: list[str]) -> list[dict[str, Any]]:
    """All events of a run in order, [] for a run without a stream. Lines that cannot be read go to `problems`."""
    try:
        keys = segment_keys(storage, run_id)
        with ThreadPoolExecutor(THREADS) as pool:
            bodies = list(pool.map(lambda key: storage.get(key).body, keys))
    except Missing:
        return []
    except StorageError as error:
        problems.append(str(error))
        return []
    return parse(b"".join(bodies), problems)


def parse(raw: bytes, problems: list[str]) -> list[dict[str, Any]]:
    """The events of a stream's text; a line that is none is counted, not fatal."""
    events, bad = [], 0
    for line in raw.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            bad += 1
            continue
        if isinstance(event, dict) and isinstance(event.get("type"), str):
            events.append(event)
        else:
            bad += 1
    if bad:
        problems.append(f"{bad} lines of the event stream cannot be read")
    return events


@dataclass
class JobProgress:
    """A job as its results tell: `results` one by one, `before` those that a summary had counted before them."""

    results: dict[tuple[str, int], bool] = field(default_factory=dict)
    last: datetime | None = None
    before: SampleCounts = field(default_factory=SampleCounts)

    @property
    def completed(self) -> int:
        """Samples × epochs that ended well."""
        return self.before.completed + sum(self.results.values())

    @property
    def errored(self) -> int:
        """Samples × epochs that ended with an error."""
        return self.before.errored + len(self.results) - sum(self.results.values())


@dataclass
class Progress:
    """Jobs by id, as far as the stream has told. The last result of a (sample, epoch) counts."""

    jobs: dict[str, JobProgress] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> "Progress":
        """Read a stream."""
        progress = cls()
        progress.add(events)
        return progress

    @classmethod
    def now(cls, storage: Storage, run_id: str, round_: int | None, problems: list[str]) -> "Progress":
        """Of a fleet in this round: from its `standing.json` and the segments since; from its whole stream where there is none."""
        try:
            known = None if round_ is None else standing.read(storage, run_id, round_)
            if known is None:
                return cls.of(read_events(storage, run_id, problems))
            newer = list(read_newer(storage, run_id, known.segment))
        except (StorageError, ValueError) as error:
            problems.append(f"how far its jobs are is not known: {error}")
            return cls()
        progress = cls()
        for job_id, told in known.jobs.items():
            counts = told.counts if told.done is None else told.done.samples
            if counts.completed or counts.errored:
                progress.jobs[job_id] = JobProgress(before=counts, last=told.last)
        progress.add(newer)
        return progress

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        """Read more of a stream."""
        for event in events:
            if event["type"] != "result" or not isinstance(event.get("job_id"), str):
                continue
            job = self.jobs.setdefault(event["job_id"], JobProgress())
            key = canonical(event.get("sample_id")), event.get("epoch") or 1
            if "replaces" not in event or key in job.results or not job.before.total:  # else it is counted already
                job.results[key] = event.get("status") == "completed"
            job.last = when(event) or job.last

    def together(self, job_ids: Iterable[str]) -> JobProgress | None:
        """What these jobs (the shards of one task, say) have told, as of one; None when they have told nothing."""
        seen = [self.jobs[job_id] for job_id in job_ids if job_id in self.jobs]
        if not seen:
            return None
        results = {key: good for job in seen for key, good in job.results.items()}
        counts = {name: sum(getattr(job.before, name) for job in seen) for name in SampleCounts.model_fields}
        last = max((job.last for job in seen if job.last), default=None)
        return JobProgress(results=results, last=last, before=SampleCounts(**counts))


def when(event: dict[str, Any]) -> datetime | None:
    """An event's time, aware UTC; None when it has none that can be read."""
    try:
        found = datetime.fromisoformat(str(event.get("ts")))
    except ValueError:
        return None
    return found if found.tzinfo else None
