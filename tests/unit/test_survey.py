"""`evalops.logs.survey`: a run that goes on again while logs and ends of its earlier rounds lie there."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import logmaker
import pytest
from counting import Counting

from evalops.batch import living, request
from evalops.commands import run_aws
from evalops.commands.status import _going_on
from evalops.logs import places, publish
from evalops.logs.promote import Promoted
from evalops.logs.survey import Survey, away, survey
from evalops.ui import Failure
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, Control, JobDone, JobSpec, Limits, Manifest, Shard
from evalworker.contract.messages import AttemptDone, SampleCounts
from evalworker.contract.wire import now

RUN, MODEL = "2026-11-29-14-05-33-1a2b3c4d", "openai/gpt-4o-mini"
JOB = JobSpec(job_id="0123456789abcdef", task="t.py@t", name="t", model=MODEL, samples=4)
FAILED: dict[str, Any] = {"task": "t", "status": "error", "error": "boom", "results": False}


class Root:
    """A root with one planned job, and a control document that a living owner beats in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Counting(folder)
        self.working = folder / layout.working(RUN)
        self.partial = Path(self.store.url(layout.partial(RUN, JOB.job_id) + "x")).parent

    def plan(self, backend: str, *jobs: JobSpec) -> None:
        plan: dict[str, Any] = {
            "created": now(),
            "jobs": jobs or [JOB],
            "arguments": {},
            "models": [MODEL],
            "submit_dir": ".",
        }
        self.store.put(layout.manifest(RUN), Manifest(fleet_id=RUN, backend=backend, **plan).to_bytes())

    def control(self, round_: int, **more: Any) -> None:
        fields = {"state": "running", "deadline": now() + timedelta(hours=9), "beat": now(), "controller": "far:1"}
        self.store.put(layout.control(RUN), Control(fleet_id=RUN, round=round_, **(fields | more)).to_bytes())

    def end(self, round_: int, category: str | None, status: str = "failed") -> None:
        done = AttemptDone(
            fleet_id=RUN, instance_id="w", ts=now(), round=round_, job_id=JOB.job_id, attempt=round_, status=status,
            ended=True, duration_s=1, failure_category=category, samples=SampleCounts(total=4),
        )  # fmt: skip
        record = JobDone(fleet_id=RUN, job_id=JOB.job_id, round=round_, log=None, attempt_done=done)
        self.store.put(layout.job_done(RUN, JOB.job_id, round_), record.to_bytes())

    def look(self) -> Survey:
        return survey(places.of_run(RUN, self.store), lambda model: None, cached=False)

    def shown(self) -> tuple[str, str]:
        """The one row's state and remark. A run whose owner lives is never said to have finished."""
        seen = self.look()
        assert seen.problems == []
        assert "Finished" not in seen.headline and "To go on" not in seen.headline
        assert _going_on(seen) and not publish.finished(seen)
        (row,) = seen.rows
        return row.state, row.remark


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.mark.parametrize("backend", ["local", "ec2"])
def test_a_fleets_job_waits_runs_and_fails_in_its_new_round(root: Root, backend: str) -> None:
    root.plan(backend)
    logmaker.make(root.working, **FAILED)
    root.end(1, "task_error")
    root.control(2)
    assert root.shown() == ("waiting", "retrying; before: error: boom")
    logmaker.make(root.partial, number=1, **FAILED)
    assert root.shown()[0] == "waiting", "the first round has left it"
    logmaker.started(logmaker.make(root.partial, number=2, task="t", results=False, status="started"))
    assert root.shown() == ("running", "retrying; before: error: boom")
    root.end(2, "task_error")
    assert root.shown() == ("error", "boom")


def test_ends_of_older_rounds_are_not_the_owners_and_the_tenth_comes_after_the_ninth(root: Root) -> None:
    root.plan("ec2")
    root.end(9, "oom")
    root.control(10)
    assert root.shown() == ("waiting", "")
    root.end(10, "disk_full")
    assert root.shown() == ("error", "failed: disk_full")
    root.control(10, state="ended")
    assert [row.remark for row in root.look().rows] == ["failed: disk_full"]


def test_a_retry_here_has_begun_with_what_has_a_new_log(root: Root) -> None:
    root.plan("local")
    logmaker.make(root.working, number=1, **FAILED)
    begun = logmaker.T0 + timedelta(seconds=30, microseconds=9)
    root.control(2, begun=begun)
    assert root.shown() == ("waiting", "retrying; before: error: boom")
    old = logmaker.make(root.working, number=20, total=5, task="t", results=False, status="started")
    logmaker.started(old)
    assert root.shown() == ("waiting", "retrying; before: dead"), "nobody writes that one any more"
    old.unlink()
    new = logmaker.make(root.working, number=30, total=2, task="t", results=False, status="started")
    logmaker.started(new)
    assert root.shown() == ("running", "retrying; before: error: boom")
    new.unlink()
    logmaker.make(root.working, number=30, **FAILED)
    assert root.shown() == ("error", "boom"), "it is this round's"


@pytest.mark.parametrize("array", [False, True], ids=["one", "array"])
def test_batch_is_asked_of_a_run_whose_logs_failed(root: Root, array: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root.plan("batch")
    logmaker.make(root.working, **FAILED)
    root.end(1, "task_error")
    round_ = BatchRound(number=2, queue="q", array=array, jobs=[0], begun=logmaker.T0 + timedelta(seconds=10))
    answer = living.Living(True, "its Batch job x is there", round_)
    monkeypatch.setattr(living, "on_batch", lambda storage, run_id: answer)
    assert root.shown() == ("waiting", "retrying; before: error: boom")
    logmaker.started(
        logmaker.make(
            root.partial if array else root.working, number=20, total=2, task="t", results=False, status="started"
        )
    )
    assert root.shown()[0] == "running"
    answer = living.Living(False, "its Batch job x failed")
    ended = root.look()
    assert ended.headline.startswith("Finished, not all well: 1 error.")


def test_a_batch_run_that_succeeded_is_not_asked_about(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.plan("batch")
    logmaker.make(root.working, task="t")
    monkeypatch.setattr(living, "on_batch", lambda storage, run_id: pytest.fail("asked"))
    assert root.look().headline == "Finished: 1 success."


def test_what_was_promoted_costs_a_run_without_such_logs_nothing(root: Root) -> None:
    """One listing, the manifest and the control document, whatever lies beside the logs."""
    root.plan("local")
    log = logmaker.make(root.working, task="t")
    for suffix in (layout.DASHBOARD_SUFFIX, layout.ZIP_SUFFIX, layout.PROMOTED_SUFFIX):  # the log itself is still there
        log.with_name(log.name + suffix).write_bytes(b"x")
    assert root.look().headline == "Finished: 1 success."
    assert root.store.calls == {"list": 1, "get": 2}


def test_a_job_that_completed_is_no_error_whatever_became_of_its_log(root: Root) -> None:
    root.plan("ec2")
    root.end(1, None, "completed")
    assert [(row.state, row.remark) for row in root.look().rows] == [("success", "completed: no log")]


def test_one_batch_job_for_all_does_not_run_again_what_was_promoted(root: Root) -> None:
    other = JOB.model_copy(update={"job_id": "f" * 16, "name": "u", "task": "t.py@u"})
    root.plan("batch", JOB, other)
    run = BatchRun(
        fleet_id=RUN, estate="e", region="r", log_group="g", rounds=[BatchRound(number=1, queue="q", jobs=[0, 1])]
    )
    manifest = Manifest.from_json(root.store.get(layout.manifest(RUN)).body)
    logmaker.make(root.working, number=1, task="t")
    failed = logmaker.make(root.working, number=2, **(FAILED | {"task": "u"}))

    def again(array: bool) -> Any:
        return run_aws._round(root.store, manifest, run, request.Wanted("q", array))

    assert again(False).jobs == [0, 1]
    moved = f"{layout.promoted_run('stage', 't', MODEL, RUN)}x.eval"
    (log,) = [info.key for info in root.store.list(layout.working(RUN)) if not info.key.endswith(failed.name)]
    root.store.copy(log, moved)
    root.store.delete(log)
    root.store.put(log + layout.PROMOTED_SUFFIX, Promoted(log=moved).to_bytes())
    with pytest.raises(Failure, match=r"t.py@t with .* its log was promoted, .* --array runs the others alone"):
        again(False)
    assert (again(True).jobs, again(True).logs) == ([1], {1: layout.working(RUN) + failed.name})
    failed.unlink()
    logmaker.make(root.working, number=3, task="u")
    assert again(False) is None and again(True) is None
    logmaker.make(root.working, number=3, task="u", completed=3)
    assert again(False) is None, "Inspect runs no error again that the options allow"


def test_a_log_that_ended_well_and_is_not_published_is_not_done(root: Root) -> None:
    """The worker was killed before it could publish it: what goes on fetches it, and must not be told that nothing is left."""
    root.plan("ec2")
    root.control(1, state="ended")
    logmaker.make(root.partial, task="t")
    seen = root.look()
    (row,) = seen.rows
    assert (row.state, row.remark) == ("dead", "it has ended well, and its log is not published yet")
    assert away(seen) == set() and "To go on" in seen.headline


def test_a_job_whose_code_ended_its_process_has_failed_while_its_fleet_lives(root: Root) -> None:
    """Its log, which was published with its end, was never finished."""
    root.plan("local")
    root.control(1)
    logmaker.started(logmaker.make(root.working, task="t", results=False, status="started"))
    root.end(1, "crash")
    assert root.shown() == ("error", "failed: crash")


def test_a_merge_that_runs_again_runs_while_its_shards_do(root: Root) -> None:
    shards = [JOB.model_copy(update={"job_id": f"{n:016x}", "shard": Shard(index=n, of=2, ids=[])}) for n in (0, 1)]
    root.plan("local", *shards, JOB.model_copy(update={"merges": [shard.job_id for shard in shards]}))
    logmaker.make(root.working, **FAILED)
    root.end(1, "task_error")
    root.control(2)
    assert root.shown()[0] == "waiting"
    place = Path(root.store.url(layout.partial(RUN, shards[1].job_id) + "x")).parent
    logmaker.started(logmaker.make(place, task="t", results=False, status="started"))
    assert root.shown()[0] == "running"


def test_an_unfinished_log_of_the_last_round_says_nothing_of_this_one(root: Root) -> None:
    root.plan("ec2")
    logmaker.started(logmaker.make(root.partial, task="t", results=False, status="started"))
    root.end(1, "oom")
    limits = Limits(deadline_s=3600)
    root.control(2, limits=limits, deadline=now() + timedelta(seconds=3610))
    assert root.shown()[0] == "waiting"
    root.control(2, limits=limits, deadline=now() + timedelta(seconds=3500))
    assert root.shown()[0] == "running"


def test_a_look_at_many_failed_jobs_lists_what_is_unfinished_once(root: Root) -> None:
    jobs = [JOB.model_copy(update={"job_id": f"{n:016x}", "name": f"t{n}", "task": f"t.py@t{n}"}) for n in range(1, 6)]
    root.plan("ec2", *jobs)
    for number, job in enumerate(jobs):
        logmaker.make(root.working, **(FAILED | {"task": job.name, "number": number}))
    root.control(2)
    root.store.calls.clear()
    assert [row.state for row in root.look().rows] == ["waiting"] * 5
    assert root.store.calls["list"] == 3
