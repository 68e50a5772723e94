"""`ct` and `ies` as processes that need not import Inspect: forked from one that has imported it already, which saves 2 s of CPU each.

Called by `fleets` for commands that run as they are. As a program (`python warm.py FD`) it is the process that forks; what it forks is
`python -m evalops …` from there on: own session, directory, environment, arguments and standard files, and an exit as Python's own.
"""

import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LONGEST = 1 << 20
"""Bytes that an order (arguments, environment, directory) may take."""


class Forked:
    """A running command. As much of `subprocess.Popen` as the tests use."""

    def __init__(self, pid: int, status: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = stdout, stderr
        self._status = status

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("ct", timeout or 0)
            said = os.read(self._status, 64)
            assert said, "the process that forks commands has ended"
            self.returncode = os.waitstatus_to_exitcode(int(said))
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of stdout and stderr, when it has ended. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        said: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name, file=file: said.update({name: file.read()}), daemon=True)
            for name, file in (("out", self.stdout), ("err", self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("ct", timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return said["out"], said["err"]

    def send_signal(self, number: int) -> None:
        """A signal to this process alone; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Forker:
    """This test process's forker. It ends when the line does."""

    process: "subprocess.Popen[bytes]"
    line: socket.socket
    python_path: str | None


@functools.cache
def _forker() -> Forker:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, size, LONGEST)
    command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    return Forker(process, ours, os.environ.get("PYTHONPATH"))


def fits(environment: dict[str, str]) -> bool:
    """Whether a fork can have this environment: PYTHONPATH is read as Python starts."""
    return environment.get("PYTHONPATH") == _forker().python_path


def start(words: list[str], folder: Path, environment: dict[str, str]) -> Forked:
    """Start `python -m evalops WORDS…` in a directory, with exactly this environment, which must fit."""
    line = _forker().line
    out, err, status = os.pipe(), os.pipe(), os.pipe()
    with Path(os.devnull).open() as null:
        order = json.dumps({"words": words, "folder": str(folder), "environment": environment})
        socket.send_fds(line, [order.encode()], [null.fileno(), out[1], err[1], status[1]])
    for _, ours in (out, err, status):
        os.close(ours)
    pid = int(line.recv(64))
    return Forked(pid, status[0], os.fdopen(out[0]), os.fdopen(err[0]))


# The process that forks


def serve(line: socket.socket) -> dict[str, Any]:
    """Fork for each order and tell how each fork ended. Returns in a fork, with its order; ends when the line does."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([line, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _tell_ends(children)
        if line in ready:
            data, files, _, _ = socket.recv_fds(line, LONGEST, 4)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(wakeup)
                signal.signal(signal.SIGCHLD, handler)
                _settle(files[:3], [line.fileno(), reader, writer, *files, *children.values()])
                return dict(json.loads(data))
            children[pid] = files[3]
            for file in files[:3]:
                os.close(file)
            line.send(str(pid).encode())


def _tell_ends(children: dict[int, int]) -> None:
    """Say of each child that has ended how it did."""
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            file = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(file, str(status).encode())
            os.close(file)


def _settle(standard: list[int], others: list[int]) -> None:
    """In a fork: a session of its own with these standard files and none of the forker's descriptors."""
    os.setsid()
    for number, file in enumerate(standard):
        os.dup2(file, number)
    for file in others:
        os.close(file)
    random.seed()


def main() -> None:
    """The forker's life, then a fork's: the command."""
    del sys.path[0]  # this file's directory, which the command does not have
    import inspect_ai._cli.eval
    import inspect_ai._eval.evalset  # noqa: F401

    gc.freeze()  # forks share what is never collected
    line = socket.socket(fileno=int(sys.argv[1]))
    order = serve(line)
    line.detach()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = order["words"]
    sys.path.insert(0, order["folder"])
    runpy.run_module("evalops", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
