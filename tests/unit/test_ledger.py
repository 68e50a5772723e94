"""One final result per sample and one end per job, in whatever order and however often the workers' messages come."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalops.fleet.ledger import JobState, Ledger
from evalworker.contract.documents import JobSpec
from evalworker.contract.events import Event, line, written
from evalworker.contract.failures import Category
from evalworker.contract.ids import digest_of_keys, sample_key
from evalworker.contract.messages import AttemptDone, SampleCounts, SampleDone, read_from_worker
from evalworker.contract.wire import now

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
JOB = "00000000000000aa"
OTHER = "00000000000000bb"
IDS: list[int | str] = [1, "1", "001", "a:b", "../../x"]
"""Ids that are equal for whoever does not keep their types."""

Message = SampleDone | AttemptDone


def spec(job_id: str = JOB, samples: int = 1, name: str = "t") -> JobSpec:
    return JobSpec(job_id=job_id, task=f"{name}.py@{name}", name=name, model="scripted/good", samples=samples)


def sample(uuid: str | None, id_: int | str = 1, epoch: int = 1, attempt: int = 1, **more: Any) -> SampleDone:
    fields: dict[str, Any] = {"status": "completed", "scores": {"s": {"value": uuid}}, "round": 1, "job_id": JOB} | more
    usage = {"scripted/good": {"total_tokens": 7}}
    return SampleDone(
        fleet_id=FLEET,
        instance_id="w",
        ts=now(),
        attempt=attempt,
        task="t",
        model="scripted/good",
        sample_id=id_,
        epoch=epoch,
        uuid=uuid,
        model_usage=usage,
        **fields,
    )


def digest_of(job: JobState) -> str:
    return digest_of_keys((key, said.uuid) for key, said in job.said.items())


def attempt_done(attempt: int = 1, log: list[SampleDone] | None = None, **more: Any) -> AttemptDone:
    samples = log or []
    errored = sum(one.status == "errored" for one in samples)
    fields: dict[str, Any] = {
        "status": "completed",
        "ended": True,
        "round": 1,
        "job_id": JOB,
        "samples": SampleCounts(total=len(samples), completed=len(samples) - errored, errored=errored),
        "log": None if log is None else "somewhere.eval",
        "digest": None
        if log is None
        else digest_of_keys((sample_key(one.sample_id, one.epoch), one.uuid) for one in samples),
    } | more
    return AttemptDone(fleet_id=FLEET, instance_id="w", ts=now(), attempt=attempt, duration_s=1.0, **fields)


class Controller:
    """What the controller does with a ledger, without queues and files."""

    def __init__(self, ledger: Ledger, logs: dict[int, list[SampleDone]] | None = None) -> None:
        self.ledger = ledger
        self.logs = logs or {}
        self.stream: list[Event] = []
        self.retries: list[int] = []

    def take(self, message: Message) -> None:
        message = read_from_worker(message.to_json())  # type: ignore[assignment]
        outcome = self.ledger.sample(message) if isinstance(message, SampleDone) else self.ledger.attempt(message)
        self.write(outcome.events)
        if outcome.retry is not None:
            self.retries.append(outcome.retry.attempt)
        if outcome.compare is not None:
            matches = self.ledger.matches(outcome.compare, digest_of)
            missing = [] if matches else self.logs.get(outcome.compare.attempt, [])
            self.write(self.ledger.conclude(outcome.compare, missing))

    def write(self, events: list[Event]) -> None:
        for event in events:
            full = written(event, seq=len(self.stream) + 1, fleet_id=FLEET, ts=now())
            self.stream.append(json.loads(line(full)))


def final(stream: list[Event]) -> dict[tuple[str, int], Event]:
    """The result that stands for each sample; fails where one does not name what it replaces."""
    found: dict[tuple[str, int], Event] = {}
    for event in stream:
        if event["type"] == "result":
            key = sample_key(event["sample_id"], event["epoch"])
            if key in found:
                assert event["replaces"] == (found[key]["uuid"] or "")
            else:
                assert "replaces" not in event
            found[key] = event
    return found


@dataclass
class History:
    """What workers sent for one job: all messages, and the log of the attempt that ended it."""

    messages: list[Message]
    log: list[SampleDone]
    attempts: int
    samples: int


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Attempts of one job; some by two workers at once (a redelivered message), each leaving what it finished to the next."""
    keys = [
        (id_, epoch)
        for id_ in draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique_by=repr))
        for epoch in (1, 2)
    ]
    messages: list[Message] = []
    kept: dict[tuple[Any, int], SampleDone] = {}
    attempts = draw(st.integers(1, 3))
    for attempt in range(1, attempts + 1):
        logs = []
        for worker in range(draw(st.integers(1, 2))):
            log = dict(kept)
            for key in keys:
                if key in log and log[key].status == "completed":
                    continue
                base = f"{attempt}-{worker}-{key}"
                for again in range(draw(st.integers(0, 2))):
                    messages.append(
                        sample(f"{base}-{again}", *key, attempt, status="errored", error="x", will_retry=True)
                    )
                if attempt == attempts or draw(st.booleans()):
                    status = draw(st.sampled_from(["completed", "completed", "errored"]))
                    log[key] = sample(base, *key, attempt, status=status, error="x" if status == "errored" else None)
                    if draw(st.integers(0, 9)):  # else the hook failed and only the comparison finds it
                        messages.append(log[key])
            logs.append(log)
        kept = draw(st.sampled_from(logs))
        ended = attempt == attempts
        failed = {} if ended else {"status": "failed", "failure_category": Category.CRASH, "retry_after_s": 0.0}
        messages.append(attempt_done(attempt, list(kept.values()), ended=ended, **failed))
    return History(messages, list(kept.values()), attempts, len(keys))


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[History, list[Message]]:
    """A history and the order in which a standard queue hands it out: any, some messages more than once."""
    history = draw(histories())
    twice = draw(st.lists(st.sampled_from(history.messages), max_size=6))
    return history, draw(st.permutations(history.messages + twice))


@settings(deadline=None)
@given(deliveries())
def test_any_order_and_duplication_ends_in_the_log(case: tuple[History, list[Message]]) -> None:
    history, delivered = case
    controller = Controller(Ledger([spec(samples=history.samples)]), {history.attempts: history.log})
    for message in delivered:
        controller.take(message)

    logged = {sample_key(one.sample_id, one.epoch): one for one in history.log}
    standing = final(controller.stream)
    assert {key: event["uuid"] for key, event in standing.items()} == {key: one.uuid for key, one in logged.items()}
    for key, event in standing.items():
        assert (event["status"], event["scores"]) == (logged[key].status, logged[key].scores)
    ends = [event for event in controller.stream if event["type"] == "job_done"]
    assert controller.stream[-1:] == ends
    assert controller.ledger.samples == SampleCounts(
        total=len(logged),
        completed=sum(one.status == "completed" for one in history.log),
        errored=sum(one.status == "errored" for one in history.log),
    )
    assert controller.retries == sorted(set(controller.retries))


@settings(deadline=None)
@given(deliveries(), st.data())
def test_a_replayed_stream_gives_the_same_state(case: tuple[History, list[Message]], data: st.DataObject) -> None:
    """Another controller takes over in the middle: it goes on as the first one would have."""
    history, delivered = case
    cut = data.draw(st.integers(0, len(delivered)))
    logs = {history.attempts: history.log}
    first = Controller(Ledger([spec(samples=history.samples)]), logs)
    for message in delivered[:cut]:
        first.take(message)

    second = Controller(Ledger([spec(samples=history.samples)]), logs)
    for event in first.stream:
        second.ledger.replay(event)
    second.stream = list(first.stream)
    assert _state(second.ledger) == _state(first.ledger)
    # Messages whose segment was stored and that were not deleted in time come again.
    for message in delivered[max(0, cut - 3) :]:
        second.take(message)
    logged = {sample_key(one.sample_id, one.epoch): one.uuid for one in history.log}
    assert {key: event["uuid"] for key, event in final(second.stream).items()} == logged
    assert [event["type"] for event in second.stream].count("job_done") == 1
    assert second.stream[-1]["type"] == "job_done"


def _state(ledger: Ledger) -> Any:
    return {
        job_id: (job.said, job.retries_said, job.attempt, job.base, job.status, job.done and job.done.samples)
        for job_id, job in ledger.jobs.items()
    }


def test_a_late_duplicate_does_not_bring_back_what_was_replaced() -> None:
    """Two workers ran one attempt: the stream may show both, each of them once."""
    controller = Controller(Ledger([spec()]))
    for uuid in ("a", "b", "a", "b", "a"):
        controller.take(sample(uuid))
    assert [event["uuid"] for event in controller.stream] == ["a", "b"]


def test_a_sample_of_an_earlier_attempt_does_not_replace_one_of_a_later() -> None:
    controller = Controller(Ledger([spec()]))
    controller.take(sample("late", attempt=2))
    controller.take(sample("early", attempt=1))
    assert [event["uuid"] for event in controller.stream] == ["late"]


def test_a_retry_that_never_came_becomes_a_result() -> None:
    """`eval_set` ended before the retry that had been announced: the same execution is now the end."""
    controller = Controller(Ledger([spec()]))
    controller.take(sample("u", status="errored", error="x", will_retry=True))
    controller.take(sample("u", status="errored", error="x"))
    assert [event["type"] for event in controller.stream] == ["sample_retry", "result"]


def test_messages_of_unknown_jobs_and_other_rounds_change_nothing() -> None:
    controller = Controller(Ledger([spec()], 2))
    for message in (
        sample("a"),
        attempt_done(),
        sample("a", job_id=OTHER, round=2),
        attempt_done(job_id=OTHER, round=2),
    ):
        controller.take(message)
    assert controller.stream == []
    assert len(controller.ledger.open_jobs) == 1


def test_a_retry_is_asked_for_once_and_counts_on() -> None:
    controller = Controller(Ledger([spec()]))
    failed = attempt_done(1, status="failed", ended=False, failure_category=Category.OOM, retry_after_s=3.0)
    controller.take(failed)
    controller.take(failed)
    assert controller.retries == [2]
    (event,) = controller.stream
    assert (event["type"], event["failure_category"], event["retry_in_s"]) == ("job_attempt", "oom", 3.0)
    after = Ledger([spec()])
    after.replay(event)
    assert controller.ledger.jobs[JOB].failed_on == after.jobs[JOB].failed_on == failed.instance_id


def test_what_was_redone_is_told_once() -> None:
    """A crash makes samples run twice: `job_attempt` says how many."""
    controller = Controller(Ledger([spec(samples=2)]), {2: [sample("a2", 1, attempt=2), sample("b2", 2, attempt=2)]})
    controller.take(sample("a1", 1))
    controller.take(attempt_done(1, status="failed", ended=False, failure_category=Category.CRASH, retry_after_s=0))
    controller.take(sample("a2", 1, attempt=2))
    controller.take(attempt_done(2, controller.logs[2]))
    attempts = [event for event in controller.stream if event["type"] == "job_attempt"]
    assert [(event["attempt"], event["redone"]) for event in attempts] == [(1, 0), (2, 1)]
    assert controller.stream[-1]["attempts"] == 2


def test_a_new_round_opens_what_did_not_complete_and_counts_attempts_on() -> None:
    good, bad = spec(JOB, 1, "good"), spec(OTHER, 1, "bad")
    controller = Controller(Ledger([good, bad]), {1: [sample("a")]})
    controller.take(attempt_done(1, [sample("a")]))
    controller.take(
        attempt_done(1, None, job_id=OTHER, status="failed", failure_category=Category.TASK_ERROR, error_summary="x")
    )
    again = Ledger([good, bad], 1)
    for event in controller.stream:
        again.replay(event)
    assert [(job.spec.job_id, job.attempt, job.base) for job in again.new_round(2)] == [(OTHER, 2, 1)]
    assert again.count("completed") == 1
    assert again.samples.completed == 1


@pytest.mark.parametrize("uuid", [None, "u"])
def test_a_sample_without_a_uuid_can_be_replaced(uuid: str | None) -> None:
    """A recovered log may have none."""
    controller = Controller(Ledger([spec()]), {1: [sample("final")]})
    controller.take(sample(uuid))
    controller.take(attempt_done(1, [sample("final")]))
    assert final(controller.stream)[sample_key(1, 1)]["uuid"] == "final"


def test_zero_cost_is_a_value_and_no_price_is_none() -> None:
    free = Ledger([spec()])
    free.sample(sample("a").model_copy(update={"model_usage": {"m": {"total_tokens": 5, "total_cost": 0.0}}}))
    assert (free.token_cost, free.tokens) == (0.0, 5)
    unknown = Ledger([spec()])
    unknown.sample(sample("a").model_copy(update={"model_usage": {"m": {"total_tokens": 5}}}))
    assert unknown.token_cost is None
