"""Where everything is kept below the root: the only place that builds a storage key.

A key is a POSIX path relative to the root (an S3 bucket or a directory). How a key becomes an object or a file is the
business of `evalworker.storage`. Design, section 4.
"""

import hashlib
import re
import time
from collections.abc import Iterable

from evalworker.contract.ids import BadId, check_job_id, check_run_id, slug
from evalworker.contract.jsonio import canonical


def manifest(fleet_id: str) -> str:
    """What was submitted."""
    return f"{check_run_id(fleet_id)}/manifest.json"


def control(fleet_id: str) -> str:
    """What the controller tells the workers."""
    return f"{check_run_id(fleet_id)}/control.json"


def machines(fleet_id: str) -> str:
    """Which EC2 instances the fleet has had, and what they cost."""
    return f"{check_run_id(fleet_id)}/machines.json"


def batch(fleet_id: str) -> str:
    """Which jobs of AWS Batch a run has."""
    return f"{check_run_id(fleet_id)}/batch.json"


def standing(fleet_id: str) -> str:
    """How the fleet stands, in short, for whoever only looks."""
    return f"{check_run_id(fleet_id)}/standing.json"


def segments(fleet_id: str) -> str:
    """The prefix of the event stream's segments."""
    return f"{check_run_id(fleet_id)}/events/"


def segment(fleet_id: str, number: int) -> str:
    """One segment of the event stream, counted from 1."""
    return f"{segments(fleet_id)}{number:06d}.jsonl"


def segment_number(key: str) -> int:
    """Which segment a key is. From a million on they have more digits: they are ordered by number, not by name."""
    return int(key.rpartition("/")[2].removesuffix(".jsonl"))


def attempt_log(fleet_id: str, job_id: str, attempt: int, worker: str) -> str:
    """What one attempt on one worker produced."""
    return f"{check_run_id(fleet_id)}/attempts/{check_job_id(job_id)}/{attempt}-{slug(worker)}.eval"


def attempt_end(fleet_id: str, job_id: str, attempt: int) -> str:
    """Created once: how an attempt ended (its `attempt_done`)."""
    return f"{check_run_id(fleet_id)}/attempts/{check_job_id(job_id)}/{attempt}.end.json"


def job_log(fleet_id: str, job_id: str) -> str:
    """The job's log, published by the attempt that ended it."""
    return f"{check_run_id(fleet_id)}/{check_job_id(job_id)}.eval"


def job_done(fleet_id: str, job_id: str, round_: int) -> str:
    """Created once; its existence means that the job has ended for this round."""
    return f"{check_run_id(fleet_id)}/{check_job_id(job_id)}.done-{round_}.json"


def job_ends(fleet_id: str, keys: Iterable[str]) -> dict[str, int]:
    """The newest round in which each job has ended, by job: from the keys of `job_done` among these."""
    found: dict[str, int] = {}
    for key in keys:
        job_id, is_end, round_ = key.removeprefix(f"{fleet_id}/").removesuffix(".json").partition(".done-")
        if is_end and "/" not in job_id and round_.isdigit():
            found[job_id] = max(found.get(job_id, 0), int(round_))
    return found


def late(fleet_id: str) -> str:
    """A fresh key for a message that came after its fleet's end."""
    return f"{check_run_id(fleet_id)}/late/{time.time_ns()}.json"


def unreadable(fleet_id: str) -> str:
    """A fresh key for a message that could not be read."""
    return f"{check_run_id(fleet_id)}/unreadable/{time.time_ns()}.txt"


def worker_logs(fleet_id: str) -> str:
    """The prefix of the workers' logs."""
    return f"{check_run_id(fleet_id)}/workers/"


def worker_log(fleet_id: str, worker: str) -> str:
    """A worker's boot and run log."""
    return f"{worker_logs(fleet_id)}{slug(worker)}.log"


def report(fleet_id: str) -> str:
    """The run's HTML report."""
    return f"{check_run_id(fleet_id)}/report.html"


def partials(fleet_id: str) -> str:
    """The prefix of a fleet's unfinished logs."""
    return f"partial/{check_run_id(fleet_id)}/"


def partial(fleet_id: str, job_id: str) -> str:
    """The prefix of the unfinished log that a job's next attempt starts from."""
    return f"{partials(fleet_id)}{check_job_id(job_id)}/"


def buffer_of(log: str) -> str:
    """The key of what Inspect's shared buffer says of the unfinished log of that key (`log_shared`)."""
    folder, slash, name = log.rpartition("/")
    return f"{folder}{slash}.buffer/{name.removesuffix('.eval')}/manifest.json"


def lane(name: str) -> str:
    """Who owns a lane, until when."""
    return f"lanes/{slug(name)}.json"


LANES = "lanes/"
"""The prefix of all lane records."""


def timing(task: str, model: str) -> str:
    """What a sample of this task with this model took, the last time it was run whole."""
    identity = hashlib.sha256(canonical([task, model]).encode("ascii")).hexdigest()[:16]
    return f"timings/{slug(task.rsplit('/', 1)[-1])}-{identity}.json"


def code(digest: str) -> str:
    """A tree of user code, by the hash of its content."""
    return f"code/{slug(digest)}.tar.gz"


def wheel(digest: str) -> str:
    """The worker package of a checkout, by the hash of its content."""
    return f"worker/{slug(digest)}.whl"


BOOT_SCRIPT = "worker/boot.sh"
"""What an instance of the stock image fetches and runs."""

WORKING = "logs/working/"
"""The prefix of all runs' logs, one log per (task, model)."""


def working(run_id: str) -> str:
    """The prefix of one run's logs: what status, summarize and promote read."""
    return f"{WORKING}{check_run_id(run_id)}/"


DASHBOARD_SUFFIX = ".dashboard.json"
ZIP_SUFFIX = ".zip"
REPLACED_SUFFIX = ".replaced.json"
"""What stands beside `<log>.eval`: the dashboard's file, the download, and a dashboard file that another run's has replaced."""


PROMOTED_SUFFIX = ".promoted"
"""What stands in the place of a working log that was promoted, and says where it is; no name that Inspect takes for a log's."""


def is_derived(key: str) -> bool:
    """Whether `summarize` has made it from the log that it stands beside, and would make it again."""
    return key.endswith((f".eval{DASHBOARD_SUFFIX}", f".eval{ZIP_SUFFIX}"))


ENVIRONMENTS = ("stage", "prod")
"""Where logs are promoted to."""


def promoted(environment: str) -> str:
    """The prefix of all that was promoted to an environment."""
    assert environment in ENVIRONMENTS, environment
    return f"logs/{environment}/"


def is_promoted(key: str) -> bool:
    """Whether it lies where an environment's files are."""
    return key.startswith(tuple(map(promoted, ENVIRONMENTS)))


def promoted_pair(environment: str, task: str, model: str) -> str:
    """The prefix of all promoted runs of one task and model.

    The dashboard's key rules: the task without its package and with underscores, the model with each "/" as "+", which the task
    must not contain. Raises BadId for a model without a provider, which the dashboard would drop in silence.
    """
    bare = _segment(task.rsplit("/", 1)[-1].replace("-", "_"), r"[^A-Za-z0-9_.]")
    if not model.partition("/")[2]:
        raise BadId(f"the model {model!r} has no provider: the dashboard finds a model by the + that stands for its /")
    return f"{promoted(environment)}{bare}/{_segment(model.replace('/', '+'), r'[^A-Za-z0-9_.:@+=,-]')}/"


def promoted_run(environment: str, task: str, model: str, run_id: str) -> str:
    """The prefix of one promoted run of one task and model."""
    return f"{promoted_pair(environment, task, model)}{check_run_id(run_id)}/"


def _segment(text: str, illegal: str) -> str:
    """One step of a key: what is not legal in it becomes `_`, and a hash keeps two such names apart."""
    clean = re.sub(illegal, "_", text)
    if clean == text and clean.strip("."):
        return clean
    return f"{clean.strip('.')[:80]}_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def published(run_id: str) -> str:
    """What publishing made of a run's logs the last time: while they are the same, there is nothing to do."""
    return f"{check_run_id(run_id)}/published.json"


PUBLISH_LOCK = "locks/publish.json"
"""Who publishes right now, until when."""


OWN_FOLDERS = ("partial", "code", "worker", "lanes", "logs", "locks", "timings")


def is_ours(key: str) -> bool:
    """Whether a key is one that this module may have built: a bucket may hold what others keep there."""
    first = key.partition("/")[0]
    try:
        return first in OWN_FOLDERS or bool(check_run_id(first))
    except BadId:
        return False
