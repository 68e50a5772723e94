"""What a command asks of a fleet beside what it says to Inspect, and what follows for the workers' limits. Pure.

Made by the commands, read by everything that starts a fleet or drives one on.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from evalworker.contract.documents import Backend, Guards, Limits, Manifest

LOCAL_LIMITS = Limits(visibility_s=15, heartbeat_s=5.0, control_s=1.0)
"""On one machine, looking is cheap: workers notice everything sooner than on AWS."""

BUDGETED_CONTROL_S: dict[Backend, float] = {"local": 0.2, "ec2": 2.0, "batch": 2.0}
"""How often workers look whether to stop when each sample costs money that is counted."""

DEFAULT_WORKERS = 2
"""Workers at the most where nobody says."""

FAR_SLOTS = 2
"""Jobs at once on a worker of another machine, of which nothing is known before it runs."""

LONGEST = timedelta(days=365)
"""No fleet means to live longer, and dates end."""


@dataclass(frozen=True)
class Request:
    """What a command asks for, beside what it says to Inspect.

    Attributes:
        workers: at the most, None for what the run began with. concurrency: samples in flight on each.
        slots: jobs at once on each, None for this machine's share.
        deadline: when the fleet ends whatever happens.
        hung_after_s, on_hung: see `Limits`. guards: see `Guards`.
        queues: of this machine, or one of the estate's lanes; wait: for a lane that becomes free.
        connections: to models, of all running jobs together; None leaves them to Inspect.
        typed: names of the command's own parameters that stand on the command line.
    """

    workers: int | None = None
    concurrency: int = 10
    slots: int | None = None
    deadline: timedelta = timedelta(hours=12)
    job_timeout_s: float | None = None
    hung_after_s: float = 1800.0
    on_hung: Literal["wait", "error"] = "wait"
    guards: Guards = field(default_factory=Guards)
    queues: Literal["local", "estate"] = "local"
    wait: bool = False
    quiet: bool = False
    connections: int | None = None
    typed: frozenset[str] = frozenset()


def workers_of(request: Request, manifest: Manifest) -> int:
    """Workers at the most: what was asked for at the start, for who drives a fleet of machines on."""
    return request.workers or (manifest.machines.workers if manifest.machines else DEFAULT_WORKERS)


def as_begun(request: Request, limits: Limits) -> Request:
    """What somebody asks for who drives a fleet on: of workers and slots, where he says nothing, what it had."""
    return replace(request, workers=request.workers or limits.workers, slots=request.slots or limits.slots)


def limits_of(request: Request, backend: Backend) -> Limits:
    """The workers' bounds. On this machine looking is cheap; elsewhere the defaults hold, which bound the number of AWS calls."""
    return adjusted(LOCAL_LIMITS if backend == "local" else Limits(), request, backend)


def adjusted(limits: Limits, request: Request, backend: Backend) -> Limits:
    """Limits with all in them that options say."""
    given: dict[str, Any] = {
        "workers": request.workers,
        "concurrency_per_worker": request.concurrency,
        "slots": request.slots,
        "deadline_s": request.deadline.total_seconds(),
        "job_timeout_s": request.job_timeout_s,
        "hung_after_s": request.hung_after_s,
        "on_hung": request.on_hung,
        "fleet_connections": request.connections,
    }
    if budgeted(request.guards):
        given["control_s"] = BUDGETED_CONTROL_S[backend]
    return limits.model_copy(update=given)


def budgeted(guards: Guards) -> bool:
    """Whether somebody has to count the money."""
    return guards.budget_usd is not None or guards.token_budget is not None


def deadline_of(text: str) -> timedelta:
    """A duration such as `90m`, `12h` or `2d`; raises ValueError."""
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    if len(text) < 2 or text[-1] not in units:
        raise ValueError(f"{text!r} is no duration: write 90m, 12h or 2d")
    try:
        found = timedelta(**{units[text[-1]]: float(text[:-1])})
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no duration: write 90m, 12h or 2d") from None
    if found <= timedelta(0):
        raise ValueError(f"{text!r} is over before it begins")
    if found > LONGEST:
        raise ValueError(f"{text!r} is too long: {LONGEST.days} days at the most")
    return found
