"""Whether a run's jobs still live on AWS Batch: for status, and for whoever is about to run the same run elsewhere.

Two owners of one log directory steal from each other. What cannot be asked is not known, and never an error here.
"""

from dataclasses import dataclass
from datetime import timedelta

from botocore.exceptions import BotoCoreError, ClientError

from evalops.batch import states
from evalops.batch.follow import PER_CALL
from evalops.batch.record import newest, read
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract.documents import BatchRound
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Storage

SUBMITTING = timedelta(minutes=5)
"""After so long a submission that is not complete was broken off."""


@dataclass(frozen=True)
class Living:
    """Whether a job of the run's newest round has not ended (None: that is not known), a clause about it, and the round."""

    alive: bool | None
    clause: str = ""
    round: BatchRound | None = None


def on_batch(storage: Storage, run_id: str) -> Living:
    """What AWS Batch says of a run."""
    try:
        run = read(storage, run_id)
        if run is None or not run.rounds:
            return Living(None)
        last = run.rounds[-1]
        if len(last.submissions) < len(last.names) and last.begun is not None and now() - last.begun < SUBMITTING:
            return Living(True, f"it is being submitted since {last.begun:%H:%M:%S} UTC", last)
        round_ = newest(run)
        if round_ is None:
            return Living(False, "it has no job on AWS Batch")
        ids = [each.job_id for each in round_.submissions]
        client = aws.client("batch", run.region)
        answers = [client.describe_jobs(jobs=ids[at : at + PER_CALL])["jobs"] for at in range(0, len(ids), PER_CALL)]
    except (ClientError, BotoCoreError, ServiceError, Unreadable):
        return Living(None)
    jobs = [states.job(entry) for some in answers for entry in some]
    if not jobs:
        return Living(False, "AWS Batch has forgotten its job", round_)
    if alive := next((job for job in jobs if not job.ended), None):
        return Living(True, f"its Batch job {alive.id} is there: {states.words(alive, now())}", round_)
    failed = next((job for job in jobs if job.state == "FAILED"), jobs[0])
    return Living(False, f"its Batch job {failed.id} {states.words(failed, now())}", round_)
