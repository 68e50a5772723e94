"""Ends jobs of Batch and sees them ended. Always TerminateJob, because CancelJob leaves what runs alone.

A container has half a minute to flush its logs after its SIGTERM; an array's children go with it.
"""

import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops import ui
from evalops.batch import states
from evalops.batch.follow import Follower
from evalops.batch.record import Target
from evalworker import aws

EVERY_S = 2.0
SLOWEST_S = 30.0
"""The longest pause before a call that AWS refused for a moment is made again."""

WAIT_S = 600.0
"""For the final state: a job whose host is being started ends only when that is there."""


def terminate(
    client: Any,
    target: Target,
    reason: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[states.Job], bool]:
    """End the jobs and wait for their final states: what became of each, and whether any was still alive.

    What AWS refuses for a moment is waited out. Ends with one sentence when it is not allowed, or (exit 4) when a job was told to end and
    it is not seen to.
    """
    follower = Follower(target.jobs)
    end = clock() + WAIT_S
    patience = _Patience(sleep, lambda: clock() > end)
    patience.ask("the jobs cannot be looked at (batch:DescribeJobs)", lambda: follower.look(client))
    living = [each.job_id for each in target.jobs if (job := follower.jobs.get(each.job_id)) is None or not job.ended]
    refused = []
    for job_id in living:
        doing = f"the job{f' {job_id}' if len(living) > 1 else ''} cannot be terminated (batch:TerminateJob)"
        try:
            patience.ask(doing, lambda job_id=job_id: client.terminate_job(jobId=job_id, reason=reason[:1024]))  # type: ignore[misc]
        except ui.Failure as error:
            refused.append(error)
    if refused:
        more = f"; and {len(refused) - 1} more of {len(living)}" if len(refused) > 1 else ""
        ui.fail(
            f"{refused[0].message}{more}", ui.EXIT_LEFT_RUNNING if len(refused) < len(living) else refused[0].exit_code
        )
    patience.exit_code = ui.EXIT_LEFT_RUNNING if living else patience.exit_code
    while not follower.ended:
        if clock() > end:
            ui.fail(
                f"{len(follower.open)} jobs have not ended within {ui.seconds_text(WAIT_S)}: `ies batch list` shows them",
                ui.EXIT_LEFT_RUNNING,
            )
        patience.ask(
            "the jobs were told to end, but cannot be looked at (batch:DescribeJobs)", lambda: follower.look(client)
        )
        if not follower.ended:
            sleep(EVERY_S)
    return follower.runs, bool(living) and bool(follower.runs)


class _Patience:
    """Repeats a call while AWS refuses it for a moment; what it refuses for good is a sentence."""

    def __init__(self, sleep: Callable[[float], None], over: Callable[[], bool]) -> None:
        self._sleep, self._over = sleep, over
        self.exit_code = ui.EXIT_USAGE

    def ask(self, doing: str, call: Callable[[], Any]) -> None:
        """Make the call. Raises Failure, which begins with `doing`."""
        errors = 0
        while True:
            try:
                call()
                return
            except (ClientError, BotoCoreError) as error:
                fault = aws.explain(error)
                if not fault.retryable or self._over():
                    raise ui.Failure(f"{doing}: {fault.text}", self.exit_code) from error
            errors += 1
            self._sleep(min(SLOWEST_S, EVERY_S * 2 ** min(errors, 5)))
