"""A Docker engine of a test's own, with Compose as Inspect wants it: it may be stopped, killed and started without harm to others.

Debian 13's engine in a privileged container of the machine's own engine, without a way to any network; its socket, and Debian 13's
command with Compose, are in a folder of the host. All that it ever had goes with the container.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker_bench
from docker_bench import docker

ENGINE = "inspect-fleet-test/engine:trixie"
DOCKERFILE = f"""
FROM {docker_bench.DEBIAN}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get -qq update && apt-get -qqy install --no-install-recommends docker.io docker-cli docker-compose procps \\
    && rm -rf /var/lib/apt/lists/*
"""

# With cgroup v2 a group that has processes can have no sub-groups with controllers: what is there moves into one of its own.
DELEGATE = """
cd /sys/fs/cgroup
if [ -f cgroup.controllers ]; then
    mkdir -p init && xargs -rn1 <cgroup.procs >init/cgroup.procs || true
    sed -e 's/ / +/g' -e 's/^/+/' <cgroup.controllers >cgroup.subtree_control
fi
exec sleep infinity
"""
DOCKERD = "rm -f /var/run/docker.pid; exec dockerd --host unix:///run/engine/docker.sock --bridge none --iptables=false"

BUSYBOX = """
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
"""

START_S = 60.0
"""How long an engine may take to answer, or to end."""


def image() -> str:
    """Debian 13 with the engine; made once per machine."""
    docker_bench.debian()
    with docker_bench.making():
        if not docker_bench.exists(ENGINE):
            docker("build", "--quiet", "--tag", ENGINE, "-", stdin=DOCKERFILE.encode(), timeout=900)
    return ENGINE


@dataclass(frozen=True)
class Engine:
    """`environment` is what a process needs to use it; `container` holds it."""

    container: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For processes on this machine."""
        return {
            "DOCKER_HOST": f"unix://{self.folder}/docker.sock",
            "DOCKER_CONFIG": str(self.folder / "config"),
            "DOCKER_BUILDKIT": "0",
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self) -> None:
        """Start it; returns when it answers."""
        docker("exec", "--detach", self.container, "sh", "-c", f"{DOCKERD} >>/run/engine/log 2>&1")
        end = time.monotonic() + START_S
        while self._docker("version").returncode != 0:
            assert time.monotonic() < end, f"the engine does not answer: {self._log()}"
            time.sleep(0.1)

    def stop(self, *, crash: bool = False) -> None:
        """End it as systemd does, containers and all, or as the kernel does: they live on until it is back."""
        docker("exec", self.container, "pkill", "-KILL" if crash else "-TERM", "-x", "dockerd")
        end = time.monotonic() + START_S
        while docker("exec", self.container, "pgrep", "-x", "dockerd|containerd", check=False).strip():
            assert time.monotonic() < end, f"the engine does not end: {self._log()}"
            time.sleep(0.1)

    def make_image(self, name: str) -> None:
        """An image of the machine's own static busybox: none can be pulled."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_text(BUSYBOX)
            shutil.copy(shutil.which("busybox") or "/bin/busybox", folder)
            done = self._docker("build", "--quiet", "--tag", name, folder)
            assert done.returncode == 0, done.stderr

    def running(self) -> list[str]:
        """Running containers."""
        return self._docker("ps", "--quiet").stdout.split()

    def kill(self, container: str) -> None:
        """Kill a container; one that has just gone is left alone."""
        self._docker("kill", container)

    def left(self) -> list[str]:
        """All containers that there are, and the networks, volumes and images of Compose projects."""
        found = []
        for kind, words in {
            "container": ("ps", "--all", "--format", "{{.Names}} {{.Status}}"),
            "network": ("network", "ls", "--filter", "type=custom", "--format", "{{.Name}}"),
            "volume": ("volume", "ls", "--format", "{{.Name}}"),
            "image": ("image", "ls", "--format", "{{.Repository}}", "inspect-*"),
        }.items():
            done = self._docker(*words)
            assert done.returncode == 0, done.stderr
            found += [f"{kind} {line}" for line in done.stdout.splitlines()]
        return found

    def clear(self) -> None:
        """Remove all but images, so that nothing of one run is found after the next."""
        for listing, removal in (("ps -aq", "rm -f -v"), ("network ls -q --filter type=custom", "network rm")):
            if found := self._docker(*listing.split()).stdout.split():
                self._docker(*removal.split(), *found)
        self._docker("volume", "prune", "--all", "--force")

    def _docker(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | self.environment
        return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, env=environment)

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "it has no log"


@contextmanager
def engine() -> Iterator[Engine]:
    """A running engine, gone with all it has at the end. The folder's path is short: that of a socket has 107 bytes."""
    docker_bench.setup()
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        made = Engine(docker_bench.name(), Path(folder))
        arguments = ("--privileged", "--init", "--network", "none", "--volume", "/var/lib/docker")
        place = ("--volume", f"{folder}:/run/engine")
        docker("run", "--detach", "--name", made.container, *arguments, *place, image(), "sh", "-c", DELEGATE)
        try:
            _fetch_command(made)
            made.start()
            yield made
        finally:
            docker("rm", "--force", "--volumes", made.container, check=False)


def _fetch_command(made: Engine) -> None:
    """Debian 13's `docker` with Compose, for this machine: its own may be too old, or lack Compose."""
    plugins = made.folder / "config" / "cli-plugins"
    (made.folder / "bin").mkdir()
    plugins.mkdir(parents=True)
    docker("cp", f"{made.container}:/usr/bin/docker", str(made.folder / "bin" / "docker"))
    docker("cp", f"{made.container}:/usr/libexec/docker/cli-plugins/docker-compose", str(plugins / "docker-compose"))
