"""Measures processes from outside: CPU of a child with all that it waited for, CPU of whole trees, many commands at once.

CPU is what the kernel has accounted to the processes, so other work on the machine hardly changes it. Linux only.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """What a command took. `cpu_s` is its own and its children's."""

    wall_s: float
    cpu_s: float


def command(words: list[str], folder: Path, environment: Mapping[str, str]) -> Spent:
    """Run one command to its end; raises RuntimeError with its output unless it ends with 0."""
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{words} ended with {process.returncode}: {output.read().decode()[-2000:]}")
    return Spent(wall, usage.ru_utime + usage.ru_stime)


def commands(many: Iterable[list[str]], folder: Path, environment: Mapping[str, str], at_once: int) -> Spent:
    """Run commands, at most `at_once` at a time: the whole time, and the CPU of all of them."""
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        spent = list(pool.map(lambda words: command(words, folder, environment), many))
    return Spent(time.monotonic() - started, sum(one.cpu_s for one in spent))


def naming(text: str) -> list[int]:
    """The living processes whose command line holds this text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def process_cpu(pid: int) -> float:
    """Seconds of CPU that one living process has used by now, without its children, in steps of 10 ms."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def tree_cpu(role_of: Callable[[bytes, str], str | None], root: int, role: str) -> dict[str, float]:
    """Seconds of CPU used by a living process and its living descendants, with the ended ones that they waited for, by role.

    `role_of(command line, role of the parent)` names a process's role; None leaves it out, with its descendants.
    """
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    found: dict[str, float] = {}
    left: list[tuple[int, str]] = [(root, role)]
    while left:
        pid, role = left.pop()
        found[role] = found.get(role, 0.0) + seconds.get(pid, 0.0)
        for child in children.get(pid, ()):
            try:
                theirs = role_of(Path(f"/proc/{child}/cmdline").read_bytes(), role)
            except OSError:
                continue
            if theirs is not None:
                left.append((child, theirs))
    return found
