"""The end of an attempt at every point at which storage can turn away or the worker can die, seen with the controller's eyes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_controller import FLEET, JOB, controller  # noqa: F401 - the fixture

from evalops.fleet import job_ends
from evalops.fleet.controller import Controller
from evalworker import attempt as module
from evalworker.attempt import Attempt
from evalworker.aws import Fault
from evalworker.contract import layout
from evalworker.contract.failures import Category
from evalworker.contract.messages import AttemptDone, Job, SampleCounts, read_from_worker
from evalworker.contract.wire import now
from evalworker.job import JobEnd
from evalworker.queues import Received
from evalworker.storage import LocalStorage, StorageError
from evalworker.verdict import ProcessEnd

STEPS = ("upload the log", "create end.json", "create the done document", "copy the job's log", "copy the working log")
RECORDED = STEPS.index("create end.json")
NAME = "2026-11-29T14-05-33-00-00_t_abc.eval"


class Killed(BaseException):
    """The worker dies here."""


class FailingStorage(LocalStorage):
    """Its writes fail from one on; that one is done all the same when only its answer is lost."""

    def __init__(self, root: Path, step: int, failure: BaseException, *, answer_lost: bool) -> None:
        super().__init__(root)
        self._left, self._failure, self._answer_lost = step, failure, answer_lost

    def _write(self, name: str, *arguments: Any) -> Any:
        if self._left > 0:
            self._left -= 1
            return getattr(LocalStorage, name)(self, *arguments)
        if self._answer_lost:
            self._answer_lost = False
            getattr(LocalStorage, name)(self, *arguments)
        raise self._failure

    def upload(self, *arguments: Any) -> Any:
        return self._write("upload", *arguments)

    def create(self, *arguments: Any) -> Any:
        return self._write("create", *arguments)

    def copy(self, *arguments: Any) -> Any:
        return self._write("copy", *arguments)


AWAY = StorageError("the store is away", Fault("SlowDown", 503, "slow down", retryable=True))


class Slot:
    """A worker with one attempt whose job has just completed, and what it sends and deletes."""

    def __init__(self, controller: Controller, storage: LocalStorage, work: Path, name: str) -> None:  # noqa: F811
        self.posted: list[str] = []
        self.deleted: list[str] = []
        self.runs = 0
        self._log = work / name / NAME
        self._log.parent.mkdir(parents=True)
        self._log.write_text(f"the log of {name}")
        worker = SimpleNamespace(
            storage=storage,
            work=work,
            config=SimpleNamespace(instance_id=name),
            poster=SimpleNamespace(post=self._post),
            keeper=SimpleNamespace(hold=lambda *_: None, release=lambda _: None),
            jobs=SimpleNamespace(delete=self.deleted.extend, extend=lambda *_: None),
            log=lambda _: None,
        )
        message = Job(fleet_id=FLEET, round=2, job_id=JOB, attempt=1)
        spec = controller.fleet.ledger.jobs[JOB].spec
        received = Received(message.to_json(), f"receipt of {name}", 1)
        self.attempt = Attempt(worker, received, message, spec, controller.fleet.manifest)
        self.attempt._try_once = self._try_once

    def _post(self, text: str, *, urgent: bool) -> Any:
        assert urgent
        self.posted.append(text)
        return SimpleNamespace(wait=lambda _: True)

    def _try_once(self) -> None:
        self.runs += 1
        said = JobEnd(log_path=str(self._log), log_status="success", samples=SampleCounts(total=1, completed=1))
        self.attempt._conclude(ProcessEnd(said, 0), None, 1.0)

    def run(self, controller: Controller) -> None:  # noqa: F811
        """Run it to its end, and let the controller hear what it says."""
        self.attempt.run()
        for text in self.posted:
            controller.apply(read_from_worker(text))


def failing(controller: Controller, step: int, failure: BaseException, *, answer_lost: bool) -> FailingStorage:  # noqa: F811
    assert isinstance(controller.fleet.storage, LocalStorage)
    return FailingStorage(controller.fleet.storage.root, step, failure, answer_lost=answer_lost)


def turned_away_after_its_end(controller: Controller, work: Path, monkeypatch: pytest.MonkeyPatch) -> Slot:  # noqa: F811
    """A worker whose attempt has recorded its end, and whom the store has refused from then on."""
    monkeypatch.setattr(module, "STORE_TRIES", 1)
    slot = Slot(controller, failing(controller, RECORDED + 1, AWAY, answer_lost=False), work, "w1")
    slot.attempt.run()
    return slot


def lines(controller: Controller) -> list[dict[str, Any]]:  # noqa: F811
    path = controller.fleet.stream.path
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def check_completed(controller: Controller, log: bytes) -> None:  # noqa: F811
    (end,) = lines(controller)
    assert (end["type"], end["status"], end["samples"]["completed"]) == ("job_done", "completed", 1)
    for key in (layout.job_log(FLEET, JOB), layout.working(FLEET) + NAME):
        assert controller.fleet.storage.get(key).body == log
    assert controller.fleet.due == []


@pytest.mark.parametrize("answer_lost", [False, True])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
@pytest.mark.parametrize("base", [0, -2], ids=["first attempt", "last attempt"])
def test_when_storage_turns_away_a_recorded_end_stands_and_nothing_is_paid_twice(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    answer_lost: bool,
    base: int,
) -> None:
    monkeypatch.setattr(module, "STORE_TRIES", 2)
    slot = Slot(controller, failing(controller, step, AWAY, answer_lost=answer_lost), tmp_path, "w1")
    slot.attempt.message = slot.attempt.message.model_copy(update={"base": base})
    slot.run(controller)
    assert slot.deleted == ["receipt of w1"]
    job = controller.fleet.ledger.jobs[JOB]
    if step > RECORDED or (step == RECORDED and answer_lost):
        check_completed(controller, b"the log of w1")
    elif base == 0:  # nothing tells that it had completed: the next attempt starts from its partial log
        (event,) = lines(controller)
        assert (event["type"], event["failure_category"], job.status) == ("job_attempt", "storage", "open")
        assert [due.message.attempt for due in controller.fleet.due] == [2]
    else:
        (event,) = lines(controller)
        assert (event["type"], event["failure_category"], event["log"]) == ("job_done", "storage", None)


@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
@pytest.mark.parametrize("next_", ["another worker", "the fleet's stop", "a dead letter"])
def test_whoever_comes_after_a_killed_worker_finishes_a_recorded_end(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    step: int,
    next_: str,
) -> None:
    with pytest.raises(Killed):
        Slot(controller, failing(controller, step, Killed(), answer_lost=False), tmp_path, "w1").run(controller)
    fleet, job, recorded = controller.fleet, controller.fleet.ledger.jobs[JOB], step > RECORDED
    if next_ == "the fleet's stop":
        job_ends.end_job(fleet, job, "cancelled", Category.CANCELLED, "stopped")
    elif next_ == "a dead letter":
        fleet.dead.put.append(Job(fleet_id=FLEET, round=2, job_id=JOB, attempt=1).to_json())  # type: ignore[attr-defined]
        controller.dispatch.read_dead_letters()
    # the message is delivered again, however the job has ended meanwhile
    assert isinstance(fleet.storage, LocalStorage)
    again = Slot(controller, fleet.storage, tmp_path, "w2")
    again.run(controller)
    assert (again.deleted, again.runs) == (["receipt of w2"], int(not recorded and next_ == "another worker"))
    if recorded:
        check_completed(controller, b"the log of w1")
    elif next_ == "another worker":
        check_completed(controller, b"the log of w2")
    else:
        assert [line["status"] for line in lines(controller)] == [
            {"the fleet's stop": "cancelled"}.get(next_, "failed")
        ]


UNFINISHED = layout.partial(FLEET, JOB) + NAME


def record_another_end(fleet: Any, how: str) -> None:
    """While the attempt ran on, its message was taken from it and another worker's try failed; or the job was given up."""
    fleet.storage.put(UNFINISHED, b"what there was a minute ago")
    counts = SampleCounts(total=1, completed=int(how == "completed"))
    told = {
        "fleet_id": FLEET,
        "ts": now(),
        "round": 2,
        "job_id": JOB,
        "attempt": 1,
        "duration_s": 1.0,
        "samples": counts,
    }
    if how == "failed":
        end = AttemptDone(
            **told, instance_id="w0", status="failed", ended=False, failure_category="oom", retry_after_s=0.0
        )
        fleet.storage.create(layout.attempt_end(FLEET, JOB, 1), end.to_bytes())
    elif how == "completed":
        key = layout.attempt_log(FLEET, JOB, 1, "w0")
        fleet.storage.put(key, b"the log of w0")
        end = AttemptDone(**told, instance_id="w0", status="completed", ended=True, log=key, log_name=NAME)
        fleet.storage.create(layout.attempt_end(FLEET, JOB, 1), end.to_bytes())
    else:
        job_ends.end_job(fleet, fleet.ledger.jobs[JOB], "cancelled", Category.CANCELLED, "stopped")


def unfinished(controller: Controller) -> list[bytes]:  # noqa: F811
    storage = controller.fleet.storage
    return [storage.get(info.key).body for info in storage.list(layout.partial(FLEET, JOB))]


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_work_that_was_completed_when_another_end_stands_is_where_the_next_attempt_starts(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    how: str,
) -> None:
    record_another_end(controller.fleet, how)
    assert isinstance(controller.fleet.storage, LocalStorage)
    slot = Slot(controller, controller.fleet.storage, tmp_path, "w1")
    slot.attempt._already_ended = lambda: False  # it was recorded while the attempt ran
    slot.run(controller)
    assert slot.deleted == ["receipt of w1"]
    assert json.loads(slot.posted[0])["status"] == how
    assert unfinished(controller) == [b"the log of w1"]
    assert not controller.fleet.storage.exists(layout.job_log(FLEET, JOB)), "the recorded end stands"


def test_nothing_is_left_when_another_worker_has_completed_the_job(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
) -> None:
    record_another_end(controller.fleet, "completed")
    assert isinstance(controller.fleet.storage, LocalStorage)
    slot = Slot(controller, controller.fleet.storage, tmp_path, "w1")
    slot.attempt._already_ended = lambda: False
    slot.run(controller)
    check_completed(controller, b"the log of w0")
    assert unfinished(controller) == []


def test_a_worker_that_is_killed_before_its_completed_work_is_kept_is_followed_by_one_that_keeps_it(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
) -> None:
    record_another_end(controller.fleet, "cancelled")
    copying = RECORDED + 2  # after the done document, which is there already
    killed = Slot(controller, failing(controller, copying, Killed(), answer_lost=False), tmp_path, "w1")
    killed.attempt._already_ended = lambda: False
    with pytest.raises(Killed):
        killed.run(controller)
    assert unfinished(controller) == [b"what there was a minute ago"]
    assert isinstance(controller.fleet.storage, LocalStorage)
    again = Slot(controller, controller.fleet.storage, tmp_path, "w2")
    again.run(controller)
    assert (again.deleted, again.runs) == (["receipt of w2"], 0)
    assert unfinished(controller) == [b"the log of w1"]


@pytest.mark.parametrize("answer_lost", [False, True])
def test_completed_work_is_kept_with_patience(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer_lost: bool,
) -> None:
    record_another_end(controller.fleet, "failed")
    storage = failing(controller, RECORDED + 1, AWAY, answer_lost=answer_lost)
    monkeypatch.setattr(module.time, "sleep", lambda _: setattr(storage, "_left", 9))
    slot = Slot(controller, storage, tmp_path, "w1")
    slot.attempt._already_ended = lambda: False
    slot.run(controller)
    assert slot.deleted == ["receipt of w1"]
    assert unfinished(controller) == [b"the log of w1"]


def test_a_recorded_end_that_cannot_be_read_ends_nothing_wrongly_and_blocks_nothing(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = turned_away_after_its_end(controller, tmp_path, monkeypatch)
    controller.fleet.storage.put(layout.attempt_end(FLEET, JOB, 1), b"not json")
    controller.apply(read_from_worker(slot.posted[0]))
    assert [line["type"] for line in lines(controller)] == ["warning", "job_attempt"]


def test_a_controller_that_cannot_read_either_asks_again(
    controller: Controller,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = turned_away_after_its_end(controller, tmp_path, monkeypatch)
    get, failures = controller.fleet.storage.get, [AWAY, AWAY]

    def refused(key: str) -> Any:
        if failures:
            raise failures.pop()
        return get(key)

    monkeypatch.setattr(controller.fleet.storage, "get", refused)
    controller.fleet.events.put += slot.posted  # type: ignore[attr-defined]
    for _ in range(2):
        controller.inbox.receive(controller.apply)
        assert lines(controller) == []
    controller.inbox.receive(controller.apply)
    check_completed(controller, b"the log of w1")
