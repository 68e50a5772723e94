"""The rules that stop a fleet: facts in, verdict or event out."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalops.fleet import guards
from evalops.fleet.ledger import Ledger, Spend
from evalops.fleet.watch import Watch
from evalworker.contract.documents import Control, Guards, JobSpec
from evalworker.contract.failures import Category
from evalworker.contract.messages import AttemptDone, Heartbeat, Hung, SampleCounts, SampleDone

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
START = datetime(2026, 11, 29, 14, 5, tzinfo=UTC)
PRICED = {"m/a": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15, "total_cost": 0.25}}


def spec(number: int, name: str = "t", model: str = "m/a") -> JobSpec:
    return JobSpec(job_id=f"{number:016x}", task=f"{name}.py@{name}", name=name, model=model, samples=3)


def attempt(job: JobSpec, number: int = 1, **changes: Any) -> AttemptDone:
    made = AttemptDone(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=START,
        round=1,
        job_id=job.job_id,
        attempt=number,
        status="completed",
        ended=True,
        duration_s=1.0,
        samples=SampleCounts(total=3, completed=3),
    )
    return made.model_copy(update=changes)


def failed(category: Category) -> AttemptDone:
    return attempt(spec(0), status="failed", failure_category=category, error_summary="it broke")


def sample(job: JobSpec, number: int = 1, uuid: str = "u", **changes: Any) -> SampleDone:
    made = SampleDone(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=START,
        round=1,
        job_id=job.job_id,
        attempt=1,
        task=job.name,
        model=job.model,
        sample_id=number,
        epoch=1,
        uuid=uuid,
        status="completed",
        scores={},
        model_usage=PRICED,
    )
    return made.model_copy(update=changes)


def control(**changes: Any) -> Control:
    return Control(
        fleet_id=FLEET,
        round=1,
        state="running",
        deadline=START + timedelta(hours=1),
        beat=START,
        guards=Guards(**changes),
    )


def replayed(ledger: Ledger, events: list[dict[str, Any]]) -> Ledger:
    """A ledger that an attaching controller makes of the stream."""
    again = Ledger([job.spec for job in ledger.jobs.values()], ledger.round)
    for event in [{"type": "fleet_start", "round": ledger.round}, *events]:
        again.replay(event | {"fleet_id": FLEET, "ts": START.isoformat()})
    return again


# Time


def test_the_deadline_ends_a_fleet_at_its_moment() -> None:
    assert guards.deadline(START, START + timedelta(seconds=1)) is None
    verdict = guards.deadline(START, START)
    assert verdict == guards.Verdict("stopped", "the deadline, 2026-11-29 14:05:00 UTC, has passed")


# Failures


def test_the_first_refused_key_ends_a_fleet() -> None:
    assert guards.refused_key([attempt(spec(0)), failed(Category.TASK_ERROR)]) is None
    verdict = guards.refused_key([attempt(spec(0)), failed(Category.AUTH)])
    assert verdict is not None
    assert verdict.reason == "a model provider refused the credentials (it broke)"


@pytest.mark.parametrize(
    ("first", "stops"),
    [
        ([Category.CONFIG] * 3, True),
        ([Category.SANDBOX] * 3, True),
        ([Category.SANDBOX] * 2, False),
        ([Category.SANDBOX, Category.OOM, Category.SANDBOX], False),
        ([Category.TASK_ERROR] * 3, False),
        ([Category.CANCELLED] * 3, False),
        ([None, Category.CONFIG, Category.CONFIG, Category.CONFIG], False),
        ([Category.CONFIG] * 3 + [None] * 3, True),
    ],
)
def test_first_jobs_that_all_fail_alike(first: list[Category | None], stops: bool) -> None:
    ended = [attempt(spec(0)) if category is None else failed(category) for category in first]
    verdict = guards.failure_rate(ended, 0.5)
    assert (verdict is not None) is stops
    if verdict is not None:
        assert verdict.reason == f"the first 3 jobs all failed with {first[0]}, for example: it broke"
    assert guards.failure_rate(ended, 1.0) is None


@given(st.lists(st.booleans(), max_size=40), st.floats(0, 1))
def test_the_share_of_failed_jobs_counts_from_ten_on(ends: list[bool], share: float) -> None:
    ended = [failed(Category.TASK_ERROR) if bad else attempt(spec(0)) for bad in ends]
    verdict = guards.failure_rate(ended, share)
    expected = share < 1 and len(ends) >= 10 and sum(ends) > share * len(ends)
    assert (verdict is not None) is expected
    if verdict is not None:
        assert verdict.reason == (
            f"{sum(ends)} of the first {len(ends)} jobs failed, more than --max-failed-share {share:g} allows"
        )


# Money


def test_marks_are_told_once_and_in_order() -> None:
    budget, bounds = guards.Budget(), Guards(budget_usd=1.0, token_budget=100)
    told = [
        (event["kind"], event["percent"], event["spent"])
        for usd, tokens in ((0.0, 0), (0.5, 20), (0.6, 20), (1.2, 81), (1.3, 81))
        for event in budget.marks(bounds, Spend(usd=usd, tokens=tokens))
    ]
    assert told == [("usd", 50, 0.5), ("usd", 80, 1.2), ("usd", 100, 1.2), ("tokens", 50, 81), ("tokens", 80, 81)]


def test_marks_of_an_earlier_controller_are_not_told_again_but_those_of_a_larger_budget_are() -> None:
    first = guards.Budget()
    events = first.marks(Guards(budget_usd=1.0), Spend(usd=0.9))
    again = guards.Budget()
    for event in events:
        again.replay(event)
    assert again.marks(Guards(budget_usd=1.0), Spend(usd=0.9)) == []
    assert [event["percent"] for event in again.marks(Guards(budget_usd=1.5), Spend(usd=0.9))] == [50]


@pytest.mark.parametrize(
    ("bounds", "spend", "reason"),
    [
        (Guards(), Spend(usd=1e9, tokens=10**12), None),
        (Guards(budget_usd=0.5), Spend(usd=0.49), None),
        (Guards(budget_usd=0.5), Spend(usd=0.5), "the budget is spent: $0.5000 of $0.5000"),
        (Guards(budget_usd=20), Spend(usd=21.456), "the budget is spent: $21.46 of $20.00"),
        (Guards(token_budget=1000), Spend(tokens=1200), "the token budget is spent: 1200 tokens of 1000 tokens"),
    ],
)
def test_a_spent_budget(bounds: Guards, spend: Spend, reason: str | None) -> None:
    verdict = guards.over_budget(bounds, spend)
    assert (verdict.reason if verdict else None) == reason


def test_every_execution_costs_once_also_retried_and_redone_ones() -> None:
    job = spec(0)
    ledger = Ledger([job])
    events = []
    for message in (
        sample(job, uuid="a", status="errored", will_retry=True),
        sample(job, uuid="a", status="errored", will_retry=True),  # delivered twice
        sample(job, uuid="b"),
        sample(job, uuid="b"),
        sample(job, uuid="c", attempt=2),  # a crash made it run again
        sample(job, number=2, uuid="d"),
    ):
        events += ledger.sample(message).events
    assert (ledger.spend.usd, ledger.spend.tokens) == (1.0, 60)
    assert replayed(ledger, events).spend == ledger.spend


def test_what_an_earlier_round_spent_counts() -> None:
    job = spec(0)
    ledger = Ledger([job])
    events = ledger.sample(sample(job)).events
    events += ledger.conclude(attempt(job, status="failed", failure_category=Category.CRASH))
    again = replayed(ledger, events)
    again.new_round(2)
    assert again.spend == ledger.spend
    assert again.spend.usd == 0.25


def test_a_model_without_a_price_is_named_once() -> None:
    job = spec(0)
    ledger = Ledger([job])
    watch = Watch(ledger, 0.0)
    ledger.sample(sample(job, model_usage=PRICED | {"m/grader": {"total_tokens": 9}}))
    bounded = control(budget_usd=10.0)
    (warning,) = watch.marks(bounded)
    assert warning["text"] == "the budget does not count m/grader: its price is not in --model-cost-config"
    assert watch.marks(bounded) == []
    assert ledger.token_cost is None
    assert Watch(ledger, 0.0).marks(control()) == []


# Canary


def test_canaries_are_the_first_open_jobs_of_each_task_and_model() -> None:
    jobs = [spec(0), spec(1), spec(2, model="m/b"), spec(3, name="u"), spec(4, name="u")]
    ledger = Ledger(jobs)
    watch, bounds = Watch(ledger, 0.0), control(canary=True)
    watch.hold(bounds)
    assert [job.spec.job_id[-1] for job in watch.canaries(bounds)] == ["0", "2", "3"]
    assert watch.held(bounds) == {jobs[1].job_id, jobs[4].job_id}
    assert watch.canaries(control()) == []


def test_all_jobs_are_released_when_the_last_canary_has_passed() -> None:
    jobs = [spec(0), spec(1), spec(2, model="m/b")]
    ledger = Ledger(jobs)
    watch, bounds = Watch(ledger, 0.0), control(canary=True)
    watch.hold(bounds)
    outcome = ledger.attempt(attempt(jobs[0], ended=False, canary=True))
    assert outcome.retry is None
    assert [(event["type"], event["canary"], event["retry_in_s"]) for event in outcome.events] == [
        ("job_attempt", True, None)
    ]
    assert watch.release(bounds) == []
    assert jobs[0].job_id in watch.held(bounds)
    ledger.conclude(attempt(jobs[2], canary=True))  # it had one sample alone: its canary ended it
    assert [job.spec.job_id for job in watch.release(bounds)] == [jobs[0].job_id, jobs[1].job_id]
    assert watch.release(bounds) == []
    assert watch.held(bounds) == set()
    state = ledger.jobs[jobs[0].job_id]
    assert (state.attempt, state.base) == (2, 1)


def test_a_canary_that_may_be_tried_again_holds_the_others_back() -> None:
    job = spec(0)
    ledger = Ledger([job, spec(1)])
    watch, bounds = Watch(ledger, 0.0), control(canary=True)
    watch.hold(bounds)
    again = attempt(
        job, ended=False, canary=True, status="failed", failure_category=Category.RATE_LIMIT, retry_after_s=15.0
    )
    outcome = ledger.attempt(again)
    assert outcome.retry is not None
    assert watch.verdict(bounds, START, 0.0, "") is None
    assert [found.spec.job_id for found in watch.canaries(bounds)] == [job.job_id]


def test_a_failed_canary_stops_the_fleet_even_as_its_last_job() -> None:
    job = spec(0)
    ledger = Ledger([job])
    watch, bounds = Watch(ledger, 0.0), control(canary=True)
    watch.hold(bounds)
    ledger.conclude(
        attempt(job, canary=True, status="failed", failure_category=Category.TASK_ERROR, error_summary="1 of 3 errored")
    )
    verdict = watch.verdict(bounds, START, 0.0, "")
    assert verdict == guards.Verdict("stopped", "the canary of t with m/a failed (task_error): 1 of 3 errored")
    assert watch.release(bounds) == []


def test_canaries_are_rebuilt_from_the_stream() -> None:
    jobs = [spec(0), spec(1, model="m/b")]
    ledger = Ledger(jobs)
    events = ledger.attempt(attempt(jobs[0], ended=False, canary=True)).events
    again = replayed(ledger, events)
    watch, bounds = Watch(again, 0.0), control(canary=True)
    watch.hold(bounds)
    assert [job.spec.job_id for job in watch.canaries(bounds)] == [jobs[1].job_id]
    state = again.jobs[jobs[0].job_id]
    assert (state.attempt, state.base) == (2, 1)


def test_a_new_round_begins_with_its_own_canaries() -> None:
    job = spec(0)
    ledger = Ledger([job])
    ledger.attempt(attempt(job, ended=False, canary=True))
    ledger.new_round(2)
    assert ledger.passed == set()


# Silence


def test_a_silence_is_told_once_and_ends_the_fleet_at_twice_the_time() -> None:
    stall = guards.Stall(100.0)
    assert stall.event(129.0, 30.0, "a call") is None
    assert stall.event(130.0, 30.0, "a call") == {"type": "stalled", "silent_s": 30.0, "waiting_for": "a call"}
    assert stall.event(140.0, 30.0, "a call") is None
    assert stall.verdict(159.0, 30.0, "a call") is None
    assert stall.verdict(160.0, 30.0, "a call") == guards.Verdict("stopped", "nothing happened for 60 s (a call)")


def test_whatever_happens_ends_the_silence() -> None:
    stall = guards.Stall(0.0)
    assert stall.event(30.0, 30.0, "") is not None
    stall.happened(31.0)
    assert stall.verdict(62.0, 30.0, "") is None
    assert stall.event(62.0, 30.0, "") is not None


def heartbeat(hung: list[Hung], waits: dict[str, str] | None = None, worker: str = "i-1") -> Heartbeat:
    return Heartbeat(
        fleet_id=FLEET,
        instance_id=worker,
        ts=START,
        running=[],
        load=0.0,
        disk_free=0,
        memory_free=0,
        rate_limited=3,
        waits=waits or {},
        hung=hung,
    )


def test_a_hung_sample_is_told_once_and_again_when_it_was_ended() -> None:
    job = spec(0)
    ledger = Ledger([job])
    watch = Watch(ledger, 0.0)
    hung = Hung(job_id=job.job_id, attempt=1, sample_id="a:b", epoch=2, quiet_s=61.0, activity="a call of m")
    (event,) = watch.heard(heartbeat([hung]))
    assert event | {"type": "stalled", "task": "t", "model": "m/a", "sample_id": "a:b", "epoch": 2} == event
    assert (event["silent_s"], event["ended"], event["waiting_for"]) == (61.0, False, "a call of m")
    assert watch.heard(heartbeat([hung.model_copy(update={"quiet_s": 70.0})])) == []
    (ended,) = watch.heard(heartbeat([hung.model_copy(update={"ended": True})]))
    assert guards.sentence(ended) == (
        "t with m/a, sample 'a:b': nothing has happened for 61 s (a call of m); it was ended with an error"
    )
    ledger.conclude(attempt(job))
    assert watch.heard(heartbeat([hung.model_copy(update={"attempt": 2})])) == []


def test_what_workers_wait_for_is_forgotten_with_them() -> None:
    watch = Watch(Ledger([spec(0)]), 0.0)
    watch.heard(heartbeat([], {"1": "a call"}, "i-1"))
    watch.heard(heartbeat([], {"2": "a call", "3": "a tool"}, "i-2"))
    assert (watch.waits, watch.rate_limited) == ("2 × a call; a tool", 6)
    watch.gone("i-2")
    assert (watch.waits, watch.rate_limited) == ("a call", 3)


def test_no_guard_stops_a_fleet_whose_jobs_have_all_ended() -> None:
    job = spec(0)
    ledger = Ledger([job])
    watch, bounds = Watch(ledger, 0.0), control(budget_usd=0.1)
    ledger.sample(sample(job))
    assert watch.verdict(bounds, START, 0.0, "") is not None
    ledger.conclude(attempt(job))
    assert watch.verdict(bounds, START + timedelta(hours=2), 1e9, "") is None


def test_events_for_the_terminal() -> None:
    (event,) = guards.Budget().marks(Guards(token_budget=10), Spend(tokens=6))
    assert guards.sentence(event) == "50 % of the token budget is spent: 6 tokens of 10 tokens"
    silence = guards.Stall(0.0).event(30.0, 30.0, "a worker")
    assert silence is not None
    assert guards.sentence(silence) == "nothing has happened for 30 s (a worker)"
