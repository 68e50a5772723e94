"""The messages on a lane's queues. Design, section 5.

`job` goes from the controller to a worker; all others from a worker to the controller. A message stays under 32 KiB: text
that a model or a task wrote is cut to fit and the message is marked `truncated`.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from evalworker.contract.failures import Category
from evalworker.contract.ids import SampleId
from evalworker.contract.jsonio import dumps
from evalworker.contract.wire import Part, Unreadable, Wire, describe

MAX_MESSAGE_BYTES = 32 * 1024
"""The largest message that we send; SQS itself once refused more than 256 KiB a batch of ten."""


class Job(Wire):
    """One attempt of one job, to be taken by any worker of the fleet. The rest is in the manifest.

    Attempts are counted through all rounds (their keys are created once); `base` are those of earlier rounds, which do not count
    against the retry policy. A `canary` ends with its first sample. `avoid`: the instance on which the attempt before this one failed;
    it leaves the job to others for a moment.
    """

    type: Literal["job"] = "job"
    fleet_id: str
    round: int
    job_id: str
    attempt: int
    base: int = 0
    canary: bool = False
    avoid: str | None = None


class _FromWorker(Wire):
    """What every message of a worker says of itself."""

    fleet_id: str
    instance_id: str
    ts: datetime
    truncated: bool = False


class WorkerOnline(_FromWorker):
    """A worker is about to take its first job. `bootstrap_s`: seconds since its launch."""

    type: Literal["worker_online"] = "worker_online"
    bootstrap_s: float
    instance_type: str
    lifecycle: Literal["local", "spot", "on-demand", "batch"]
    slots: int
    versions: dict[str, str] = {}


class Hung(Part):
    """A sample in which nothing has happened for `quiet_s` seconds; `activity` says what it is in, `ended` whether it was ended for it."""

    job_id: str
    attempt: int
    sample_id: SampleId
    epoch: int
    quiet_s: float
    activity: str
    ended: bool = False


class Heartbeat(_FromWorker):
    """A worker lives. `running`: its jobs' ids; `load`: one-minute load average; `disk_free`, `memory_free`: bytes.

    `rate_limited`: rate-limited model calls of what runs, `refused`: of all that this worker has run; `waits`: what each running job is
    in, as a short phrase; `moved`: a sample has begun or got on since the last heartbeat. `leaving`: why it drains, once it does; its
    goodbye follows when what runs has been handed over.
    """

    type: Literal["heartbeat"] = "heartbeat"
    running: list[str]
    load: float
    disk_free: int
    memory_free: int
    rate_limited: int = 0
    refused: int = 0
    waits: dict[str, str] = {}
    moved: bool = False
    hung: list[Hung] = []
    leaving: str | None = None


class WorkerDraining(_FromWorker):
    """A worker has handed over what it ran and is about to go. `reason`: spot, sigterm, idle, deadline, stopped, over, …"""

    type: Literal["worker_draining"] = "worker_draining"
    reason: str
    handed_over: list[str] = []


class BootstrapFailed(_FromWorker):
    """A worker could not start; `lines` are the last ones of its log."""

    type: Literal["bootstrap_failed"] = "bootstrap_failed"
    lines: list[str]


class SampleDone(_FromWorker):
    """A sample ended. `will_retry`: it errored and is run again, so it is not a result yet.

    `scores` maps scorer to {"value": …, "answer"?, "explanation"?}; `duration_s` is the sample's total time; `cost_usd` is
    None where no price is known.
    """

    type: Literal["sample_done"] = "sample_done"
    round: int
    job_id: str
    attempt: int
    task: str
    model: str
    sample_id: SampleId
    epoch: int
    uuid: str | None
    status: Literal["completed", "errored"]
    scores: dict[str, dict[str, Any]]
    error: str | None = None
    limit: str | None = None
    duration_s: float | None = None
    model_usage: dict[str, dict[str, Any]] = {}
    cost_usd: float | None = None
    will_retry: bool = False


class SampleCounts(Part):
    """Samples of a job (sample × epoch), counted from its log."""

    total: int = 0
    completed: int = 0
    errored: int = 0


class AttemptDone(_FromWorker):
    """An attempt ended; stored as its `end.json` before it is posted.

    `ended`: the job has ended with it (else a retry is due after `retry_after_s`). `kept`: samples taken over from the attempt
    before. `log`: key of the attempt's log; `log_name` is the name that Inspect gave it; `metrics` are its scores as
    `scorer/metric`. `shard`: the log is a shard's, which stays
    under the fleet's prefix. `digest`: of the (id, epoch, uuid) of the log's samples, which the controller compares with its stream. A
    `canary` that passed with its first sample has not ended its job: its log is where the next attempt starts from.
    """

    type: Literal["attempt_done"] = "attempt_done"
    round: int
    job_id: str
    attempt: int
    status: Literal["completed", "failed", "cancelled"]
    ended: bool
    failure_category: Category | None = None
    error_summary: str | None = None
    retry_after_s: float | None = None
    duration_s: float
    samples: SampleCounts
    kept: int = 0
    metrics: dict[str, float | None] = {}
    log: str | None = None
    log_name: str | None = None
    digest: str | None = None
    canary: bool = False
    shard: bool = False


class Warning_(_FromWorker):
    """Something a person should know and no failure of a job."""

    type: Literal["warning"] = "warning"
    text: str
    job_id: str | None = None


FromWorker = WorkerOnline | Heartbeat | WorkerDraining | BootstrapFailed | SampleDone | AttemptDone | Warning_
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="type")])


def read_from_worker(text: str) -> FromWorker:
    """A worker's message; raises Unreadable."""
    try:
        return _FROM_WORKER.validate_json(text)
    except ValidationError as error:
        raise Unreadable(describe(error), text) from None


_TEXT_LIMITS = (8192, 2048, 512, 128, 32)


def fit(message: FromWorker, limit: int = MAX_MESSAGE_BYTES) -> str:
    """The message as JSON of at most `limit` bytes: its longest texts are cut, then whole scores' explanations go.

    Ids, names, numbers and categories are never cut. Raises ValueError if nothing helps (an id of 40 kB, say).
    """
    text = message.to_json()
    if len(text) <= limit:
        return text
    body = message.to_dict()
    body["truncated"] = True
    for longest in _TEXT_LIMITS:
        for name in ("scores", "error", "error_summary", "text", "lines", "model_usage"):
            if name in body:
                body[name] = _cut(body[name], longest)
        text = dumps(body)
        if len(text) <= limit:
            return text
    if "scores" in body:
        body["scores"] = {str(name)[:64]: {"value": None} for name in list(body["scores"])[:50]}
        body["model_usage"] = dict(list(body["model_usage"].items())[:50])
        text = dumps(body)
    if len(text) > limit:
        raise ValueError(f"a {message.type} message of {len(text)} bytes cannot be cut to {limit}")
    return text


def _cut(value: Any, longest: int) -> Any:
    """A copy in which no text is longer than `longest` characters and no list longer than that either."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[: longest - 1] + "…"
    if isinstance(value, dict):
        return {key: _cut(item, longest) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item, longest) for item in value[-longest:]]
    return value
