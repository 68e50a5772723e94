"""Failure categories: every row of the design's table, on exceptions that real evals left in real logs."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai import eval
from inspect_ai.log import EvalLog, EvalSample, read_eval_log

from evalworker.contract import failures
from evalworker.contract.failures import (
    EXIT_CONFIG,
    MAX_ATTEMPTS,
    MAX_RATE_LIMITED,
    NEVER_RETRIED,
    REDELIVERED,
    Category,
    JobEvidence,
    classify_exception,
    exception_type,
    judge,
    retry_delay,
)

TASKS = "../tasks"


@pytest.fixture(autouse=True)
def beside_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def run(task: str, tmp_path: Path, **options: Any) -> EvalLog:
    """The log as it is stored, which is what a worker reads."""
    options = {"continue_on_fail": True, "model": "scripted/good", "max_retries": 1} | options
    [log] = eval(f"{TASKS}/{task}", log_dir=str(tmp_path), display="none", ctl_server=False, **options)
    return read_eval_log(log.location)


def found_in(sample: EvalSample) -> tuple[str, str, int | None]:
    assert sample.error is not None
    return exception_type(sample.error.traceback, sample.error.message), sample.error.message, None


def evidence_of(log: EvalLog, exit_status: int | None = 0, **facts: Any) -> JobEvidence:
    samples = log.samples or []
    errored = [sample for sample in samples if sample.error is not None]
    failed = log.status == "error" and log.error is not None
    given: dict[str, Any] = {
        "exit_status": exit_status,
        "log_status": log.status,
        "samples_total": len(samples),
        "samples_completed": len(samples) - len(errored),
        "samples_errored": len(errored),
        "error_type": exception_type(log.error.traceback, log.error.message) if failed and log.error else "",
        "error_message": log.error.message if failed and log.error else "",
        "sample_errors": [found_in(sample) for sample in errored],
    }
    return JobEvidence(**(given | facts))


# what Inspect's logs say of real exceptions


@pytest.mark.parametrize(
    ("fault", "type_name", "category"),
    [
        ("rate_limit", "RateLimitError", Category.RATE_LIMIT),
        ("timeout", "APITimeoutError", Category.TIMEOUT),
        ("auth", "AuthenticationError", Category.AUTH),
        ("oom", "MemoryError", Category.OOM),
        ("error", "ValueError", Category.TASK_ERROR),
    ],
)
def test_what_a_model_raises(fault: str, type_name: str, category: Category, tmp_path: Path) -> None:
    arguments = {fault: 1, "retry_pause": 0, "memory_mb": 16}
    log = run("slow.py", tmp_path, model_args=arguments, task_args={"n": 2, "seconds": 0})
    assert [found_in(sample)[0] for sample in log.samples or []] == [type_name] * 2
    assert judge(evidence_of(log)) is category


@pytest.mark.parametrize(
    ("kind", "type_name", "category"),
    [
        ("disk", "OSError", Category.DISK_FULL),
        ("file", "FileNotFoundError", Category.TASK_ERROR),
        ("memory", "MemoryError", Category.OOM),
        ("connection", "ConnectionResetError", Category.NETWORK),
        ("lookup", "LookupError", Category.TASK_ERROR),
        ("key", "KeyError", Category.TASK_ERROR),
        ("module", "ModuleNotFoundError", Category.TASK_ERROR),
        ("runtime", "RuntimeError", Category.TASK_ERROR),
        ("daemon", "RuntimeError", Category.SANDBOX),
        ("pull", "RuntimeError", Category.IMAGE_PULL),
        ("pool", "RuntimeError", Category.DOCKER_NETWORK),
        ("chained", "ValueError", Category.TASK_ERROR),
        ("group", "ConnectionResetError", Category.NETWORK),
    ],
)
def test_what_a_sample_raises(kind: str, type_name: str, category: Category, tmp_path: Path) -> None:
    log = run("errors.py@raises", tmp_path, task_args={"kind": kind})
    assert {found_in(sample)[0] for sample in log.samples or []} == {type_name}
    assert judge(evidence_of(log)) is category


@pytest.mark.parametrize("fail_on_error", [True, False])
def test_a_value_error_that_speaks_of_429_and_timeouts_is_a_task_error(fail_on_error: bool, tmp_path: Path) -> None:
    options = {"continue_on_fail": False, "fail_on_error": fail_on_error}
    log = run("errors.py@misleading_error", tmp_path, **options)
    errored = [
        sample for sample in log.samples or [] if sample.error and sample.error.message.startswith("ValueError(")
    ]
    assert errored
    for sample in errored:
        assert sample.error is not None
        assert exception_type(sample.error.traceback) == "ValueError"
        assert classify_exception(*found_in(sample)) is Category.TASK_ERROR
        # a rate limit that the same sample met and got over does not make it one either
        assert classify_exception("ValueError", sample.error.message, 429) is Category.TASK_ERROR
    assert judge(evidence_of(log, sample_errors=[found_in(sample) for sample in errored])) is Category.TASK_ERROR


def test_all_samples_errored_is_a_failure_although_the_status_is_success(tmp_path: Path) -> None:
    log = run("errors.py@all_error", tmp_path, continue_on_fail=False, fail_on_error=False)
    assert log.status == "success"
    assert judge(evidence_of(log)) is Category.TASK_ERROR


def test_a_refused_key_in_every_sample_is_auth_although_the_status_is_success(tmp_path: Path) -> None:
    options = {"continue_on_fail": False, "fail_on_error": False, "model_args": {"auth": 1}}
    log = run("slow.py", tmp_path, task_args={"n": 2, "seconds": 0}, **options)
    assert log.status == "success"
    assert judge(evidence_of(log)) is Category.AUTH


def test_one_errored_sample_fails_the_attempt_and_none_does_not(tmp_path: Path) -> None:
    log = run("errors.py@one_error", tmp_path)
    assert log.status == "error"
    assert judge(evidence_of(log)) is Category.TASK_ERROR
    once = {"task_args": {"state_dir": str(tmp_path)}}
    assert judge(evidence_of(run("errors.py@error_once", tmp_path, **once))) is Category.TASK_ERROR
    assert judge(evidence_of(run("errors.py@error_once", tmp_path, **once))) is None


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ("missing_module.py", ModuleNotFoundError),
        ("raises_at_import.py", RuntimeError),
        ("exits_at_import.py", SystemExit),
        ("empty.py", ValueError),
        ("errors.py@no_such_task", Exception),
        ("errors.py@raises", Exception),
    ],
)
def test_what_cannot_be_loaded_is_config(task: str, error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        run(task, tmp_path)
    evidence = JobEvidence(
        exit_status=EXIT_CONFIG, error_type=type(caught.value).__name__, error_message=str(caught.value)
    )
    assert judge(evidence) is Category.CONFIG


@pytest.mark.parametrize(
    ("model", "arguments"), [("scripted/best", {}), ("scripted/good", {"latancy": 1}), ("nobody/x", {})]
)
def test_a_model_that_cannot_be_made_is_config(model: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        run("slow.py", tmp_path, model=model, model_args=arguments)
    evidence = JobEvidence(
        exit_status=EXIT_CONFIG, error_type=type(caught.value).__name__, error_message=str(caught.value)
    )
    assert judge(evidence) is Category.CONFIG


# exits and kills


@pytest.mark.parametrize(
    ("evidence", "category"),
    [
        (JobEvidence(exit_status=EXIT_CONFIG), Category.CONFIG),
        (JobEvidence(exit_status=EXIT_CONFIG, error_type="TypeError", error_message="bad argument"), Category.CONFIG),
        (JobEvidence(exit_status=EXIT_CONFIG, error_type="OSError", error_message="[Errno 28] x"), Category.DISK_FULL),
        (JobEvidence(exit_status=EXIT_CONFIG, error_type="AuthenticationError"), Category.AUTH),
        (JobEvidence(exit_status=EXIT_CONFIG, error_type="ConnectionError"), Category.NETWORK),
        (JobEvidence(exit_status=-9), Category.CRASH),
        (JobEvidence(exit_status=-9, log_status="started"), Category.CRASH),
        (JobEvidence(exit_status=-9, log_status="started", oom_killed=True), Category.OOM),
        (JobEvidence(exit_status=-9, oom_killed=True, killed_for=Category.TIMEOUT), Category.TIMEOUT),
        (JobEvidence(exit_status=-11), Category.CRASH),
        (JobEvidence(exit_status=255), Category.CRASH),
        (JobEvidence(exit_status=0), Category.CRASH),
        (JobEvidence(exit_status=0, log_status="started", samples_completed=3), Category.CRASH),
        (JobEvidence(exit_status=None), Category.CRASH),
        (JobEvidence(exit_status=-9, log_status="started", sample_errors=[("ValueError", "x", None)]), Category.CRASH),
        (JobEvidence(exit_status=0, log_status="cancelled", samples_completed=3), Category.CANCELLED),
        (JobEvidence(exit_status=0, log_status="cancelled", killed_for=Category.SPOT), Category.SPOT),
        (JobEvidence(exit_status=0, log_status="cancelled", killed_for=Category.CANCELLED), Category.CANCELLED),
        (JobEvidence(exit_status=-9, log_status="started", killed_for=Category.TIMEOUT), Category.TIMEOUT),
        (JobEvidence(exit_status=0, log_status="success"), Category.TASK_ERROR),
        (JobEvidence(exit_status=0, log_status="success", samples_total=4, samples_errored=4), Category.TASK_ERROR),
        (JobEvidence(exit_status=0, log_status="success", samples_total=4, samples_completed=4), None),
        (JobEvidence(exit_status=-9, log_status="success", samples_total=4, samples_completed=4), None),
    ],
    ids=repr,
)
def test_how_a_process_ended(evidence: JobEvidence, category: Category | None) -> None:
    assert judge(evidence) is category


def test_a_job_that_stopped_itself_for_a_refused_key_is_auth_not_cancelled() -> None:
    assert judge(JobEvidence(exit_status=0, log_status="cancelled", error_type="AuthenticationError")) is Category.AUTH
    refused = [("PermissionDeniedError", "Error code: 403", None)]
    assert judge(JobEvidence(exit_status=0, log_status="cancelled", sample_errors=refused)) is Category.AUTH


def test_a_child_that_the_kernel_killed_explains_the_tasks_error() -> None:
    errors = [("RuntimeError", "the tool died", None)]
    facts: dict[str, Any] = {"exit_status": 0, "log_status": "error", "samples_errored": 1, "sample_errors": errors}
    assert judge(JobEvidence(**facts)) is Category.TASK_ERROR
    assert judge(JobEvidence(**facts, oom_killed=True)) is Category.OOM


def test_what_may_heal_wins_over_a_tasks_own_error_and_the_most_frequent_over_others() -> None:
    errors = [
        ("ValueError", "", None),
        ("ReadTimeout", "", None),
        ("RateLimitError", "", 429),
        ("RateLimitError", "", 429),
    ]
    facts: dict[str, Any] = {"exit_status": 0, "log_status": "error", "samples_errored": 4}
    assert judge(JobEvidence(**facts, sample_errors=errors)) is Category.RATE_LIMIT
    assert judge(JobEvidence(**facts, sample_errors=errors[:1])) is Category.TASK_ERROR
    assert judge(JobEvidence(**facts, sample_errors=[*errors, ("AuthenticationError", "", 401)])) is Category.AUTH


# exceptions as the libraries word them


@pytest.mark.parametrize(
    ("type_name", "message", "status", "category"),
    [
        ("openai.RateLimitError", "Error code: 429 - {}", None, Category.RATE_LIMIT),
        ("anthropic.APIStatusError", "Error code: 529 - {'type': 'error'}", None, Category.RATE_LIMIT),
        ("APIStatusError", "APIStatusError('Error code: 401 - {}')", None, Category.AUTH),
        ("InternalServerError", "Error code: 503 - {}", None, Category.RATE_LIMIT),
        ("InternalServerError", "Error code: 500 - {}", None, Category.NETWORK),
        ("BadRequestError", "Error code: 400 - context of 429 tokens exceeded", None, Category.TASK_ERROR),
        ("BadRequestError", "Error code: 400 - {}", 400, Category.TASK_ERROR),
        ("google.genai.errors.ClientError", "429 RESOURCE_EXHAUSTED. {'error': {}}", None, Category.RATE_LIMIT),
        ("google.genai.errors.ClientError", "400 INVALID_ARGUMENT. 429", None, Category.TASK_ERROR),
        ("google.genai.errors.ServerError", "503 UNAVAILABLE. {}", None, Category.RATE_LIMIT),
        ("HTTPStatusError", "Client error '403 Forbidden' for url 'https://x'", None, Category.AUTH),
        (
            "botocore.exceptions.ClientError",
            "An error occurred (ThrottlingException) when calling the InvokeModel operation: slow down",
            None,
            Category.RATE_LIMIT,
        ),
        (
            "ClientError",
            "An error occurred (RequestTimeTooSkewed) when calling the PutObject operation: skew",
            None,
            Category.CLOCK,
        ),
        ("ClientError", "An error occurred (SlowDown) when calling the PutObject operation: x", None, Category.STORAGE),
        (
            "ClientError",
            "An error occurred (NoSuchKey) when calling the GetObject operation: x",
            None,
            Category.TASK_ERROR,
        ),
        ("evalworker.storage.StorageError", "the bucket is gone", None, Category.STORAGE),
        ("NoCredentialsError", "Unable to locate credentials", None, Category.STORAGE),
        ("APIConnectionError", "Connection error.", None, Category.NETWORK),
        ("socket.gaierror", "[Errno -3] Temporary failure in name resolution", None, Category.NETWORK),
        ("OSError", "[Errno 28] No space left on device: '/x'", None, Category.DISK_FULL),
        ("OSError", "OSError(28, 'No space left on device')", None, Category.DISK_FULL),
        ("OSError", "[Errno 101] Network is unreachable", None, Category.NETWORK),
        ("OSError", "[Errno 9] Bad file descriptor", None, Category.TASK_ERROR),
        ("OSError", "28 things went wrong", None, Category.TASK_ERROR),
        ("RuntimeError", "Error: pull access denied for x", None, Category.IMAGE_PULL),
        ("RuntimeError", "write /var/lib/docker/x: no space left on device", None, Category.DISK_FULL),
        ("RuntimeError", "all predefined address pools have been fully subnetted", None, Category.DOCKER_NETWORK),
        ("PrerequisiteError", "Failed to build docker containers", None, Category.SANDBOX),
        (
            "PrerequisiteError",
            "ERROR: Docker sandbox environments require a working Docker Engine\n\ndocker exited with return code 1",
            None,
            Category.SANDBOX,
        ),
        (
            "PrerequisiteError",
            "ERROR: Docker sandbox environments require Docker Engine\n\nInstall: …",
            None,
            Category.CONFIG,
        ),
        ("SandboxUnavailableError", 'The sandbox is not running: service "default" is gone', None, Category.SANDBOX),
        ("PrerequisiteError", "the model needs a key", None, Category.CONFIG),
        ("SomeoneElsesError", "429 timeout", None, Category.TASK_ERROR),
        ("SomeoneElsesError", "", 429, Category.RATE_LIMIT),
        ("", "", None, Category.TASK_ERROR),
    ],
)
def test_exceptions_of_libraries(type_name: str, message: str, status: int | None, category: Category) -> None:
    assert classify_exception(type_name, message, status) is category


@pytest.mark.parametrize(
    ("traceback_text", "message", "type_name"),
    [
        ("", "", ""),
        ("no traceback at all", "", ""),
        ("Traceback (most recent call last):\n  File 'x'\nKeyError: 'a'\n", "", "KeyError"),
        ("Traceback (most recent call last):\n  File 'x'\nKeyboardInterrupt\n", "", "KeyboardInterrupt"),
        ("Traceback (most recent call last):\n  File 'x'\na.b.C: text: more\n", "", "C"),
        ("Traceback (most recent call last):\n  File 'x'\nValueError: 1\nTimeoutError: 2\n", "", "ValueError"),
        (
            "Traceback (most recent call last):\n  File 'x'\nKeyError: 1\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File 'x'\nValueError: 2\n",
            "",
            "ValueError",
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\nValueError: quoted\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File 'x'\nTimeoutError: 2\n",
            "ValueError('quoted\\n\\nDuring …')",
            "ValueError",
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\n"
            "tenacity.RetryError: RetryError[<Future at 0x7f4a state=finished raised RateLimitError>]\n",
            "RetryError(<Future at 0x7f4a state=finished raised RateLimitError>)",
            "RateLimitError",
        ),
        ("", "AuthenticationError('Error code: 401')", "AuthenticationError"),
        ("", "RetryError(<Future at 0x7f4a state=finished raised RateLimitError>)", "RateLimitError"),
        ("", "print(1) has failed", ""),
        ("", "no exception", ""),
    ],
)
def test_type_of_a_traceback(traceback_text: str, message: str, type_name: str) -> None:
    assert exception_type(traceback_text, message) == type_name


@given(st.text(), st.text())
def test_any_text_may_be_given_for_a_traceback(text: str, message: str) -> None:
    assert isinstance(exception_type(text, message), str)
    assert isinstance(exception_type(f"Traceback (most recent call last):\n  File 'x'\n{text}", message), str)


# rules for retries


def test_every_category_has_its_rule() -> None:
    never = {each for each in Category if retry_delay(each, 1) is None}
    assert never == NEVER_RETRIED | REDELIVERED
    assert {Category.SPOT, Category.WORKER_LOST} == REDELIVERED
    assert {Category.CONFIG, Category.AUTH, Category.TASK_ERROR, Category.CANCELLED} == NEVER_RETRIED
    assert set(failures._BY_TYPE.values()) <= set(Category)


@pytest.mark.parametrize(
    ("category", "most"), [(Category.RATE_LIMIT, MAX_RATE_LIMITED), (Category.SANDBOX, MAX_ATTEMPTS)]
)
def test_rate_limits_and_sandboxes_wait_longer_each_time_and_end(category: Category, most: int) -> None:
    pauses = [retry_delay(category, attempt) for attempt in range(1, most)]
    assert None not in pauses
    assert pauses == sorted(set(pauses))  # type: ignore[type-var]
    assert pauses[0] > 0  # type: ignore[operator]
    assert retry_delay(category, most) is None


@given(st.sampled_from(Category), st.integers(1, 10**6))
def test_retries_are_bounded(category: Category, attempt: int) -> None:
    bound = MAX_RATE_LIMITED if category is Category.RATE_LIMIT else MAX_ATTEMPTS
    delay = retry_delay(category, attempt)
    assert delay is None or (delay >= 0 and attempt < bound)
    if attempt < bound and category not in NEVER_RETRIED | REDELIVERED:
        assert delay is not None


_types = st.sampled_from([*failures._BY_TYPE, "ValueError", "OSError", "RuntimeError", "ClientError", ""]) | st.text()
_errors = st.tuples(_types, st.text(), st.none() | st.integers())
_evidence = st.builds(
    JobEvidence,
    exit_status=st.none() | st.integers(-64, 255),
    log_status=st.sampled_from([None, "success", "error", "cancelled", "started"]) | st.text(),
    samples_total=st.integers(0, 100),
    samples_completed=st.integers(0, 100),
    samples_errored=st.integers(0, 100),
    error_type=_types,
    error_message=st.text(),
    error_status=st.none() | st.integers(),
    sample_errors=st.lists(_errors, max_size=5),
    oom_killed=st.booleans(),
    killed_for=st.none() | st.sampled_from(Category),
)


@given(_evidence)
def test_judge_never_raises_and_only_a_log_with_results_is_no_failure(evidence: JobEvidence) -> None:
    category = judge(evidence)
    assert (category is None) == (evidence.log_status == "success" and evidence.samples_completed > 0)
    if category is not None and evidence.killed_for is not None:
        assert category is evidence.killed_for
