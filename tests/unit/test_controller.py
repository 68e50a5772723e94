"""The controller's decisions at the edges: dead letters of others, an end that cannot be stored at once. No AWS here."""

import io
import json
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evalops.fleet import fleet as module
from evalops.fleet import heartbeat, inbox, job_ends, lanes, stream, takeover
from evalops.fleet.assemble import fleet_start
from evalops.fleet.controller import Controller
from evalops.fleet.fleet import Due, Fleet, Plan
from evalops.fleet.guards import Verdict
from evalops.fleet.ledger import Ledger
from evalops.fleet.stream import EventStream
from evalops.fleet.view import ProgressLine
from evalops.fleet.workers import Pool
from evalworker.aws import Fault
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Manifest
from evalworker.contract.failures import Category
from evalworker.contract.ids import digest_of_keys, sample_key
from evalworker.contract.messages import AttemptDone, Job, SampleCounts, SampleDone, read_from_worker
from evalworker.contract.wire import now
from evalworker.queues import Counts, QueueError, Received, SendFailed
from evalworker.storage import LocalStorage, StorageError

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
OTHER = "2026-11-29-14-05-34-1a2b3c4d"
JOB = "00000000000000aa"


class FakeQueue:
    """A queue in memory that can be made to fail."""

    def __init__(self, _client: Any, url: str) -> None:
        self.name = url
        self.put: list[str] = []
        self.deleted: list[str] = []
        self.failures = 0

    def send(self, bodies: list[str], delay_s: int = 0) -> None:
        self.put += bodies

    def receive(self, max_messages: int = 1, wait_s: int = 20) -> list[Received]:
        taken, self.put = self.put[:max_messages], self.put[max_messages:]
        return [Received(body, f"receipt of {body}", 20) for body in taken]

    def delete(self, receipts: list[str]) -> set[str]:
        if self.failures:
            self.failures -= 1
            raise QueueError("cannot be reached")
        self.deleted += receipts
        return set()

    def counts(self) -> Counts:
        return Counts(0, 0, 0)


class Direct:
    """The pump without its threads: tests say what happens when."""

    def __init__(self, source: FakeQueue) -> None:
        self._source = source

    def take(self, wait_s: float = 2) -> tuple[list[Received], bool]:
        found = self._source.receive(10, 1)
        return found, len(found) < 10

    def delete(self, receipts: list[str]) -> None:
        self._source.delete(receipts)

    def flush(self) -> None: ...

    def stop(self, *, wait: bool) -> list[Received]:
        return []


class IdlePool(Pool):
    """A worker that never says anything."""

    count = 1

    @property
    def alive(self) -> int:
        return self.count

    def start(self, count: int) -> None: ...

    def ended(self) -> list[Any]:
        return []

    def stop(self, *, now: bool = False) -> None:
        self.count = 0


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(module, "Queue", FakeQueue)
    monkeypatch.setattr(inbox, "Pump", Direct)
    monkeypatch.setattr(module.aws, "sqs", lambda lane: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    storage = LocalStorage(tmp_path / "root")
    specs = [JobSpec(job_id=JOB, task="t.py@t", name="t", model="scripted/good", samples=1)]
    manifest = Manifest(
        fleet_id=FLEET, created=now(), backend="local", jobs=specs, arguments={}, models=["m"], submit_dir="."
    )
    control = Control(fleet_id=FLEET, round=2, state="running", deadline=now() + timedelta(hours=1), beat=now())
    etag = storage.create(layout.control(FLEET), control.to_bytes())
    made = Fleet(
        manifest=manifest,
        control=control,
        control_etag=etag,
        storage=storage,
        lane=Lane(name="l", jobs="jobs", events="events", dead="dead", endpoint="http://127.0.0.1:9"),
        ledger=Ledger(specs, 2),
        stream=EventStream(storage, FLEET, tmp_path / "events.jsonl"),
        pool=IdlePool(),
        view=ProgressLine(quiet=True),
        plan=Plan(workers=1),
    )
    assert list(made.stream.restore()) == []
    yield Controller(made)


def dead_letter(controller: Controller, **fields: Any) -> None:
    message = Job(**({"fleet_id": FLEET, "round": 2, "job_id": JOB, "attempt": 1} | fields))
    controller.fleet.dead.put.append(message.to_json())  # type: ignore[attr-defined]
    controller.dispatch.read_dead_letters()


def test_a_dead_letter_ends_its_job(controller: Controller) -> None:
    dead_letter(controller)
    assert controller.fleet.ledger.jobs[JOB].status == "failed"
    assert {job.done and job.done.failure_category for job in controller.fleet.ledger.jobs.values()} == {Category.CRASH}


@pytest.mark.parametrize("fields", [{"fleet_id": OTHER}, {"round": 1}, {"job_id": "00000000000000bb"}])
def test_a_dead_letter_of_another_fleet_or_round_ends_nothing(controller: Controller, fields: dict[str, Any]) -> None:
    """Two fleets with the same job have the same job id, and they may have used the same lane."""
    dead_letter(controller, **fields)
    assert controller.fleet.ledger.jobs[JOB].status == "open"
    assert len(controller.fleet.dead.deleted) == 1  # type: ignore[attr-defined]


def test_a_dead_letter_of_an_attempt_that_has_ended_ends_nothing(controller: Controller) -> None:
    controller.fleet.ledger.jobs[JOB].attempt = 2
    dead_letter(controller, attempt=1)
    assert controller.fleet.ledger.jobs[JOB].status == "open"


def test_an_unreadable_dead_letter_is_kept_aside(controller: Controller) -> None:
    controller.fleet.dead.put.append("{nothing")  # type: ignore[attr-defined]
    controller.dispatch.read_dead_letters()
    (kept,) = controller.fleet.storage.list(f"{FLEET}/unreadable/")
    assert controller.fleet.storage.get(kept.key).body == b"{nothing"


def test_what_is_due_is_sent_in_one_call_and_what_could_not_be_sent_again(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand jobs are released by their canary at once: a call for each would keep the controller from saying that it lives."""
    calls: list[list[str]] = []
    refused: list[str] = []

    def send(bodies: list[str], delay_s: int = 0) -> None:
        calls.append(bodies)
        if len(calls) == 1:
            refused.extend(bodies[3:5])
            raise SendFailed("throttled", unsent=refused)

    monkeypatch.setattr(controller.fleet.jobs, "send", send)
    for attempt in range(1, 8):
        message = Job(fleet_id=FLEET, round=2, job_id=JOB, attempt=attempt)
        controller.fleet.due.append(Due(0.0, message))
    controller.fleet.due.append(Due(time.monotonic() + 3600, Job(fleet_id=FLEET, round=2, job_id=JOB, attempt=9)))
    for _ in range(3):
        controller.dispatch.cycle()
    assert [len(bodies) for bodies in calls] == [7, 2]
    assert calls[1] == refused
    assert [due.message.attempt for due in controller.fleet.due] == [9]


def test_who_reads_a_long_stream_gives_signs_of_life_and_undoes_nobodys_word(controller: Controller) -> None:
    fleet = controller.fleet
    before = fleet.control.beat
    heartbeat.still_here(fleet)
    stored = Control.from_json(fleet.storage.get(layout.control(FLEET)).body)
    assert stored.beat > before and stored == fleet.control
    stop = stored.model_copy(update={"state": "stopping"})
    fleet.storage.replace(layout.control(FLEET), stop.to_bytes(), fleet.control_etag)
    heartbeat.still_here(fleet)
    assert Control.from_json(fleet.storage.get(layout.control(FLEET)).body).state == "stopping"
    controller.heartbeat.beat()
    assert controller.heartbeat.asked_to_stop


def completed(**more: Any) -> str:
    done = AttemptDone(
        **more,
        fleet_id=FLEET,
        instance_id="w",
        ts=now(),
        round=2,
        job_id=JOB,
        attempt=1,
        status="completed",
        ended=True,
        duration_s=1.0,
        samples=SampleCounts(total=1, completed=1),
    )
    return done.to_json()


def test_a_job_ends_when_its_log_can_be_had_again(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are not given up because storage is away for a moment."""
    fault = Fault("SlowDown", 503, "slow down", retryable=True)
    read: list[Exception | list[SampleDone]] = [StorageError("the store is away", fault)] * 2
    common = {"fleet_id": FLEET, "instance_id": "w", "ts": now(), "round": 2, "job_id": JOB, "attempt": 1}
    about = {"task": "t", "model": "scripted/good", "sample_id": 1, "epoch": 1, "uuid": "u", "scores": {}}
    read.append([SampleDone.model_validate(common | about | {"status": "completed"})])

    def found(*_: Any) -> list[SampleDone]:
        if isinstance(came := read.pop(0), Exception):
            raise came
        return came

    monkeypatch.setattr(job_ends, "_read_samples", found)
    controller.fleet.events.put.append(completed(log="x.eval", digest="other"))  # type: ignore[attr-defined]
    for _ in range(2):
        controller.inbox.receive(controller.apply)
    assert controller.fleet.ledger.jobs[JOB].status == "open"
    controller.fleet.stream.store()
    assert controller.fleet.events.deleted == []  # type: ignore[attr-defined]
    assert controller.run().ending == "complete"
    lines = [json.loads(text)["type"] for text in controller.fleet.stream.path.read_text().splitlines()]
    assert lines == ["result", "job_done", "fleet_summary"]


def test_a_lane_that_another_fleet_has_by_now_is_not_emptied(controller: Controller) -> None:
    fleet = controller.fleet
    fleet.lane = fleet.lane.model_copy(update={"endpoint": None, "fleet_id": FLEET})
    fleet.jobs.put.append("a job of the other fleet")  # type: ignore[attr-defined]
    fleet.storage.put(layout.lane("l"), fleet.lane.model_copy(update={"fleet_id": OTHER}).to_bytes())
    controller.ending._empty_lane()
    assert fleet.jobs.put == ["a job of the other fleet"]  # type: ignore[attr-defined]
    fleet.storage.put(layout.lane("l"), fleet.lane.to_bytes())
    controller.inbox.discard = lambda: None  # type: ignore[method-assign]
    controller.ending._empty_lane()
    assert fleet.jobs.put == []  # type: ignore[attr-defined]


def test_the_end_is_stored_however_often_storage_fails(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    create, failures = controller.fleet.storage.create, [None] * 3

    def failing(key: str, body: bytes) -> str:
        if "/events/" in key and failures:
            failures.pop()
            raise StorageError("the store is away")
        return create(key, body)

    monkeypatch.setattr(controller.fleet.storage, "create", failing)
    controller.fleet.events.put.append(completed())  # type: ignore[attr-defined]
    controller.fleet.events.failures = 2  # type: ignore[attr-defined]
    verdict = controller.run()
    assert verdict.ending == "complete"
    assert not failures
    stored = b"".join(
        controller.fleet.storage.get(info.key).body for info in controller.fleet.storage.list(layout.segments(FLEET))
    )
    assert stored == controller.fleet.stream.path.read_bytes()
    assert b'"fleet_summary"' in stored.splitlines()[-1]
    control = Control.from_json(controller.fleet.storage.get(layout.control(FLEET)).body)
    assert (control.state, control.outcome) == ("ended", "complete")


def test_the_time_of_a_round_goes_on_under_another_controller(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, terminal, begun = controller.fleet, io.StringIO(), now() - timedelta(hours=9)
    fleet.view = ProgressLine(stream=terminal)
    with monkeypatch.context() as patched:
        patched.setattr(stream, "now", lambda: begun)
        fleet.stream.append([fleet_start(fleet, 1)])
        fleet.stream.store()
    assert takeover._replay(fleet)
    controller.fleet.events.put.append(completed())  # type: ignore[attr-defined]
    controller.run()
    summary = json.loads(fleet.stream.path.read_text().splitlines()[-1])
    assert 9 * 3600 <= summary["elapsed_s"] < 10 * 3600
    assert "1 worker, 9 h 0" in terminal.getvalue()


def test_ctrl_c_while_the_fleet_ends_does_not_cut_it_short(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = controller.fleet.pool.stop

    def interrupted(*, now: bool = False) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(now=now)

    monkeypatch.setattr(controller.fleet.pool, "stop", interrupted)
    controller.fleet.events.put.append(completed())  # type: ignore[attr-defined]
    assert controller.run().ending == "complete"
    assert controller.fleet.pool.alive == 0


def test_one_message_twice_and_one_unreadable_leave_one_end(controller: Controller) -> None:
    controller.fleet.events.put += ["not json", completed(), completed()]  # type: ignore[attr-defined]
    controller.run()
    lines = controller.fleet.stream.path.read_text().splitlines()
    assert sum('"type":"job_done"' in text for text in lines) == 1
    assert sum("could not be read" in text for text in lines) == 1
    assert len(controller.fleet.events.deleted) == 3  # type: ignore[attr-defined]


def sample() -> str:
    done = SampleDone(
        fleet_id=FLEET,
        instance_id="w",
        ts=now(),
        round=2,
        job_id=JOB,
        attempt=1,
        task="t",
        model="m",
        sample_id=1,
        epoch=1,
        uuid="u",
        status="completed",
        scores={},
    )
    return done.to_json()


def test_an_end_before_its_last_sample_waits_for_it(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues keep no order; without waiting, the whole log would be read for one sample that is on its way."""
    monkeypatch.setattr(job_ends, "_read_samples", lambda *_: pytest.fail("the log was read"))
    end = AttemptDone.from_json(completed()).model_copy(
        update={"log": "k.eval", "digest": digest_of_keys([(sample_key(1, 1), "u")])}
    )
    queue: Any = controller.fleet.events
    queue.put.append(end.to_json())
    controller.inbox.receive(controller.apply)
    assert controller.fleet.ledger.jobs[JOB].status == "open"
    assert not controller.fleet.stream.store(), "a message that has not been obeyed was settled"
    queue.put.append(sample())
    assert controller.run().ending == "complete"


def test_an_end_whose_samples_never_come_is_completed_from_the_log(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(job_ends, "_read_samples", lambda fleet, done: asked.append(done.job_id) or [])
    end = AttemptDone.from_json(completed()).model_copy(update={"log": "k.eval", "digest": "d"})
    controller.fleet.events.put.append(end.to_json())  # type: ignore[attr-defined]
    assert controller.run().ending == "complete"
    assert asked == [JOB]


def test_a_stop_that_could_not_be_told_is_told_with_the_next_beat(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = controller.fleet.storage.replace

    def away(*words: Any) -> str:
        raise StorageError("storage is away")

    monkeypatch.setattr(controller.fleet.storage, "replace", away)
    controller.ending.begin(Verdict("stopped", "the budget is spent"))
    monkeypatch.setattr(controller.fleet.storage, "replace", replace)
    controller.heartbeat.beat()
    assert Control.from_json(controller.fleet.storage.get(layout.control(FLEET)).body).state == "stopping"


def test_a_lane_that_cannot_be_given_back_does_not_hide_how_the_fleet_ended(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*words: Any) -> None:
        raise StorageError("storage is away")

    monkeypatch.setattr(lanes, "release", away)
    controller.apply(read_from_worker(completed()))
    assert controller.run().ending == "complete"


def foreign() -> str:
    return completed().replace(FLEET, OTHER)


@pytest.mark.parametrize("body", ["not json", "foreign"])
def test_what_cannot_be_kept_aside_is_not_deleted(
    body: str, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = foreign() if body == "foreign" else body
    put = controller.fleet.storage.put

    def away(*words: Any) -> str:
        raise StorageError("storage is away")

    for queue in (controller.fleet.events, controller.fleet.dead):
        queue.put.append(body if queue is controller.fleet.events else "not json")  # type: ignore[attr-defined]
    monkeypatch.setattr(controller.fleet.storage, "put", away)
    controller.inbox.receive(controller.apply)
    controller.dispatch.read_dead_letters()
    controller.inbox.store_all()
    controller.dispatch.delete_dead_letters()
    assert (controller.fleet.events.deleted, controller.fleet.dead.deleted) == ([], [])  # type: ignore[attr-defined]
    assert controller.fleet.stream.seq == 0  # nothing says that it is kept
    monkeypatch.setattr(controller.fleet.storage, "put", put)
    controller.fleet.events.put.append(body)  # type: ignore[attr-defined]
    controller.inbox.receive(controller.apply)
    controller.inbox.store_all()
    assert controller.fleet.events.deleted == [f"receipt of {body}"]  # type: ignore[attr-defined]


def test_a_dead_letter_is_deleted_when_the_end_of_its_job_is_stored(controller: Controller) -> None:
    dead_letter(controller)
    assert controller.fleet.ledger.jobs[JOB].status == "failed"
    controller.dispatch.read_dead_letters()
    assert controller.fleet.dead.deleted == []  # type: ignore[attr-defined]
    controller.inbox.store_all()
    controller.dispatch.read_dead_letters()
    controller.dispatch.delete_dead_letters()
    assert len(controller.fleet.dead.deleted) == 1  # type: ignore[attr-defined]


def test_while_too_much_waits_to_be_stored_no_more_is_taken(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = controller.fleet.storage.create

    def away(*words: Any) -> str:
        raise StorageError("storage is away")

    monkeypatch.setattr(stream, "FULL_MESSAGES", 10)
    monkeypatch.setattr(controller.fleet.storage, "create", away)
    controller.fleet.events.put += [completed()] * 30  # type: ignore[attr-defined]
    for _ in range(5):
        controller.inbox.receive(controller.apply)
        controller.inbox.store()
    assert len(controller.fleet.events.put) == 10  # type: ignore[attr-defined]
    monkeypatch.setattr(controller.fleet.storage, "create", create)
    for _ in range(3):
        controller.inbox.store()
        controller.inbox.receive(controller.apply)
    assert controller.fleet.events.put == []  # type: ignore[attr-defined]


def test_ends_that_were_held_back_are_not_left_in_the_lane(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = completed(log="the log", digest="of a sample that has not been heard of")
    monkeypatch.setattr(Direct, "take", lambda *_: ([Received(early, "held", 1)], False))
    controller.inbox.receive(controller.apply)
    assert controller.fleet.ledger.jobs[JOB].status == "open"
    controller.inbox.discard()
    assert controller.fleet.events.deleted == ["held"]  # type: ignore[attr-defined]
