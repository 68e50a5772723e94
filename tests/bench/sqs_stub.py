"""A server that speaks as much of SQS's JSON protocol as a bench needs: what is sent or deleted succeeds at once, nothing is kept.

What a receive answers is the bench's own business. Used by `bench_agent` and `bench_controller`.
"""

import http.server
import json
import socket
from collections.abc import Callable
from typing import Any


class Sqs(http.server.ThreadingHTTPServer):
    """Listens on loopback; `receive` is called for each ReceiveMessage, in a thread of its connection, and gives the answer's JSON."""

    daemon_threads = True

    def __init__(self, receive: Callable[[], bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self.receive = receive

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Call(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sqs

    def setup(self) -> None:
        """Answers go at once."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_POST(self) -> None:
        """One call."""
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = self._answer(self.headers["X-Amz-Target"].rpartition(".")[2], given)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, operation: str, given: dict[str, Any]) -> bytes:
        if operation == "ReceiveMessage":
            return self.server.receive()
        entries = [{"Id": entry["Id"], "MessageId": entry["Id"]} for entry in given.get("Entries", [])]
        return json.dumps({"Successful": entries, "Failed": []} if entries else {}).encode()

    def log_message(self, *_: object) -> None:
        """Nothing."""
