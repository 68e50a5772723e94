"""Docker for the end-to-end tests: base images made from Debian's archive, because none can be pulled, and containers that go away.

The engine is started by `setup.sh`. Images are made once per machine and kept under names that begin with `inspect-fleet-test/`.
"""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = HERE.parent / ".cache"

DEBIAN = "inspect-fleet-test/debian:trixie"
INSTANCE = "inspect-fleet-test/instance:trixie"
WORKER = "inspect-fleet-test-worker"
MIRROR = [mirror] if (mirror := os.environ.get("INSPECT_FLEET_DEBIAN_MIRROR")) else []
"""Where debootstrap fetches from; without it, debootstrap's own default."""

# What Debian's cloud image has and debootstrap's minimum lacks. The container's own network is the bench's, so networkd is masked.
INSTANCE_DOCKERFILE = f"""
FROM {DEBIAN}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get -qq update && apt-get -qqy install --no-install-recommends systemd-sysv systemd dbus openssh-server sudo cloud-init \\
    python3 iproute2 curl && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash admin && echo 'admin ALL=(ALL) NOPASSWD:ALL' >/etc/sudoers.d/admin \\
    && install -d -m 700 -o admin -g admin /home/admin/.ssh
RUN systemctl mask -q systemd-modules-load getty@tty1 console-getty systemd-networkd systemd-networkd-wait-online \\
    && rm -f /etc/machine-id && : >/etc/machine-id
STOPSIGNAL SIGRTMIN+3
CMD ["/sbin/init"]
"""


def docker(*arguments: str, stdin: bytes | None = None, check: bool = True, timeout: float = 600) -> str:
    """Run a Docker command and return what it prints; fails with its words."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=timeout, env=environment)
    if check and done.returncode != 0:
        raise AssertionError(
            f"docker {' '.join(arguments)[:300]}: {(done.stdout + done.stderr).decode(errors='replace')[-3000:]}"
        )
    return done.stdout.decode(errors="replace")


def exists(image: str) -> bool:
    """Whether there is an image of this name."""
    return bool(docker("image", "ls", "--quiet", image).strip())


def setup() -> None:
    """An engine that answers."""
    subprocess.run([HERE / "setup.sh"], check=True)


@contextmanager
def making() -> Iterator[None]:
    """One base image at a time: test processes side by side share what one of them has made."""
    with Path(tempfile.gettempdir(), "inspect-fleet-test-base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def debian() -> str:
    """Debian 13, minimal, which knows the machine's own certificates (a proxy's may be among them)."""
    with making():
        if not exists(DEBIAN):
            archive = CACHE / "debian-trixie.tar"
            if not archive.exists():
                _bootstrap(archive)
            docker("import", str(archive), DEBIAN)
    return DEBIAN


def _bootstrap(archive: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        subprocess.run(
            ["debootstrap", "--variant=minbase", "trixie", root, *MIRROR], check=True, stdout=subprocess.DEVNULL
        )
        for path in (root / "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        ours = Path("/usr/local/share/ca-certificates")
        (root / "usr/local/share/ca-certificates").mkdir(parents=True, exist_ok=True)
        for certificate in ours.glob("*.crt"):
            shutil.copy(certificate, root / "usr/local/share/ca-certificates")
        if Path("/etc/ssl/certs/ca-certificates.crt").exists():
            (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
            shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs")
        part = archive.with_suffix(".part")
        subprocess.run(["tar", "-C", root, "-cf", part, "."], check=True)
        part.rename(archive)


def instance() -> str:
    """Debian 13 as a machine: systemd, cloud-init, an SSH server."""
    debian()
    docker("build", "--quiet", "--tag", INSTANCE, "-", stdin=INSTANCE_DOCKERFILE.encode(), timeout=900)
    return INSTANCE


def name() -> str:
    """A new name for a container or network of a test."""
    return f"inspect-fleet-test-{uuid.uuid4().hex[:8]}"


@contextmanager
def container(*arguments: str, image: str, command: tuple[str, ...] = ()) -> Iterator[str]:
    """A running container, removed with its volumes afterwards."""
    found = name()
    docker("run", "--detach", "--name", found, *arguments, image, *command)
    try:
        yield found
    finally:
        docker("rm", "--force", "--volumes", found, check=False)


@contextmanager
def network(subnet: str, *arguments: str) -> Iterator[str]:
    """A network with this subnet."""
    found = name()
    # Packets must fit the machine's own link; the engine's --mtu holds for its default network alone.
    mtu = f"com.docker.network.driver.mtu={link_mtu()}"
    docker("network", "create", "--subnet", subnet, "--opt", mtu, *arguments, found)
    try:
        yield found
    finally:
        docker("network", "rm", found, check=False)


def link_mtu() -> int:
    """The MTU of the machine's default route."""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        link, destination = line.split()[:2]
        if destination == "00000000":
            return min(1500, int(Path(f"/sys/class/net/{link}/mtu").read_text()))
    return 1500


def pid(container: str) -> int:
    """The process id of a container's first process, as the host counts."""
    return int(json.loads(docker("inspect", "--format", "{{json .State.Pid}}", container)))
