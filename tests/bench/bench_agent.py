"""What an agent costs until it asks for its first job: every worker of a fleet pays it, on small machines too."""

import http.server
import json
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

from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import now
from evalworker.storage import open_storage

ROUNDS = 7
PATIENCE_S = 120.0


class _Queues(http.server.ThreadingHTTPServer):
    """Takes all messages, gives none, and notes that the first receive has come."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked = threading.Event()
        self.answer = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Queues

    def do_POST(self) -> None:
        """One call of SQS's JSON protocol."""
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["X-Amz-Target"].endswith("ReceiveMessage"):
            self.server.asked.set()
            self.server.answer.wait(PATIENCE_S)
        entries = [{"Id": entry["Id"], "MessageId": entry["Id"]} for entry in given.get("Entries", [])]
        body = json.dumps({"Successful": entries, "Failed": []} if entries else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


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
