"""What an attempt's end means: from the job's own facts and its process's exit to an `AttemptDone`. Pure.

The job says what it saw (`JobEnd`), the agent adds what only it can know (exit status, out-of-memory kills, why it stopped the job
itself), and the rules of `contract.failures` decide.
"""

from dataclasses import dataclass

from evalworker import redact
from evalworker.contract.failures import EXIT_CONFIG, Category, JobEvidence, judge
from evalworker.job import JobEnd
from evalworker.processes import signal_name

SUMMARY_LIMIT = 600
"""Characters of an error summary: it is one line on a terminal."""


@dataclass(frozen=True)
class ProcessEnd:
    """What is known of a job process that is gone. `said` is None when it died before it could speak."""

    said: JobEnd | None
    exit_status: int | None
    oom_killed: bool = False
    killed_for: Category | None = None
    last_output: str = ""


def category_of(ending: ProcessEnd) -> Category | None:
    """Why the attempt failed, None if it completed."""
    said = ending.said or JobEnd()
    return judge(
        JobEvidence(
            exit_status=ending.exit_status,
            log_status=said.log_status,
            samples_total=said.samples.total,
            samples_completed=said.samples.completed,
            samples_errored=said.samples.errored,
            error_type=said.error_type,
            error_message=said.error_message,
            error_status=said.error_status,
            sample_errors=said.sample_errors,
            oom_killed=ending.oom_killed,
            killed_for=ending.killed_for,
        )
    )


def summary_of(ending: ProcessEnd, category: Category) -> str:
    """One line that says what happened, for events and the terminal."""
    said = ending.said or JobEnd()
    if category is Category.OOM:
        text = "the kernel ended the job because memory ran out"
    elif category is Category.TIMEOUT and ending.killed_for is category:
        text = "the job ran longer than --job-timeout and was ended"
    elif said.error_type:
        text = _error_text(said.error_type, said.error_message)
    elif said.cut_short and said.sample_errors:
        text = f"its first sample errored: {_error_text(*said.sample_errors[0][:2])}"
    elif said.sample_errors:
        name, message, _ = said.sample_errors[0]
        count = said.samples.errored or len(said.sample_errors)
        what = "every sample" if count >= said.samples.total else f"{count} of {said.samples.total} samples"
        text = f"{what} errored, for example {_error_text(name or 'an error', message)}"
    elif said.log_status == "success" and said.samples.completed == 0:
        text = "the log says success but no sample completed"
    else:
        text = _exit_text(ending)
    return " ".join(redact.text(text).split())[:SUMMARY_LIMIT]


def _error_text(name: str, message: str) -> str:
    """An exception as a person reads it; Inspect keeps a sample's as its `repr`, which has the name in it."""
    if name == "SystemExit":
        return f"the task's code called sys.exit({message})"
    if not message or message.startswith(f"{name}("):
        return message or name
    return f"{name}: {message}"


def _exit_text(ending: ProcessEnd) -> str:
    status = ending.exit_status
    if status is None:
        text = "the job's process vanished with the fork server"
    elif status < 0:
        text = f"the job's process was killed by {signal_name(-status)}"
    elif status == EXIT_CONFIG:
        text = "the job could not be set up"
    else:
        text = f"the job's process ended with exit status {status} before its eval was finished"
    last = ending.last_output.strip().splitlines()
    return f"{text}; its last output: {last[-1].strip()}" if last else text
