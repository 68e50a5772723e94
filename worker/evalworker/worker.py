"""What all parts of one worker share: its configuration, its stores and queues, its log. Made once by the agent."""

import collections
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from evalworker import redact
from evalworker.contract.documents import Control
from evalworker.contract.messages import Hung, Warning_, fit
from evalworker.contract.wire import now
from evalworker.poster import Poster
from evalworker.process import Launcher
from evalworker.queues import Queue
from evalworker.storage import Storage
from evalworker.visibility import VisibilityKeeper


@dataclass(frozen=True)
class Config:
    """Who a worker is and what it serves.

    Attributes:
        root: `s3://bucket` or a directory.
        fleet_id, lane: the fleet it works for and the lane whose queues feed it.
        instance_id, instance_type, lifecycle: as EC2 names them, or this machine's.
        launched: when the machine (or, here, the process) was started, in seconds since the epoch.
        work: a directory of its own; what it holds may be lost.
        slots: jobs at once; None leaves it to the fleet's limits, else to the number of CPUs.
        imds: whether this is an EC2 instance, whose metadata service gives notice before it is taken back.
    """

    root: str
    fleet_id: str
    lane: str
    instance_id: str
    instance_type: str
    lifecycle: Literal["local", "spot", "on-demand", "batch"]
    launched: float
    work: Path
    slots: int | None = None
    imds: bool = False


class Log:
    """The worker's log: a file of its own, uploaded when the worker ends. Safe from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """One line with its time."""
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {redact.text(text)}\n"
        self.raw(line.encode("utf-8", "backslashreplace"))

    def raw(self, data: bytes) -> None:
        """Bytes of a job, redacted already. A full disk loses the log, not the job."""
        with self._lock:
            try:
                self._file.write(data)
            except OSError:
                return


@dataclass
class Worker:
    """The worker's parts. `control` is replaced whole at each reading of the fleet's control document.

    `path`: from where jobs import the run's code, first where they run. `environment`: what jobs have beside the agent's own
    environment: `--env` and the run's secrets. `hung`: samples that the next heartbeat names, each once; `news` makes it go at once;
    `moved`: a sample has got on since the last one.
    """

    config: Config
    storage: Storage
    jobs: Queue
    poster: Poster
    keeper: VisibilityKeeper
    launcher: Launcher
    control: Control
    path: list[str]
    log_file: Log
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    handed_over: list[str] = field(default_factory=list)
    hung: collections.deque[Hung] = field(default_factory=collections.deque)
    news: threading.Event = field(default_factory=threading.Event)
    moved: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.monotonic)

    @property
    def work(self) -> Path:
        """Where attempts keep their directories."""
        return self.config.work

    def log(self, text: str) -> None:
        """One line in the worker's log."""
        self.log_file.line(text)

    def log_raw(self, data: bytes) -> None:
        """A job's output."""
        self.log_file.raw(data)

    def log_exception(self, where: str) -> None:
        """The current exception with its traceback: a bug of ours."""
        self.log(f"{where}: {traceback.format_exc()}")

    def warn(self, text: str, job_id: str | None = None) -> None:
        """Tell the controller something that a person should know."""
        message = Warning_(
            fleet_id=self.config.fleet_id,
            instance_id=self.config.instance_id,
            ts=now(),
            text=redact.text(text)[:2000],
            job_id=job_id,
        )
        self.poster.post(fit(message))
