"""Processes and the kernel's view of them, read from /proc: descendants, killing whole trees, out-of-memory counts.

Linux only, like the worker. Nothing here knows of jobs.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
KILL_PATIENCE_S = 10


def adopt_orphans() -> None:
    """Make this process the parent of daemons whose own parents have gone, so that they can be found and ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _parents() -> dict[int, tuple[int, int]]:
    """Of each living process: its parent and its session. Zombies are dead."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        # The name in parentheses may hold anything; what follows is: state ppid pgrp session …
        state, parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if state not in "ZX":
            found[int(entry.name)] = (int(parent), int(session))
    return found


def tree(pid: int) -> set[int]:
    """The process, its descendants and the members of its session, as far as they live."""
    processes = _parents()
    found = {one for one, (_, session) in processes.items() if one == pid or session == pid}
    grown = True
    while grown:
        more = {one for one, (parent, _) in processes.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found


def children(pid: int) -> set[int]:
    """The process's living children."""
    return {one for one, (parent, _) in _parents().items() if parent == pid}


def kill_tree(pid: int) -> None:
    """SIGKILL the process and all that it has started, and wait (bounded) until they are gone."""
    end = time.monotonic() + KILL_PATIENCE_S
    while members := tree(pid):
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if time.monotonic() > end:
            return
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return pid in _parents()


def oom_kills() -> int:
    """Out-of-memory kills that the kernel has counted in this process's cgroup (v2 or v1), 0 where none is counted.

    Source: `memory.events` (`oom_kill N`) and `memory.oom_control` (`oom_kill N`) of the kernel's cgroup documentation.
    """
    for path in _memory_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _memory_counters() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield Path("/sys/fs/cgroup" + path, "memory.events")
            elif "memory" in controllers.split(","):
                yield Path("/sys/fs/cgroup/memory" + path, "memory.oom_control")


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 40` for one without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_free() -> int:
    """Bytes that new processes could use, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
