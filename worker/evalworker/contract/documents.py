"""The documents under the root: manifest, control, lane, job end. Design, section 4.

Each is one JSON object. Values that change are written whole; who may write which is said in each docstring.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from evalworker.contract.ids import SampleId, task_file
from evalworker.contract.messages import AttemptDone
from evalworker.contract.wire import Part, Wire

Backend = Literal["local", "ec2", "batch"]
"""Where a run's jobs run."""


class Shard(Part):
    """A slice of a task's samples: number `index` (from 0) of `of`. `ids` are its samples', in the dataset's order."""

    index: int
    of: int
    ids: list[SampleId]


class JobSpec(Part):
    """One job as planned.

    `task` is what Inspect is given (a registry name, or `file.py@name` relative to the submit directory); `name` is the
    task's own name; `task_args` and `model_args` are typed values; `samples` counts (sample × epoch).

    A task that is run in shards has a job for each (`shard`), and one that merges their logs when they have ended: `merges` are their
    ids, and `order` names the shard (from 0) of each sample in the dataset's order; empty when that is each shard's in turn. It has the
    id that the task's job has when it is not sharded. `ids` are all samples' in the dataset's order: in an older manifest, and once
    `with_ids` has put them together.
    """

    job_id: str
    task: str
    name: str
    task_args: dict[str, Any] = {}
    model: str
    model_index: int = 0
    samples: int
    epochs: int = 1
    shard: Shard | None = None
    merges: list[str] = []
    order: list[int] = []
    ids: list[SampleId] = []

    def same_file(self, logged: str | None) -> bool:
        """Whether a log's task file may be this task's: an unknown one may, and a package's task has none."""
        own, theirs = task_file(self.task.rpartition("@")[0]), task_file(logged)
        return not own or not theirs or own == theirs


def wholes(jobs: Iterable[JobSpec]) -> list[JobSpec]:
    """The jobs that stand for a (task, model): all but shards."""
    return [job for job in jobs if job.shard is None]


def with_ids(spec: JobSpec, jobs: Iterable[JobSpec]) -> JobSpec:
    """A job that merges, with the ids that its shards among `jobs` hold; any other, and one that has them, as it is."""
    if not spec.merges or spec.ids:
        return spec
    slices = {job.job_id: job.shard.ids for job in jobs if job.shard is not None}
    left = [iter(slices[job_id]) for job_id in spec.merges]
    total = sum(len(slices[job_id]) for job_id in spec.merges)
    order = spec.order or [number % len(left) for number in range(total)]
    return spec.model_copy(update={"ids": [next(left[shard]) for shard in order]})


def total_samples(jobs: Iterable[JobSpec]) -> int:
    """Samples × epochs of all jobs."""
    return sum(job.samples for job in wholes(jobs))


Market = Literal["spot", "on-demand"]


class Machines(Part):
    """From what a run's EC2 workers are launched, so that whoever drives the fleet on launches the same.

    `estate` names the configuration that Terraform wrote. `markets` are asked in this order; `on_demand_base` workers are on-demand in
    any case. `images` and `instance_types` are by architecture, `workers` the most at once.
    """

    estate: str
    markets: list[Market]
    on_demand_base: int = 0
    images: dict[str, str]
    instance_types: dict[str, list[str]]
    workers: int


class Manifest(Wire):
    """A run as submitted; written once per round by the controller. Holds no secret.

    `arguments` are `eval_set`'s keyword arguments as typed values (`evalworker.arguments` reads and writes them);
    `submit_dir` is where the run was submitted, relative to the code's root; `environment` are the names and values of `--env`;
    `work_dir` is where local workers keep their directories, `machines` what EC2 workers are launched from. `owner` is who submitted,
    `versions` with what.

    The code: `code` is the hash of the packed tree; without it the code is used in place at `code_root`. `python_path` are further
    directories of it from which modules are imported. `worker` is the hash of the run's `evalworker`. The environment of the run:
    `lock` is the directory of its `uv.lock`, `requirements` are pinned; without both the worker's own environment is used. All
    directories are relative to the code's root. `secrets` are names, never values.
    """

    type: Literal["manifest"] = "manifest"
    fleet_id: str
    created: datetime
    backend: Backend
    jobs: list[JobSpec]
    arguments: dict[str, Any]
    models: list[Any]
    submit_dir: str
    code_root: str | None = None
    code: str | None = None
    python_path: list[str] = []
    worker: str | None = None
    lock: str | None = None
    requirements: list[str] = []
    secrets: list[str] = []
    environment: dict[str, str] = {}
    versions: dict[str, str] = {}
    git: dict[str, Any] | None = None
    owner: str = ""
    work_dir: str | None = None
    machines: Machines | None = None


class Limits(Part):
    """What bounds the workers; all times in seconds.

    `controller_silent_s`: with a budget, no job is taken when the controller has been silent for so long, because nobody counts the
    money. `disk_free_min`: bytes that must be free for a job to be taken. `hung_after_s`, `on_hung`: a sample in which nothing has
    happened for so long is reported, or ended with an error too. `fleet_connections`: model connections of all running jobs
    together, None where each has as many as Inspect gives it. `workers` (at the most), `slots` and `deadline_s` (counted from a round's
    start) are as they were given, None where they were not: for whoever goes on.
    """

    workers: int | None = None
    concurrency_per_worker: int = 10
    slots: int | None = None
    deadline_s: float | None = None
    visibility_s: int = 60
    heartbeat_s: float = 10.0
    control_s: float = 10.0
    idle_s: float = 300.0
    job_timeout_s: float | None = None
    partial_s: float = 60.0
    controller_silent_s: float = 600.0
    disk_free_min: int = 1_000_000_000
    hung_after_s: float = 1800.0
    on_hung: Literal["wait", "error"] = "wait"
    fleet_connections: int | None = None


class Guards(Part):
    """What makes the controller stop a fleet before its jobs end it: `ct run eval`'s options of the same names.

    `max_failed_share`: of ended jobs; 1 switches the failure rate off.
    """

    budget_usd: float | None = None
    token_budget: int | None = None
    canary: bool = False
    max_failed_share: float = 0.5
    stall_after_s: float = 1800.0


ControlState = Literal["running", "draining", "stopping", "ended"]


class Control(Wire):
    """What the controller tells the workers; written by the controller alone, read by workers every few seconds.

    `state`: `running`; `draining` (finish what runs, take nothing new); `stopping` (interrupt what runs, keep partial logs; with
    `at_once`, without letting jobs flush); `ended`. `beat` is the controller's last sign of life; `round` is the current one,
    messages of older rounds are deleted. `ct fleet stop` alone writes it from outside. `rate_limited` and `waiting_for` are what the
    controller last heard and knew, for whoever only looks; `outcome` is how the fleet ended, as in its `fleet_summary`.
    `connections` are the shares of `fleet_connections`, `pressure` the rate-limited model calls, `draining` why workers that drain do
    so, by worker. `begun` is set by `ies run local` alone: since when one `eval_set` writes into the run's own log directory.
    """

    type: Literal["control"] = "control"
    fleet_id: str
    round: int
    state: ControlState
    deadline: datetime
    beat: datetime
    at_once: bool = False
    budgeted: bool = False
    controller: str = ""
    limits: Limits = Limits()
    guards: Guards = Guards()
    rate_limited: int = 0
    waiting_for: str | None = None
    connections: dict[str, int] = {}
    pressure: dict[str, int] = {}
    draining: dict[str, str] = {}
    outcome: str | None = None
    begun: datetime | None = None


class Lane(Wire):
    """Three queues and who owns them until when; the key's conditional writes make ownership exclusive.

    `endpoint` is set only where the queues are an emulator's on this machine's loopback.
    """

    type: Literal["lane"] = "lane"
    name: str
    jobs: str
    events: str
    dead: str
    region: str = "us-east-1"
    endpoint: str | None = None
    fleet_id: str | None = None
    owner: str = ""
    until: datetime | None = None


class MachineRecord(Part):
    """One instance of a fleet and what it has cost so far: `usd` and `usd_per_hour` are None while no price is known.

    `ended` is None while it runs; `price_from` says where its price is from.
    """

    instance_id: str
    instance_type: str
    market: Market
    zone: str | None = None
    launched: datetime
    ended: datetime | None = None
    usd_per_hour: float | None = None
    usd: float | None = None
    price_from: str | None = None


class MachineBook(Wire):
    """All instances that a fleet has had, and their cost at `as_of`; written whole by the controller."""

    type: Literal["machines"] = "machines"
    fleet_id: str
    as_of: datetime
    machines: list[MachineRecord] = []


class Timing(Wire):
    """What one (task, model) took the last time that a fleet ran it whole: seconds of its jobs, over its samples (× epochs)."""

    type: Literal["timing"] = "timing"
    task: str
    model: str
    seconds_per_sample: float
    samples: int
    fleet_id: str
    as_of: datetime


class JobDone(Wire):
    """A job has ended for one round. Created once: by the worker that ended it, or by the controller for cancelled jobs."""

    type: Literal["job_done"] = "job_done"
    fleet_id: str
    job_id: str
    round: int
    log: str | None
    attempt_done: AttemptDone


class BatchSubmission(Part):
    """One job as AWS Batch knows it. `offset` is its first job's place in the round, `size` its children (None: a plain job)."""

    job_id: str
    name: str
    offset: int = 0
    size: int | None = None


class BatchRound(Part):
    """One submission of a run to Batch.

    `jobs` are places in the manifest's list; `array` gives each a child and a log directory of its own, else one `eval_set` runs them
    all. `logs` maps a place to the key of the working log that its child goes on from. `names` are those of all its Batch jobs,
    written before the first is sent, at `begun`: what is sent and not yet recorded is found by its name. `vcpus`, `memory` (MiB) and
    `timeout_s` are what was asked for, None for what the estate says.
    """

    number: int
    queue: str
    array: bool = False
    jobs: list[int]
    logs: dict[int, str] = {}
    names: list[str] = []
    begun: datetime | None = None
    submissions: list[BatchSubmission] = []
    vcpus: int | None = None
    memory: int | None = None
    timeout_s: float | None = None


class BatchRun(Wire):
    """What of a run went to Batch; written by who submits. `estate` and `region` say where, `log_group` where its output is."""

    type: Literal["batch"] = "batch"
    fleet_id: str
    estate: str
    region: str
    log_group: str
    rounds: list[BatchRound]
