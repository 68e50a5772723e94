"""What an agent costs until it asks for its first job: every worker of a fleet pays it, on small machines too."""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import measure
from bench_fleet import MODEL, environment
from figures import Figure
from sqs_stub import Sqs

from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import now
from evalworker.storage import open_storage

ROUNDS = 7
PATIENCE_S = 120.0


class _Queues(Sqs):
    """Takes all messages, gives none, and notes that the first receive has come."""

    def __init__(self) -> None:
        super().__init__(self._nothing)
        self.asked = threading.Event()
        self.answer = threading.Event()

    def _nothing(self) -> bytes:
        self.asked.set()
        self.answer.wait(PATIENCE_S)
        return b"{}"


def _fleet(root: Path, endpoint: str) -> tuple[str, str]:
    """The documents of a fleet of one job; returns its id and its lane's name."""
    storage, fleet_id, moment = open_storage(str(root)), new_run_id(), now()
    job = JobSpec(job_id="0" * 16, task="none.py@none", name="none", model=MODEL, samples=1)
    manifest = Manifest(
        fleet_id=fleet_id,
        created=moment,
        backend="local",
        jobs=[job],
        arguments={},
        models=[MODEL],
        submit_dir=".",
        code_root=str(root),
    )
    control = Control(
        fleet_id=fleet_id,
        round=1,
        state="running",
        deadline=moment + timedelta(hours=1),
        beat=moment,
        controller="none",
    )
    urls = {name: f"{endpoint}/000000000000/{name}" for name in ("jobs", "events", "dead")}
    lane = Lane(name="bench", endpoint=endpoint, fleet_id=fleet_id, **urls)
    storage.create(layout.manifest(fleet_id), manifest.to_bytes())
    storage.create(layout.control(fleet_id), control.to_bytes())
    storage.put(layout.lane(lane.name), lane.to_bytes())
    return fleet_id, lane.name


@contextmanager
def _queues() -> Iterator[_Queues]:
    server = _Queues()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.answer.set()
        server.shutdown()
        server.server_close()


def _start_once() -> measure.Spent:
    """Start an agent: what it has used itself when it asks for a job, without the server that it starts for its jobs."""
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-bench-") as folder, _queues() as server:
        root = Path(folder)
        fleet_id, lane = _fleet(root, server.url)
        options = {"root": folder, "fleet": fleet_id, "lane": lane, "instance": "bench", "work": str(root / "work")}
        words = [part for name, value in options.items() for part in (f"--{name}", value)]
        started = time.monotonic()
        with (root / "agent.out").open("wb") as output:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "evalworker", *words],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not server.asked.wait(0.2):
                if agent.poll() is not None or time.monotonic() - started > PATIENCE_S:
                    raise RuntimeError(f"the agent did not start: {(root / 'agent.out').read_text()[-2000:]}")
            return measure.Spent(time.monotonic() - started, measure.process_cpu(agent.pid))
        finally:
            server.answer.set()
            agent.terminate()
            agent.wait()


def bench_agent_start() -> list[Figure]:
    """From the start of the agent's process to its first receive."""
    taken = [_start_once() for _ in range(ROUNDS)]
    note = f"median of {ROUNDS}"
    cpu, wall = (statistics.median(values) for values in zip(*((one.cpu_s, one.wall_s) for one in taken), strict=True))
    return [
        Figure("agent start to its first receive", cpu, "CPU s", bound=0.5, note=note),
        Figure("agent start to its first receive, time", wall, "s", note=note),
    ]
