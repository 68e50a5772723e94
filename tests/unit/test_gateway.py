"""The gateway of fleet tests: which calls its faults fail, what they double, and that a rule comes first."""

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gateway import Change, Faults, Lost, Twice, Verdict, gateway

CALLS = 4000


def decide(
    faults: Faults, call: int, attempt: int = 1, operation: str = "ReceiveMessage", body: bytes = b""
) -> Verdict:
    headers = {"amz-sdk-invocation-id": f"call-{call}", "amz-sdk-request": f"attempt={attempt}; max=4"}
    return faults.decide("sqs", operation, body, headers)


def test_a_share_of_calls_fails_half_of_them_at_every_try_and_half_after_they_were_carried_out() -> None:
    faults = Faults(1)
    first = {call: verdict for call in range(CALLS) if (verdict := decide(faults, call))}
    again = {call for call in first if decide(faults, call, attempt=4)}
    lost = [verdict for verdict in first.values() if isinstance(verdict, Lost)]
    assert 0.04 < len(first) / CALLS < 0.06
    assert 0.4 < len(again) / len(first) < 0.6
    assert 0.4 < len(lost) / len(first) < 0.6
    assert faults.failed == len(first) + len(again)


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    def failing(seed: int) -> set[int]:
        return {call for call in range(CALLS) if decide(Faults(seed), call)}

    assert failing(1) == failing(1) != failing(2)


def test_a_share_of_messages_is_doubled_one_by_one() -> None:
    faults = Faults(1)
    body = json.dumps({"QueueUrl": "q", "Entries": [{"Id": str(n), "MessageBody": "m"} for n in range(10)]}).encode()
    sent = [decide(faults, call, 2, "SendMessageBatch", body) for call in range(CALLS // 10)]
    extra = [json.loads(verdict.body)["Entries"] for verdict in sent if isinstance(verdict, Twice)]
    assert 0.04 < sum(map(len, extra)) / CALLS < 0.06
    assert sum(map(len, extra)) == faults.doubled
    assert max(map(len, extra)) < 10


@pytest.fixture
def upstream() -> Iterator[tuple[str, list[bytes]]]:
    """A service that answers with what it was sent, and what that was."""
    seen: list[bytes] = []

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(body)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("verdict", "status", "answer", "carried_out"),
    [
        (None, 200, b"asked", [b"asked"]),
        ((503, b"no"), 503, b"no", []),
        (Lost((503, b"no")), 503, b"no", [b"asked"]),
        (Twice(b"more"), 200, b"asked", [b"more", b"asked"]),
        (Change(b"other", bytes.upper), 200, b"OTHER", [b"other"]),
    ],
)
def test_what_a_verdict_does(
    upstream: tuple[str, list[bytes]], verdict: Verdict, status: int, answer: bytes, carried_out: list[bytes]
) -> None:
    url, seen = upstream
    with gateway(url) as gate:
        gate.rule = lambda service, operation, body: verdict
        connection = http.client.HTTPConnection(gate.endpoint.removeprefix("http://"))
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/sqs/aws4_request"}
        connection.request("POST", "/", b"asked", signed | {"X-Amz-Target": "AmazonSQS.SendMessage"})
        got = connection.getresponse()
        assert (got.status, got.read(), seen) == (status, answer, carried_out)
        connection.close()
    assert gate.calls == [("sqs", "SendMessage")]
