"""What a Batch job is doing, in words: from what `describe_jobs` says to a state, a reason, and what to do. Pure.

The rules follow AWS's own words in `statusReason` and the container's `reason`; what a container of ours means by its exit status is
said too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from evalops import ui

State = Literal["SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED"]
FINAL = frozenset({"SUCCEEDED", "FAILED"})

Why = Literal[
    "terminated",
    "oom",
    "timeout",
    "host",
    "image",
    "misconfigured",
    "capacity",
    "dependency",
    "exit",
    "start",
    "unknown",
]

_EXITS = {
    1: "its command failed, or its evaluation has failures",
    69: "the container has no Docker engine (EX_UNAVAILABLE)",
    74: "its eval ended, but its logs could not be published to S3 (EX_IOERR)",
    78: "its tasks or the run's environment cannot be set up",
    127: "the image has no such command",
    130: "it was interrupted",
    137: "it was killed (SIGKILL)",
    143: "it was ended (SIGTERM)",
}
"""What an exit status of the worker image means."""

_CAPACITY = {
    "INSUFFICIENT_INSTANCE_CAPACITY": "AWS has no machine of these types free right now; --on-demand may start at once",
    "QUOTA": "the account's vCPU quota is used up: ask for more in Service Quotas",
}
_MISCONFIGURED = {
    "COMPUTE_ENVIRONMENT_MAX_RESOURCE": "the job wants more than batch.max_vcpus leaves: lower --vcpus or --memory, or raise it",
    "JOB_RESOURCE_REQUIREMENT": "no instance type of the estate is large enough: lower --vcpus or --memory",
    "SERVICE_ROLE_PERMISSIONS": "Batch's own role lacks a permission: run `make apply`",
    "EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": "the hosts cannot start with the estate's configuration: run `make doctor`",
}

CANNOT_START = "it can never start: "
"""How the reason begins with which a monitor ends a job that could never start; AWS's own words follow."""

_TIMED_OUT = ("job attempt duration exceeded timeout",)
_NEVER_PLACED = re.compile(rf"(?:{CANNOT_START})?(CAPACITY|MISCONFIGURATION):[A-Z_]+")
"""AWS's own reasons at the head of `statusReason`: anybody's words may hold the same further on."""


@dataclass(frozen=True)
class Attempt:
    """One try of a job on one host. `stream` is the name of its log stream, which need not exist."""

    stream: str | None
    reason: str
    exit_code: int | None
    started: datetime | None
    stopped: datetime | None


@dataclass(frozen=True)
class Job:
    """A described job.

    Attributes:
        reason: AWS's words, "" for none. why: the kind of failure, None while it has not failed.
        since: when it began to wait or to run, as far as Batch says. group: of its log, None where Batch does not say.
        children: of an array, how many are in each state.
    """

    id: str
    name: str
    state: State
    reason: str
    why: Why | None
    exit_code: int | None
    created: datetime | None
    since: datetime | None
    stopped: datetime | None
    queue: str
    command: list[str]
    group: str | None
    attempts: list[Attempt] = field(default_factory=list)
    children: dict[str, int] | None = None

    @property
    def ended(self) -> bool:
        """Whether it has come to its final state."""
        return self.state in FINAL

    @property
    def stuck(self) -> bool:
        """Whether it waits for what can never come."""
        return self.state == "RUNNABLE" and self.why == "misconfigured"


def job(described: Mapping[str, Any]) -> Job:
    """One entry of `describe_jobs`."""
    container = described.get("container") or {}
    state: State = described["status"]
    attempts = [_attempt(entry) for entry in described.get("attempts") or []]
    running = container.get("logStreamName")
    if state in ("STARTING", "RUNNING", *FINAL) and running and running not in [each.stream for each in attempts]:
        attempts.append(Attempt(running, container.get("reason") or "", container.get("exitCode"), None, None))
    exit_code = container.get("exitCode")
    if exit_code is None and attempts and state in FINAL:
        exit_code = attempts[-1].exit_code
    detail = container.get("reason") or (attempts[-1].reason if attempts and state in FINAL else "")
    reason = "; ".join(dict.fromkeys(filter(None, (described.get("statusReason") or "", detail))))
    options = (container.get("logConfiguration") or {}).get("options") or {}
    array = described.get("arrayProperties") or {}
    return Job(
        id=described["jobId"],
        name=described["jobName"],
        state=state,
        reason=reason,
        why=_why(described, state, reason, exit_code),
        exit_code=exit_code,
        created=_time(described.get("createdAt")),
        since=_since(described, state, attempts),
        stopped=_time(described.get("stoppedAt")),
        queue=str(described.get("jobQueue", "")).rsplit("/", 1)[-1],
        command=list(container.get("command") or []),
        group=options.get("awslogs-group"),
        attempts=attempts,
        children=dict(array["statusSummary"]) if "size" in array and "statusSummary" in array else None,
    )


def _attempt(entry: Mapping[str, Any]) -> Attempt:
    container = entry.get("container") or {}
    reason = "; ".join(dict.fromkeys(filter(None, (entry.get("statusReason") or "", container.get("reason") or ""))))
    return Attempt(
        container.get("logStreamName"),
        reason,
        container.get("exitCode"),
        _time(entry.get("startedAt")),
        _time(entry.get("stoppedAt")),
    )


def _time(milliseconds: Any) -> datetime | None:
    """Batch's times are milliseconds since the epoch; zero stands for none."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


def _since(described: Mapping[str, Any], state: State, attempts: list[Attempt]) -> datetime | None:
    """When the present state began: Batch says it of running jobs; one that waits does so since it came, or came back."""
    if state in FINAL:
        return _time(described.get("stoppedAt"))
    if state == "RUNNING":
        return _time(described.get("startedAt"))
    ends = [each.stopped for each in attempts if each.stopped is not None]
    return max(ends) if ends else _time(described.get("createdAt"))


def _why(described: Mapping[str, Any], state: State, reason: str, exit_code: int | None) -> Why | None:
    text = reason.lower()
    if state == "RUNNABLE":
        if "misconfiguration:" in text:
            return "misconfigured"
        return "capacity" if "capacity:" in text or "quota" in text or "limit exceeded" in text else None
    if state != "FAILED":
        return None
    stated = described.get("statusReason") or ""
    if stated.lower().startswith(_TIMED_OUT):  # Batch terminates such a job itself
        return "timeout"
    if described.get("isTerminated") or described.get("isCancelled"):
        found = _NEVER_PLACED.match(stated)
        return "terminated" if found is None else "capacity" if found[1] == "CAPACITY" else "misconfigured"
    signs: tuple[tuple[Why, tuple[str, ...]], ...] = (
        ("host", ("host ec2", "spot interruption")),
        ("oom", ("outofmemory", "out of memory", "oomkilled")),
        ("timeout", ("exceeded timeout", "attempt duration exceeded", "timed out", "attemptdurationseconds")),
        ("image", ("cannotpull", "cannot pull", "manifest unknown", "imagepull")),
        ("misconfigured", ("misconfiguration:",)),
        ("capacity", ("capacity:",)),
        ("dependency", ("dependent job",)),
        ("start", ("cannotstartcontainer", "cannotcreatecontainer", "resourceinitialization", "task failed to start", "dockertimeout")),
    )  # fmt: skip
    for why, words in signs:
        if any(word in text for word in words):
            return why
    return "exit" if exit_code not in (None, 0) else "unknown"


def words(job: Job, now: datetime) -> str:
    """The state for people: what it is, since when, and what can be done about it."""
    if job.children is not None and not job.ended:
        shown = [f"{count} {state.lower()}" for state, count in job.children.items() if count]
        return f"array: {', '.join(shown) or 'its children are being made'}"
    duration = ui.seconds_text((now - job.since).total_seconds()) if job.since else None
    lasting = f" for {duration}" if duration else ""
    if job.state == "RUNNABLE":
        return f"waiting for a host{lasting}{_waiting_for(job)}"
    if job.state == "STARTING":
        return f"starting{lasting}: a host is there, the image is being pulled"
    if job.state == "RUNNING":
        number = f" (attempt {len(job.attempts)})" if len(job.attempts) > 1 else ""
        return f"running{lasting}{number}"
    if job.state == "SUCCEEDED":
        return "succeeded"
    if job.state == "FAILED":
        return failure(job)
    return {"SUBMITTED": "submitted", "PENDING": "waiting for what it depends on"}[job.state] + lasting


def _waiting_for(job: Job) -> str:
    if not job.reason:
        return " (a first host takes one to three minutes)"
    for table in (_MISCONFIGURED, _CAPACITY):
        for code, meaning in table.items():
            if code.lower() in job.reason.lower():
                return f": {meaning} ({job.reason.split(' - ')[0]})"
    return f": {job.reason}"


def failure(job: Job) -> str:
    """Why a job failed, with its exit status, AWS's reason, and what to do."""
    meaning: dict[str, str] = {
        "terminated": "terminated",
        "oom": "out of memory: submit it again with a larger --memory",
        "timeout": "it ran longer than --job-timeout (or the estate's batch.timeout_minutes)",
        "host": "its host was lost, as often as the estate allows (batch.host_retries)",
        "image": "the worker image could not be pulled: push one with `make push-image` and apply its digest",
        "misconfigured": f"it could never start{_waiting_for(job) if job.reason else ''}",
        "capacity": f"it found no host{_waiting_for(job) if job.reason else ''}",
        "dependency": "a job that it depends on failed",
        "start": "its container could not be started",
        "exit": _EXITS.get(job.exit_code or 0, "its command failed"),
        "unknown": "Batch gives no reason",
    }
    if job.children is not None and job.why in ("unknown", "exit") and job.children.get("FAILED"):
        return f"failed: {job.children['FAILED']} of {sum(job.children.values())} children failed"
    text = f"failed: {meaning[job.why or 'unknown']}" if job.why != "terminated" else "terminated"
    if job.exit_code is not None:
        text += f" (exit {job.exit_code})"
    if job.reason and job.why not in ("misconfigured", "capacity"):
        text += f" [{job.reason}]"
    if len(job.attempts) > 1:
        text += f", {len(job.attempts)} attempts"
    return text
