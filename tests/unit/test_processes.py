"""What the kernel says of processes: whole trees end, daemons are found, signals and memory kills have names."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalworker import processes
from evalworker.processes import alive, children, kill_tree, memory_free, oom_kills, signal_name, tree

FAMILY = """
import os, sys, time
def stay(text):
    os.write(1, f"{text} {os.getpid()}\\n".encode())
    time.sleep(600)
if not os.fork():
    if not os.fork():
        os.setsid()
        stay("session")
    stay("child")
stay("parent")
"""


@pytest.fixture
def family() -> Iterator[dict[str, int]]:
    """A parent, its child, and a grandchild in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    found = {}
    for _ in range(3):
        name, pid = process.stdout.readline().split()
        found[name] = int(pid)
    yield found
    for pid in found.values():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    process.stdout.close()


def test_a_tree_reaches_into_other_sessions(family: dict[str, int]) -> None:
    assert tree(family["parent"]) == set(family.values())
    assert children(family["parent"]) == {family["child"]}
    assert family["parent"] in children(os.getpid())


def test_a_killed_tree_is_gone_when_the_call_returns(family: dict[str, int]) -> None:
    kill_tree(family["parent"])
    assert not any(map(alive, family.values()))


def test_killing_what_is_gone_is_no_error(family: dict[str, int]) -> None:
    kill_tree(family["parent"])
    kill_tree(family["parent"])


def test_a_zombie_is_dead() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not alive(pid)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (40, "signal 40")])
def test_signals_have_names(number: int, name: str) -> None:
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/a/b\n", "a/b/memory.events", "low 0\nhigh 0\nmax 3\noom 3\noom_kill 2\n"),
        ("4:memory:/a\n0::/\n", "memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ("7:cpu,memory:/a\n", "memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_memory_kills_are_counted_in_either_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, file: str, text: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(cgroup)
    real = Path

    def moved(*parts: str) -> Path:
        path = str(real(*parts))
        if path == "/proc/self/cgroup":
            return tmp_path / "cgroup"
        return real(path.replace("/sys/fs/cgroup", str(tmp_path), 1))

    monkeypatch.setattr(processes, "Path", moved)
    assert oom_kills() == 2


def test_where_nothing_is_counted_it_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_memory_counters", lambda: iter([Path("/nonexistent/memory.events")]))
    assert oom_kills() == 0


def test_memory_free_is_some_of_this_machine() -> None:
    assert 1 << 20 < memory_free() < 1 << 50
