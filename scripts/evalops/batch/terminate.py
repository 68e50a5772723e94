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

    Ends with one sentence when it is not allowed, or when a job does not end.
    """
    follower = Follower(target.jobs)
    try:
        follower.look(client)
        living = [
            each.job_id
            for each in target.jobs
            if follower.jobs.get(each.job_id) is None or not follower.jobs[each.job_id].ended
        ]
        for job_id in living:
            client.terminate_job(jobId=job_id, reason=reason[:1024])
        end = clock() + WAIT_S
        while not follower.ended:
            if clock() > end:
                ui.fail(
                    f"{len(follower.open)} jobs have not ended within {ui.seconds_text(WAIT_S)}: `ies batch list` shows them",
                    ui.EXIT_LEFT_RUNNING,
                )
            follower.look(client)
            if not follower.ended:
                sleep(EVERY_S)
    except (ClientError, BotoCoreError) as error:
        ui.fail(f"the job cannot be terminated (batch:TerminateJob): {aws.explain(error).text}")
    return follower.runs, bool(living) and bool(follower.runs)
