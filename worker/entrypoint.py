#!/usr/bin/env python3
"""PID 1 of the worker image: starts the container's own Docker engine, then the command, and ends with the command's status.

INSPECT_FLEET_DOCKER says whether an engine is needed: `auto` (the default: one is started where the container is privileged),
`yes` (refuse to run without one), `no` (for evals without sandboxes). SIGTERM reaches the command as Ctrl-C, so that evals flush
their logs; a second one ends it. Only the standard library; never imports the worker.
"""

import contextlib
import grp
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DOCKERD_WAIT_S = 60.0
DOCKERD_LOG = Path("/var/log/inspect-fleet/dockerd.log")
RULES = Path("/etc/inspect-fleet/metadata.nft")
CGROUP = Path("/sys/fs/cgroup")
GROUP = "inspect-fleet"
USAGE = 2
NO_DOCKER = 69
"""Exit status (EX_UNAVAILABLE) when an engine is needed and there is none."""


def say(text: str) -> None:
    """One line for whoever reads the container's log."""
    sys.stderr.write(f"inspect-fleet: {text}\n")
    sys.stderr.flush()


def privileged() -> bool:
    """Whether this container may run an engine: the capability to mount, and a cgroup tree that can be written."""
    mask = next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")
    )
    return bool(int(mask, 16) >> 21 & 1) and os.access(CGROUP, os.W_OK)  # 21: CAP_SYS_ADMIN


def delegate_cgroups() -> None:
    """With cgroup v2 a group that has processes can have no sub-groups with controllers: move ours into one of their own."""
    controllers = CGROUP / "cgroup.controllers"
    if not controllers.exists():
        return
    with contextlib.suppress(OSError):
        (CGROUP / "init").mkdir(exist_ok=True)
        for process in (CGROUP / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CGROUP / "init" / "cgroup.procs").write_text(process)
        wanted = " ".join(f"+{name}" for name in controllers.read_text().split())
        (CGROUP / "cgroup.subtree_control").write_text(wanted)


def close_metadata() -> bool:
    """Refuse the metadata and credentials addresses to sandboxes; False where the kernel does not let us."""
    done = subprocess.run(["nft", "--file", str(RULES)], capture_output=True, text=True)
    if done.returncode != 0:
        say(f"the metadata service cannot be closed to sandboxes: {done.stderr.strip().splitlines()[:1]}")
    return done.returncode == 0


def link_mtu() -> int:
    """The MTU of the default route's link, so that packets of nested containers fit."""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        link, destination = line.split()[:2]
        if destination == "00000000":
            return int(Path(f"/sys/class/net/{link}/mtu").read_text())
    return 1500


def start_dockerd() -> subprocess.Popen[bytes] | None:
    """An engine that answers, on a real storage driver; None, with the reason and the end of its log, when there is none."""
    DOCKERD_LOG.parent.mkdir(parents=True, exist_ok=True)
    for stale in ("/var/run/docker.pid", "/run/docker/containerd/containerd.pid"):
        Path(stale).unlink(missing_ok=True)
    command = ["dockerd", f"--mtu={min(1500, link_mtu())}"]
    with DOCKERD_LOG.open("wb") as log:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    end = time.monotonic() + DOCKERD_WAIT_S
    reason = f"did not answer within {DOCKERD_WAIT_S:.0f} s"
    while time.monotonic() < end:
        asked = subprocess.run(["docker", "info", "--format", "{{.Driver}}"], capture_output=True, text=True)
        driver = asked.stdout.strip()
        if asked.returncode == 0 and driver == "vfs":
            reason = "has fallen back to the vfs driver, which copies whole images: mount a volume at /var/lib/docker"
            break
        if asked.returncode == 0 and driver:
            return engine
        if engine.poll() is not None:
            reason = f"ended with status {engine.returncode}"
            break
        time.sleep(0.1)
    say(f"the Docker engine {reason}; the end of its log:")
    for line in DOCKERD_LOG.read_text(errors="replace").splitlines()[-30:]:
        sys.stderr.write(f"  {line}\n")
    stop(engine)
    return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine, with bounded patience."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(command: list[str], in_group: bool) -> int:
    """Run the command as a child, pass on signals, reap orphans as PID 1 must; its exit status, 128+N for signal N."""
    group = grp.getgrnam(GROUP).gr_gid if in_group else None
    passed_on = {signal.SIGTERM, signal.SIGINT}

    def like_a_shell() -> None:
        # A shell in the background starts us with SIGINT ignored, and the command would never see Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)

    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # what comes before there is a child to tell waits for it
    child = subprocess.Popen(command, group=group, preexec_fn=like_a_shell)
    told = []

    def on_term(*_: object) -> None:
        told.append(True)  # first: the next signal may interrupt this handler
        child.send_signal(signal.SIGINT if len(told) == 1 else signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, lambda *_: child.send_signal(signal.SIGINT) if not sys.stdin.isatty() else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main(command: list[str]) -> int:
    """The container's life."""
    wanted = os.environ.get("INSPECT_FLEET_DOCKER", "auto")
    if wanted not in ("auto", "yes", "no"):
        say(f"INSPECT_FLEET_DOCKER is {wanted!r}, and must be auto, yes or no")
        return USAGE
    if not command or shutil.which(command[0]) is None:
        say(f"there is no command {command[0] if command else ''!r} in this image")
        return 127
    engine = None
    closed = False
    if wanted != "no":
        if privileged():
            delegate_cgroups()
            closed = close_metadata()
            engine = start_dockerd()
            if engine is None:
                return NO_DOCKER
        elif wanted == "yes":
            say("a Docker engine needs a privileged container: run with --privileged, or INSPECT_FLEET_DOCKER=no")
            return NO_DOCKER
        else:
            say("no Docker engine: the container is not privileged; evals with Docker sandboxes will fail")
    try:
        return run(command, in_group=closed)
    finally:
        if engine is not None:
            stop(engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
