"""What a job process and its agent say to each other, and how many samples run at once."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalworker import containers, job
from evalworker.job import ABANDONED_GRACE_S, END, SAMPLE, AgentLine, Share, tries_allowed
from evalworker.processes import alive


class Loop:
    """An event loop whose thread runs what is handed to it at `turn`."""

    def __init__(self) -> None:
        self.due: list[Any] = []
        self.closed = False

    def call_soon_threadsafe(self, call: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.due.append(call)

    def turn(self) -> None:
        for call in self.due:
            call()
        self.due.clear()


@pytest.fixture
def limits() -> list[int]:
    return []


def share_of(limits: list[int], streaming: Any, ceiling: int | None = None) -> Share:
    def set_limit(n: int) -> int:
        limits.append(n)
        return 1

    return Share(streaming, set_limit, 10, ceiling)


def test_a_share_that_comes_before_the_event_loop_is_set_when_the_task_starts(limits: list[int]) -> None:
    share = share_of(limits, SimpleNamespace(loop=None))
    share.change(5)
    assert limits == []
    share.apply()
    assert limits == [5]


def test_a_share_that_comes_while_the_task_runs_is_set_in_the_loops_thread(limits: list[int]) -> None:
    loop = Loop()
    share = share_of(limits, SimpleNamespace(loop=loop))
    share.change(3)
    share.change(7)
    assert limits == []
    loop.turn()
    assert limits[-1] == 7


def test_the_users_own_bound_is_never_exceeded(limits: list[int]) -> None:
    share = share_of(limits, SimpleNamespace(loop=None), ceiling=2)
    share.change(10)
    share.apply()
    share.change(1)
    share.apply()
    assert limits == [2, 1]


def test_a_loop_that_has_just_ended_is_no_error(limits: list[int]) -> None:
    loop = Loop()
    loop.closed = True
    share_of(limits, SimpleNamespace(loop=loop)).change(3)


class Timer:
    """Stands in for the timer that kills a job whose agent has died: here that would be the tests' own process group."""

    made: list[tuple[Any, ...]] = []
    started = threading.Event()

    def __init__(self, *arguments: Any) -> None:
        Timer.made.append(arguments)

    def start(self) -> None:
        Timer.started.set()


def test_the_agents_word_is_kept_for_whoever_listens_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threading, "Timer", Timer)
    ours, theirs = Pipe()
    line = AgentLine(theirs, tmp_path)
    heard: queue.Queue[int] = queue.Queue()
    with line:
        ours.send_bytes(json.dumps({"share": 4}).encode())
        ours.send_bytes(json.dumps({"share": 5}).encode())
        line.follow("share", heard.put)
        while (share := heard.get(timeout=30)) != 5:
            assert share == 4
        ours.send_bytes(json.dumps({"share": 6}).encode())
        assert heard.get(timeout=30) == 6
        assert line.send(SAMPLE, b"{}")
        assert ours.recv_bytes() == b"s{}"
        ours.close()  # the agent has died
        assert Timer.started.wait(30)
    assert line.stopped
    assert Timer.made == [(ABANDONED_GRACE_S, job._end_abandoned, [tmp_path])]
    assert line.abandoned


def test_a_job_without_its_agent_ends_its_daemons_and_sandboxes_too(tmp_path: Path) -> None:
    """A daemon in a session of its own is not in the job's group; a container is no process of this machine's at all."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n')
    docker.chmod(0o755)
    (tmp_path / containers.RECORD).write_text("inspect-t-iabc\n")
    script = """
import os, subprocess, sys
from pathlib import Path
from evalworker import job
os.setsid()
daemon = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(daemon.pid, flush=True)
job._end_abandoned(Path(sys.argv[1]))
"""
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert not alive(int(ended.stdout))
    assert (
        "ps --all --quiet --filter label=com.docker.compose.project=inspect-t-iabc" in (tmp_path / "calls").read_text()
    )


def test_a_descriptor_that_means_another_file_by_now_is_not_written_to(tmp_path: Any) -> None:
    """User code closes all descriptors; the next file that is opened gets the pipe's number."""
    ours, theirs = Pipe()
    line = AgentLine(theirs, tmp_path)
    number = theirs.fileno()
    victim = os.open(tmp_path / "log.eval", os.O_RDWR | os.O_CREAT)
    os.dup2(victim, number)
    assert not line.send(END, b"scribble")
    assert (tmp_path / "log.eval").read_bytes() == b""
    os.close(number)
    assert not line.send(END, b"scribble")
    os.close(victim)
    theirs._handle = None  # type: ignore[attr-defined]
    ours.close()


@pytest.mark.parametrize(
    ("arguments", "tries"),
    [
        ({}, 11),
        ({"retry_attempts": 0}, 1),
        ({"retry_attempts": 3}, 4),
        ({"retry_attempts": 3, "retry_immediate": True}, 4),
        ({"retry_attempts": 3, "retry_immediate": False}, 3),
        ({"retry_attempts": 0, "retry_immediate": False}, 1),
        ({"retry_attempts": 3, "fail_on_error": 0.5}, 4),
        ({"retry_attempts": 3, "fail_on_error": False}, None),
    ],
)
def test_tries_allowed(arguments: dict[str, Any], tries: int | None) -> None:
    assert tries_allowed(arguments) == tries
