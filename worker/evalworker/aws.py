"""The AWS clients: one per process and service, with bounded retries and short timeouts, and what their errors mean.

Called by `evalworker.storage`, `evalworker.queues` and the controller. `sqs` is the only place that knows of an emulator;
every other endpoint comes from the user's own standard variables.
"""

import errno
import ipaddress
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoRegionError,
    ProfileNotFound,
)
from botocore.exceptions import ConnectionError as BotocoreConnectionError

from evalworker.contract.documents import Lane
from evalworker.contract.failures import Category
from evalworker.contract.wire import now

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
"""Longer than the longest long poll (20 s)."""

_COMMON = Config(
    retries={"mode": "standard", "total_max_attempts": 4},  # four tries in all, exponential back-off with jitter
    connect_timeout=CONNECT_TIMEOUT_S,
    read_timeout=READ_TIMEOUT_S,
    max_pool_connections=16,
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    user_agent_extra="inspect-fleet",
)

_SQS = _COMMON.merge(Config(parameter_validation=False))
"""Our queue calls are built in one module, so that checking each of them against the API's model only costs time."""

_PATIENT = _COMMON.merge(Config(retries={"mode": "adaptive", "total_max_attempts": 8}))
"""For services that are asked again and again for as long as a job runs: throttled calls slow the next ones down."""

_CONFIGS = {"sqs": _SQS, "batch": _PATIENT, "logs": _PATIENT}

_LOOPBACK = _SQS.merge(Config(proxies={}, use_fips_endpoint=False, use_dualstack_endpoint=False))
"""For the emulator: what the user set for the real AWS (a proxy, FIPS endpoints) has no meaning on loopback."""

_lock = threading.Lock()
_clients: dict[tuple[str, ...], Any] = {}


def client(service: str, region: str | None = None) -> Any:
    """This process's client of a service, made at its first use; thread-safe. Raises ServiceError.

    Args:
        service: boto3's name of the service, such as "s3".
        region: None takes the user's own.
    """
    return _cached((service, region or ""), lambda: _ordinary(service, region))


def sqs(lane: Lane) -> Any:
    """The SQS client for a lane's queues: AWS in the lane's region, or the emulator whose loopback endpoint it names."""
    if lane.endpoint is None or not is_loopback(lane.endpoint):
        return client("sqs", lane.region)
    endpoint, region = lane.endpoint, lane.region
    return _cached(("sqs", region, endpoint), lambda: _emulated_sqs(endpoint, region))


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine's loopback (a literal address or `localhost`; no name is looked up)."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ordinary(service: str, region: str | None) -> Any:
    import boto3  # here, because a local fleet's processes never need it, and wait for it as they start

    session: Any = boto3.Session()
    return session.client(service, region_name=region, config=_CONFIGS.get(service, _COMMON))


def _emulated_sqs(endpoint: str, region: str) -> Any:
    # A session that reads no profile and no file: a user's broken AWS configuration must not stop an offline run.
    unread = {
        "profile": (None, None, None, None),
        "config_file": (None, None, os.devnull, None),
        "credentials_file": (None, None, os.devnull, None),
    }
    session = botocore.session.Session(session_vars=unread)
    return session.create_client(
        "sqs",
        region_name=region,
        endpoint_url=endpoint,
        aws_access_key_id="embedded",
        aws_secret_access_key="embedded",  # noqa: S106 (not a secret: the emulator takes any)
        config=_LOOPBACK,
    )


def _cached(key: tuple[str, ...], make: Callable[[], Any]) -> Any:
    with _lock:
        if key not in _clients:
            try:
                _clients[key] = make()
            except (BotoCoreError, ValueError) as error:
                raise ServiceError.of(error, f"cannot use AWS ({key[0]})") from error
        return _clients[key]


def forget_clients() -> None:
    """Drop all clients: after a fork (their sockets belong to the parent), and in tests that change the environment."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=forget_clients)


@dataclass(frozen=True)
class Fault:
    """What an AWS or OS error means.

    Attributes:
        code: the service's error code, or the exception's class.
        status: the HTTP status, 0 without an answer.
        text: one clause for a person.
        category: for the failure table; None where it depends on what was called.
        retryable: sending the same again later may work.
        credentials: the user's credentials are missing or have expired; `text` says how to renew them.
        resent: botocore had sent the request before, so an earlier sending may have been carried out.
    """

    code: str
    status: int
    text: str
    category: Category | None = None
    retryable: bool = False
    credentials: bool = False
    resent: bool = False


class ServiceError(RuntimeError):
    """An AWS service (or the local stand-in for it) did not do what was asked; the text is one sentence."""

    default_category = Category.NETWORK

    def __init__(self, sentence: str, fault: Fault | None = None, category: Category | None = None) -> None:
        super().__init__(sentence)
        self.fault = fault
        self.category = category or (fault.category if fault else None) or self.default_category

    @property
    def credentials(self) -> bool:
        """Whether renewed credentials would mend it."""
        return self.fault is not None and self.fault.credentials

    @property
    def retryable(self) -> bool:
        """Whether the same call may work later without anybody's doing."""
        return self.fault is not None and self.fault.retryable

    @classmethod
    def of(cls, error: BaseException, doing: str) -> Self:
        """The error of this class for one of botocore's: `doing` says what could not be done, and where."""
        fault = explain(error)
        return cls(f"{doing}: {fault.text}", fault)


_RENEW = "renew the credentials (`aws sso login`, or new values in the environment) and run the same command again"
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}) | {
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "SSOError",
    "TokenRetrievalError",
}
_UNUSABLE = frozenset({"InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "InvalidToken"}) | {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
}
_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture", "SignatureNotYetCurrent"})
_CLOCK_TEXT = ("signature expired", "signature not yet current")
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "AllAccessDisabled", "KMS.AccessDeniedException"})
_BUSY = frozenset({"Throttling", "ThrottlingException", "RequestThrottled", "RequestLimitExceeded", "SlowDown"})
_UNREACHED = (HTTPClientError, BotocoreConnectionError, ConnectionError, TimeoutError)
_BROKEN_OFF = frozenset({"IncompleteReadError", "ResponseStreamingError"})

SKEW = timedelta(minutes=5)
"""The smallest difference of clocks at which an AWS service refuses a signature."""


def explain(error: BaseException) -> Fault:
    """What an error of botocore, boto3's transfers or the operating system means; never raises."""
    inner = error.__cause__ or error.__context__
    if not isinstance(error, ClientError | BotoCoreError | OSError) and isinstance(inner, ClientError | BotoCoreError):
        error = inner  # boto3's transfers wrap what the service said
    if isinstance(error, ClientError):
        return _of_answer(error)
    name, text = type(error).__name__, " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if name in _EXPIRED | _UNUSABLE:
        return _of_credentials(name, 0)
    if isinstance(error, ProfileNotFound | NoRegionError):
        return Fault(name, 0, f"{text}; set AWS_PROFILE or AWS_DEFAULT_REGION", Category.CONFIG)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fault(name, 0, f"{text}; free some space", Category.DISK_FULL)
    again = isinstance(error, _UNREACHED) or name in _BROKEN_OFF
    return Fault(name, 0, text, retryable=again)


def _of_answer(error: ClientError) -> Fault:
    said, about = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    code, status = str(said.get("Code", "")), int(about.get("HTTPStatusCode", 0))
    text = f"{code}: {str(said.get('Message', '')).strip()}".rstrip(": .")
    denied = code in _DENIED or status == 403
    if code in _EXPIRED | _UNUSABLE:
        return _of_credentials(code, status)
    if code in _CLOCK or any(part in text.lower() for part in _CLOCK_TEXT) or (denied and _skewed(about)):
        told = f"this machine's clock is wrong ({text}); set it (`timedatectl set-ntp true`)"
        return Fault(code, status, told, Category.CLOCK, retryable=True)
    if denied:
        return Fault(code, status, f"access denied ({text}); the role or user in use lacks the permission")
    again = status >= 500 or status == 429 or code in _BUSY
    return Fault(code, status, text, retryable=again, resent=about.get("RetryAttempts", 0) > 0)


def _of_credentials(code: str, status: int) -> Fault:
    what = "the AWS credentials have expired" if code in _EXPIRED else f"there are no usable AWS credentials ({code})"
    return Fault(code, status, f"{what}; {_RENEW}", credentials=True)


def _skewed(about: Any) -> bool:
    """Whether our clock differs from the service's by what it refuses: the answer to a HEAD says no more than 403."""
    try:
        theirs = parsedate_to_datetime(about["HTTPHeaders"]["date"])
        return abs(theirs - now()) > SKEW
    except (KeyError, TypeError, ValueError):
        return False
