"""The end of an attempt in storage: killed after any step, the next one that comes along makes it whole."""

from pathlib import Path
from typing import Any

import pytest

from evalworker import publish
from evalworker.contract import layout
from evalworker.contract.documents import JobDone
from evalworker.contract.failures import Category
from evalworker.contract.messages import AttemptDone, SampleCounts
from evalworker.contract.wire import now
from evalworker.storage import Denied, LocalStorage

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
JOB = "00000000000000aa"
NAME = "2026-11-29T14-05-33-00-00_t_abc.eval"


class Killed(BaseException):
    """The worker dies here."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def done(attempt: int = 1, worker: str = "w1", **more: Any) -> AttemptDone:
    fields: dict[str, Any] = {"round": 1, "status": "completed", "ended": True, "log_name": NAME} | more
    return AttemptDone(
        fleet_id=FLEET,
        instance_id=worker,
        ts=now(),
        job_id=JOB,
        attempt=attempt,
        duration_s=1.0,
        samples=SampleCounts(total=1, completed=1),
        log=layout.attempt_log(FLEET, JOB, attempt, worker),
        **fields,
    )


def log(folder: Path, content: str) -> Path:
    path = folder / f"{content}.eval"
    path.write_text(content)
    return path


def finish(store: LocalStorage, one: AttemptDone, path: Path | None) -> AttemptDone:
    return publish.conclude(store, publish.record_end(store, one, path))


def content(store: LocalStorage, key: str) -> str:
    return store.get(key).body.decode()


WORKING = layout.working(FLEET) + NAME


def test_a_completed_job_is_recorded_and_published(store: LocalStorage, tmp_path: Path) -> None:
    one = done()
    assert finish(store, one, log(tmp_path, "one")) == one
    assert content(store, layout.job_log(FLEET, JOB)) == content(store, WORKING) == "one"
    record = publish.find_done(store, FLEET, JOB, 1)
    assert record is not None
    assert (record.attempt_done, record.log) == (one, one.log)


def test_an_attempt_that_will_be_retried_is_recorded_and_not_published(store: LocalStorage, tmp_path: Path) -> None:
    one = done(status="failed", ended=False, failure_category=Category.CRASH, retry_after_s=0.0)
    finish(store, one, log(tmp_path, "one"))
    assert publish.find_end(store, FLEET, JOB, 1) == one
    assert publish.find_done(store, FLEET, JOB, 1) is None
    assert not store.exists(WORKING)


def test_two_workers_with_one_attempt_agree_on_the_first(store: LocalStorage, tmp_path: Path) -> None:
    first, second = done(worker="w1"), done(worker="w2")
    assert finish(store, first, log(tmp_path, "one")) == first
    assert finish(store, second, log(tmp_path, "two")) == first
    assert content(store, layout.job_log(FLEET, JOB)) == content(store, WORKING) == "one"


def test_two_attempts_that_end_the_job_agree_on_the_first(store: LocalStorage, tmp_path: Path) -> None:
    first, second = done(2), done(1, "w2")
    finish(store, first, log(tmp_path, "two"))
    assert finish(store, second, log(tmp_path, "one")) == first
    assert content(store, WORKING) == "two"


def test_a_job_that_the_controller_has_cancelled_stays_cancelled(store: LocalStorage, tmp_path: Path) -> None:
    cancelled = done(worker="controller", status="cancelled", log_name=None).model_copy(update={"log": None})
    record = JobDone(fleet_id=FLEET, job_id=JOB, round=1, log=None, attempt_done=cancelled)
    store.create(layout.job_done(FLEET, JOB, 1), record.to_bytes())
    assert finish(store, done(), log(tmp_path, "late")) == cancelled
    assert not store.exists(WORKING)


@pytest.mark.parametrize("survived", range(5))
def test_killed_after_any_step_the_next_one_makes_it_whole(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """upload, create end, create done, copy the job's log, copy the working log: the worker dies after `survived` of them."""
    left = [survived]

    def counted(name: str) -> Any:
        original = getattr(LocalStorage, name)

        def call(self: LocalStorage, *arguments: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return original(self, *arguments)

        return call

    with monkeypatch.context() as patched:
        for name in ("upload", "create", "copy"):
            patched.setattr(LocalStorage, name, counted(name))
        with pytest.raises(Killed):
            finish(store, done(), log(tmp_path, "one"))
    record = publish.find_done(store, FLEET, JOB, 1)
    end = publish.find_end(store, FLEET, JOB, 1)
    if record is not None:
        publish.publish(store, record)
        final = record.attempt_done
    elif end is not None:
        final = publish.conclude(store, end)
    else:  # the job runs again, on another worker
        final = finish(store, done(worker="w2"), log(tmp_path, "one"))
    assert final.status == "completed"
    assert content(store, layout.job_log(FLEET, JOB)) == content(store, WORKING) == "one"


def test_a_later_round_takes_the_place_of_the_earlier_ones_log(store: LocalStorage, tmp_path: Path) -> None:
    finish(
        store, done(status="failed", failure_category=Category.TASK_ERROR, log_name="old.eval"), log(tmp_path, "old")
    )
    finish(store, done(2, round=2), log(tmp_path, "new"))
    assert [info.key for info in store.list(layout.working(FLEET))] == [WORKING]
    assert content(store, layout.job_log(FLEET, JOB)) == "new"


def test_a_later_round_without_a_log_leaves_the_earlier_one(store: LocalStorage, tmp_path: Path) -> None:
    finish(store, done(status="failed", failure_category=Category.TASK_ERROR), log(tmp_path, "old"))
    crashed = done(2, round=2, status="failed", failure_category=Category.CRASH, log_name=None)
    finish(store, crashed.model_copy(update={"log": None}), None)
    assert content(store, WORKING) == "old"


def test_the_partial_log_goes_and_that_of_others_stays(store: LocalStorage) -> None:
    other = "00000000000000ab"
    for key in (
        layout.partial(FLEET, JOB) + "a.eval",
        layout.partial(FLEET, JOB) + ".buffer/x/1",
        layout.partial(FLEET, other) + "b.eval",
    ):
        store.put(key, b"x")
    publish.clear_partial(store, FLEET, JOB)
    assert [info.key for info in store.list("partial/")] == [layout.partial(FLEET, other) + "b.eval"]


def test_a_partial_log_that_cannot_be_removed_is_no_failure(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's end is recorded by then: an error here would be told as the failure of a completed job."""
    store.put(layout.partial(FLEET, JOB) + "a.eval", b"x")

    def refuse(key: str) -> None:
        raise Denied(f"cannot delete {key}")

    monkeypatch.setattr(store, "delete", refuse)
    publish.clear_partial(store, FLEET, JOB)
    assert store.exists(layout.partial(FLEET, JOB) + "a.eval")
