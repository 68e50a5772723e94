"""The container's side of a Batch job as a process of this machine, on a directory for a root: kills, interruptions, children, refusals."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import python_path
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries

import evalworker
from evalops import wheel
from evalops.logs import local_run, places
from evalops.logs.metadata import Models
from evalops.logs.survey import survey
from evalops.monitor.results import LiveResults
from evalworker.batch_job import JobRefused, choose, place_of
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, JobDone, JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
TASKS = Path(__file__).parents[1] / "tasks"
EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 90.0
NONE = {"retry_attempts": 0, "log_shared": 1, "display": "none", "ctl_server": False}


def spec(task: str, name: str, model: str = "scripted/good", index: int = 0, samples: int = 6, **args: Any) -> JobSpec:
    job_id = f"{abs(hash((task, model))) % 16**8:016x}"
    return JobSpec(job_id=job_id, task=task, name=name, model=model, model_index=index, samples=samples, task_args=args)


class Run:
    """A run on a directory and its container."""

    def __init__(
        self, folder: Path, jobs: list[JobSpec], *, array: bool = False, code: Path = TASKS, **arguments: Any
    ) -> None:
        self.storage = LocalStorage(folder)
        models = list(dict.fromkeys(job.model for job in jobs))
        task_args = jobs[0].task_args
        self.manifest = Manifest(
            fleet_id=RUN,
            created=now(),
            backend="batch",
            jobs=jobs,
            arguments=NONE | {"continue_on_fail": True, "task_args": task_args} | arguments,
            models=models,
            submit_dir=".",
            code_root=str(code),
        )
        self.folder, self.array, self.number = folder, array, 1
        self.round()

    def round(self, **more: Any) -> None:
        """Submit the next round."""
        self.storage.put(layout.manifest(RUN), self.manifest.to_bytes())
        places_ = list(range(len(self.manifest.jobs)))
        round_ = BatchRound(number=self.number, queue="q", array=self.array, jobs=places_, **more)
        run = BatchRun(fleet_id=RUN, estate="e", region="r", log_group="g", rounds=[round_])
        self.storage.put(layout.batch(RUN), run.to_bytes())

    def start(self, child: int | None = None, attempt: int = 1, **environment: str) -> "subprocess.Popen[str]":
        work = self.folder / "container"
        work.mkdir(exist_ok=True)
        words = [f"{self.folder}/{RUN}/manifest.json", "--round", str(self.number), "--work", str(work)]
        words += ["--child", "0"] if self.array else []
        index = {"AWS_BATCH_JOB_ARRAY_INDEX": str(child)} if child is not None else {}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "evalworker.batch_job", *words],
            env=os.environ | index | {"AWS_BATCH_JOB_ATTEMPT": str(attempt), "AWS_BATCH_JOB_ID": "j"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, child: int | None = None, **more: Any) -> tuple[int, str]:
        """Run to the end: exit status and output."""
        process = self.start(child, **more)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def done(self, job: JobSpec) -> JobDone:
        return JobDone.from_json(self.storage.get(layout.job_done(RUN, job.job_id, self.number)).body)

    @property
    def working(self) -> Path:
        return self.folder / "logs" / "working" / RUN


def finished(folder: Path) -> dict[tuple[str, int | str], str]:
    """(log's task, sample) → uuid of what is finished in a directory's logs."""
    found = {}
    for log in list_eval_logs(str(folder), recursive=False):
        for sample in read_eval_log_sample_summaries(log):
            if sample.completed and sample.scores:
                found[log.task, sample.id] = str(sample.uuid)
    return found


def when_finished(run: Run, count: int) -> LiveResults:
    """Wait until the run's logs and buffers tell of so many finished samples, as a monitor does."""
    results = LiveResults(run.storage, run.manifest, array=run.array)
    enough, ticking = threading.Event(), threading.Event()
    for _ in range(int(PATIENCE_S * 5)):
        results.poll()
        if results.finished >= count:
            return results
        ticking.wait(0.2)
    assert enough.is_set(), f"{results.finished} of {count} samples"
    return results


@pytest.fixture
def slow(tmp_path: Path) -> Run:
    """Six samples of half a second, one at a time."""
    return Run(tmp_path, [spec("slow.py@slow", "slow", n=6, seconds=0.5)], max_samples=1)


def test_tasks_and_models_in_one_eval_set(tmp_path: Path) -> None:
    jobs = [
        spec(f"{name}.py@{name}", name, model, index, samples)
        for index, model in enumerate(("scripted/good", "scripted/refuse"))
        for name, samples in (("arithmetic", 3), ("choices", 6))
    ]
    run = Run(tmp_path, jobs, code=EXAMPLES, limit=3)
    code, said = run.run()
    assert code == 0, said
    headers = [read_eval_log(log, header_only=True) for log in list_eval_logs(str(run.working))]
    assert {(h.eval.task, h.eval.model) for h in headers} == {(job.name, job.model) for job in jobs}
    assert len({h.eval.eval_set_id for h in headers}) == 1
    assert [run.done(job).attempt_done.status for job in jobs] == ["completed"] * 4
    assert "attempt 1: 4 jobs; logs in" in said


def test_a_killed_attempt_is_gone_on_from(slow: Run) -> None:
    process = slow.start()
    when_finished(slow, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = when_finished(slow, 2).finished
    code, said = slow.run(attempt=2)
    assert code == 0, said
    assert f"{before} samples of an earlier attempt are kept" in said
    assert f"kept {before} of 6 samples from earlier attempts; " in said
    done = slow.done(slow.manifest.jobs[0]).attempt_done
    assert (done.kept, done.samples.completed, done.samples.total, done.attempt) == (before, 6, 6, 2)
    seen = survey(places.of_run(RUN, slow.storage), Models().price, cached=False)
    assert [(row.state, row.completed) for row in seen.rows] == [("success", 6)]


def test_an_interruption_flushes_and_is_no_end(slow: Run) -> None:
    process = slow.start()
    when_finished(slow, 2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "cancelled: slow with scripted/good: interrupted" in said
    assert not slow.storage.exists(layout.job_done(RUN, slow.manifest.jobs[0].job_id, 1))
    (log,) = list_eval_logs(str(slow.working))
    assert read_eval_log(log, header_only=True).status == "cancelled"
    before = finished(slow.working)
    assert len(before) >= 2
    code, said = slow.run(attempt=2)
    assert code == 0, said
    after = finished(slow.working)
    assert len(after) == 6 and before.items() <= after.items()


def test_a_child_has_a_directory_of_its_own_and_publishes(tmp_path: Path) -> None:
    jobs = [
        spec("arithmetic.py@arithmetic", "arithmetic", "scripted/good", 0, 3),
        spec("arithmetic.py@arithmetic", "arithmetic", "scripted/mixed", 1, 3),
    ]
    run = Run(tmp_path, jobs, array=True, code=EXAMPLES, limit=3)
    code, said = run.run(child=1)
    assert code == 0, said
    (log,) = list_eval_logs(str(run.working))
    assert read_eval_log(log, header_only=True).eval.model == "scripted/mixed"
    assert list(run.storage.list(layout.partials(RUN))) == [], "what is published is not kept twice"
    assert run.done(jobs[1]).attempt_done.log_name == Path(log.name).name


def test_a_child_that_is_interrupted_publishes_too_and_goes_on_from_there(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("slow.py@slow", "slow", n=6, seconds=0.5)], array=True, max_samples=1)
    process = run.start(child=0)
    when_finished(run, 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    before = finished(run.working)
    assert len(before) >= 2
    for info in list(run.storage.list(layout.partials(RUN))):
        run.storage.delete(info.key)  # they expire after some days
    (log,) = list_eval_logs(str(run.working))
    run.number = 2
    run.round(logs={0: layout.working(RUN) + Path(log.name).name})
    code, said = run.run(child=0)
    assert code == 0, said
    after = finished(run.working)
    assert len(after) == 6 and before.items() <= after.items()
    assert len(list_eval_logs(str(run.working))) == 1, "the log that was gone on from is replaced"


def test_what_a_killed_child_has_kept_can_be_gone_on_from_here(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("slow.py@slow", "slow", n=6, seconds=0.5)], array=True, max_samples=1)
    process = run.start(child=0)
    when_finished(run, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert local_run.fetch_partials(places.of_run(RUN, run.storage)) == 1
    assert local_run.fetch_partials(places.of_run(RUN, run.storage)) == 0, "what is there is not replaced"
    run.array, run.number = False, 2
    run.round()
    code, said = run.run()
    assert code == 0, said
    assert " samples of an earlier attempt are kept" in said
    assert len(finished(run.working)) == 6


def test_a_task_that_cannot_be_loaded(tmp_path: Path) -> None:
    jobs = [spec("raises_at_import.py@x", "x")]
    run = Run(tmp_path, jobs)
    code, said = run.run()
    assert code == 78, said
    done = run.done(jobs[0]).attempt_done
    assert (done.status, done.failure_category, done.ended) == ("failed", "config", True)
    seen = survey(places.of_run(RUN, run.storage), Models().price, cached=False)
    assert [(row.state, row.remark) for row in seen.rows] == [("error", "failed: config")]


def test_errored_samples_are_failures(tmp_path: Path) -> None:
    jobs = [spec("arithmetic.py@arithmetic", "arithmetic", samples=3)]
    run = Run(tmp_path, jobs, code=EXAMPLES, limit=3, model_args={"error": 2})
    code, said = run.run()
    assert code == 1, said
    done = run.done(run.manifest.jobs[0]).attempt_done
    assert (done.status, done.samples.completed, done.samples.errored) == ("failed", 1, 2)


def test_what_is_printed_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "leaky.py").write_text(
        "import os, subprocess\nfrom inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "@task\ndef leaky():\n    print('key', os.environ['LEAKY_API_KEY'], flush=True)\n"
        "    subprocess.run('echo child $LEAKY_API_KEY', shell=True)\n    return Task([Sample(id=1, input='x', target='x')])\n"
    )
    run = Run(tmp_path, [spec("leaky.py@leaky", "leaky", samples=1)], code=tmp_path / "code")
    _, said = run.run(LEAKY_API_KEY="sk-planted-marker-0123456789")
    assert "key [redacted LEAKY_API_KEY]" in said and "child [redacted LEAKY_API_KEY]" in said
    assert "sk-planted-marker" not in said


def test_an_older_image_becomes_what_the_run_asks_for_and_is_still_heard(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("arithmetic.py@arithmetic", "arithmetic", samples=1)], code=EXAMPLES, limit=1)
    run.manifest = run.manifest.model_copy(update={"worker": wheel.ship(run.storage)})
    run.round()
    stale = tmp_path / "image" / "evalworker"
    shutil.copytree(Path(evalworker.__file__).parent, stale, ignore=shutil.ignore_patterns("__pycache__"))
    (stale / "old.txt").write_text("of another day")
    code, said = run.run(PYTHONPATH=python_path(stale.parent), INSPECT_FLEET_CACHE=str(tmp_path / "cache"))
    assert code == 0, said
    assert "starting again with evalworker" in said
    assert "attempt 1: arithmetic with scripted/good" in said, "the output of the new process is heard"


def some_run(jobs: list[int], array: bool) -> BatchRun:
    round_ = BatchRound(number=1, queue="q", array=array, jobs=jobs)
    return BatchRun(fleet_id=RUN, estate="e", region="r", log_group="g", rounds=[round_])


def test_which_jobs_a_container_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, [spec("t.py@t", "t", f"m/{n}", n) for n in range(4)])
    whole = choose(run.storage, run.manifest, some_run([0, 2, 3], False), 1, None)
    assert [job.model for job in whole.jobs] == ["m/0", "m/2", "m/3"] and whole.log_dir == f"logs/working/{RUN}"
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "1")
    child = choose(run.storage, run.manifest, some_run([0, 2, 3], True), 1, 1)
    assert [job.model for job in child.jobs] == ["m/3"]
    assert child.log_dir == f"partial/{RUN}/{child.jobs[0].job_id}"
    with pytest.raises(JobRefused, match="has 3 jobs, and none is number 4"):
        choose(run.storage, run.manifest, some_run([0, 2, 3], True), 1, 3)
    with pytest.raises(JobRefused, match="no round 2"):
        choose(run.storage, run.manifest, some_run([0], True), 2, None)


@pytest.mark.parametrize("url", ["", "s3://b/manifest.json", f"s3://b/{RUN}/control.json", "s3://b/x/manifest.json"])
def test_what_is_no_manifest(url: str) -> None:
    with pytest.raises(JobRefused):
        place_of(url)


def test_where_a_manifest_is() -> None:
    assert place_of(f"s3://b/{RUN}/manifest.json") == ("s3://b", RUN)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INSPECT_LOG_LEVEL", "error")
    yield
