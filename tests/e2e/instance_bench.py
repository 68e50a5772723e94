"""Instances as containers: systemd boots in one, and finds the metadata service and the AWS emulator where an instance would.

Both are sockets inside the container's network namespace, served by threads of the bench: no address is added to the machine
itself, and nothing but the instance can ask. Used by the tests and the benchmark of the image's boot.
"""

import contextlib
import ctypes
import http.server
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker_bench
from docker_bench import docker

METADATA = "169.254.169.254"
CLONE_NEWNET = 0x40000000


def listen_inside(pid: int, address: str, port: int) -> socket.socket:
    """A listening socket in the network namespace of a process. Made by a thread of its own, which then ends."""
    made: list[socket.socket | BaseException] = []

    def enter() -> None:
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.close(descriptor)
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(64)
            made.append(listener)
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


@dataclass
class Metadata:
    """What the service says. `notice` is the spot notice, while there is one; `asked` all paths asked for.

    `launched`: when EC2 says that the instance was launched; None for the moment at which its container is asked for.
    """

    instance_id: str
    tags: dict[str, str]
    lifecycle: str = "spot"
    instance_type: str = "m7i.large"
    user_data: str = ""
    notice: str | None = None
    rebalance: str | None = None
    launched: datetime | None = None
    asked: list[tuple[float, str]] = field(default_factory=list)

    def answer(self, path: str) -> str | None:
        """The document at a path below /latest/, None for 404."""
        credentials = {
            "AccessKeyId": "ASIABENCH",
            "SecretAccessKey": "bench",
            "Token": "bench",
            "Code": "Success",
            "Type": "AWS-HMAC",
        }
        identity = {
            "instanceId": self.instance_id,
            "instanceType": self.instance_type,
            "region": "us-east-1",
            "architecture": "x86_64",
        }
        identity |= {
            "pendingTime": (self.launched or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "accountId": "123456789012",
            "imageId": "ami-1",
        }
        listing: dict[str, str | None] = {
            "": "dynamic\nmeta-data\nuser-data",
            "user-data": self.user_data or None,
            "meta-data/": "instance-id\nlocal-hostname",
            "dynamic/instance-identity/document": json.dumps(identity),
            "meta-data/instance-id": self.instance_id,
            "meta-data/instance-type": self.instance_type,
            "meta-data/instance-life-cycle": self.lifecycle,
            "meta-data/local-hostname": self.instance_id,
            "meta-data/placement/region": "us-east-1",
            "meta-data/placement/availability-zone": "us-east-1a",
            "meta-data/iam/security-credentials/": "worker",
            "meta-data/iam/security-credentials/worker": json.dumps(
                credentials | {"LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z"}
            ),
            "meta-data/spot/instance-action": self.notice,
            "meta-data/events/recommendations/rebalance": self.rebalance,
        }
        if path.startswith("meta-data/tags/instance/"):
            return self.tags.get(path.removeprefix("meta-data/tags/instance/"))
        return listing.get(path)


class _Server(http.server.ThreadingHTTPServer):
    """Serves a socket that is there already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = "metadata", 80


def _handler(metadata: Metadata) -> type[http.server.BaseHTTPRequestHandler]:
    token = secrets.token_urlsafe(24)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            asked = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._send(200 if asked else 400, token if asked else "")

        def do_GET(self) -> None:
            path = self.path.lstrip("/").partition("/")[2]  # after the version
            metadata.asked.append((time.time(), path))
            # A container has no DMI, so cloud-init takes its platform for unknown and asks without a token.
            cloud_init = self.headers.get("User-Agent", "").startswith("Cloud-Init")
            allowed = self.headers.get("X-aws-ec2-metadata-token") == token or cloud_init
            answer = metadata.answer(path)
            if not allowed:
                self._send(401, "")
            elif answer is None:
                self._send(404, "")
            else:
                self._send(200, answer)

        def _send(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _relay(listener: socket.socket, target: tuple[str, int]) -> None:
    """Pass connections on to the host's loopback until the listener is closed."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    while True:
        try:
            inner, _ = listener.accept()
        except OSError:
            return
        try:
            outer = socket.create_connection(target)
        except OSError:
            inner.close()
            continue
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


@dataclass
class Instance:
    """A booting or running instance. `started`: when its container was asked for, in seconds since the epoch."""

    container: str
    metadata: Metadata
    started: float

    def exec(self, *command: str, check: bool = True) -> str:
        """Run a command in it as root."""
        return docker("exec", self.container, *command, check=check)

    def journal(self) -> str:
        """What the worker's unit has said so far."""
        return self.exec("journalctl", "-b", "-u", "inspect-fleet-worker", "--no-pager", "-o", "cat", check=False)

    def running(self) -> bool:
        """Whether the machine is up."""
        return docker("inspect", "--format", "{{.State.Running}}", self.container, check=False).strip() == "true"

    def wait_off(self, timeout: float) -> bool:
        """Wait until the machine has shut itself down."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not self.running():
                return True
            time.sleep(0.2)
        return False


@contextmanager
def instance(image: str, metadata: Metadata, endpoint: str, files: dict[str, str] | None = None) -> Iterator[Instance]:
    """Boot a container image as an instance whose AWS is the emulator at `endpoint`; `files` are put in before."""
    name, port = docker_bench.name(), int(endpoint.rpartition(":")[2])
    docker(
        "create",
        "--name",
        name,
        "--privileged",
        "--cgroupns=private",
        "--network",
        "none",
        "--hostname",
        metadata.instance_id,
        "--volume",
        "/var/lib/docker",
        "--tmpfs",
        "/run",
        "--tmpfs",
        "/tmp:exec",
        image,
        "/sbin/init",
    )
    wanted = {"/etc/inspect-fleet/environment": f"AWS_ENDPOINT_URL={endpoint}\n", "/etc/resolv.conf": ""} | (
        files or {}
    )
    for path, content in wanted.items():
        put(name, path, content)
    servers: list[Any] = []
    try:
        started = time.time()
        metadata.launched = metadata.launched or datetime.fromtimestamp(started, UTC)
        docker("start", name)
        pid = docker_bench.pid(name)
        # The source is another address, as on a real machine: the worker's rules look at destinations, and would catch the answers.
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        subprocess.run([*inside, "addr", "add", f"{METADATA}/32", "dev", "lo"], check=True)
        route = ["route", "replace", "local", METADATA, "dev", "lo", "table", "local", "src", "127.0.0.1"]
        subprocess.run([*inside, *route], check=True)
        server = _Server(listen_inside(pid, METADATA, 80), _handler(metadata))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        relay = listen_inside(pid, "127.0.0.1", port)
        threading.Thread(target=_relay, args=(relay, ("127.0.0.1", port)), daemon=True).start()
        servers = [server, relay]
        yield Instance(name, metadata, started)
    finally:
        for served in servers:
            with contextlib.suppress(OSError):
                served.shutdown() if isinstance(served, _Server) else served.close()
        docker("rm", "--force", "--volumes", name, check=False)


def put(container: str, path: str, content: str) -> None:
    """Write a file into a container that does not run yet."""
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(Path(path).name)
        data = content.encode()
        info.size, info.mode = len(data), 0o644
        tar.addfile(info, io.BytesIO(data))
    docker("cp", "-", f"{container}:{Path(path).parent}", stdin=buffer.getvalue())
