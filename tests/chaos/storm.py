"""A run of six jobs and 200 samples that is killed again and again, and what must hold afterwards.

Real processes throughout: the CLI's controller, agents, fork servers and jobs, SQS on loopback and an S3 root. `python tests/chaos/storm.py
SEEDS` runs many seeds; `test_storm.py` runs a few.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from evalworker.processes import alive, children

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate


def _sums(first: int, count: int) -> Task:
    samples = [Sample(id=n, input=f"{n} + 1 =", target=str(n + 1)) for n in range(first, first + count)]
    return Task(dataset=samples, solver=generate(), scorer=match())


@task
def ones() -> Task:
    return _sums(0, 34)


@task
def hundreds() -> Task:
    return _sums(100, 33)


@task
def thousands() -> Task:
    return _sums(1000, 33)
"""

SAMPLES = 200
JOBS = 6
RUN = (
    *("run", "eval", "sums.py", "--model", "scripted/good", "--model", "scripted/mixed", "-M", "latency=1", "--json"),
    *("--max-workers", "2", "--concurrency-per-worker", "5", "--log-shared", "1"),
)
ALLOWED_S = 8.0
"""How long before a kill a sample may have ended and still be run again: `--log-shared`, the agent's look, the upload, a busy machine."""

VICTIMS = ("job", "server", "agent", "controller", "all")
FINISH_S = 240.0


class Broken(AssertionError):
    """Something that must hold did not; the text says what."""


def check(condition: object, text: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(text)


@dataclass
class Storm:
    """One seed: the processes, what was killed when, and the run's directory."""

    seed: int
    folder: Path
    environment: dict[str, str]
    kills: int = 6
    task: str = TASK
    words: tuple[str, ...] = RUN
    samples: int = SAMPLES
    jobs: int = JOBS
    controller: subprocess.Popen[bytes] | None = None
    fleet_id: str = ""
    killed: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._any_time = False
        self.random = random.Random(self.seed)
        (self.folder / "sums.py").write_text(self.task)

    # Driving

    def run(self) -> None:
        """Start, kill, attach until it ends, and check."""
        self.start_run()
        try:
            for _ in range(self.kills):
                time.sleep(self.random.uniform(0.5, 3.0))
                if self._ended():
                    break
                self._kill(self.random.choice(VICTIMS))
            end = time.monotonic() + FINISH_S
            while not self._ended():
                check(time.monotonic() < end, f"the fleet did not end within {FINISH_S} s:\n{self.tail()}")
                self._revive()
                time.sleep(0.2)
            self.verify()
        finally:
            self.clean()

    def start_run(self, *more: str) -> None:
        """Submit the run; returns when it has started."""
        self._start([*self.words, *more])

    def command(self, *words: str) -> list[str]:
        """A command line of `ct`."""
        return [sys.executable, "-P", "-m", "evalops", "ct", *words]

    def in_folder(self, *, capture: bool = True) -> dict[str, Any]:
        """How commands beside the controller are started."""
        common: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL}
        if capture:
            return common | {"capture_output": True, "text": True}
        return common | {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}

    def make_bucket(self) -> None:
        """The run's root."""
        self._s3().create_bucket(Bucket=self.environment["S3_BUCKET_NAME"])

    def _start(self, words: list[str]) -> None:
        log = (self.folder / "controller.log").open("ab")
        self.controller = subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert self.controller.stdout is not None
        first = self.controller.stdout.readline()
        check(first, f"the controller did not start: {self.tail()}")
        self.fleet_id = json.loads(first)["fleet_id"]

    def _ended(self) -> bool:
        assert self.controller is not None
        return self.controller.poll() == 0

    def _revive(self) -> None:
        """Attach a new controller when the last one was killed."""
        assert self.controller is not None
        status = self.controller.poll()
        if status is None or status == 0:
            return
        check(status == -signal.SIGKILL, f"the controller ended with {status}:\n{self.tail()}")
        self._start(["fleet", "attach", self.fleet_id, "--json"])

    def _kill(self, what: str) -> None:
        victims = self._victims(what)
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.killed.append((time.time(), what))
        if what in ("controller", "all"):
            assert self.controller is not None
            self.controller.wait()
            self._revive()

    def _victims(self, what: str) -> list[int]:
        assert self.controller is not None
        agents = list(self.agents())
        servers = [child for agent in agents for child in children(agent) if _is_server(child)]
        jobs = [child for server in servers for child in children(server)]
        if what == "controller":
            return [self.controller.pid]
        if what == "all":
            return [self.controller.pid, *agents, *servers, *jobs]
        pool = {"job": jobs, "server": servers, "agent": agents}[what]
        return [self.random.choice(sorted(pool))] if pool else []

    def agents(self) -> Iterator[int]:
        """The living agents' process ids."""
        for path in self.folder.glob(f"logs/fleet/{self.fleet_id}/work/*/agent.pid"):
            pid = int(path.read_text() or 0)
            if pid and alive(pid) and self.fleet_id in _command(pid):
                yield pid

    # Checking

    def verify(self, *, redone_any_time: bool = False) -> None:
        """All that must hold after the end. `redone_any_time`: samples may have been run twice without a kill close by."""
        self._any_time = redone_any_time
        events = [json.loads(line) for line in self._live().splitlines()]
        check([event["seq"] for event in events] == list(range(1, len(events) + 1)), "the sequence has gaps")
        check(self._live() == self._stored(), "events.jsonl differs from its segments")
        summary = events[-1]
        check(summary["type"] == "fleet_summary" and summary["outcome"] == "complete", f"the summary says {summary}")
        check(
            summary["samples"] == {"total": self.samples, "completed": self.samples, "errored": 0},
            f"samples: {summary['samples']}",
        )
        done = [event for event in events if event["type"] == "job_done"]
        check(len(done) == self.jobs == len({event["job_id"] for event in done}), f"{len(done)} job_done events")
        self._verify_results(events)
        self._verify_left_over()

    def _verify_results(self, events: list[dict[str, Any]]) -> None:
        standing: dict[tuple[str, Any, int], dict[str, Any]] = {}
        redone = 0
        for event in events:
            if event["type"] != "result":
                continue
            key = (event["job_id"], event["sample_id"], event["epoch"])
            if key in standing:
                check(event.get("replaces") == standing[key]["uuid"], f"a second result of {key} that replaces nothing")
                self._verify_redone(standing[key], event)
                redone += 1
            standing[key] = event
        check(len(standing) == self.samples, f"{len(standing)} of {self.samples} samples have a result")
        reported = sum(event["redone"] for event in events if event["type"] == "job_attempt")
        check(reported == redone, f"{redone} samples were redone and {reported} reported")
        self._verify_logs(standing)

    def _verify_redone(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        """A sample is run again only if it ended shortly before a kill: older ones were in a partial log."""
        from datetime import datetime

        if self._any_time:
            return
        ended = datetime.fromisoformat(first["ts"]).timestamp()
        later = [moment - ended for moment, _ in self.killed if moment >= ended - 2]
        check(
            later and min(later) < ALLOWED_S,
            f"sample {first['sample_id']} was redone, {later and min(later)} s before a kill",
        )

    def _verify_logs(self, standing: dict[tuple[str, Any, int], dict[str, Any]]) -> None:
        from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries

        folder = self.folder / "downloaded"
        store = self._s3()
        bucket = self.environment["S3_BUCKET_NAME"]
        prefix = f"logs/working/{self.fleet_id}/"
        names = [item["Key"] for item in store.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]
        check(len(names) == self.jobs, f"{len(names)} logs under {prefix}")
        folder.mkdir()
        for name in names:
            store.download_file(bucket, name, str(folder / name.rsplit("/", 1)[-1]))
        uuids = {event["uuid"] for event in standing.values()}
        logged: set[str | None] = set()
        for info in list_eval_logs(str(folder)):
            check(read_eval_log(info.name, header_only=True).status == "success", f"{info.name} is no success")
            logged |= {summary.uuid for summary in read_eval_log_sample_summaries(info.name)}
        check(uuids == logged, "the stream's last results are not the logs' samples")

    def _verify_left_over(self) -> None:
        end = time.monotonic() + 30
        while left := [
            pid for pid in _all_processes() if self.fleet_id in _command(pid) or str(self.folder) in _cwd(pid)
        ]:
            check(time.monotonic() < end, f"left running: {[_command(pid) for pid in left]}")
            time.sleep(0.2)

    def _live(self) -> str:
        return (self.folder / "logs/fleet" / self.fleet_id / "events.jsonl").read_text()

    def _stored(self) -> str:
        return self._segments(self.fleet_id)

    def stored_events(self, fleet_id: str) -> list[dict[str, Any]]:
        """A fleet's events as its segments hold them."""
        return [json.loads(line) for line in self._segments(fleet_id).splitlines()]

    def _segments(self, fleet_id: str) -> str:
        store, bucket = self._s3(), self.environment["S3_BUCKET_NAME"]
        pages = store.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{fleet_id}/events/")
        keys = sorted(item["Key"] for page in pages for item in page.get("Contents", []))
        return "".join(store.get_object(Bucket=bucket, Key=key)["Body"].read().decode() for key in keys)

    def _s3(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def tail(self) -> str:
        """The end of what the controllers said, and of the stream."""
        said = (self.folder / "controller.log").read_text()[-3000:]
        path = self.folder / "logs/fleet" / self.fleet_id / "events.jsonl"
        lines = path.read_text().splitlines()[-5:] if self.fleet_id and path.exists() else []
        return "\n".join([f"killed: {self.killed}", said, *(line[:300] for line in lines)])

    def clean(self) -> None:
        """Leave nothing running, whatever happened."""
        if self.controller is not None and self.controller.poll() is None:
            self.controller.kill()
            self.controller.wait()
        for pid in _all_processes():
            if self.fleet_id and (self.fleet_id in _command(pid) or str(self.folder) in _cwd(pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _cwd(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def _is_server(pid: int) -> bool:
    return "multiprocessing.forkserver" in _command(pid)


def _all_processes() -> list[int]:
    mine = os.getpid()
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != mine]


def storm_environment(endpoint: str, bucket: str) -> dict[str, str]:
    """The environment of a run with its root in an emulator's S3."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "INSPECT_", "S3_"))}
    return kept | {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "S3_BUCKET_NAME": bucket,
    }


@contextmanager
def storm(seed: int, endpoint: str, folder: Path) -> Iterator[Storm]:
    """A storm with a bucket of its own."""
    made = Storm(seed, folder, storm_environment(endpoint, f"chaos-{seed}"))
    made.make_bucket()
    yield made


def play(
    name: str, seeds: range, make: Callable[[int, Path], AbstractContextManager[Any]], tell: Callable[[Any], str]
) -> int:
    """Run seeds one after the other, with a line about each; the number of those that broke.

    `make` prepares one in a folder of its own, `tell` says what it has met.
    """
    broken = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix=f"{name}-{seed}-") as folder, make(seed, Path(folder)) as made:
            started, said = time.monotonic(), "held"
            try:
                made.run()
            except Broken as error:
                broken += 1
                said = f"BROKEN: {error}"
            print(f"seed {seed}: {said} after {time.monotonic() - started:.0f} s, {tell(made)}", flush=True)
    return broken


def main(seeds: int, first: int = 1) -> int:
    """Play seeds on one emulator; the number of those that broke."""
    from servers import ministack

    with ministack() as endpoint:
        return play(
            "storm",
            range(first, first + seeds),
            lambda seed, folder: storm(seed, endpoint, folder),
            lambda made: f"killed {[what for _, what in made.killed]}",
        )


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), *(int(word) for word in sys.argv[2:]))))
