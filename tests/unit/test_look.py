"""Looking at a fleet: what it shows is what the whole stream tells, and what it costs does not grow with the stream."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evalops.commands.fleet import _status_record
from evalops.fleet import look, standing
from evalops.fleet.ledger import Ledger
from evalops.fleet.stream import EventStream
from evalops.logs.events import Progress
from evalworker import redact
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Manifest
from evalworker.contract.events import Event
from evalworker.contract.messages import AttemptDone, SampleCounts, SampleDone
from evalworker.contract.wire import now, stamp

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import crowd
from counting import Counting

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
WHOLE, FIRST, SECOND, ALONE = (f"{number:016x}" for number in range(4))
SAMPLES = 40


def specs() -> list[JobSpec]:
    def spec(job_id: str, name: str, samples: int, **more: Any) -> JobSpec:
        return JobSpec(job_id=job_id, task="t.py@t", name=name, model="scripted/good", samples=samples, **more)

    parts = [
        spec(job_id, "divided", SAMPLES, shard={"index": index, "of": 2, "ids": []})
        for index, job_id in enumerate((FIRST, SECOND))
    ]
    return [*parts, spec(WHOLE, "divided", 2 * SAMPLES, merges=[FIRST, SECOND]), spec(ALONE, "alone", SAMPLES)]


class Fleet:
    """A controller's ledger and stream, without the rest of it. Each step is stored as a segment."""

    def __init__(self, folder: Path) -> None:
        self.store = Counting(folder / "root")
        self.jobs = specs()
        self.ledger = Ledger(self.jobs)
        self.stream = EventStream(self.store, FLEET, folder / "events.jsonl")
        assert list(self.stream.restore()) == []
        moment = now()
        manifest = Manifest(
            fleet_id=FLEET, created=moment, backend="ec2", jobs=self.jobs, arguments={}, models=["m"], submit_dir="."
        )
        self.store.put(layout.manifest(FLEET), manifest.to_bytes())
        self.control(state="running")

    def control(self, **fields: Any) -> None:
        made = {"fleet_id": FLEET, "round": 1, "deadline": now() + timedelta(hours=1), "beat": now()} | fields
        self.store.put(layout.control(FLEET), Control(**made).to_bytes())

    def step(self, *events: Event) -> None:
        self.stream.append(list(events))
        self.stream.store()

    def sample(self, job_id: str, number: int, uuid: str = "a", **more: Any) -> None:
        fields = {"status": "completed", "scores": {}, "cost_usd": 0.25, "attempt": 1} | more
        usage = {"scripted/good": {"total_tokens": 3, "total_cost": 0.25}}
        done = SampleDone(
            fleet_id=FLEET, instance_id="w1", ts=now(), round=1, job_id=job_id, task="t", model="scripted/good",
            sample_id=number, epoch=1, uuid=f"{job_id}-{number}-{uuid}", model_usage=usage, **fields,
        )  # fmt: skip
        self.step(*self.ledger.sample(done).events)

    def end(self, job_id: str, **more: Any) -> None:
        fields = {"status": "completed", "ended": True, "attempt": 1, "metrics": {"match/accuracy": 0.5}} | more
        samples = SampleCounts(total=SAMPLES, completed=SAMPLES)
        done = AttemptDone(
            fleet_id=FLEET,
            instance_id="w1",
            ts=now(),
            round=1,
            job_id=job_id,
            duration_s=2.0,
            samples=samples,
            **fields,
        )
        outcome = self.ledger.attempt(done)
        self.step(*outcome.events, *(self.ledger.conclude(done) if outcome.compare else []))

    def write(self) -> None:
        body = standing.body_of(FLEET, self.ledger, self.stream.noted, self.stream.segment)
        self.store.put(layout.standing(FLEET), body)

    def shown(self) -> dict[str, Any]:
        record = _status_record(look.look(self.store, FLEET))
        return {name: value for name, value in record.items() if name not in VARIES}

    def shown_by_all(self) -> dict[str, Any]:
        """What the whole stream tells: without the document."""
        self.store.delete(layout.standing(FLEET))
        return self.shown()


VARIES = ("beat_age_s", "samples_per_minute", "minutes_left")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def online(name: str) -> Event:
    return {
        "type": "worker_online",
        "instance_id": name,
        "bootstrap_s": 1.0,
        "instance_type": "m7i.large",
        "lifecycle": "spot",
        "slots": 2,
    }


START: Event = {"type": "fleet_start", "expected": 4, "workers": 2, "round": 1}


def script(fleet: Fleet) -> list[Callable[[], None]]:
    """A life of a fleet in steps."""
    return [
        lambda: fleet.step(START),
        lambda: fleet.step(online("w1"), online("w2")),
        lambda: fleet.sample(FIRST, 1),
        lambda: fleet.sample(FIRST, 2, status="errored", error="no"),
        lambda: fleet.sample(SECOND, 1),
        lambda: fleet.step({"type": "worker_lost", "instance_id": "w2", "reason": "gone"}),
        lambda: fleet.sample(ALONE, 1, will_retry=True, status="errored"),
        lambda: fleet.sample(ALONE, 1, "b"),
        lambda: fleet.end(ALONE, ended=False, status="failed", failure_category="network", retry_after_s=1.0),
        lambda: fleet.sample(ALONE, 2, attempt=2),
        lambda: fleet.end(FIRST),
        lambda: fleet.end(ALONE, status="failed", failure_category="task_error", error_summary="bad", attempt=2),
        lambda: fleet.end(SECOND),
        lambda: fleet.end(WHOLE),
        lambda: fleet.step({"type": "worker_draining", "instance_id": "w1", "reason": "idle", "handed_over": []}),
        lambda: fleet.step({"type": "fleet_summary", "outcome": "failures", "reason": None}),
    ]


@pytest.mark.parametrize("written_after", range(len(script(None))))  # type: ignore[arg-type]
def test_the_document_and_what_is_newer_say_what_the_whole_stream_says(fleet: Fleet, written_after: int) -> None:
    for number, step in enumerate(script(fleet)):
        step()
        if number == written_after:
            fleet.write()
    shown = fleet.shown()
    assert shown == fleet.shown_by_all()
    assert shown["summary"]["seq"] == fleet.stream.seq
    assert [worker["state"] for worker in shown["workers"]] == ["left (idle)", "lost"]


def test_each_step_is_shown_as_the_whole_stream_tells_it(fleet: Fleet) -> None:
    script(fleet)[0]()
    fleet.write()
    document = fleet.store.get(layout.standing(FLEET)).body
    for step in script(fleet)[1:]:
        step()
        fleet.store.put(layout.standing(FLEET), document)
        assert fleet.shown() == fleet.shown_by_all()


def test_what_a_look_costs_does_not_grow_with_the_stream(fleet: Fleet) -> None:
    """Manifest, control, machines, the document, the segments since, one read that finds no more; without a controller, the lanes."""
    fleet.step(START)
    costs = []
    for rounds in (3, SAMPLES - 2):
        for number in range(rounds):
            fleet.sample(ALONE, number, uuid=str(rounds))
        fleet.write()
        fleet.sample(FIRST, rounds)
        fleet.store.calls.clear()
        look.look(fleet.store, FLEET)
        costs.append(dict(fleet.store.calls))
    assert costs == [{"get": 6, "list": 1}] * 2


def test_status_of_logs_reads_the_newest_segments_too(fleet: Fleet) -> None:
    """`ies status`: jobs that have no log yet, from the document and what is newer, as from the whole stream."""

    def told() -> dict[str, tuple[int, int, Any]]:
        fleet.store.calls.clear()
        problems: list[str] = []
        found = Progress.now(fleet.store, FLEET, 1, problems)
        assert problems == []
        groups = {"alone": [ALONE], "first": [WHOLE, FIRST], "second": [SECOND]}
        seen = {name: found.together(ids) for name, ids in groups.items()}
        return {name: (job.completed, job.errored, job.last and stamp(job.last)) for name, job in seen.items() if job}

    steps = script(fleet)[:10]
    for number, step in enumerate(steps):
        step()
        if number == len(steps) - 3:
            fleet.write()
    fleet.sample(FIRST, 2, "again", status="errored", attempt=2)
    shown = told()
    assert fleet.store.calls == {"get": 5}
    assert {name: counts[:2] for name, counts in shown.items()} == {"alone": (2, 0), "first": (1, 1), "second": (1, 0)}
    fleet.store.delete(layout.standing(FLEET))
    assert told() == shown


def test_a_replaced_sample_is_counted_once(fleet: Fleet) -> None:
    fleet.step(START)
    fleet.sample(ALONE, 1)
    fleet.write()
    fleet.sample(ALONE, 1, "again", attempt=2)
    assert fleet.shown()["samples"]["completed"] == 1
    assert fleet.shown()["tokens"] == 6
    assert fleet.shown() == fleet.shown_by_all()


@pytest.mark.parametrize("body", [None, b"{", b'{"schema":2,"type":"standing"}'], ids=["none", "torn", "newer"])
def test_without_a_document_that_can_be_used_the_whole_stream_is_read(fleet: Fleet, body: bytes | None) -> None:
    for step in script(fleet):
        step()
    if body is not None:
        fleet.store.put(layout.standing(FLEET), body)
    assert fleet.shown()["samples"] == {"total": 3 * SAMPLES, "completed": 3 * SAMPLES, "errored": 0}


def test_the_document_of_another_round_is_not_used(fleet: Fleet) -> None:
    for step in script(fleet):
        step()
    fleet.write()
    fleet.control(state="running", round=2)
    fleet.ledger.new_round(2)
    fleet.step(START | {"round": 2})
    shown = fleet.shown()
    assert [job["status"] for job in shown["jobs"]] == ["completed", "completed", "completed", "open"]
    assert shown == fleet.shown_by_all()


def test_no_secret_is_in_the_document(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_process", redact.Redactor())
    redact.learn({"KEY": "s3cr3t-value-of-a-key"})
    fleet.end(ALONE, status="failed", failure_category="auth", error_summary="refused: s3cr3t-value-of-a-key")
    fleet.write()
    body = fleet.store.get(layout.standing(FLEET)).body
    assert b"refused: " in body
    assert b"s3cr3t" not in body


def test_a_controller_leaves_a_document_of_its_whole_stream(tmp_path: Path) -> None:
    jobs = crowd.specs(3, 5)
    controller = crowd.controller(tmp_path, jobs, crowd.messages(jobs, 2))
    storage, segment = controller.fleet.storage, controller.fleet.stream
    assert controller.run().ending == "complete"
    found = standing.read(storage, crowd.FLEET, 1)
    assert found is not None
    assert found.segment == segment.segment
    assert found.summary is not None
    assert found.summary["outcome"] == "complete"
    assert {job.done.status for job in found.jobs.values() if job.done} == {"completed"}


def test_a_worker_that_drains_is_shown_as_such(fleet: Fleet) -> None:
    def states() -> list[str]:
        return [worker["state"] for worker in fleet.shown()["workers"]]

    fleet.step(START)
    fleet.step(online("w1"), online("w2"))
    fleet.control(state="running", draining={"w2": "spot"})
    assert states() == ["online", "draining (spot)"]
    fleet.step({"type": "worker_draining", "instance_id": "w2", "reason": "spot", "handed_over": []})
    assert states() == ["online", "left (spot)"]
    fleet.control(state="ended", draining={"w1": "stopped"})
    assert states() == ["ended", "left (spot)"]


def test_results_of_the_last_minutes_make_the_rate() -> None:
    noted = standing.Noted()
    for ago in (1000, 290, 100, 50, 0):
        noted.note({"type": "result", "job_id": ALONE}, now() - timedelta(seconds=ago))
    assert noted.samples_per_minute == pytest.approx(4 / 290 * 60, rel=0.05)
    assert standing.Noted().samples_per_minute == 0.0
