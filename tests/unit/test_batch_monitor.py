"""Following a run to its end: what is said, what ends it, and what does not; AWS answers from botocore's Stubber."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from evalops import ui
from evalops.batch import states, terminate
from evalops.batch.follow import Follower
from evalops.batch.record import Target
from evalops.commands.batch import exit_code
from evalops.monitor import monitor
from evalops.monitor.monitor import Monitor, Where, explain_failures
from evalops.monitor.progress import ProgressLine, line_of
from evalworker import aws
from evalworker.contract.documents import BatchRound, BatchSubmission
from evalworker.contract.wire import now

JOB = "5b2152b4-7c28-4d95-9303-45ebe8b08a9b"
LAST = "6b2152b4-7c28-4d95-9303-45ebe8b08a9b"
WHERE = Where("us-east-1", "/g")
REQUIRED = {"jobArn": "a", "jobQueue": "q", "startedAt": 1, "jobDefinition": "d", "jobName": "n"}


class World:
    """Stubbed clients, a clock that only sleeping moves, and what was said."""

    def __init__(self) -> None:
        self.time = 0.0
        self.batch, self.logs = Stubber(aws.client("batch", "us-east-1")), Stubber(aws.client("logs", "us-east-1"))
        self.batch.activate()
        self.logs.activate()
        self.renewed = 0

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def monitor(self, size: int | None = None, **more: Any) -> Monitor:
        target = Target([BatchSubmission(job_id=JOB, name="n", size=size)], None, None, whole=True)
        clients = {"batch": self.batch.client, "logs": self.logs.client}
        return Monitor(
            target, WHERE, None, client=clients.__getitem__, sleep=self.sleep, clock=lambda: self.time, **more
        )

    def state(self, state: str, job: str = JOB, **more: Any) -> dict[str, Any]:
        return REQUIRED | {"jobId": job, "status": state} | more

    def answers(self, *entries: dict[str, Any]) -> None:
        self.batch.add_response("describe_jobs", {"jobs": list(entries)}, {"jobs": ANY})

    def prints(self, token: str, *lines: str) -> None:
        events = [{"timestamp": 1000 + n, "message": line} for n, line in enumerate(lines)]
        found = {"events": events, "nextForwardToken": token, "nextBackwardToken": "b"}
        self.logs.add_response("get_log_events", found)

    def nothing_pending(self) -> None:
        self.batch.assert_no_pending_responses()
        self.logs.assert_no_pending_responses()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    aws.forget_clients()
    yield World()
    aws.forget_clients()


def test_a_job_from_its_submission_to_its_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    container = {"logStreamName": "s"}
    world.answers(world.state("RUNNABLE", createdAt=1))
    world.answers(world.state("RUNNING", container=container))
    world.prints("f/1", "first")
    world.prints("f/1")
    world.answers(world.state("SUCCEEDED", container=container | {"exitCode": 0}))
    world.prints("f/2", "\x1b[31mlast")
    world.prints("f/2")
    world.prints("f/2")
    world.prints("f/2")
    outcome = world.monitor().run()
    assert outcome.succeeded and not outcome.terminated and outcome.ending == "ended"
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("state   waiting for a host for ")
    assert said[1] == "state   running for " + said[1].split("for ")[1]
    assert said[2].endswith("/log-events/s")
    assert said[3:] == ["00:00:01 | first", "state   succeeded", "00:00:01 | \\x1b[31mlast"]
    world.nothing_pending()


def test_a_job_that_never_had_a_container(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.answers(world.state("FAILED", statusReason="Task failed to start", container={"logStreamName": "s"}))
    world.logs.add_client_error("get_log_events", "ResourceNotFoundException")
    outcome = world.monitor().run()
    assert outcome.jobs[0].why == "start" and not outcome.succeeded
    world.logs.add_client_error("get_log_events", "ResourceNotFoundException")
    lines = explain_failures(lambda _: world.logs.client, WHERE, outcome.jobs, followed=False)
    assert lines[1:] == ["  its container has printed nothing"]


def test_attempts_are_followed_one_after_another(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"container": {"logStreamName": "s1"}, "statusReason": "Host EC2 (instance i-1) terminated.", "stoppedAt": 1}
    world.answers(world.state("RUNNING", container={"logStreamName": "s1"}))
    world.prints("a", "one")
    world.prints("a")
    ended = {
        "container": {"logStreamName": "s2", "exitCode": 0},
        "stoppedAt": 2,
        "statusReason": "Essential container in task exited",
    }
    world.answers(world.state("SUCCEEDED", attempts=[lost, ended], container={"logStreamName": "s2"}, stoppedAt=2))
    world.prints("b", "the last of one")
    world.prints("b")
    world.prints("c", "two")
    world.prints("c")
    for _ in range(2):
        world.prints("b" if _ == 0 else "c")
    world.monitor().run()
    said = capsys.readouterr().err
    order = [
        "| one",
        "| the last of one",
        "attempt 2: the one before ended (Host EC2 (instance i-1) terminated.)",
        "| two",
    ]
    assert sorted(order, key=said.index) == order
    world.nothing_pending()


def test_throttling_and_lost_connections_are_waited_out(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        world.batch.add_client_error("describe_jobs", "TooManyRequestsException", "slow down", http_status_code=429)
    world.answers(world.state("SUCCEEDED"))
    assert world.monitor().run().succeeded
    said = capsys.readouterr().err
    assert said.count("warning: TooManyRequestsException: slow down; trying again") == 1
    assert world.time > 3 * monitor.EVERY_S


def test_expired_credentials_are_waited_for(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[float] = []
    monkeypatch.setattr(aws, "forget_clients", lambda: renewals.append(world.time))
    for _ in range(2):
        world.batch.add_client_error("describe_jobs", "ExpiredTokenException", "expired", http_status_code=403)
    world.answers(world.state("SUCCEEDED"))
    assert world.monitor().run().succeeded
    assert capsys.readouterr().err.count("the AWS credentials have expired; renew the credentials") == 1
    assert renewals == [10, 20], "new clients read what was renewed"


def test_credentials_that_nobody_renews_leave_the_job_running(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "forget_clients", lambda: None)
    for _ in range(100):
        world.batch.add_client_error("describe_jobs", "ExpiredTokenException", "expired", http_status_code=403)
    with pytest.raises(
        ui.Failure, match=f"the job goes on without this command: ies batch monitor-job {JOB}"
    ) as caught:
        world.monitor().run()
    assert caught.value.exit_code == ui.EXIT_LEFT_RUNNING


def test_a_permission_that_lacks_for_the_log_ends_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.answers(world.state("RUNNING", container={"logStreamName": "s"}))
    world.logs.add_client_error("get_log_events", "AccessDeniedException", "no", http_status_code=403)
    world.answers(world.state("SUCCEEDED", container={"logStreamName": "s"}))
    assert world.monitor().run().succeeded
    assert "the job's log cannot be read (logs:GetLogEvents): access denied" in capsys.readouterr().err


def test_a_permission_that_lacks_for_the_states_is_one_sentence(world: World) -> None:
    said = "User: u is not authorized to perform: batch:DescribeJobs on resource: *"
    world.batch.add_client_error("describe_jobs", "AccessDeniedException", said, http_status_code=403)
    with pytest.raises(ui.Failure, match="batch:DescribeJobs") as caught:
        world.monitor().run()
    assert caught.value.exit_code == ui.EXIT_LEFT_RUNNING


def created(ago: timedelta) -> int:
    return int((now() - ago).timestamp() * 1000)


def test_waiting_too_long_terminates(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.answers(world.state("RUNNABLE", createdAt=created(timedelta(minutes=4))))
    world.answers(world.state("RUNNABLE", createdAt=created(timedelta(minutes=6))))
    world.batch.add_response(
        "terminate_job", {}, {"jobId": JOB, "reason": "waited in RUNNABLE for longer than 5 m 00 s"}
    )
    world.answers(world.state("FAILED", isCancelled=True, statusReason="waited in RUNNABLE for longer than 5 m 00 s"))
    outcome = world.monitor(runnable_timeout=timedelta(minutes=5)).run()
    assert (outcome.ending, outcome.terminated) == ("stopped", True)
    assert "the job is terminated: waited in RUNNABLE" in capsys.readouterr().err
    world.nothing_pending()


def array(world: World, *children: dict[str, Any], state: str = "PENDING", **counts: int) -> None:
    """A look at an array and its children."""
    parent = world.state(state, arrayProperties={"size": len(children), "statusSummary": counts or {"RUNNABLE": 1}})
    world.answers(parent)
    world.answers(parent, *children)


@pytest.mark.parametrize(
    "other",
    [
        {"status": "RUNNING"},
        {"status": "STARTING", "createdAt": 1},
        {"status": "SUCCEEDED", "stoppedAt": "now"},
        {"status": "RUNNABLE", "createdAt": 1, "attempts": [{"startedAt": 1, "stoppedAt": "now"}]},
    ],
)
def test_an_array_that_moves_is_not_ended_for_a_child_that_waits(world: World, other: dict[str, Any]) -> None:
    minute = created(timedelta(minutes=1))
    if other.get("stoppedAt") == "now":
        other = other | {"stoppedAt": minute}
    if "attempts" in other:
        other = other | {"attempts": [{"startedAt": 1, "stoppedAt": minute}]}
    waiting = world.state("RUNNABLE", f"{JOB}:0", createdAt=created(timedelta(hours=3)))
    array(world, waiting, world.state(job=f"{JOB}:1", state=other["status"]) | other)
    watching = world.monitor(size=2, runnable_timeout=timedelta(minutes=5))
    watching._cycle()
    watching._cycle()  # a TerminateJob would meet no answer
    assert watching._stopped is None


def test_an_array_of_which_nothing_has_moved_for_so_long_is_ended(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [world.state("RUNNABLE", f"{JOB}:{n}", createdAt=created(timedelta(hours=3))) for n in range(2)]
    array(world, *waiting)
    world.batch.add_response("terminate_job", {}, {"jobId": JOB, "reason": ANY})
    watching = world.monitor(size=2, runnable_timeout=timedelta(minutes=5))
    watching._cycle()
    watching._cycle()
    assert watching._stopped == "stopped"
    assert "ending  the array is terminated: waited in RUNNABLE for longer than 5 m 00 s" in capsys.readouterr().err


def test_the_log_of_a_job_that_ended_at_once_is_waited_for(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"container": {"logStreamName": "s", "exitCode": 1}, "stoppedAt": created(timedelta(seconds=2))}
    world.answers(world.state("FAILED", **ended))
    for _ in range(2):
        world.logs.add_client_error("get_log_events", "ResourceNotFoundException")
    world.prints("f/1", "why it failed")
    for _ in range(6):
        world.prints("f/1")
    watching = world.monitor()
    watching.run()
    assert "00:00:01 | why it failed" in capsys.readouterr().err
    assert watching.lines == 1


def test_a_log_that_never_comes_is_waited_for_only_so_long(world: World) -> None:
    ended = {"container": {"logStreamName": "s", "exitCode": 1}, "stoppedAt": created(timedelta(seconds=2))}
    world.answers(world.state("FAILED", **ended))
    for _ in range(20):
        world.logs.add_client_error("get_log_events", "ResourceNotFoundException")
    watching = world.monitor()
    assert watching.run().ending == "ended"
    assert monitor.LATE_S <= world.time < 2 * monitor.LATE_S and watching.lines == 0


def test_a_thousand_errors_are_waited_out(world: World) -> None:
    watching = world.monitor()
    watching._errors = 1100
    watching._survive(aws.ServiceError("away", aws.Fault("X", 500, "away", retryable=True)))
    assert world.time == monitor.SLOWEST_S


def test_of_many_failures_at_once_the_first_are_told_with_the_end_of_their_logs(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = [
        world.state("FAILED", f"{JOB}:{n}", container={"exitCode": 1, "logStreamName": f"s{n}"}) for n in range(7)
    ]
    array(world, *failed, FAILED=7)
    for number in range(monitor.SHOWN):
        world.prints("f", f"Traceback {number}")
    watching = world.monitor(size=7)
    watching._cycle()
    watching._cycle()
    said = capsys.readouterr().err
    assert said.count(" failed: its command failed") == monitor.SHOWN
    assert "/log-events/s4" in said and "  | Traceback 4" in said and "Traceback 5" not in said
    world.nothing_pending()


def test_the_results_are_looked_for_where_children_run(world: World) -> None:
    """All at the first look and at the last; between them only those of running children, which the round knows by their places."""
    looks: list[Any] = []
    parts = [BatchSubmission(job_id=JOB, name="n", offset=0, size=2), BatchSubmission(job_id=LAST, name="n", offset=2)]
    round_ = BatchRound(number=2, queue="q", array=True, jobs=[4, 2, 0], submissions=parts)
    watching = world.monitor()
    watching._target = Target(parts, None, round_, whole=True)
    watching.follower = Follower(parts)
    watching._results = SimpleNamespace(  # type: ignore[assignment]
        jobs=["j0", "j1", "j2", "j3", "j4"], poll=lambda running: looks.append(running) or [], again=0
    )
    for job, state in ((f"{JOB}:0", "SUCCEEDED"), (f"{JOB}:1", "RUNNING"), (LAST, "STARTING")):
        watching.follower.jobs[job] = states.job(world.state(state, job))
    for force in (False, False, True):
        world.time += 60
        watching._look_at_results(force=force)
    assert [look and sorted(look) for look in looks] == [None, ["j0", "j2"], None]


def test_a_look_at_the_results_that_takes_long_is_followed_by_a_long_pause(world: World) -> None:
    class Slow:
        looks, again = 0, 0

        def poll(self, running: Any) -> list[Any]:
            self.looks += 1
            world.time += 10
            return []

    slow = Slow()
    watching = world.monitor()
    watching._results = slow  # type: ignore[assignment]
    for _ in range(15):
        watching._look_at_results()
        world.time += 2
    assert slow.looks == 1
    world.time += 20
    watching._look_at_results()
    assert slow.looks == 2


def test_what_can_never_start_is_terminated_at_once(world: World) -> None:
    reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job's resources do not fit."
    world.answers(world.state("RUNNABLE", statusReason=reason, createdAt=created(timedelta(seconds=5))))
    world.batch.add_response("terminate_job", {}, {"jobId": JOB, "reason": f"it can never start: {reason}"})
    world.answers(world.state("FAILED", isCancelled=True, statusReason=f"it can never start: {reason}"))
    outcome = world.monitor().run()
    assert outcome.ending == "stuck" and outcome.jobs[0].why == "misconfigured"


def test_a_forgotten_job(world: World) -> None:
    for _ in range(3):
        world.answers()
    outcome = world.monitor().run()
    assert (outcome.ending, outcome.jobs) == ("forgotten", [])


def test_an_array_says_what_failed(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    array = {"size": 2, "statusSummary": {"RUNNING": 2}}
    world.answers(world.state("PENDING", arrayProperties=array))
    failed = world.state("FAILED", f"{JOB}:1", container={"exitCode": 1, "logStreamName": "s"})
    world.answers(world.state("FAILED", arrayProperties=array), world.state("SUCCEEDED", f"{JOB}:0"), failed)
    world.prints("f", "Traceback")
    outcome = world.monitor(size=2).run()
    said = capsys.readouterr().err
    assert "state   5b2152b4:1  failed: its command failed, or its evaluation has failures (exit 1)" in said
    assert "5b2152b4:0" not in said
    world.prints("f", "Traceback")
    lines = explain_failures(lambda _: world.logs.client, WHERE, outcome.jobs, followed=False)
    assert lines[0].startswith(f"n ({JOB}:1) failed") and lines[1:] == ["  | Traceback"]


def test_terminating_waits_for_the_final_state(world: World) -> None:
    target = Target([BatchSubmission(job_id=JOB, name="n")], None, None, whole=True)
    world.answers(world.state("RUNNING"))
    world.batch.add_response("terminate_job", {}, {"jobId": JOB, "reason": "enough"})
    world.answers(world.state("RUNNING"))
    world.answers(world.state("FAILED", isTerminated=True, statusReason="enough"))
    jobs, was_living = terminate.terminate(
        world.batch.client, target, "enough", sleep=world.sleep, clock=lambda: world.time
    )
    assert was_living and [job.why for job in jobs] == ["terminated"]
    world.answers(world.state("SUCCEEDED"))
    jobs, was_living = terminate.terminate(
        world.batch.client, target, "enough", sleep=world.sleep, clock=lambda: world.time
    )
    assert not was_living and [job.state for job in jobs] == ["SUCCEEDED"]
    world.nothing_pending()


def terminating(world: World, *jobs: str) -> tuple[list[Any], bool]:
    target = Target([BatchSubmission(job_id=job, name="n") for job in jobs], None, None, whole=True)
    return terminate.terminate(world.batch.client, target, "enough", sleep=world.sleep, clock=lambda: world.time)


def throttled(world: World, call: str) -> None:
    world.batch.add_client_error(call, "TooManyRequestsException", "slow down", http_status_code=429)


def test_throttling_while_terminating_is_waited_out(world: World) -> None:
    throttled(world, "describe_jobs")
    world.answers(world.state("RUNNING"))
    throttled(world, "terminate_job")
    world.batch.add_response("terminate_job", {}, {"jobId": JOB, "reason": "enough"})
    throttled(world, "describe_jobs")
    world.answers(world.state("FAILED", isTerminated=True, statusReason="enough"))
    jobs, was_living = terminating(world, JOB)
    assert was_living and [job.why for job in jobs] == ["terminated"]
    world.nothing_pending()


def test_each_job_is_told_to_end_although_one_is_refused(world: World) -> None:
    world.answers(world.state("RUNNING", "a"), world.state("RUNNING", "b"))
    world.batch.add_client_error("terminate_job", "AccessDeniedException", "no", http_status_code=403)
    world.batch.add_response("terminate_job", {}, {"jobId": "b", "reason": "enough"})
    with pytest.raises(
        ui.Failure, match=r"^the job a cannot be terminated \(batch:TerminateJob\): access denied"
    ) as caught:
        terminating(world, "a", "b")
    assert caught.value.exit_code == ui.EXIT_LEFT_RUNNING
    world.nothing_pending()


def test_what_was_told_to_end_and_cannot_be_looked_at_names_the_call(world: World) -> None:
    world.answers(world.state("RUNNING"))
    world.batch.add_response("terminate_job", {}, {"jobId": JOB, "reason": "enough"})
    world.batch.add_client_error("describe_jobs", "AccessDeniedException", "no", http_status_code=403)
    with pytest.raises(ui.Failure, match=r"^the jobs were told to end, but cannot be looked at \(batch:Desc") as caught:
        terminating(world, JOB)
    assert caught.value.exit_code == ui.EXIT_LEFT_RUNNING


def test_a_permission_that_lacks_for_terminating(world: World) -> None:
    target = Target([BatchSubmission(job_id=JOB, name="n")], None, None, whole=True)
    world.answers(world.state("RUNNING"))
    world.batch.add_client_error("terminate_job", "AccessDeniedException", "no", http_status_code=403)
    with pytest.raises(ui.Failure, match=r"the job cannot be terminated \(batch:TerminateJob\): access denied"):
        terminate.terminate(world.batch.client, target, "enough")


def test_the_progress_line() -> None:
    assert line_of(12, 40, 1, "running", bar=False) == "[12/40 samples, 1 errored] running"
    assert line_of(20, 40, 0, "running", bar=True) == f"{'█' * 12}{'░' * 12} [20/40 samples] running"
    assert line_of(99, 40, 0, "x", bar=True).startswith("█" * 24 + " [99/40")
    assert line_of(0, 0, 0, "submitted", bar=True) == "submitted"


def test_on_a_terminal_the_line_is_redrawn_under_the_notes() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    view = ProgressLine(stream=stream)
    view.show(1, 2, 0, "running")
    view.note("a line")
    view.show(2, 2, 0, "done")
    view.end()
    text = stream.getvalue()
    assert text.count("\r") == 4 and "\ra line\n" in text and text.endswith("[2/2 samples] done\n")


def described(state: str, **more: Any) -> states.Job:
    return states.job(REQUIRED | {"jobId": JOB, "status": state} | more)


@pytest.mark.parametrize(
    ("ending", "jobs", "rows", "whole", "code"),
    [
        ("ended", [described("SUCCEEDED")], ["success"], True, 0),
        ("ended", [described("FAILED")], ["success"], True, 0),  # the logs decide
        ("ended", [described("SUCCEEDED")], ["success", "partial"], True, 0),  # as Inspect counts
        ("ended", [described("SUCCEEDED")], ["success", "error"], True, 1),
        ("ended", [described("SUCCEEDED")], [], True, 0),
        ("ended", [described("FAILED")], [], True, 1),
        ("ended", [described("SUCCEEDED")], ["success", "error"], False, 0),  # of a part of a run Batch decides
        ("ended", [described("FAILED")], ["success"], False, 1),
        ("ended", [described("FAILED", isTerminated=True)], ["cancelled"], True, 3),
        ("stopped", [described("FAILED", isCancelled=True)], [], True, 3),
        ("stuck", [described("FAILED", isCancelled=True, statusReason="MISCONFIGURATION:X")], ["waiting"], True, 1),
        ("forgotten", [], ["success"], True, 0),
        ("forgotten", [], ["dead"], True, 1),
    ],
)
def test_exit_codes(ending: Any, jobs: list[states.Job], rows: list[str], whole: bool, code: int) -> None:
    seen: Any = SimpleNamespace(rows=[SimpleNamespace(state=row) for row in rows])
    assert exit_code(monitor.Outcome(ending, jobs, 0), seen, whole=whole) == code
