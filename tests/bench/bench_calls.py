"""What a worker and a controller ask of SQS and S3 while samples run: what docs/scale.md multiplies.

A fleet of two workers with the limits that hold on EC2 runs slow samples; a proxy before the emulator counts each call, by whose queue or
which object it is about. Counts do not depend on how fast the machine is.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "chaos"))

import servers
from figures import Figure
from storm import Storm, storm_environment
from tempest import make_lane

from evalworker.contract import layout
from evalworker.contract.documents import Control, Limits
from evalworker.storage import open_storage
from gateway import Verdict, gateway

WORKERS = 2
SLOTS = 2
SETTLE_S, WINDOW_S = 25.0, 60.0
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def slow(part: int = 0) -> Task:
    samples = [Sample(id=n, input=f"{n} + 1 =", target=str(n + 1)) for n in range(2000)]
    return Task(dataset=samples, solver=generate(), scorer=match())
"""
RUN = (
    *("run", "eval", *(f"sums.py@slow_{part}" for part in range(WORKERS * SLOTS)), "--model", "scripted/good"),
    *("-M", "latency=5", "--json", "--max-workers", str(WORKERS), "--slots", str(SLOTS), "--queues", "estate"),
)
PARTS = "".join(f"\n@task\ndef slow_{part}() -> Task:\n    return slow({part})\n" for part in range(WORKERS * SLOTS))


class Counting:
    """Counts calls by who makes them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.messages = 0

    def decide(self, service: str, operation: str, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """Pass everything on."""
        if service == "sqs":
            queue = json.loads(body).get("QueueUrl", "").rpartition("-")[2]
            hears = queue != "jobs" and not operation.startswith("Send")
            self.calls["controller sqs" if hears else "worker sqs"] += 1
            if operation == "SendMessageBatch":
                self.messages += len(json.loads(body)["Entries"])
        elif service == "s3":
            path = headers[":path"]
            own = "/events/" in path or ("control.json" in path and operation == "PUT") or "/lanes/" in path
            self.calls[
                f"{'controller' if own else 'worker'} s3 {'read' if operation in ('GET', 'HEAD') else 'write'}"
            ] += 1
        return None


def bench_calls() -> list[Figure]:
    """Calls a minute, of each worker and of the controller, with ten samples in flight on each worker."""
    counting, found = Counting(), Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="inspect-fleet-bench-") as folder,
        servers.ministack() as emulator,
        gateway(emulator) as gate,
    ):
        run = Storm(1, Path(folder), storm_environment(gate.endpoint, "calls"), task=TASK + PARTS, words=RUN)
        run.make_bucket()
        make_lane(run, gate)
        try:
            run.start_run()
            _as_on_ec2(run)
            time.sleep(SETTLE_S)
            gate.faults = counting
            before = _results(run)
            time.sleep(WINDOW_S)
            gate.faults = None
            samples = _results(run) - before
        finally:
            stop: Any = subprocess.run(
                run.command("fleet", "stop", run.fleet_id, "--now"), **run.in_folder(), timeout=120
            )
            run.clean()
        if stop.returncode != 0:
            raise RuntimeError(f"the fleet did not stop: {stop.stderr[-2000:]}")
    minutes = WINDOW_S / 60
    for name, count in counting.calls.items():
        found[name] = count
    note = f"{samples / WORKERS / minutes:.0f} samples a minute on each of {WORKERS} workers, {SLOTS} jobs on each"
    figures = [
        Figure(f"a worker: {what}", found[f"worker {kind}"] / WORKERS / minutes, "/min", note=note)
        for kind, what in (("sqs", "SQS calls"), ("s3 read", "S3 reads"), ("s3 write", "S3 writes"))
    ]
    figures += [
        Figure(f"the controller: {what}", found[f"controller {kind}"] / minutes, "/min", note=note)
        for kind, what in (("sqs", "SQS calls"), ("s3 read", "S3 reads"), ("s3 write", "S3 writes"))
    ]
    return [
        *figures,
        Figure("messages for a sample", counting.messages / max(1, samples), "", note="heartbeats included"),
    ]


def _as_on_ec2(run: Storm) -> None:
    """Workers and controller read this document: give it the intervals of other machines."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in run.environment.items() if name.startswith("AWS_")})
    try:
        storage = open_storage("s3://calls")
        key = layout.control(run.fleet_id)
        for _ in range(10):
            stored = storage.get(key)
            control = Control.from_json(stored.body)
            limits = Limits().model_copy(update={"slots": SLOTS})
            try:
                storage.replace(key, control.model_copy(update={"limits": limits}).to_bytes(), stored.etag)
                return
            except Exception:
                time.sleep(0.2)
        raise RuntimeError("control.json could not be changed")
    finally:
        os.environ.clear()
        os.environ.update(before)


def _results(run: Storm) -> int:
    path = run.folder / "logs/fleet" / run.fleet_id / "events.jsonl"
    return path.read_text().count('"type":"result"')
