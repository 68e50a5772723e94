"""A gateway that stands before AWS emulators: it records each call, and may refuse, change, lose or double it.

Used by tests of fleets. What it does is a rule: a function of (service, operation, body) and the request's headers. `faults` is the rule
of chaos runs; `ec2_error` and the like are answers for rules of a test's own.
"""

import hashlib
import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

Answer = tuple[int, bytes]
"""HTTP status and body."""


@dataclass
class Change:
    """Pass the request on with another body, and its answer back changed."""

    body: bytes
    answer: Callable[[bytes], bytes] = lambda answer: answer


@dataclass
class Lost:
    """Carry the request out, and say something else: whoever asked cannot know."""

    answer: Answer


@dataclass
class Twice:
    """Carry this out as well, unasked."""

    body: bytes


@dataclass
class Reply:
    """Answer this, with these headers, and pass nothing on."""

    status: int
    headers: dict[str, str]
    body: bytes


Verdict = Answer | Change | Lost | Twice | Reply | None
Rule = Callable[[str, str, bytes], Verdict]
"""What becomes of a call; None passes it on."""


class Decides(Protocol):
    """What chaos runs put before a gateway. Among the headers `:path` is the request's path and query."""

    def decide(self, service: str, operation: str, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """What becomes of a call."""


@dataclass
class Gateway:
    """`rule` decides on each call before it is passed on; `calls` and `bodies` are what came.

    `faults`, where there is one, decides on what `rule` passes on, and sees the headers too.
    """

    endpoint: str
    rule: Rule = lambda service, operation, body: None
    faults: Decides | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def count(self, service: str, operation: str) -> int:
        """How often something was called."""
        return self.calls.count((service, operation))

    def decide(self, service: str, operation: str, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """What becomes of a call."""
        self.calls.append((service, operation))
        self.bodies.append(body)
        verdict = self.rule(service, operation, body)
        if verdict is None and self.faults is not None:
            verdict = self.faults.decide(service, operation, body, headers)
        return verdict


@contextmanager
def gateway(endpoint: str, **services: str) -> Iterator[Gateway]:
    """A gateway on loopback before the emulator at `endpoint`; `services`: those that another emulator serves, and where."""

    class Handler(_Handler):
        gate = Gateway("")
        upstream = staticmethod(lambda service: services.get(service, endpoint))

    server = _Server(("127.0.0.1", 0), Handler)
    Handler.gate.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Handler.gate
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever was killed hears no answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gate: Gateway
    upstream: Callable[[str], str]

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_: Any) -> None: ...

    def _handle(self) -> None:
        assert "Transfer-Encoding" not in self.headers, "a body in chunks is not read here"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        service, operation = operation_of(self.headers, body, self.command)
        verdict = self.gate.decide(service, operation, body, {**dict(self.headers.items()), ":path": self.path})
        if isinstance(verdict, tuple):
            self._answer(verdict[0], {"Content-Type": "text/xml"}, verdict[1])
            return
        if isinstance(verdict, Reply):
            self._answer(verdict.status, verdict.headers, verdict.body)
            return
        change = verdict if isinstance(verdict, Change) else Change(body)
        if isinstance(verdict, Twice):
            self._pass_on(service, verdict.body)
        status, headers, content = self._pass_on(service, change.body)
        if isinstance(verdict, Lost):
            self._answer(verdict.answer[0], {"Content-Type": "text/xml"}, verdict.answer[1])
        else:
            self._answer(status, headers, change.answer(content))

    def _pass_on(self, service: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        dropped = ("content-length", "expect", "transfer-encoding", "connection")
        kept = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        place = self.upstream(service).removeprefix("http://")
        connection = http.client.HTTPConnection(place, timeout=60)
        try:
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers.items()), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        own = str(len(content))
        self.send_header("Content-Length", headers.get("Content-Length", "0") if self.command == "HEAD" else own)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle


def operation_of(headers: Mapping[str, str], body: bytes, method: str) -> tuple[str, str]:
    """(service, operation) of a signed request; for S3 the HTTP method stands for the operation."""
    scope = re.search(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/", headers.get("Authorization") or "")
    service = scope[1] if scope else ""
    if target := headers.get("X-Amz-Target"):
        return service, target.rpartition(".")[2]
    action = re.search(rb"(?:^|&)Action=(\w+)", body)
    return service, action[1].decode() if action else method


# Chaos


@dataclass
class Faults:
    """Fails a share of all calls and doubles a share of all messages, by a seed.

    A call is what botocore calls one: its tries bear one id. Half of the calls that fail do so at every try, so that the code behind
    botocore meets them; the others at the first. Half of all failures come after the call has been carried out.
    """

    seed: int
    share: float = 0.05
    on: bool = True
    failed: int = 0
    doubled: int = 0

    def decide(self, service: str, operation: str, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """What becomes of a call."""
        if not self.on:
            return None
        call, attempt = headers.get("amz-sdk-invocation-id", ""), headers.get("amz-sdk-request", "")
        draw = self._draw(call)
        if draw < self.share and (draw < self.share / 2 or "attempt=1" in attempt):
            self.failed += 1
            answer = unavailable(service)
            return Lost(answer) if self._draw(call, "after") < 0.5 else answer
        return self._double(body, call) if operation in ("SendMessage", "SendMessageBatch") else None

    def _double(self, body: bytes, call: str) -> Verdict:
        sent = json.loads(body)
        if "Entries" not in sent:
            again = sent if self._draw(call, "double") < self.share else None
        else:
            chosen = [entry for entry in sent["Entries"] if self._draw(call, entry["Id"], "double") < self.share]
            again = sent | {"Entries": chosen} if chosen else None
        if again is None:
            return None
        self.doubled += len(again.get("Entries", [again]))
        return Twice(json.dumps(again).encode())

    def _draw(self, *words: str) -> float:
        """A number in [0, 1) that belongs to these words."""
        found = hashlib.sha256("\0".join((str(self.seed), *words)).encode()).digest()
        return int.from_bytes(found[:8]) / 2**64


def unavailable(service: str) -> Answer:
    """What a service says that cannot serve just now."""
    if service == "s3":
        return 503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    if service == "ec2":
        return ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)
    if service in ("sqs", "ssm"):
        return 503, b'{"__type":"ServiceUnavailable","message":"The service cannot serve just now."}'
    text = "<ErrorResponse><Error><Code>ServiceUnavailable</Code><Message>later</Message></Error></ErrorResponse>"
    return 503, text.encode()


# Answers


def ec2_error(code: str, message: str, status: int = 400) -> Answer:
    """EC2's answer to a call that failed."""
    text = f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>r</RequestID></Response>"
    return status, text.encode()


def expired(service: str) -> Answer:
    """What a service says of credentials that have expired."""
    if service == "s3":
        return 400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    if service == "sqs":
        return 403, b'{"__type":"com.amazonaws.sqs#ExpiredTokenException","message":"The token has expired"}'
    return ec2_error("ExpiredToken", "The security token included in the request is expired", 403)
