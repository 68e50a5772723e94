"""The lines of `events.jsonl`. Design, section 5.

The controller writes them, people and their `jq` read them: `ts`, `seq`, `type` and `fleet_id` come first in each, then the
fields below in this order. Fields may be added; none is renamed.
"""

from datetime import datetime
from typing import Any

from evalworker.contract.jsonio import dumps
from evalworker.contract.messages import SampleDone
from evalworker.contract.wire import stamp

TYPES = (
    "fleet_start",
    "attached",
    "worker_online",
    "worker_draining",
    "worker_lost",
    "bootstrap_failed",
    "result",
    "sample_retry",
    "job_attempt",
    "job_done",
    "budget",
    "stalled",
    "warning",
    "fleet_summary",
)
"""Every type of event that a stream may hold."""

Event = dict[str, Any]
"""One event: plain JSON values, without `ts`, `seq` and `fleet_id` until it is written."""


def written(event: Event, *, seq: int, fleet_id: str, ts: datetime) -> Event:
    """The event as it stands in the stream. `seq` counts from 1 within a fleet, without gaps."""
    assert event["type"] in TYPES, event["type"]
    head = {"ts": stamp(ts), "seq": seq, "type": event["type"], "fleet_id": fleet_id}
    return head | {key: value for key, value in event.items() if key != "type"}


def line(event: Event) -> str:
    """A written event as one line of the stream, with its line feed."""
    return dumps(event) + "\n"


def of_sample(done: SampleDone, *, replaces: str | None = None) -> Event:
    """The `result` (or, for a sample that is run again, the `sample_retry`) of a worker's message."""
    event: Event = {
        "type": "sample_retry" if done.will_retry else "result",
        "job_id": done.job_id,
        "task": done.task,
        "model": done.model,
        "scores": done.scores,
        "error": done.error,
        "duration_s": done.duration_s,
        "instance_id": done.instance_id,
        "status": done.status,
        "sample_id": done.sample_id,
        "epoch": done.epoch,
        "uuid": done.uuid,
        "attempt": done.attempt,
        "model_usage": done.model_usage,
        "cost_usd": done.cost_usd,
        "limit": done.limit,
    }
    if done.truncated:
        event["truncated"] = True
    if replaces is not None:
        event["replaces"] = replaces
    return event
