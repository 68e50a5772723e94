"""Why an attempt failed, and whether it is tried again: pure rules on facts that others gathered.

A failure's type is the class of the exception (in a log: the last line of its traceback), its status code comes from
Inspect's retry hook, its exit from the process status, cgroup and kernel. The message serves for unknown types alone and a
traceback is never searched: a `ValueError` whose text mentions 429 or a timeout is a task error. Design, section 6.
"""

import enum
import re
from dataclasses import dataclass, field


class Category(enum.StrEnum):
    """What broke. The values appear in events, on the terminal and in the docs."""

    CONFIG = "config"
    AUTH = "auth"
    RATE_LIMIT = "rate_limit"
    TIMEOUT = "timeout"
    OOM = "oom"
    DISK_FULL = "disk_full"
    SANDBOX = "sandbox"
    IMAGE_PULL = "image_pull"
    DOCKER_NETWORK = "docker_network"
    NETWORK = "network"
    STORAGE = "storage"
    CLOCK = "clock"
    CRASH = "crash"
    SPOT = "spot"
    WORKER_LOST = "worker_lost"
    TASK_ERROR = "task_error"
    CANCELLED = "cancelled"


NEVER_RETRIED = frozenset({Category.CONFIG, Category.AUTH, Category.TASK_ERROR, Category.CANCELLED})
"""Trying again gives the same end (or Inspect has tried already)."""

REDELIVERED = frozenset({Category.SPOT, Category.WORKER_LOST})
"""The queue itself gives the message to another worker; nothing is counted and nobody sends a new one."""

MAX_ATTEMPTS = 3
"""Attempts of a job whose surroundings failed."""

MAX_RATE_LIMITED = 6
"""Attempts of a job that a provider's rate limit ended, each after a longer pause."""

RATE_LIMIT_PAUSE_S = (15.0, 30.0, 60.0, 120.0, 240.0)
"""Pause before the second, third, … attempt of a rate-limited job; jitter of up to half is added by the sender."""

EXIT_CONFIG = 78
"""A job process's exit status when its task, model or arguments cannot be used (EX_CONFIG of sysexits.h)."""


def retry_delay(category: Category, attempt: int) -> float | None:
    """Seconds to wait before attempt + 1, or None when the job has ended with this attempt (counted from 1)."""
    if category in NEVER_RETRIED or category in REDELIVERED:
        return None
    if category is Category.RATE_LIMIT:
        if attempt >= MAX_RATE_LIMITED:
            return None
        return RATE_LIMIT_PAUSE_S[min(attempt, len(RATE_LIMIT_PAUSE_S)) - 1]
    return 0.0 if attempt < MAX_ATTEMPTS else None


_BY_TYPE: dict[str, Category] = {
    # providers: openai, anthropic, google, mistral, groq, together, boto name their classes so
    "AuthenticationError": Category.AUTH,
    "PermissionDeniedError": Category.AUTH,
    "UnauthorizedError": Category.AUTH,
    "RateLimitError": Category.RATE_LIMIT,
    "TooManyRequests": Category.RATE_LIMIT,
    "ResourceExhausted": Category.RATE_LIMIT,
    "ThrottlingException": Category.RATE_LIMIT,
    "OverloadedError": Category.RATE_LIMIT,
    "APITimeoutError": Category.TIMEOUT,
    "TimeoutError": Category.TIMEOUT,
    "ReadTimeout": Category.TIMEOUT,
    "ConnectTimeout": Category.TIMEOUT,
    "MemoryError": Category.OOM,
    "APIConnectionError": Category.NETWORK,
    "ConnectError": Category.NETWORK,
    "ReadError": Category.NETWORK,
    "ConnectionError": Category.NETWORK,
    "ConnectionResetError": Category.NETWORK,
    "ConnectionRefusedError": Category.NETWORK,
    "BrokenPipeError": Category.NETWORK,
    "gaierror": Category.NETWORK,
    # Inspect's own
    "PrerequisiteError": Category.CONFIG,
    "ModuleNotFoundError": Category.CONFIG,
    "LookupError": Category.CONFIG,
    # storage
    "NoSuchBucket": Category.STORAGE,
    "NoCredentialsError": Category.STORAGE,
    "RequestTimeTooSkewed": Category.CLOCK,
    "StorageError": Category.STORAGE,
}

_BY_STATUS: dict[int, Category] = {
    401: Category.AUTH,
    403: Category.AUTH,
    408: Category.TIMEOUT,
    429: Category.RATE_LIMIT,
    503: Category.RATE_LIMIT,
    529: Category.RATE_LIMIT,
}

_ERRNO = re.compile(r"\[Errno (\d+)\]")
_BY_ERRNO = {28: Category.DISK_FULL, 122: Category.DISK_FULL, 12: Category.OOM}

_SANDBOX_TEXT: tuple[tuple[str, Category], ...] = (
    ("non-overlapping ipv4 address pool", Category.DOCKER_NETWORK),
    ("could not find an available", Category.DOCKER_NETWORK),
    ("toomanyrequests", Category.IMAGE_PULL),
    ("pull access denied", Category.IMAGE_PULL),
    ("manifest unknown", Category.IMAGE_PULL),
    ("failed to pull", Category.IMAGE_PULL),
    ("no space left on device", Category.DISK_FULL),
    ("cannot connect to the docker daemon", Category.SANDBOX),
    ("failed to start docker services", Category.SANDBOX),
    ("docker compose", Category.SANDBOX),
)
"""Docker reports all of these in one exception type (a RuntimeError of Inspect's sandbox), so here the text decides."""

_SANDBOX_TYPES = frozenset({"SandboxError", "DockerError", "RuntimeError"})


def exception_type(traceback_text: str) -> str:
    """The class name in a traceback's last line, without its module; "" when there is none."""
    lines = [line for line in traceback_text.strip().splitlines() if line and not line[0].isspace()]
    if not lines:
        return ""
    head = lines[-1].split(":", 1)[0].strip()
    return head.rsplit(".", 1)[-1] if re.fullmatch(r"[\w.]+", head) else ""


def classify_exception(type_name: str, message: str = "", status_code: int | None = None) -> Category:
    """The category of one exception.

    Args:
        type_name: the exception's class, with or without its module.
        message: its text, read only for the few types that say nothing themselves.
        status_code: the HTTP status that Inspect's retry hook or the exception reported.
    """
    if status_code in _BY_STATUS:
        return _BY_STATUS[status_code]
    name = type_name.rsplit(".", 1)[-1]
    if name in ("OSError", "IOError") and (found := _ERRNO.search(message)):
        return _BY_ERRNO.get(int(found[1]), Category.TASK_ERROR)
    if name in _SANDBOX_TYPES:
        lowered = message.lower()
        return next((category for text, category in _SANDBOX_TEXT if text in lowered), Category.TASK_ERROR)
    return _BY_TYPE.get(name, Category.TASK_ERROR)


@dataclass(frozen=True)
class JobEvidence:
    """What is known of an attempt after its process has gone. All of it is fact, none of it a guess.

    Attributes:
        exit_status: the process's exit code, -N for signal N, None if it is unknown.
        log_status: the stored log's status (success, error, cancelled, started), None without a log.
        samples_total, samples_completed, samples_errored: counted from the log's samples.
        error_type, error_message: the exception that ended the eval, "" if there was none.
        sample_error_types: (type, message, status) of each errored sample, at most a handful.
        oom_killed: the kernel or the cgroup counted an out-of-memory kill while the job ran.
        killed_for: why we killed it ourselves (`timeout`, `cancelled`, `spot`), None if we did not.
    """

    exit_status: int | None = None
    log_status: str | None = None
    samples_total: int = 0
    samples_completed: int = 0
    samples_errored: int = 0
    error_type: str = ""
    error_message: str = ""
    error_status: int | None = None
    sample_errors: list[tuple[str, str, int | None]] = field(default_factory=list)
    oom_killed: bool = False
    killed_for: Category | None = None


def judge(evidence: JobEvidence) -> Category | None:
    """Why the attempt failed, None if it did not.

    A log whose status is `success` but in which every sample errored, or which has no sample, is a failure: counts come
    from the samples, not from the status.
    """
    if evidence.log_status == "success" and evidence.samples_completed > 0 and not evidence.killed_for:
        return None
    if evidence.killed_for is not None:
        return evidence.killed_for
    if evidence.oom_killed and evidence.exit_status != 0:
        return Category.OOM
    if evidence.log_status in (None, "started") and evidence.exit_status == EXIT_CONFIG:
        found = classify_exception(evidence.error_type, evidence.error_message, evidence.error_status)
        return found if found in (Category.AUTH, Category.DISK_FULL) else Category.CONFIG
    if evidence.log_status == "cancelled":
        return Category.CANCELLED
    if evidence.error_type:
        return classify_exception(evidence.error_type, evidence.error_message, evidence.error_status)
    if evidence.sample_errors:
        return _of_samples(evidence.sample_errors)
    if evidence.exit_status != 0 or evidence.log_status in (None, "started"):
        return Category.CRASH
    return Category.TASK_ERROR


def _of_samples(errors: list[tuple[str, str, int | None]]) -> Category:
    """What the errored samples say together.

    A refused key stops everything; otherwise what another attempt may heal wins over a task's own error, because that
    attempt runs only the errored samples again. What a sample raises never makes the job's configuration wrong.
    """
    found = {classify_exception(*error) for error in errors} - {Category.CONFIG, Category.CLOCK}
    if Category.AUTH in found:
        return Category.AUTH
    healable = sorted(found - {Category.TASK_ERROR})
    return healable[0] if healable else Category.TASK_ERROR
