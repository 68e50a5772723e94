"""Runs whole fleets through the real command line, in a directory of the test's own, and checks what holds for every fleet.

Called by the fleet tests. A fleet costs seconds, so a test module runs few of them and asks each many questions.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries

from evalworker.contract.events import TYPES
from evalworker.contract.ids import sample_key
from evalworker.processes import kill_tree

REPOSITORY = Path(__file__).parents[2]
MARK = "INSPECT_FLEET_TEST"
"""Environment variable that every process of a test's fleet inherits: the test's directory."""

PATIENCE_S = 300.0
"""Before a fleet that does not end counts as hanging."""

_FOREIGN = ("AWS_", "INSPECT_", "OPENAI_", "ANTHROPIC_", "S3_BUCKET_NAME")

Event = dict[str, Any]
Process = subprocess.Popen[str] | warm.Forked


@dataclass
class Fleet:
    """A fleet that has ended, or what became of a command that started none."""

    folder: Path
    code: int
    out: str
    err: str
    root: Path
    events: list[Event] = field(default_factory=list)

    @property
    def fleet_id(self) -> str:
        """The fleet's id."""
        return str(self.events[0]["fleet_id"])

    @property
    def path(self) -> Path:
        """Its live files."""
        return self.folder / "logs" / "fleet" / self.fleet_id

    @property
    def live(self) -> Path:
        """Its `events.jsonl`."""
        return self.path / "events.jsonl"

    @property
    def working(self) -> list[Path]:
        """The published logs of a local root."""
        return sorted((self.folder / "logs" / "working" / self.fleet_id).glob("*.eval"))

    def of(self, type_: str, **fields: Any) -> list[Event]:
        """The events of a type with these values."""
        return [
            event
            for event in self.events
            if event["type"] == type_ and all(event.get(name) == value for name, value in fields.items())
        ]

    def done(self, task: str, model: str | None = None) -> Event:
        """The last `job_done` of a task's job."""
        fields = {"task": task} | ({"model": model} if model else {})
        return self.of("job_done", **fields)[-1]

    def results(self, job_id: str) -> dict[tuple[str, int], Event]:
        """The final result of each sample of a job: a result that replaces another takes its place."""
        return final_results(self.of("result", job_id=job_id))

    @property
    def summary(self) -> Event:
        """The last line."""
        return self.events[-1]

    def storage_file(self, key: str) -> Path:
        """Where a key lies on a local root."""
        return self.folder / (key if key.startswith("logs/") else f"logs/fleet/{key}")


def final_results(results: list[Event]) -> dict[tuple[str, int], Event]:
    """One result per (sample, epoch); fails where a second one does not name what it replaces."""
    found: dict[tuple[str, int], Event] = {}
    for event in results:
        key = sample_key(event["sample_id"], event["epoch"])
        if key in found:
            assert event.get("replaces") == (found[key]["uuid"] or ""), (found[key], event)
        else:
            assert "replaces" not in event, event
        found[key] = event
    return found


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a command runs with: nothing of the machine's AWS, Inspect or provider settings, and the mark."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {MARK: str(folder), "AWS_EC2_METADATA_DISABLED": "true"} | more


def python_path(*folders: Path) -> str:
    """The value of PYTHONPATH that puts these directories before what stands there."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def prepare(folder: Path) -> Path:
    """A directory to run in, with the examples and the tasks that go wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (REPOSITORY / "examples", REPOSITORY / "tests" / "tasks"):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder


def command(*arguments: str) -> list[str]:
    """`ct run eval …` as a process of this interpreter."""
    return [sys.executable, "-m", "evalops", "ct", "run", "eval", *arguments]


def run(folder: Path, *arguments: str, wrapper: tuple[str, ...] = (), **more: str) -> Fleet:
    """Run `ct run eval` to its end. `wrapper` are words before the command, `more` environment variables."""
    with started(folder, *arguments, wrapper=wrapper, **more) as (process, _):
        out, err = process.communicate(timeout=PATIENCE_S)
    return ended(folder, process.returncode, out, err)


@contextmanager
def started(
    folder: Path, *arguments: str, wrapper: tuple[str, ...] = (), **more: str
) -> Iterator[tuple["Process", "Watcher"]]:
    """`ct run eval` as it runs; whatever is left of it is ended with the block."""
    before = set(_live_files(folder))
    process = _start(folder, arguments, wrapper, environment(folder, **more))
    try:
        yield process, Watcher(folder, before, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            for left in left_running(folder):
                kill_tree(left)


def _start(
    folder: Path, arguments: tuple[str, ...], wrapper: tuple[str, ...], surroundings: dict[str, str]
) -> "Process":
    """A fork of a process that has imported the command, unless something is to happen as Python starts."""
    if not wrapper and warm.fits(surroundings):
        return warm.start(["ct", "run", "eval", *arguments], folder, surroundings)
    return subprocess.Popen(
        [*wrapper, *command(*arguments)],
        cwd=folder,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def call(folder: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Any command of `ct` or `ies`, which is the first word, to its end. `more`: environment variables."""
    process = warm.start([*words], folder, environment(folder, **more))
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess([*words], process.wait(), out, err)


def ended(folder: Path, code: int, out: str, err: str) -> Fleet:
    """What is left of a run, with the events of its newest fleet."""
    fleet = Fleet(folder, code, out, err, folder)
    if files := _live_files(folder):
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        fleet.events = [json.loads(text) for text in newest.read_text("ascii").splitlines()]
    return fleet


def _live_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("logs/fleet/*/events.jsonl"))


@dataclass
class Watcher:
    """Follows a running fleet's `events.jsonl`, as a person with `tail -f` would."""

    folder: Path
    before: set[Path]
    process: Process

    def events(self) -> list[Event]:
        """All whole lines so far."""
        files = set(_live_files(self.folder)) - self.before or set(_live_files(self.folder))
        if not files:
            return []
        text = max(files, key=lambda path: path.stat().st_mtime_ns).read_text("ascii")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, wanted: Callable[[list[Event]], Any]) -> Any:
        """What `wanted` says of the events as soon as it says anything; fails when the fleet ends or hangs before."""
        end = time.monotonic() + PATIENCE_S
        while not (found := wanted(self.events())):
            if self.process.poll() is not None:
                found = wanted(self.events())
                assert found, f"the fleet ended before: {self.process.communicate()}"
                return found
            assert time.monotonic() < end, "the fleet hangs"
            time.sleep(0.05)
        return found

    @property
    def work(self) -> Path:
        """Where the workers keep their directories."""
        (found,) = self.folder.glob("logs/fleet/*/work")
        return found

    def agents(self) -> dict[str, int]:
        """The living agents' process ids by name."""
        pids = {path.parent.name: int(path.read_text()) for path in self.work.glob("*/agent.pid")}
        return {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}


def job_processes(agent: int) -> dict[str, int]:
    """The job processes below an agent by job id: they say it of themselves in their environment's place, the session."""
    return {str(pid): pid for pid in _descendants(agent) if os.getsid(pid) == pid and pid != agent}


def fork_server(agent: int) -> int:
    """The process id of an agent's fork server."""
    (found,) = (
        pid
        for pid in _descendants(agent)
        if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.getsid(pid) == os.getsid(agent)
    )
    return found


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def left_running(folder: Path) -> list[int]:
    """Processes that were started for this directory: by the mark in their environment, or by their arguments."""
    mark, name = f"{MARK}={folder}".encode(), str(folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            named = name in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if state not in "ZX" and (marked or named):
            found.append(int(entry.name))
    return found


# What holds for every fleet


def check(fleet: Fleet, *, stored: Mapping[str, bytes] | None = None) -> None:
    """The rules of design section 5 that hold however a fleet ended. `stored`: its segments, where the root is a bucket."""
    assert fleet.events, f"no fleet: {fleet.out}{fleet.err}"
    _check_lines(fleet)
    _check_jobs(fleet)
    _check_segments(fleet, stored)
    wait_until_gone(fleet.folder)
    assert not any(line.startswith("Traceback (") for line in fleet.err.splitlines()), fleet.err


def wait_until_gone(folder: Path) -> None:
    """Nothing of a fleet that has ended is left running: the queues' guard notices the end by itself, which takes a moment."""
    end = time.monotonic() + 30
    while left := left_running(folder):
        shown = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()}
        assert time.monotonic() < end, f"left running: {shown}"
        time.sleep(0.1)


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def _check_lines(fleet: Fleet) -> None:
    text = fleet.live.read_text("ascii")
    assert text.endswith("\n")
    lines = [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
    assert [event["seq"] for event in lines] == list(range(1, len(lines) + 1))
    assert {event["fleet_id"] for event in lines} == {fleet.fleet_id}
    assert {event["type"] for event in lines} <= set(TYPES)
    assert [event["type"] for event in lines].count("fleet_start") == [event["type"] for event in lines].count(
        "fleet_summary"
    )
    assert (lines[0]["type"], lines[-1]["type"]) == ("fleet_start", "fleet_summary")
    times = [event["ts"] for event in lines]
    assert times == sorted(times)


def _check_jobs(fleet: Fleet) -> None:
    """Each job ends once a round, nothing of it comes after, and the counts are those of the logs."""
    ends = {event["job_id"]: event for event in fleet.of("job_done")}
    assert len(ends) == fleet.summary["expected"]
    for job_id, end in ends.items():
        rounds = [event["round"] for event in fleet.of("job_done", job_id=job_id)]
        assert rounds == sorted(set(rounds)), job_id
        own = [event for event in fleet.events if event.get("job_id") == job_id and event["type"] != "warning"]
        assert own[-1] == end
        final = fleet.results(job_id)
        uuids = [event["uuid"] for event in fleet.of("result", job_id=job_id)]
        assert len(uuids) == len(set(uuids))
        _check_log(fleet, end, final)
    statuses = [end["status"] for end in ends.values()]
    shown = [fleet.summary["completed"], fleet.summary["failed"], fleet.summary["cancelled"]]
    assert shown == [statuses.count(status) for status in ("completed", "failed", "cancelled")]
    for name, count in fleet.summary["samples"].items():
        assert count == sum(end["samples"][name] for end in ends.values() if "merged" not in end), name


def _check_log(fleet: Fleet, end: Event, final: dict[tuple[str, int], Event]) -> None:
    if end["log"] is None:
        return
    path = fleet.storage_file(end["log"])
    if not path.exists():  # the root is a bucket: its own test reads the logs
        return
    summaries = read_eval_log_sample_summaries(str(path))
    errored = [summary for summary in summaries if summary.error is not None]
    completed = [summary for summary in summaries if summary.completed and summary.error is None]
    assert (end["samples"]["completed"], end["samples"]["errored"]) == (len(completed), len(errored)), end
    logged = {sample_key(summary.id, summary.epoch): summary.uuid for summary in summaries}
    if "merged" in end:  # its samples are told of by the shards
        same = [e for e in fleet.of("job_done", task=end["task"], model=end["model"]) if "shard" in e]
        final = {key: each for e in same for key, each in fleet.results(e["job_id"]).items()}
    streamed = {key: event["uuid"] for key, event in final.items()}
    assert logged.items() <= streamed.items()
    if end["status"] == "completed":
        assert logged == streamed
        assert read_eval_log(str(path), header_only=True).status == "success"


def _check_segments(fleet: Fleet, stored: Mapping[str, bytes] | None) -> None:
    if stored is None:
        stored = {path.name: path.read_bytes() for path in (fleet.path / "events").glob("*.jsonl")}
    assert b"".join(stored[name] for name in sorted(stored)) == fleet.live.read_bytes()


def send(process: Process, number: int = signal.SIGINT) -> None:
    """A signal to the command alone, as a terminal's Ctrl-C reaches it."""
    process.send_signal(number)
