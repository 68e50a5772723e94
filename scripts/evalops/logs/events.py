"""A fleet's event stream, read back: counts of a job while it runs, and what the report draws.

The segments under the root are the durable truth; where this machine holds the live `events.jsonl`, that is one read instead of many.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalops.fleet.stream import segment_keys
from evalworker.contract.jsonio import canonical
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
    """A job as its results tell."""

    results: dict[tuple[str, int], bool] = field(default_factory=dict)
    last: datetime | None = None

    @property
    def completed(self) -> int:
        """Samples × epochs that ended well."""
        return sum(self.results.values())

    @property
    def errored(self) -> int:
        """Samples × epochs that ended with an error."""
        return len(self.results) - self.completed


@dataclass
class Progress:
    """Jobs by id, as far as the stream has told. The last result of a (sample, epoch) counts."""

    jobs: dict[str, JobProgress] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> "Progress":
        """Read a stream."""
        progress = cls()
        for event in events:
            if event["type"] != "result" or not isinstance(event.get("job_id"), str):
                continue
            job = progress.jobs.setdefault(event["job_id"], JobProgress())
            job.results[canonical(event.get("sample_id")), event.get("epoch") or 1] = event.get("status") == "completed"
            job.last = when(event) or job.last
        return progress

    def together(self, job_ids: Iterable[str]) -> JobProgress | None:
        """What these jobs (the shards of one task, say) have told, as of one; None when they have told nothing."""
        seen = [self.jobs[job_id] for job_id in job_ids if job_id in self.jobs]
        if not seen:
            return None
        results = {key: good for job in seen for key, good in job.results.items()}
        return JobProgress(results=results, last=max((job.last for job in seen if job.last), default=None))


def when(event: dict[str, Any]) -> datetime | None:
    """An event's time, aware UTC; None when it has none that can be read."""
    try:
        found = datetime.fromisoformat(str(event.get("ts")))
    except ValueError:
        return None
    return found if found.tzinfo else None
