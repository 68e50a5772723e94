"""Workers as processes of this machine: the local backend. They are the same agents as on an instance.

The controller asks for a number, hears of ends, and stops them. Each has a directory below the fleet's own, which goes when it ended
well.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evalworker import containers
from evalworker.contract.ids import check_run_id
from evalworker.processes import alive, signal_name
from evalworker.worker import Log

STOP_S = 55.0
"""How long stopped workers may flush before they are killed; they give themselves 50 s."""

SANDBOXES_S = 15.0
"""How long the end of a fleet waits until nothing is left of the sandboxes of killed workers' jobs."""


@dataclass(frozen=True)
class Lost:
    """A worker that has ended without being asked. `last_lines` are of its own output."""

    instance_id: str
    reason: str
    last_lines: list[str]


class CannotLaunch(RuntimeError):
    """No worker can be had, for a reason that time does not heal; the text is one sentence."""


class Pool(Protocol):
    """Where a fleet's workers come from. What has a body below is for pools whose workers are on other machines.

    Attributes:
        stays: the workers go on when the controller leaves.
    """

    stays: bool = False

    def start(self, count: int) -> None:
        """Launch `count` more workers. Raises CannotLaunch."""

    def adopt(self) -> int:
        """Take over the fleet's workers that still run; how many there are."""

    def ended(self) -> list[Lost]:
        """Workers that have ended since the last call, each once."""

    @property
    def alive(self) -> int:
        """Workers that run or are starting."""

    def stop(self, *, now: bool = False) -> None:
        """End all workers: as after a spot notice, or at once. Returns when they are gone."""

    def online(self, instance_id: str) -> None:
        """A worker has come online."""
        del instance_id  # of this machine: its process is watched itself

    def left(self, instance_id: str) -> None:
        """A worker has said goodbye."""
        del instance_id

    def lose(self, instance_id: str, reason: str) -> Lost | None:
        """End a worker that nobody hears of any more; None where its process is watched itself."""
        return None

    @property
    def waiting_for(self) -> str | None:
        """What the pool waits for, if for anything."""
        return None

    def cost(self) -> tuple[float | None, str | None]:
        """Dollars for the machines so far (None: not known) and what to know of the figure."""
        return None, None


class Process(Protocol):
    """What `subprocess.Popen` and an adopted process have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """End it at once."""


class Adopted:
    """A worker that an earlier controller of this fleet started: no child of ours, so its exit status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    @classmethod
    def of(cls, work: Path) -> "Adopted | None":
        """The worker that keeps its directory here, if it still runs: its command line must name it."""
        try:
            pid = int((work / "agent.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return cls(pid) if work.name.encode() in command else None

    def poll(self) -> int | None:
        """0 once it is gone."""
        if self.returncode is None and not alive(self.pid):
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(["worker"], timeout or 0)
            time.sleep(0.05)
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class NoPool(Pool):
    """No workers: for a controller that only writes a fleet's end."""

    @property
    def alive(self) -> int:
        """None runs."""
        return 0

    def start(self, count: int) -> None:
        """Nothing is launched."""

    def adopt(self) -> int:
        """There are none."""
        return 0

    def ended(self) -> list[Lost]:
        """None ends."""
        return []

    def stop(self, *, now: bool = False) -> None:
        """None runs."""


class LocalPool(Pool):
    """Agents as child processes, each in a session of its own so that Ctrl-C reaches the controller alone."""

    def __init__(
        self, root: str, fleet_id: str, lane: str, folder: Path, slots: int, environment: Mapping[str, str]
    ) -> None:
        """Args: folder: where workers keep their directories. slots: jobs at once for each. environment: the jobs' own."""
        self._root = root
        self._fleet_id = fleet_id
        self._lane = lane
        self._folder = folder
        self._slots = slots
        self._environment = dict(environment)
        self._processes: dict[str, Process] = {}
        self._ended_well: set[str] = set()

    def start(self, count: int) -> None:
        """Launch `count` more workers."""
        for _ in range(count):
            name = f"local-{secrets.token_hex(4)}"
            work = self._folder / name
            work.mkdir(parents=True)
            command = [sys.executable, "-P", "-m", "evalworker"]
            options = {
                "root": self._root,
                "fleet": self._fleet_id,
                "lane": self._lane,
                "instance": name,
                "launched": f"{time.time():.3f}",
                "work": str(work),
                "slots": str(self._slots),
            }
            command += [part for option, value in options.items() for part in (f"--{option}", value)]
            with (work / "agent.out").open("wb") as output:
                self._processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment,
                )

    def adopt(self) -> int:
        """Take over the workers of an earlier controller that still run on this machine; how many there are."""
        for work in self._folder.iterdir() if self._folder.is_dir() else ():
            if (adopted := Adopted.of(work)) is not None:
                self._processes[work.name] = adopted
            else:
                self._clean_up(work)
        return len(self._processes)

    def ended(self) -> list[Lost]:
        """Workers that have ended since the last call."""
        found = []
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[name]
            lines = [] if status == 0 else self._last_lines(name)
            reason = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
            found.append(Lost(name, "ended" if status == 0 else reason, lines))
            if status == 0:
                self._ended_well.add(name)
            else:
                self._clean_up(self._folder / name)
        self._tidy()
        return found

    def _tidy(self) -> None:
        """Remove the directories of workers that have ended well; one that notes sandboxes stays until these are gone."""
        for name in list(self._ended_well):
            if containers.nothing_noted(self._folder / name):
                self._ended_well.discard(name)
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def _clean_up(self, work: Path) -> threading.Thread | None:
        """Begin to remove the sandboxes that a dead worker's jobs have left; None if there are none to look for.

        In a thread: an engine that hangs must not hold up the fleet.
        """
        containers.inherit(work)
        if containers.nothing_noted(work):
            return None
        thread = threading.Thread(target=_clean_up_after, args=(work,), daemon=True)
        thread.start()
        return thread

    def _clean_up_all(self) -> None:
        """The same for all of them at the end, until nothing is left or it has taken too long."""
        end = time.monotonic() + SANDBOXES_S
        for work in self._folder.iterdir() if self._folder.is_dir() else ():
            while time.monotonic() < end and (cleaning := self._clean_up(work)) is not None:
                cleaning.join(max(0.1, end - time.monotonic()))
                time.sleep(0.2)

    def _last_lines(self, name: str) -> list[str]:
        lines: list[str] = []
        for file in ("worker.log", "agent.out"):
            path = self._folder / name / file
            if path.exists():
                lines += path.read_text("utf-8", "replace").splitlines()[-10:]
        return lines[-15:]

    @property
    def alive(self) -> int:
        """Workers that run or are starting."""
        return sum(1 for process in self._processes.values() if process.poll() is None)

    def stop(self, *, now: bool = False) -> None:
        """End all workers, flushing first unless `now`."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL if now else signal.SIGTERM)
        end = time.monotonic() + STOP_S
        for name, process in self._processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode == 0:
                self._ended_well.add(name)
        self._clean_up_all()
        self._tidy()
        self._processes.clear()
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()


def _clean_up_after(work: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next look comes
        containers.clean_up_after(work, Log(work / "worker.log").line)


def fleets_here() -> dict[str, int]:
    """The fleets that have a worker among this machine's processes, by the command line of `LocalPool`, each with the id of one.

    Workers of other roots and of other people are among them.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended; other words
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
            if words[words.index("-m") + 1] == "evalworker":
                found[check_run_id(words[words.index("--fleet") + 1])] = int(path.parent.name)
    return found


def default_slots(workers: int) -> int:
    """Jobs at once on each of `workers` local workers: the CPUs are shared among them."""
    return max(1, (os.cpu_count() or 1) // workers)
