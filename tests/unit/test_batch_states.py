"""What a Batch job is doing, in words: AWS's answers as its documentation and its users show them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evalops.batch import states

T0 = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
JOB = "5b2152b4-7c28-4d95-9303-45ebe8b08a9b"


def milliseconds(minutes: float) -> int:
    return int((T0 + timedelta(minutes=minutes)).timestamp() * 1000)


def described(state: str, **more: Any) -> dict[str, Any]:
    """An entry of DescribeJobs, created ten minutes before T0."""
    return {
        "jobId": JOB,
        "jobName": "n",
        "status": state,
        "createdAt": milliseconds(-10),
        "jobQueue": "arn:aws:batch:r:1:job-queue/q",
    } | more


def words(state: str, **more: Any) -> str:
    return states.words(states.job(described(state, **more)), T0)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (described("SUBMITTED"), "submitted for 10 m 00 s"),
        (described("PENDING"), "waiting for what it depends on for 10 m 00 s"),
        (described("RUNNABLE"), "waiting for a host for 10 m 00 s (a first host takes one to three minutes)"),
        (
            described("RUNNABLE", statusReason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - The job queue is blocked."),
            "waiting for a host for 10 m 00 s: AWS has no machine of these types free right now; --on-demand may start at "
            "once (CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY)",
        ),
        (
            described("RUNNABLE", statusReason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job cannot be placed."),
            "waiting for a host for 10 m 00 s: no instance type of the estate is large enough: lower --vcpus or --memory "
            "(MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT)",
        ),
        (
            described("RUNNABLE", statusReason="MISCONFIGURATION:SOMETHING_NEW - Words."),
            "waiting for a host for 10 m 00 s: MISCONFIGURATION:SOMETHING_NEW - Words.",
        ),
        (described("STARTING"), "starting for 10 m 00 s: a host is there, the image is being pulled"),
        (described("RUNNING", startedAt=milliseconds(-1.5)), "running for 1 m 30 s"),
        (described("SUCCEEDED", container={"exitCode": 0}), "succeeded"),
        (
            described("FAILED", statusReason="Essential container in task exited", container={"exitCode": 78}),
            "failed: its tasks or the run's environment cannot be set up (exit 78) [Essential container in task exited]",
        ),
        (
            described("FAILED", container={"exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"}),
            "failed: out of memory: submit it again with a larger --memory (exit 137) "
            "[OutOfMemoryError: Container killed due to memory usage]",
        ),
        (
            described("FAILED", statusReason="Job attempt duration exceeded timeout"),
            "failed: it ran longer than --job-timeout (or the estate's batch.timeout_minutes) "
            "[Job attempt duration exceeded timeout]",
        ),
        (
            described("FAILED", statusReason="Task failed to start", container={"reason": "CannotPullContainerError: manifest unknown"}),
            "failed: the worker image could not be pulled: push one with `make push-image` and apply its digest "
            "[Task failed to start; CannotPullContainerError: manifest unknown]",
        ),
        (described("FAILED", statusReason="enough", isTerminated=True, container={"exitCode": 130}), "terminated (exit 130) [enough]"),
        (described("FAILED", statusReason="enough", isCancelled=True), "terminated [enough]"),
        (
            described("FAILED", statusReason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", isCancelled=True),
            "failed: it found no host: AWS has no machine of these types free right now; --on-demand may start at once "
            "(CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY)",
        ),
        (
            described("FAILED", statusReason="Job attempt duration exceeded timeout", isTerminated=True, container={"exitCode": 137}),
            "failed: it ran longer than --job-timeout (or the estate's batch.timeout_minutes) (exit 137) "
            "[Job attempt duration exceeded timeout]",
        ),
        (
            described("FAILED", statusReason="no capacity: try at night", isTerminated=True),
            "terminated [no capacity: try at night]",
        ),
        (
            described("FAILED", statusReason="see MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", isTerminated=True),
            "terminated [see MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT]",
        ),
        (
            described("FAILED", arrayProperties={"size": 5, "statusSummary": {"FAILED": 2, "SUCCEEDED": 3}}),
            "failed: 2 of 5 children failed",
        ),
        (
            described("FAILED", container={"exitCode": 74}),
            "failed: its eval ended, but its logs could not be published to S3 (EX_IOERR) (exit 74)",
        ),
        (described("FAILED", statusReason="Dependent Job failed"), "failed: a job that it depends on failed [Dependent Job failed]"),
        (described("FAILED"), "failed: Batch gives no reason"),
        (
            described("FAILED", statusReason="Task failed to start", container={"reason": "DockerTimeoutError: x"}),
            "failed: its container could not be started [Task failed to start; DockerTimeoutError: x]",
        ),
    ],
)  # fmt: skip
def test_every_state_in_words(entry: dict[str, Any], said: str) -> None:
    assert states.words(states.job(entry), T0) == said


def attempt(reason: str, stopped: float, code: int | None = None, stream: str = "s") -> dict[str, Any]:
    container = {"logStreamName": stream, "exitCode": code} if code is not None else {"logStreamName": stream}
    return {
        "statusReason": reason,
        "startedAt": milliseconds(-9),
        "stoppedAt": milliseconds(stopped),
        "container": container,
    }


def test_a_lost_host_waits_anew_and_is_counted() -> None:
    lost = attempt("Host EC2 (instance i-0abc) terminated.", -2)
    waiting = states.job(described("RUNNABLE", attempts=[lost]))
    assert waiting.since == T0 - timedelta(minutes=2), "since the host was lost, not since the job was submitted"
    assert waiting.attempts[0].reason == "Host EC2 (instance i-0abc) terminated."
    running = described("RUNNING", startedAt=milliseconds(-1), attempts=[lost], container={"logStreamName": "s2"})
    assert states.words(states.job(running), T0) == "running for 1 m 00 s (attempt 2)"
    given_up = described("FAILED", statusReason="Host EC2 (instance i-0abc) terminated.", attempts=[lost, lost, lost])
    assert states.words(states.job(given_up), T0) == (
        "failed: its host was lost, as often as the estate allows (batch.host_retries) "
        "[Host EC2 (instance i-0abc) terminated.], 3 attempts"
    )


def test_a_stream_is_known_once_and_only_from_the_start_on() -> None:
    assert states.job(described("RUNNABLE", container={"logStreamName": "old"})).attempts == []
    assert states.job(described("RUNNING", container={})).attempts == []
    running = states.job(described("RUNNING", container={"logStreamName": "s"}))
    assert [each.stream for each in running.attempts] == ["s"]
    ended = states.job(described("FAILED", container={"logStreamName": "s"}, attempts=[attempt("x", -1, 1)]))
    assert [each.stream for each in ended.attempts] == ["s"] and ended.exit_code == 1


def test_the_log_group_is_what_batch_says() -> None:
    options = {"awslogs-group": "/g", "awslogs-stream-prefix": "job"}
    found = states.job(
        described("RUNNING", container={"logConfiguration": {"logDriver": "awslogs", "options": options}})
    )
    assert found.group == "/g" and states.job(described("RUNNING")).group is None
    assert found.queue == "q"


def test_only_what_can_never_start_is_stuck() -> None:
    assert states.job(described("RUNNABLE", statusReason="MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - x")).stuck
    assert not states.job(described("RUNNABLE", statusReason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - x")).stuck
    assert not states.job(described("RUNNABLE")).stuck


def test_an_array_is_its_children() -> None:
    summary = {"RUNNING": 3, "SUCCEEDED": 2, "FAILED": 0}
    said = words("PENDING", arrayProperties={"size": 5, "statusSummary": summary})
    assert said == "array: 3 running, 2 succeeded"
    assert words("PENDING", arrayProperties={"size": 5, "statusSummary": {}}) == "array: its children are being made"
    child = states.job(described("RUNNING", arrayProperties={"index": 3, "statusSummary": {}}))
    assert child.children is None


def test_zero_is_an_exit_status_and_a_time_of_zero_is_none() -> None:
    found = states.job(described("SUCCEEDED", container={"exitCode": 0}, stoppedAt=0))
    assert found.exit_code == 0 and found.stopped is None and found.why is None
