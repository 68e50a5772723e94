"""An emulator's S3 behind a relay that waits before each answer and counts requests and bytes: what a bench of reading logs needs.

The relay works on the bytes of the connections, so client and server are the real ones.
"""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from ports import free_port

STARTED_S = 60.0
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


@dataclass
class Traffic:
    """What went through the relay: requests by method, bytes of answers."""

    requests: Counter[str] = field(default_factory=Counter)
    received: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Begin to count anew."""
        with self.lock:
            self.requests.clear()
            self.received = 0

    @property
    def total(self) -> int:
        """All requests."""
        return sum(self.requests.values())


class Relay:
    """Listens on loopback; each answer is held back for `latency_s` after its request."""

    def __init__(self, port: int, latency_s: float) -> None:
        self.traffic = Traffic()
        self._target, self._latency = port, latency_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            socket.create_connection(("127.0.0.1", self._target)) as server,
            selectors.DefaultSelector() as ready,
        ):
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready.register(end, selectors.EVENT_READ)
            asked = False
            while True:
                for key, _ in ready.select():
                    try:
                        data = key.fileobj.recv(256 * 1024)  # type: ignore[union-attr]
                        if not data:
                            return
                        asked = self._pass_on(key.fileobj is client, data, asked, client, server)
                    except OSError:
                        return

    def _pass_on(
        self, from_client: bool, data: bytes, asked: bool, client: socket.socket, server: socket.socket
    ) -> bool:
        if from_client:
            method = data.split(b" ", 1)[0]
            if not asked and method in (b"GET", b"HEAD", b"PUT", b"POST", b"DELETE"):
                with self.traffic.lock:
                    self.traffic.requests[method.decode()] += 1
            server.sendall(data)
            return True
        if asked:
            time.sleep(self._latency)
        with self.traffic.lock:
            self.traffic.received += len(data)
        client.sendall(data)
        return False


@contextmanager
def slow_s3(bucket: str, latency_s: float = 0.03, *, large: bool = False) -> Iterator[tuple[Relay, Any]]:
    """A bucket behind a relay, with the environment pointing at the relay; yields it and a fast client for preparing.

    `large`: take the emulator that puts a gigabyte together within a client's patience; the other one answers faster.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "MINISTACK_HOST": "127.0.0.1", "TMPDIR": folder,
                    "SFTP_ENABLED": "0", "IOT_MTLS_ENABLED": "0", "DOCKER_HOST": "unix:///nonexistent", "LOG_LEVEL": "ERROR"}  # fmt: skip
        with Path(folder, "log").open("wb") as output:
            words = ["moto.server", "-H", "127.0.0.1", "-p", str(port)] if large else ["ministack"]
            server = subprocess.Popen(
                [sys.executable, "-m", *words], env=os.environ | settings, stdout=output, stderr=output
            )
        try:
            _wait(f"http://127.0.0.1:{port}/", server)
            plain = Config(request_checksum_calculation="when_required")  # the emulator's own checksums are slow
            direct = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=plain, **KEYS)
            direct.create_bucket(Bucket=bucket)
            relay = Relay(port, latency_s)
            with _environment(relay.url, bucket, folder):
                yield relay, direct
            relay.close()
        finally:
            server.kill()
            server.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + STARTED_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the emulator did not start")


@contextmanager
def _environment(url: str, bucket: str, folder: str) -> Iterator[None]:
    from evalworker import aws

    values = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
              "AWS_DEFAULT_REGION": "us-east-1", "S3_BUCKET_NAME": bucket, "XDG_CACHE_HOME": f"{folder}/cache"}  # fmt: skip
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    aws.forget_clients()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        aws.forget_clients()
