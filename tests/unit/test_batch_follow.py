"""Looking at many jobs: how many calls it takes, and what is asked for; each request checked against the service's model."""

from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from evalops.batch.follow import MISSES, Follower
from evalops.batch.record import children
from evalworker import aws
from evalworker.contract.documents import BatchSubmission

PARENT = "5b2152b4-7c28-4d95-9303-45ebe8b08a9b"


def entry(job: str, state: str, **more: Any) -> dict[str, Any]:
    required = {"jobArn": "a", "jobQueue": "q", "startedAt": 1, "jobDefinition": "d"}
    return required | {"jobId": job, "jobName": "n", "status": state} | more


def array(state: str, size: int, **counts: int) -> dict[str, Any]:
    return entry(PARENT, state, arrayProperties={"size": size, "statusSummary": counts})


def answer(stub: Stubber, *entries: dict[str, Any], asked: list[str] | None = None) -> None:
    stub.add_response("describe_jobs", {"jobs": list(entries)}, {"jobs": ANY if asked is None else asked})


@pytest.mark.parametrize("size", [2, 99, 100, 1000, 10_000])
def test_a_cycle_takes_at_most_one_call_and_one_for_each_hundred(stub: Stubber, size: int) -> None:
    follower = Follower([BatchSubmission(job_id=PARENT, name="n", size=size)])
    answer(stub, array("PENDING", size, RUNNING=size), asked=[PARENT])
    follower.look(stub.client)
    ids = [PARENT, *(f"{PARENT}:{index}" for index in range(size))]
    for cycle in range(2):
        before = follower.calls
        for start in range(0, len(ids), 100):
            part = ids[start : start + 100]
            answer(
                stub,
                *(entry(job, "RUNNING") if job != PARENT else array("PENDING", size, RUNNING=size) for job in part),
                asked=part,
            )
        changed = follower.look(stub.client)
        assert follower.calls - before <= 1 + size / 100
        assert len(changed) == (size if cycle == 0 else 0)
    stub.assert_no_pending_responses()


def test_what_has_ended_is_asked_for_no_more(stub: Stubber) -> None:
    follower = Follower([BatchSubmission(job_id=PARENT, name="n", size=3)])
    answer(stub, array("PENDING", 3, RUNNING=3))
    follower.look(stub.client)
    answer(
        stub,
        array("PENDING", 3, RUNNING=1),
        entry(f"{PARENT}:0", "SUCCEEDED"),
        entry(f"{PARENT}:1", "FAILED"),
        entry(f"{PARENT}:2", "RUNNING"),
    )
    assert [job.id for job in follower.look(stub.client)] == [f"{PARENT}:{n}" for n in range(3)]
    answer(stub, array("FAILED", 3), entry(f"{PARENT}:2", "SUCCEEDED"), asked=[PARENT, f"{PARENT}:2"])
    follower.look(stub.client)
    assert follower.ended and [job.state for job in follower.runs] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]


def test_children_are_asked_for_once_the_array_has_made_them(stub: Stubber) -> None:
    follower = Follower([BatchSubmission(job_id=PARENT, name="n", size=2)])
    for state in ("SUBMITTED", "PENDING"):
        answer(stub, array(state, 2), asked=[PARENT])
        follower.look(stub.client)
    answer(stub, array("PENDING", 2, SUBMITTED=2), asked=[PARENT])
    follower.look(stub.client)
    assert follower.open == [PARENT, f"{PARENT}:0", f"{PARENT}:1"]


def test_an_array_that_ended_before_it_had_children_is_over(stub: Stubber) -> None:
    follower = Follower([BatchSubmission(job_id=PARENT, name="n", size=2)])
    answer(stub, array("FAILED", 2))
    follower.look(stub.client)
    answer(stub)
    follower.look(stub.client)
    assert follower.ended


def test_a_fresh_job_may_be_unknown_for_a_moment_and_an_old_one_is_forgotten(stub: Stubber) -> None:
    fresh = Follower([BatchSubmission(job_id=PARENT, name="n")])
    answer(stub)
    fresh.look(stub.client)
    answer(stub, entry(PARENT, "RUNNABLE"))
    assert [job.state for job in fresh.look(stub.client)] == ["RUNNABLE"]
    old = Follower([BatchSubmission(job_id=PARENT, name="n")])
    for _ in range(MISSES):
        assert not old.ended
        answer(stub)
        old.look(stub.client)
    assert old.ended and old.forgotten == {PARENT} and old.runs == []


def test_calls_are_tried_again_adaptively() -> None:
    for service in ("batch", "logs"):
        config = aws.client(service, "us-east-1").meta.config
        assert (config.retries["mode"], config.retries["total_max_attempts"]) == ("adaptive", 8)


def test_a_reason_that_changes_is_a_change(stub: Stubber) -> None:
    follower = Follower([BatchSubmission(job_id=PARENT, name="n")])
    for reason, expected in (("", 1), ("", 0), ("CAPACITY:X - y", 1)):
        answer(stub, entry(PARENT, "RUNNABLE", statusReason=reason))
        assert len(follower.look(stub.client)) == expected


def test_children_of_submissions() -> None:
    found = children([BatchSubmission(job_id="a", name="n", size=2), BatchSubmission(job_id="b", name="n", offset=2)])
    assert list(found) == ["a:0", "a:1", "b"]
