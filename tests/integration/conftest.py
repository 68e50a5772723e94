"""Real AWS emulators for the integration tests: `ministack` and `moto_server`, one of each per test process.

No test here can reach a real account: the AWS configuration of whoever runs the tests is taken out of the environment.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulators import REGION, Emulator

from evalworker import aws
from ports import free_port

STARTED_S = 60.0
"""Before a server that does not answer counts as broken."""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def _server(name: str, command: list[str], port: int, log: Path, **environment: str) -> Iterator[Emulator]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=kept | environment,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + STARTED_S
        while not _answers(f"http://127.0.0.1:{port}/"):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield Emulator(name, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A running ministack."""
    port = free_port()
    folder = tmp_path_factory.mktemp("ministack")
    settings = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
        "TMPDIR": str(folder),
        "SFTP_ENABLED": "0",
        "IOT_MTLS_ENABLED": "0",
        "DOCKER_HOST": "unix:///nonexistent",
        "LOG_LEVEL": "WARNING",
    }
    with _server("ministack", [sys.executable, "-m", "ministack"], port, folder / "log", **settings) as running:
        yield running


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A running moto server."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _server("moto", command, port, tmp_path_factory.mktemp("moto") / "log") as running:
        yield running


@pytest.fixture(params=["ministack", "moto"])
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """Each emulator in turn."""
    found: Emulator = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def no_aws_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No AWS configuration of the machine is seen, and no client of an earlier test is left."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    aws.forget_clients()
    yield
    aws.forget_clients()


@pytest.fixture
def aws_environment(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """The standard variables name the emulator, as a user's own endpoint would be named."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    return emulator
