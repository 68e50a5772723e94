"""Job processes as the agent sees them: started through the warm fork server, talked to over a pipe, killed whole.

One `Launcher` per agent. `multiprocessing`'s fork server does the forking; what it leaves to us (a killed server, a job that outlives
it, daemons that a job leaves behind) is here. Never imports Inspect.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.forkserver import _forkserver
from pathlib import Path

from evalworker import job
from evalworker.preload_settings import SETTINGS
from evalworker.processes import children, kill_tree

STOP_GRACE_S = 30
"""How long a job that was told to stop may flush its log before it is killed."""


SERVER_DEATH_S = 10.0
"""How long a fork server that no longer answers may take to die."""

CODE, INSPECT, SPAWN = range(3)


class LauncherClosed(RuntimeError):
    """No more jobs are started: the worker leaves."""


class Launcher:
    """Starts job processes, as forks of a warm server for as long as that works.

    Levels: `CODE`, the server has imported Inspect and the run's code; `INSPECT`, only Inspect (the run's code starts threads, or
    ends the server); `SPAWN`, no server: each job imports everything itself.
    """

    def __init__(
        self,
        work: Path,
        path: list[str],
        tasks: list[str],
        environment: dict[str, str],
        secrets: list[str],
        *,
        fork: bool = True,
    ) -> None:
        """Args: path: from where the run's code is imported, first where jobs run. environment: what jobs have beside the agent's.

        secrets: names of the variables whose values are hidden.
        """
        self._work = work
        self._path = path
        self._environment = environment
        self._secrets = secrets
        self._tasks = tasks
        self._level = CODE if fork else SPAWN
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._running: dict[int, int] = {}
        self._closed = False

    def warm(self) -> None:
        """Start the server now, so that it imports while the agent waits for its first job."""
        with self._lock:
            if self._level < SPAWN:
                self._configure()
                _forkserver.ensure_running()

    def close(self) -> None:
        """End the server, which would otherwise finish its imports first, for good; every job must be gone."""
        self._closed = True
        server = _forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:
            kill_tree(server)
            _await_death()

    def start(self, order: job.Order) -> "JobProcess":
        """Start a job process; blocks until the server has warmed up.

        Raises LauncherClosed after (or during) `close`, OSError when no process can be made.
        """
        while True:
            if self._closed:
                raise LauncherClosed
            level, context = self._context()
            try:
                with self._starting:
                    process = JobProcess(dataclasses.replace(order, forked=level < SPAWN), context)
                    self._running[process.pid] = level
                    return process
            except (EOFError, ConnectionError):
                # The server died while it imported (user code that ends the process) or was killed; the next try starts another.
                if level == SPAWN:
                    raise OSError("no process can be started") from None
                _await_death()
                if not self._had_warmed_up():
                    self._degrade(level)

    def finish(self, process: "JobProcess") -> int | None:
        """What `JobProcess.finish` says; ends what this and other dead jobs left behind as children of the server.

        A running job adopts its own daemons, so only those of dead jobs become the server's.
        """
        status = process.finish()
        with self._starting:
            level = self._running.pop(process.pid)
            server = _forkserver._forkserver_pid  # type: ignore[attr-defined]
            if server is not None:
                for orphan in children(server) - self._running.keys():
                    kill_tree(orphan)
        if status == job.EXIT_UNSAFE_FORK:
            self._degrade(level)
        return status

    def _context(self) -> tuple[int, ForkServerContext | SpawnContext]:
        with self._lock:
            if self._level < SPAWN:
                self._configure()
                return self._level, multiprocessing.get_context("forkserver")
            return self._level, multiprocessing.get_context("spawn")

    def _configure(self) -> None:
        settings = {
            "path": self._path,
            "environment": self._environment,
            "secrets": self._secrets,
            "tasks": self._tasks if self._level == CODE else [],
            "report": str(self._work / "preload.json"),
        }
        os.environ[SETTINGS] = json.dumps(settings)
        multiprocessing.get_context("forkserver").set_forkserver_preload(["evalworker.preload"])

    def _had_warmed_up(self) -> bool:
        """Whether the server had warmed up before it died: then it was killed, and another one may serve."""
        report = self._work / "preload.json"
        warmed = report.exists()
        with contextlib.suppress(OSError):
            report.unlink()
        return warmed

    def _degrade(self, level: int) -> None:
        """Go one level down, unless another slot has done so already.

        The old server is let go, not stopped (`ForkServer._stop` waits for its jobs): it ends with the last of them.
        """
        with self._lock, self._starting:
            if self._level != level:
                return
            self._level += 1
            if _forkserver._forkserver_alive_fd is not None:  # type: ignore[attr-defined]
                os.close(_forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
            _forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
            _forkserver._forkserver_address = None  # type: ignore[attr-defined]
            _forkserver._forkserver_pid = None  # type: ignore[attr-defined]


def _await_death() -> None:
    """Wait (bounded) until a dying server can be reaped: until its last thread has gone, `multiprocessing` takes it for alive."""
    server = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    end = time.monotonic() + SERVER_DEATH_S
    while server is not None and time.monotonic() < end:
        try:
            if os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
        except ChildProcessError:
            return
        time.sleep(0.01)


class JobProcess:
    """One running job: its process, its pipe, what it prints.

    Attributes:
        pid: the process and, at the same time, its group and session.
        pipe: what the job sends (`evalworker.job`).
        output: the read end of its stdout and stderr.
        sentinel: becomes readable when the process, or the server that watches it, is gone.
    """

    def __init__(self, order: job.Order, context: ForkServerContext | SpawnContext) -> None:
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        reader, writer = os.pipe()
        self.output = Connection(reader, writable=False)
        output = Connection(writer, readable=False)
        self._process = context.Process(target=job.main, args=(order, theirs, output), daemon=False)
        try:
            self._process.start()
        except BaseException:
            self.pipe.close()
            self.output.close()
            raise
        finally:
            theirs.close()
            output.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.sentinel: int = self._process.sentinel
        self._stopping: float | None = None

    def tell(self, **said: object) -> None:
        """Send the job a message (`share=…`, `stop=True`); one that is gone does not hear it."""
        with contextlib.suppress(OSError, ValueError):
            self.pipe.send_bytes(json.dumps(said).encode())

    def stop(self) -> None:
        """Ask the job to end as after Ctrl-C."""
        if self._stopping is None:
            self._stopping = time.monotonic()
            self.tell(stop=True)

    @property
    def overdue(self) -> bool:
        """Whether it was asked to stop and has had its time."""
        return self._stopping is not None and time.monotonic() - self._stopping > STOP_GRACE_S

    def kill(self) -> None:
        """Kill the job and everything it has started, and see it gone."""
        kill_tree(self.pid)

    def finish(self) -> int | None:
        """The exit status after the sentinel has fired (-N for signal N), None when it cannot be known.

        What the job left running is killed. When the server died, its answer is 255 for a job that lives on: the job is killed and
        seen gone before anything is said of it.
        """
        status = self._process.exitcode
        if status is None:
            self._process.join(1)
            status = self._process.exitcode
        kill_tree(self.pid)
        return None if status == 255 else status

    def close(self) -> None:
        """Give the descriptors back."""
        for connection in (self.pipe, self.output):
            with contextlib.suppress(OSError):
                connection.close()
        with contextlib.suppress(ValueError):
            self._process.close()
