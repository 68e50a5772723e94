"""AWS emulators for chaos runs, each as a process of its own on a free port of loopback, ended with the test."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from ports import free_port


@contextlib.contextmanager
def ministack() -> Iterator[str]:
    """S3 and SQS, fast; its URL."""
    port = free_port()
    settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SFTP_ENABLED": "0"}
    with _serving([str(Path(sys.executable).parent / "ministack")], port, settings) as url:
        yield url


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """S3, SQS and EC2; its URL."""
    port = free_port()
    with _serving([str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], port) as url:
        yield url


@contextlib.contextmanager
def _serving(command: list[str], port: int, settings: dict[str, str] | None = None) -> Iterator[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    process = subprocess.Popen(
        command,
        env=kept | (settings or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
