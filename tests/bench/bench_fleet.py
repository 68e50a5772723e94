"""What a fleet costs beside plain Inspect: the same trivial tasks on a local one-worker fleet and in plain processes.

A fleet's own start (planning, queues, the workers' imports) is counted apart: figures begin where the worker is warm. CPU is that of
controller, agent, fork server and jobs together; the queue server, which is AWS elsewhere, is counted apart too.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import fleet_tasks
import measure
from figures import Figure

from evalworker.processes import kill_tree

PATIENCE_S = 600.0
"""Before a fleet that does not end counts as hanging."""

GONE_S = 15.0
"""For what a fleet has started to end after it."""

LOOK_S = 0.01
"""Between two looks at a running fleet."""

MODEL = "scripted/good"
PLAIN = ["--display", "none", "--model", MODEL]
SAME_LOGS = ["--log-shared", "60", "--continue-on-fail", "--no-retry-cleanup", "--ctl-server", "false"]
"""Plain `inspect eval-set` as the jobs of a fleet run it."""

INSPECT = [sys.executable, "-m", "inspect_ai"]

Event = dict[str, Any]
Cpu = dict[str, float]


@dataclass
class Fleet:
    """What was seen of one fleet.

    Attributes:
        events: its stream.
        warm_at: when its worker was ready for its first job, seconds since the epoch; `warm` the CPU spent by then, by role.
        done: the CPU spent when the n-th job had ended.
        start_s: from the command to the warm worker.
    """

    folder: Path
    events: list[Event] = field(default_factory=list)
    warm_at: float = 0.0
    warm: Cpu = field(default_factory=dict)
    done: list[Cpu] = field(default_factory=list)
    start_s: float = 0.0

    def of(self, type_: str) -> list[Event]:
        """The events of a type, in order."""
        return [event for event in self.events if event["type"] == type_]

    @property
    def ends(self) -> list[float]:
        """When the jobs ended, as their `job_done` lines say."""
        return [seconds_of(event["ts"]) for event in self.of("job_done")]


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory to run in."""
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-bench-") as folder:
        try:
            yield Path(folder)
        finally:
            _wait_until_gone(folder)


def _wait_until_gone(folder: str) -> None:
    """The queue server's guard reads in this directory that its fleet has ended; whoever has not noticed after a while is ended."""
    end = time.monotonic() + GONE_S
    while left := measure.naming(folder):
        if time.monotonic() > end:
            for pid in left:
                kill_tree(pid)
            return
        time.sleep(0.1)


def environment() -> dict[str, str]:
    """The environment of both sides: nothing of the user's AWS or Inspect settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "INSPECT_", "S3_"))}
    return kept | {"AWS_EC2_METADATA_DISABLED": "true"}


def seconds_of(text: str) -> float:
    """A time of a log or an event, in seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def role_of(command: bytes, parent: str) -> str | None:
    """Which part of a fleet a process is, by its command line and its parent's part."""
    if b"embedded_guard" in command or parent == "queues":
        return "queues"
    return "worker" if parent == "worker" or b"evalworker" in command else parent


def run_fleet(folder: Path, *words: str) -> Fleet:
    """Run `ct run eval` with one worker to its end and look at it from outside; raises RuntimeError unless all is well."""
    fleet = Fleet(folder)
    started = time.time()
    command = [sys.executable, "-m", "evalops", "ct", "run", "eval", *words, "--max-workers", "1"]
    with (folder / "fleet.out").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        for _ in _until_ended(process):
            _look(fleet, process.pid)
    finally:
        process.kill()
        process.wait()
    fleet.start_s = fleet.warm_at - started
    if process.returncode != 0 or not fleet.done or not fleet.warm_at:
        raise RuntimeError(f"the fleet ended with {process.returncode}: {(folder / 'fleet.out').read_text()[-3000:]}")
    return fleet


def _until_ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        yield
        time.sleep(LOOK_S)
    yield


def _look(fleet: Fleet, pid: int) -> None:
    """Take over new events; note the CPU when the worker is warm and whenever jobs have ended."""
    if not fleet.warm_at:
        for report in fleet.folder.glob("logs/fleet/*/work/*/preload.json"):
            fleet.warm = measure.tree_cpu(role_of, pid, "controller")
            fleet.warm_at = report.stat().st_mtime
    for path in fleet.folder.glob("logs/fleet/*/events.jsonl"):
        lines = path.read_bytes().split(b"\n")[len(fleet.events) : -1]
        fleet.events += [json.loads(line) for line in lines]
        ended = len(fleet.of("job_done")) if lines else len(fleet.done)
        if ended > len(fleet.done):
            cpu = measure.tree_cpu(role_of, pid, "controller")
            fleet.done += [cpu] * (ended - len(fleet.done))


def own_cpu(later: Cpu, earlier: Cpu) -> float:
    """CPU of controller and worker, jobs included, between two looks."""
    return sum(later[role] - earlier.get(role, 0.0) for role in ("controller", "worker"))


def apart(what: str, fleet: Fleet, later: Cpu, earlier: Cpu) -> list[Figure]:
    """What is counted apart, for information."""
    queues = later.get("queues", 0.0) - earlier.get("queues", 0.0)
    parts = ", ".join(f"{role} {later[role] - earlier.get(role, 0.0):.2f}" for role in ("controller", "worker"))
    return [
        Figure(f"{what}: the queue server's CPU", queues, "CPU s", note=f"CPU s of the others: {parts}"),
        Figure(f"{what}: the fleet's start", fleet.start_s, "s", note="until the worker was warm"),
        Figure(f"{what}: CPU of the fleet's start", own_cpu(fleet.warm, {}), "CPU s"),
    ]


def sample_ends(fleet: Fleet) -> dict[str, float]:
    """When each sample ended, by uuid, as the published logs say."""
    from inspect_ai.log import read_eval_log_sample_summaries

    found: dict[str, float] = {}
    for path in fleet.folder.glob("logs/working/*/*.eval"):
        for summary in read_eval_log_sample_summaries(str(path)):
            assert summary.uuid is not None
            assert summary.completed_at is not None
            found[summary.uuid] = seconds_of(str(summary.completed_at))
    return found


def job_end_delays(fleet: Fleet) -> list[float]:
    """Seconds from the end of each job's last sample to its `job_done` line: Inspect's own end of the eval is in it."""
    ends = sample_ends(fleet)
    last: dict[str, float] = {}
    for event in fleet.of("result"):
        last[event["job_id"]] = max(last.get(event["job_id"], 0.0), ends[event["uuid"]])
    return [seconds_of(event["ts"]) - last[event["job_id"]] for event in fleet.of("job_done")]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def one_sample_tasks(folder: Path, count: int) -> list[str]:
    """A file of `count` tasks of one sample: the specs of its tasks."""
    names = [f"one_{number:02d}" for number in range(count)]
    file = fleet_tasks.write(folder, "one_sample", dict.fromkeys(names, 1))
    return [f"{file}@{name}" for name in names]


def cold_eval(spec: str) -> list[str]:
    """One plain `inspect eval` process."""
    return [*INSPECT, "eval", spec, *PLAIN]


def bench_one_job() -> list[Figure]:
    """One job after the other in a warm worker, against a cold process for each."""
    with scratch() as folder:
        specs = one_sample_tasks(folder, 15)
        cold = [measure.command(cold_eval(spec), folder, environment()).wall_s for spec in specs[:3]]
        fleet = run_fleet(folder, specs[0].partition("@")[0], "--model", MODEL, "--slots", "1")
        cold += [measure.command(cold_eval(spec), folder, environment()).wall_s for spec in specs[3:6]]
        gaps = [later - earlier for earlier, later in zip(fleet.ends, fleet.ends[1:], strict=False)]
        return [
            Figure(
                "one job of one sample, receive to posted end",
                statistics.median(gaps),
                "s",
                bound=0.2,
                baseline=statistics.median(cold),
                against="a cold `inspect eval` process",
                note="median time between two job_done lines of a worker with one slot",
            ),
            Figure(
                "job end to its job_done line, one slot",
                statistics.median(job_end_delays(fleet)),
                "s",
                bound=0.5,
                note="median, from the end of the job's last sample",
            ),
        ]


def bench_forty_jobs() -> list[Figure]:
    """Forty jobs on four slots, against forty cold processes four at a time."""
    with scratch() as folder:
        specs = one_sample_tasks(folder, 40)
        words = ["--model", MODEL, "--slots", "4", "--concurrency-per-worker", "4"]
        fleet = run_fleet(folder, specs[0].partition("@")[0], *words)
        cold = measure.commands([cold_eval(spec) for spec in specs], folder, environment(), at_once=4)
        return [
            Figure(
                "forty jobs of one sample, CPU",
                own_cpu(fleet.done[-1], fleet.warm),
                "CPU s",
                bound=0.2,
                baseline=cold.cpu_s,
                against="forty cold `inspect eval` processes, four at a time",
            ),
            Figure(
                "forty jobs of one sample, time",
                fleet.ends[-1] - fleet.warm_at,
                "s",
                baseline=cold.wall_s,
                against="the same",
            ),
            Figure(
                "job end to its job_done line, four slots",
                statistics.median(job_end_delays(fleet)),
                "s",
                bound=0.5,
                note="median, from the end of the job's last sample",
            ),
            *apart("forty jobs", fleet, fleet.done[-1], fleet.warm),
        ]


def bench_thousand_samples() -> list[Figure]:
    """One task of 1,000 samples on a worker that has done a job before, against plain `inspect eval-set`."""
    with scratch() as folder:
        file = fleet_tasks.write(folder, "many", {"first": 1, "many": 1000})
        plain = [*INSPECT, "eval-set", f"{file}@many", *PLAIN, *SAME_LOGS, "--max-samples", "10"]
        before = measure.command([*plain, "--log-dir", "plain-1"], folder, environment())
        fleet = run_fleet(folder, f"{file}@first", f"{file}@many", "--model", MODEL, "--slots", "1")
        after = measure.command([*plain, "--log-dir", "plain-2"], folder, environment())
        one = measure.command(
            [*INSPECT, "eval-set", f"{file}@first", *PLAIN, *SAME_LOGS, "--log-dir", "plain-3"], folder, environment()
        )
        order = [event["task"] for event in fleet.of("job_done")]
        if order != ["first", "many"]:
            raise RuntimeError("the queue gave the long job first: run it again")
        wall, cpu = fleet.ends[1] - fleet.ends[0], own_cpu(fleet.done[1], fleet.done[0])
        plain_wall, plain_cpu = (before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2
        against = "an `inspect eval-set` process with the same log settings, its start included"
        warm = "the same without its start (what an eval-set of one sample takes)"
        return [
            Figure("1,000 samples, time", wall, "s", 1.10, plain_wall, against),
            Figure("1,000 samples, CPU", cpu, "CPU s", 1.15, plain_cpu, against),
            Figure("1,000 samples, time", wall, "s", None, plain_wall - one.wall_s, warm),
            Figure("1,000 samples, CPU", cpu, "CPU s", None, plain_cpu - one.cpu_s, warm),
            *apart("1,000 samples", fleet, fleet.done[1], fleet.done[0]),
        ]


def bench_sample_latency() -> list[Figure]:
    """How long after its end a sample's line stands in events.jsonl, while samples end at 50 a second."""
    with scratch() as folder:
        file = fleet_tasks.write(folder, "many", {"many": 1000})
        pace = ["-M", "latency=0.15", "-M", "jitter=0.5"]
        fleet = run_fleet(folder, file, "--model", MODEL, *pace, "--slots", "1")
        ends = sample_ends(fleet)
        results = fleet.of("result")
        delays = [seconds_of(event["ts"]) - ends[event["uuid"]] for event in results]
        rate = (len(ends) - 1) / (max(ends.values()) - min(ends.values()))
        note = f"{len(delays)} samples, {rate:.0f} a second"
        return [
            Figure("sample end to its line, median", statistics.median(delays), "s", bound=0.1, note=note),
            Figure("sample end to its line, 99th percentile", percentile(delays, 0.99), "s", bound=0.5, note=note),
            Figure("sample end to its line, worst", max(delays), "s", note=note),
            Figure("samples a second while it was measured", rate, "/s", note="50 are meant"),
            Figure("job end to its job_done line, 1,000 samples", job_end_delays(fleet)[0], "s"),
        ]
