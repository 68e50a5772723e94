"""What an attempt's end is called, and the one line that says so."""

import signal

import pytest

from evalworker.contract.failures import EXIT_CONFIG, Category
from evalworker.contract.messages import SampleCounts
from evalworker.job import JobEnd
from evalworker.verdict import SUMMARY_LIMIT, ProcessEnd, category_of, summary_of


def ended(
    status: int | None = 0, *, oom: bool = False, killed: Category | None = None, output: str = "", **said: object
):
    return ProcessEnd(JobEnd(**said) if said else None, status, oom, killed, output)


def counts(total: int, completed: int, errored: int) -> SampleCounts:
    return SampleCounts(total=total, completed=completed, errored=errored)


@pytest.mark.parametrize(
    ("ending", "category"),
    [
        (ended(log_status="success", samples=counts(3, 3, 0)), None),
        (ended(log_status="success", samples=counts(3, 2, 1)), None),
        (
            ended(log_status="success", samples=counts(3, 0, 3), sample_errors=[("ValueError", "x", None)]),
            Category.TASK_ERROR,
        ),
        (ended(log_status="success", samples=counts(3, 3, 0), killed=Category.SPOT), None),
        (ended(-9), Category.CRASH),
        (ended(None), Category.CRASH),
        (ended(-9, oom=True), Category.OOM),
        (ended(-9, killed=Category.TIMEOUT), Category.TIMEOUT),
        (ended(-9, oom=True, killed=Category.CANCELLED), Category.CANCELLED),
        (ended(EXIT_CONFIG, error_type="ImportError", error_message="no"), Category.CONFIG),
        (ended(log_status="cancelled", error_type="AuthenticationError", error_message="401"), Category.AUTH),
        (
            ended(log_status="started", error_type="OSError", error_message="[Errno 9] Bad file descriptor"),
            Category.TASK_ERROR,
        ),
        (
            ended(log_status="started", error_type="OSError", error_message="[Errno 28] No space left"),
            Category.DISK_FULL,
        ),
    ],
)
def test_category(ending: ProcessEnd, category: Category | None) -> None:
    assert category_of(ending) is category


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (ended(-9), "the job's process was killed by SIGKILL"),
        (ended(None), "the job's process vanished with the fork server"),
        (
            ended(3, output="first\n  Segmentation fault  \n\n"),
            "the job's process ended with exit status 3 before its eval was finished; its last output: Segmentation fault",
        ),
        (ended(-9, oom=True), "the kernel ended the job because memory ran out"),
        (ended(-9, killed=Category.TIMEOUT), "the job ran longer than --job-timeout and was ended"),
        (
            ended(
                log_status="error",
                samples=counts(4, 0, 4),
                sample_errors=[("ValueError", "ValueError('no good')", None)],
            ),
            "every sample errored, for example ValueError('no good')",
        ),
        (
            ended(log_status="error", samples=counts(4, 3, 1), sample_errors=[("KeyError", "two\nlines", None)]),
            "1 of 4 samples errored, for example KeyError: two lines",
        ),
        (
            ended(log_status="started", error_type="SystemExit", error_message="3"),
            "the task's code called sys.exit(3)",
        ),
        (ended(EXIT_CONFIG, error_type="PrerequisiteError"), "PrerequisiteError"),
        (ended(log_status="success", samples=counts(3, 0, 0)), "the log says success but no sample completed"),
    ],
)
def test_summary_is_one_line(ending: ProcessEnd, text: str) -> None:
    category = category_of(ending)
    assert category is not None
    assert summary_of(ending, category) == text


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM])
def test_a_signal_has_its_name(number: signal.Signals) -> None:
    assert number.name in summary_of(ended(-number), Category.CRASH)


def test_an_unknown_signal_does_not_break_the_summary() -> None:
    assert "40" in summary_of(ended(-40), Category.CRASH)


def test_a_long_text_is_cut() -> None:
    ending = ended(log_status="error", error_type="ValueError", error_message="x" * 5000)
    assert len(summary_of(ending, Category.TASK_ERROR)) == SUMMARY_LIMIT
