"""Results of samples while a run goes on: from logs and from the buffers beside them, each execution once."""

import json
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import logmaker
import pytest

from evalops.monitor import results as module
from evalops.monitor.results import LiveResults, Result
from evalworker.batch_buffer import finished, summaries_of
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import Info, LocalStorage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
LOG = "2026-11-29T14-00-01-00-00_gsm8k_1.eval"
WHEN = "2026-11-29T14:00:01+00:00"


def manifest(samples: int = 4) -> Manifest:
    job = JobSpec(job_id="0" * 16, task="gsm8k", name="gsm8k", model="openai/gpt-4o-mini", samples=samples)
    return Manifest(fleet_id=RUN, created=now(), backend="batch", jobs=[job], arguments={}, models=[], submit_dir=".")


def entry(number: int, *, uuid: str | None = None, **more: Any) -> dict[str, Any]:
    """A finished sample's summary as the buffer has it."""
    base = {"id": number, "epoch": 1, "uuid": uuid or f"uuid-{number}-1", "completed": True, "completed_at": WHEN}
    return base | {"scores": {"match": {"value": "C"}}, "total_time": 1.5} | more


class Directory:
    """A run's working directory with one log."""

    def __init__(self, folder: Path) -> None:
        self.storage = LocalStorage(folder)
        self.results = LiveResults(self.storage, manifest(), array=False)
        self.key = layout.working(RUN) + LOG
        self.folder = folder

    def log(self, status: str, *numbers: int) -> None:
        path = self.folder / self.key
        path.parent.mkdir(parents=True, exist_ok=True)
        made = logmaker.log(status=status, samples=[logmaker.sample(number) for number in numbers], results=False)
        logmaker.write_eval_log(made, str(path))

    def buffer(self, *entries: dict[str, Any]) -> None:
        body = json.dumps({"samples": [{"summary": each} for each in entries], "segments": []})
        self.storage.put(layout.buffer_of(self.key), body.encode())

    def poll(self) -> list[tuple[int | str, str]]:
        return [(result.sample_id, str(result.scores.get("match"))) for result in self.results.poll()]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def test_where_the_buffer_of_a_log_is() -> None:
    assert layout.buffer_of("logs/working/R/a.b.eval") == "logs/working/R/.buffer/a.b/manifest.json"
    assert layout.buffer_of("a.eval") == ".buffer/a/manifest.json"


def test_each_execution_is_told_once_wherever_it_stands(directory: Directory) -> None:
    assert directory.poll() == []
    directory.log("started", 1)
    directory.buffer(entry(2), entry(3, completed=False, completed_at=None, scores=None))
    assert sorted(directory.poll()) == [(1, "C"), (2, "C")]
    directory.buffer(entry(2), entry(3))
    assert directory.poll() == [(3, "C")]
    directory.log("success", 1, 2, 3, 4)
    assert directory.poll() == [(4, "C")]
    assert directory.poll() == []
    assert (directory.results.finished, directory.results.errored, directory.results.again) == (4, 0, 0)


def test_a_sample_that_ran_again_is_counted(directory: Directory) -> None:
    directory.log("started", 1)
    directory.buffer(entry(2, error="boom", scores=None))
    directory.poll()
    assert (directory.results.finished, directory.results.errored) == (1, 1)
    directory.buffer(entry(2, uuid="another"))
    assert directory.poll() == [(2, "C")]
    assert (directory.results.finished, directory.results.errored, directory.results.again) == (2, 0, 1)


def test_what_cannot_be_read_now_is_read_at_the_next_look(directory: Directory) -> None:
    directory.log("started", 1)
    directory.storage.put(layout.buffer_of(directory.key), b"{ half")
    assert directory.poll() == [(1, "C")]
    directory.buffer(entry(2))
    assert directory.poll() == [(2, "C")]


class Listing(LocalStorage):
    """Remembers what is listed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.listed: deque[str] = deque()

    def list(self, prefix: str) -> Iterator[Info]:
        self.listed.append(prefix)
        return super().list(prefix)


class Array:
    """A run of many children, each with a log that it keeps."""

    def __init__(self, folder: Path, children: int) -> None:
        self.storage = Listing(folder)
        spec = {"task": "gsm8k", "name": "gsm8k", "model": "openai/gpt-4o-mini", "samples": 2}
        jobs = [JobSpec(job_id=f"{n:016x}", task_args={"n": n}, **spec) for n in range(children)]
        self.jobs = [job.job_id for job in jobs]
        self.results = LiveResults(self.storage, manifest().model_copy(update={"jobs": jobs}), array=True)

    def grow(self, job: str, *numbers: int) -> None:
        path = Path(self.storage.url(layout.partial(RUN, job) + LOG))
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = [logmaker.sample(number) for number in numbers]
        made = logmaker.log(status="started", samples=samples, results=False, task_args={"n": int(job, 16)})
        logmaker.write_eval_log(made, str(path))

    def poll(self, running: Collection[str] | None) -> tuple[list[int | str], list[str]]:
        """The samples that a look tells of, and the jobs whose partial logs it has listed."""
        listed = self.storage.listed
        listed.clear()
        found = [result.sample_id for result in self.results.poll(running)]
        assert listed.count(layout.working(RUN)) == 1
        return found, sorted(key.split("/")[2] for key in listed if key.startswith(layout.partials(RUN)))


def test_of_an_array_only_running_children_are_listed_and_each_that_ended_once_more(tmp_path: Path) -> None:
    array = Array(tmp_path, 4)
    first, second, third, _ = array.jobs
    for job in array.jobs:
        array.grow(job, 1)
    assert array.poll(None) == ([1] * 4, [""])
    assert array.poll([first, second]) == ([], [first, second])
    array.grow(first, 1, 2)
    array.grow(third, 1, 2)
    assert array.poll([second]) == ([2], [first, second])
    assert array.poll([second]) == ([], [second])
    assert array.poll([]) == ([], [second])
    assert array.poll([]) == ([], [])
    assert array.poll(None) == ([2], [""])


def test_many_running_children_have_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LISTED", 3)
    array = Array(tmp_path, 7)
    looks = [array.poll(array.jobs)[1] for _ in range(3)]
    assert [len(look) for look in looks] == [3, 3, 3]
    assert set(looks[0]) | set(looks[1]) | set(looks[2]) == set(array.jobs)


def test_only_what_came_to_its_end_is_finished() -> None:
    assert finished(entry(1)) and finished(entry(1, error="x", scores=None))
    assert not finished(entry(1, completed=False))
    assert not finished(entry(1, completed_at=None, scores={})), "found in the middle by a recovery"


@pytest.mark.parametrize("body", [b"[]", b'{"samples": 3}', b'{"samples": [1, {}, {"summary": {"id": 1}}]}', b"{}"])
def test_a_strange_manifest_has_no_samples(body: bytes) -> None:
    assert list(summaries_of(body)) == []


def test_a_line_for_people() -> None:
    assert Result("t", "m", 7, 2, {"a": "C", "b": 0}, None, 1.25).line() == "t  m  sample 7 epoch 2  a C, b 0  1.2 s"
    assert Result("t", "m", "x", 1, {}, "ValueError:\n bad", None).line() == "t  m  sample x  error: ValueError: bad"
    assert Result("t", "m", "x", 1, {}, None, None).line() == "t  m  sample x  no score"
