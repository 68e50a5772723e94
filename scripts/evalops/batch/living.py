"""Whether a run's jobs still live on AWS Batch: for status, and for whoever is about to run the same run elsewhere.

Two owners of one log directory steal from each other. What cannot be asked is not known, and never an error here.
"""

from datetime import timedelta

from botocore.exceptions import BotoCoreError, ClientError

from evalops.batch import states
from evalops.batch.follow import PER_CALL
from evalops.batch.record import newest, read
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Storage

SUBMITTING = timedelta(minutes=5)
"""After so long a submission that is not complete was broken off."""


def on_batch(storage: Storage, run_id: str) -> tuple[bool | None, str]:
    """Whether a job of the run's newest round has not ended, and a clause about it; None when that is not known."""
    try:
        run = read(storage, run_id)
        if run is None or not run.rounds:
            return None, ""
        last = run.rounds[-1]
        if len(last.submissions) < len(last.names) and last.begun is not None and now() - last.begun < SUBMITTING:
            return True, f"it is being submitted since {last.begun:%H:%M:%S} UTC"
        round_ = newest(run)
        if round_ is None:
            return False, "it has no job on AWS Batch"
        ids = [each.job_id for each in round_.submissions]
        client = aws.client("batch", run.region)
        answers = [client.describe_jobs(jobs=ids[at : at + PER_CALL])["jobs"] for at in range(0, len(ids), PER_CALL)]
    except (ClientError, BotoCoreError, ServiceError, Unreadable):
        return None, ""
    jobs = [states.job(entry) for some in answers for entry in some]
    if not jobs:
        return False, "AWS Batch has forgotten its job"
    if alive := next((job for job in jobs if not job.ended), None):
        return True, f"its Batch job {alive.id} is there: {states.words(alive, now())}"
    failed = next((job for job in jobs if job.state == "FAILED"), jobs[0])
    return False, f"its Batch job {failed.id} {states.words(failed, now())}"
