"""Why an attempt failed, and whether it is tried again: pure rules on facts that others gathered.

A failure's type is the class of the exception (in a log: the last line of its traceback), its status code comes from
Inspect's retry hook, its exit from the process status, cgroup and kernel. The message serves for unknown types alone and a
traceback is never searched: a `ValueError` whose text mentions 429 or a timeout is a task error. Design, section 6.
"""

import builtins
import enum
import re
from collections import Counter
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

SANDBOX_PAUSE_S = (10.0, 30.0)
"""The same for a job whose sandboxes failed: an engine that restarts is back after seconds, and would use up all attempts before."""

_PAUSES_S = {Category.RATE_LIMIT: RATE_LIMIT_PAUSE_S, Category.SANDBOX: SANDBOX_PAUSE_S}

EXIT_CONFIG = 78
"""A job process's exit status when its task, model or arguments cannot be used (EX_CONFIG of sysexits.h)."""


def retry_delay(category: Category, attempt: int) -> float | None:
    """Seconds to wait before attempt + 1, or None when the job has ended with this attempt (counted from 1)."""
    if category in NEVER_RETRIED or category in REDELIVERED:
        return None
    if attempt >= (MAX_RATE_LIMITED if category is Category.RATE_LIMIT else MAX_ATTEMPTS):
        return None
    pauses = _PAUSES_S.get(category, (0.0,))
    return pauses[min(max(attempt, 1), len(pauses)) - 1]


_BY_TYPE: dict[str, Category] = {
    # providers: openai, anthropic, google, mistral, groq, together, boto name their classes (boto: its codes) so
    "AuthenticationError": Category.AUTH,
    "PermissionDeniedError": Category.AUTH,
    "UnauthorizedError": Category.AUTH,
    "UnrecognizedClientException": Category.AUTH,
    "AccessDeniedException": Category.AUTH,
    "RateLimitError": Category.RATE_LIMIT,
    "TooManyRequests": Category.RATE_LIMIT,
    "TooManyRequestsException": Category.RATE_LIMIT,
    "ResourceExhausted": Category.RATE_LIMIT,
    "ThrottlingException": Category.RATE_LIMIT,
    "OverloadedError": Category.RATE_LIMIT,
    "ServiceUnavailableError": Category.RATE_LIMIT,
    "APITimeoutError": Category.TIMEOUT,
    "AttemptTimeoutError": Category.TIMEOUT,
    "TimeoutError": Category.TIMEOUT,
    "ReadTimeout": Category.TIMEOUT,
    "WriteTimeout": Category.TIMEOUT,
    "ConnectTimeout": Category.TIMEOUT,
    "PoolTimeout": Category.TIMEOUT,
    "ReadTimeoutError": Category.TIMEOUT,
    "ConnectTimeoutError": Category.TIMEOUT,
    "MemoryError": Category.OOM,
    "InternalServerError": Category.NETWORK,
    "APIConnectionError": Category.NETWORK,
    "EndpointConnectionError": Category.NETWORK,
    "ConnectError": Category.NETWORK,
    "ReadError": Category.NETWORK,
    "RemoteProtocolError": Category.NETWORK,
    "ConnectionError": Category.NETWORK,
    "ConnectionResetError": Category.NETWORK,
    "ConnectionRefusedError": Category.NETWORK,
    "ConnectionAbortedError": Category.NETWORK,
    "BrokenPipeError": Category.NETWORK,
    "gaierror": Category.NETWORK,
    # what cannot be loaded; LookupError is what Inspect's registry raises, and KeyError is no LookupError by name
    "PrerequisiteError": Category.CONFIG,
    "SandboxUnavailableError": Category.SANDBOX,
    "ModuleNotFoundError": Category.CONFIG,
    "LookupError": Category.CONFIG,
    # storage
    "NoSuchBucket": Category.STORAGE,
    "NoCredentialsError": Category.STORAGE,
    "ExpiredToken": Category.STORAGE,
    "AccessDenied": Category.STORAGE,
    "SlowDown": Category.STORAGE,
    "RequestTimeTooSkewed": Category.CLOCK,
    "StorageError": Category.STORAGE,
}

_BY_STATUS: dict[int, Category] = {
    401: Category.AUTH,
    403: Category.AUTH,
    408: Category.TIMEOUT,
    429: Category.RATE_LIMIT,
    500: Category.NETWORK,
    502: Category.NETWORK,
    503: Category.RATE_LIMIT,
    504: Category.TIMEOUT,
    529: Category.RATE_LIMIT,
}

_BUILTIN = frozenset(
    name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, BaseException)
)
"""Python's own exceptions: none of them carries an HTTP status, so one that comes along belongs to an earlier, healed call."""

_ERRNO = re.compile(r"\[Errno (-?\d+)\]|^\w+\((-?\d+), ")
"""`str` of an OSError, or its `repr`, which is what Inspect keeps as an error's message."""

_BY_ERRNO = {
    28: Category.DISK_FULL,
    122: Category.DISK_FULL,
    12: Category.OOM,
    101: Category.NETWORK,
    113: Category.NETWORK,
}

_STATUS_TEXT = re.compile(
    r"""(?:\w+\(['"])?"""
    r"""(?:Error\ code:\ (?P<sdk>\d{3})\b"""  # openai, anthropic, groq: APIStatusError and InternalServerError
    r"""|(?P<google>\d{3})\ (?:[A-Z_]+|None)\b"""  # google: ClientError, ServerError
    r"""|(?:Client|Server)\ error\ '(?P<httpx>\d{3})\ )""",
    re.VERBOSE,
)
_CODE_TEXT = re.compile(r"An error occurred \((?P<code>\w+)\) when calling")
_STATUS_TYPES = frozenset(
    {"APIStatusError", "APIError", "InternalServerError", "ClientError", "ServerError", "HTTPStatusError"}
)
"""Classes that stand for any HTTP status (or, in boto, any code): only their message says which."""

_SANDBOX_TEXT: tuple[tuple[str, Category], ...] = (
    ("non-overlapping ipv4 address pool", Category.DOCKER_NETWORK),
    ("could not find an available", Category.DOCKER_NETWORK),
    ("all predefined address pools have been fully subnetted", Category.DOCKER_NETWORK),
    ("toomanyrequests", Category.IMAGE_PULL),
    ("pull access denied", Category.IMAGE_PULL),
    ("manifest unknown", Category.IMAGE_PULL),
    ("failed to pull", Category.IMAGE_PULL),
    ("could not be pulled", Category.IMAGE_PULL),
    ("no space left on device", Category.DISK_FULL),
    ("cannot connect to the docker daemon", Category.SANDBOX),
    ("require a working docker engine", Category.SANDBOX),
    ("failed to start docker services", Category.SANDBOX),
    ("failed to build docker containers", Category.SANDBOX),
    ("no services started", Category.SANDBOX),
    ("docker compose", Category.SANDBOX),
)
"""Docker reports all of these in a RuntimeError or a PrerequisiteError of Inspect's sandbox, so here the text decides."""

_SANDBOX_TYPES = frozenset(
    {"SandboxError", "SandboxUnavailableError", "DockerError", "RuntimeError", "PrerequisiteError"}
)

_RAISED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?:?")
_RETRIED = re.compile(r"RetryError[\[(]<Future at 0x[0-9a-f]+ state=finished raised (?P<name>\w+)>[\])]")
_REPR = re.compile(r"(?P<name>[A-Za-z_]\w*)\(")
_CHAINED = frozenset(
    {
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    }
)


def exception_type(traceback_text: str, message: str = "") -> str:
    """The class of the exception that a traceback ends with, without its module; "" when nothing tells it.

    The line is the first one after the last frames, not the last of the text: an exception's own text may go over many
    lines that look like other exceptions. What Inspect gave up retrying and what a group holds is unwrapped.

    Args:
        traceback_text: as in a log's `error.traceback`.
        message: the log's `error.message`; where it is a `repr`, it decides between the lines of chained exceptions, and stands in
            for a traceback that is not there (a summary of a sample has none).
    """
    raised = _raised_lines(traceback_text)
    shown = _REPR.match(message)
    matching = [line for line in raised if shown and _class_of(line) == shown["name"]]
    line = next(iter(matching[-1:] or raised[-1:]), "")
    if retried := _RETRIED.search(line or message):
        return retried["name"]
    if not line and shown and shown["name"][0].isupper():
        return shown["name"]
    return _class_of(line)


def _raised_lines(text: str) -> list[str]:
    """Each exception's first line: of a chain in order, of a group its first innermost member."""
    if "Exception Group Traceback" in text:
        text = "\n".join(
            line.lstrip(" |+-") if line.lstrip().startswith(("|", "+")) else line for line in text.splitlines()
        )
        lines = [
            line for line in text.splitlines() if re.match(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b(?::|$)", line)
        ]
        return lines[:1]
    found: list[str] = []
    due, before = True, ""  # due: the next line at the margin names an exception
    for line in filter(None, text.splitlines()):
        if line.startswith("Traceback (most recent call last):"):
            due = due or before in _CHAINED
        elif due and not line[0].isspace():
            found.append(line)
            due = False
        before = line
    return found


def _class_of(line: str) -> str:
    found = _RAISED.fullmatch(line)
    return found["name"].rsplit(".", 1)[-1] if found else ""


def classify_exception(type_name: str, message: str = "", status_code: int | None = None) -> Category:
    """The category of one exception.

    Args:
        type_name: the exception's class, with or without its module.
        message: its text or `repr`, read only for the few types that say nothing themselves.
        status_code: the HTTP status that Inspect's retry hook or the exception reported; Python's own exceptions have none.
    """
    name = type_name.rsplit(".", 1)[-1]
    if name not in _BUILTIN and status_code in _BY_STATUS:
        return _BY_STATUS[status_code]
    if name in ("OSError", "IOError"):
        found = _ERRNO.search(message)
        return _BY_ERRNO.get(int(found[1] or found[2]), Category.TASK_ERROR) if found else Category.TASK_ERROR
    if name in _SANDBOX_TYPES:
        lowered = message.lower()
        default = _BY_TYPE.get(name, Category.TASK_ERROR)
        return next((category for text, category in _SANDBOX_TEXT if text in lowered), default)
    if name in _STATUS_TYPES and (category := _of_message(message)):
        return category
    return _BY_TYPE.get(name, Category.TASK_ERROR)


def _of_message(message: str) -> Category | None:
    """What the message of one of the classes that stand for any status says, at its beginning alone."""
    if code := _CODE_TEXT.search(message):
        return _BY_TYPE.get(code["code"])
    if status := _STATUS_TEXT.match(message):
        return _BY_STATUS.get(int(status["sdk"] or status["google"] or status["httpx"]))
    return None


@dataclass(frozen=True)
class JobEvidence:
    """What is known of an attempt after its process has gone. All of it is fact, none of it a guess.

    Attributes:
        exit_status: the process's exit code, -N for signal N, None if it is unknown.
        log_status: the stored log's status (success, error, cancelled, started), None without a log.
        samples_total, samples_completed, samples_errored: counted from the log's samples.
        error_type, error_message: the exception that ended the eval, "" if there was none.
        sample_errors: (type, message, status) of each errored sample, at most a handful.
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
    from the samples, not from the status. A complete log is one even if its process had to be killed afterwards.
    """
    if evidence.log_status == "success" and evidence.samples_completed > 0:
        return None
    if evidence.killed_for is not None:
        return evidence.killed_for
    found = _of_facts(evidence)
    # A killed child (a tool, a sandbox's client) shows as some error of the task: the kernel knows better.
    healed_by_memory = found in (Category.TASK_ERROR, Category.CRASH, Category.SANDBOX)
    return Category.OOM if evidence.oom_killed and healed_by_memory else found


def _of_facts(evidence: JobEvidence) -> Category:
    """The category by the errors, the log and the exit."""
    error = (evidence.error_type, evidence.error_message, evidence.error_status)
    errors = [*evidence.sample_errors, error] if evidence.error_type else list(evidence.sample_errors)
    if any(classify_exception(*each) is Category.AUTH for each in errors):
        return Category.AUTH  # a refused key makes the job stop itself, so its log says `cancelled`
    if evidence.log_status == "cancelled":
        return Category.CANCELLED
    unfinished = evidence.log_status in (None, "started")
    if unfinished and not evidence.error_type and evidence.exit_status not in (0, EXIT_CONFIG):
        return Category.CRASH  # whatever its samples met before
    if evidence.sample_errors or evidence.samples_errored:
        return _of_samples(errors)
    if evidence.error_type:
        found = classify_exception(*error)
        # A task that could not be loaded for a lack of disk or network is worth another worker, else it is its own fault.
        unloaded = unfinished and evidence.exit_status == EXIT_CONFIG
        return Category.CONFIG if unloaded and found is Category.TASK_ERROR else found
    if evidence.exit_status == EXIT_CONFIG:
        return Category.CONFIG
    return Category.CRASH if unfinished or evidence.exit_status != 0 else Category.TASK_ERROR


def _of_samples(errors: list[tuple[str, str, int | None]]) -> Category:
    """What the errored samples say together, none of them a refused key.

    What another attempt may heal (the most frequent such) wins over a task's own error, because that attempt runs only
    the errored samples again. What a sample raises never makes the job's configuration wrong.
    """
    found = Counter(classify_exception(*error) for error in errors)
    healable = [(-count, category) for category, count in found.items() if category not in NEVER_RETRIED]
    return min(healable)[1] if healable else Category.TASK_ERROR
