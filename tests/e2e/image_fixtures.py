"""The AMI build that the tests of the image share: one real `ct cloud build-ami` per session, and the worker image."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker_bench
import ec2_bench
import pytest
from docker_bench import docker

from evalops.cloud import payload

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CT = str(Path(sys.executable).parent / "ct")


@dataclass(frozen=True)
class Built:
    """A finished build: the cloud that it ran in, the AMI, the container image behind it, what the command said."""

    cloud: ec2_bench.Cloud
    ami: str
    image: str
    output: str
    seconds: float


def ct(cloud: ec2_bench.Cloud, *arguments: str, timeout: float = 600) -> "subprocess.CompletedProcess[str]":
    """Run a `ct` command in this cloud."""
    return subprocess.run([CT, *arguments], env=cloud.environment(), capture_output=True, text=True, timeout=timeout)


BUILD = ("cloud", "build-ami", "--private", "--from", ec2_bench.NETWORK, "--poll", "1")


def boxed(folder: Path) -> Path:
    """A copy of the task with a sandbox, with the machine's busybox for its image."""
    target = folder / "boxed"
    shutil.copytree(HERE / "data" / "boxed", target)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", target / "busybox")
    return target


def kept() -> str:
    """The container image behind an AMI of this checkout: built once, and kept under the fingerprint of what is in it."""
    image = _kept_name()
    docker_bench.setup()
    with _building():
        if not docker_bench.exists(image):
            with (
                tempfile.TemporaryDirectory() as folder,
                ec2_bench.cloud(Path(folder), docker_bench.instance()) as cloud,
            ):
                done = ct(cloud, *BUILD, timeout=1800)
                if done.returncode != 0:
                    raise RuntimeError(f"the AMI was not built: {done.stderr[-2000:]}")
                docker("tag", cloud.committed[done.stdout.strip()], image)
    return image


def _kept_name() -> str:
    print_ = payload.fingerprint(ROOT)
    return f"inspect-fleet-test/bench-{print_.lock}-{print_.worker}-{print_.scripts}:latest"


@contextmanager
def _building() -> Iterator[None]:
    """One build at a time: test processes side by side share what one of them has built."""
    with Path(tempfile.gettempdir(), "inspect-fleet-test-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """One build from the stock image, with the sandbox of a task baked in."""
    docker_bench.setup()
    folder = tmp_path_factory.mktemp("ami")
    with ec2_bench.cloud(folder, docker_bench.instance()) as cloud:
        started = time.monotonic()
        with _building():
            done = ct(cloud, *BUILD, "--tasks", str(boxed(folder) / "boxed.py"), timeout=1200)
            seconds = time.monotonic() - started
            assert done.returncode == 0, done.stderr[-6000:]
            ami = done.stdout.strip()
            docker("tag", cloud.committed[ami], _kept_name())
        yield Built(cloud, ami, cloud.committed[ami], done.stderr, seconds)
        docker("image", "rm", "--force", *cloud.committed.values(), check=False)


@pytest.fixture(scope="session")
def baked() -> str:
    """The same image for tests that need no build of their own."""
    return kept()


@pytest.fixture(scope="session")
def worker_image() -> str:
    """The worker image of this checkout, on Debian as the bench makes it."""
    docker_bench.setup()
    command = [CT, "cloud", "build-image", "--base", docker_bench.debian(), "--tag", "test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=_legacy_builder())
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout.strip().splitlines()[-1]


def _legacy_builder() -> dict[str, str]:
    return {**os.environ, "DOCKER_BUILDKIT": "0"}  # the engine of Debian 12 has no other
