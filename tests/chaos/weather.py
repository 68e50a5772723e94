"""What AWS does to a fleet in a storm: a rule for `tests/gateway.py`, the HTTP proxy between every process of a fleet and the emulator.

Each kind is switched on for some seconds (`begin`), several may hold at once. As AWS does, it always refuses calls whose time is off: the
clock of a fleet's processes may jump (`clock.py`). `Weather` stands where `gateway.Faults` does, which fails
a steady share of all calls for the storm over EC2 workers.
"""

import json
import math
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime

from gateway import Change, Lost, Reply, Twice, Verdict, unavailable

SKEWED = {
    "s3": (403, b"<Error><Code>RequestTimeTooSkewed</Code><Message>The clocks differ too much.</Message></Error>"),
    "sqs": (
        400,
        b'{"__type":"com.amazon.coral.service#InvalidSignatureException","message":"Signature expired: it is late"}',
    ),
}
EARLY = (400, SKEWED["sqs"][1].replace(b"expired: it is late", b"not yet current: it is early"))
"""What SQS says of a time that is ahead."""

SKEW_S = {"s3": 900, "sqs": 300}
"""How far a call's time may be off."""

SLOW_S = (0.3, 1.2)
"""What a slow S3 adds to an answer."""

LATE_S = 4
"""How much later a delayed message comes."""

KINDS = {
    "sqs errors": 8.0,
    "sqs duplicates": 20.0,
    "sqs delays": 10.0,
    "sqs outage": 60.0,
    "s3 errors": 8.0,
    "s3 lost answers": 8.0,
    "s3 slow": 8.0,
    "s3 old reads": 12.0,
}
"""Seconds that each lasts."""


class Weather:
    """The rule. `met` counts the calls that each kind has touched."""

    def __init__(self, seed: int, upstream: str) -> None:
        self._random = random.Random(seed)
        self._upstream = upstream
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._old: dict[str, tuple[str, bytes]] = {}
        self.met: dict[str, int] = dict.fromkeys([*KINDS, "clock jump"], 0)

    def begin(self, kind: str) -> float:
        """Let it come; returns how long it lasts."""
        self._until[kind] = time.monotonic() + KINDS[kind]
        return KINDS[kind]

    def clear(self) -> None:
        """Let all end."""
        self._until.clear()

    @property
    def fair(self) -> bool:
        """Whether nothing holds."""
        return not any(self._holds(kind) for kind in KINDS)

    def decide(self, service: str, operation: str, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """What becomes of a call."""
        if abs(off_s := _ahead_s(headers)) > SKEW_S.get(service, math.inf):
            with self._lock:
                self.met["clock jump"] += 1
            return EARLY if service == "sqs" and off_s > 0 else SKEWED[service]
        if service == "sqs":
            return self._sqs(operation, body)
        return self._s3(operation, headers) if service == "s3" else None

    def _sqs(self, operation: str, body: bytes) -> Verdict:
        if self._hits("sqs outage", 1.0) or self._hits("sqs errors", 0.3):
            return unavailable("sqs")
        if not operation.startswith("SendMessage"):
            return None
        if self._hits("sqs duplicates", 0.3):
            return Twice(body)
        if self._hits("sqs delays", 0.4):
            sent = json.loads(body)
            for entry in sent.get("Entries", [sent]):
                entry["DelaySeconds"] = LATE_S
            return Change(json.dumps(sent).encode())
        return None

    def _s3(self, operation: str, headers: Mapping[str, str]) -> Verdict:
        path = headers[":path"].partition("?")[0]
        if self._hits("s3 slow", 0.7):
            time.sleep(self._random.uniform(*SLOW_S))
        if path.endswith("/control.json"):
            if operation == "PUT":
                self._remember(path)
            elif path in self._old and self._hits("s3 old reads", 0.5):
                return self._as_it_was(path, headers)
        if self._hits("s3 errors", 0.3):
            return unavailable("s3")
        if operation == "PUT" and self._hits("s3 lost answers", 0.4):
            return Lost((500, b"<Error><Code>InternalError</Code><Message>Please try again.</Message></Error>"))
        return None

    def _remember(self, path: str) -> None:
        """Keep what is about to be overwritten."""
        try:
            with urllib.request.urlopen(self._upstream + path, timeout=10) as answer:
                self._old[path] = (answer.headers["ETag"], answer.read())
        except urllib.error.HTTPError:
            return

    def _as_it_was(self, path: str, headers: Mapping[str, str]) -> Verdict:
        etag, body = self._old[path]
        if headers.get("If-None-Match") == etag:
            return Reply(304, {"ETag": etag}, b"")
        return Reply(200, {"ETag": etag, "Content-Type": "binary/octet-stream"}, body)

    def _holds(self, kind: str) -> bool:
        return time.monotonic() < self._until.get(kind, 0.0)

    def _hits(self, kind: str, share: float) -> bool:
        with self._lock:
            if not self._holds(kind) or self._random.random() >= share:
                return False
            self.met[kind] += 1
            return True


def _ahead_s(headers: Mapping[str, str]) -> float:
    """How far the time of a signed call is ahead of ours; 0 without one."""
    if (said := headers.get("X-Amz-Date")) is None:
        return 0.0
    return (datetime.strptime(said, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()
