"""How a job ends: its log is compared with the stream, and a job that no worker can end is ended in the controller's name.

Called by the controller for what workers report, by `dispatch` for dead letters, by `ending` for what is open when a fleet stops.
"""

import tempfile
import time
from pathlib import Path
from typing import Literal

from evalops.fleet.fleet import Fleet
from evalops.fleet.ledger import JobState
from evalworker import publish
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import JobDone
from evalworker.contract.failures import Category
from evalworker.contract.ids import digest_of_keys
from evalworker.contract.messages import AttemptDone, SampleDone
from evalworker.contract.wire import now
from evalworker.storage import AlreadyExists


def conclude(fleet: Fleet, done: AttemptDone) -> None:
    """Compare the job's log with the stream and write the job's end.

    Raises ServiceError when the log cannot be had now; the job is open as before, and the same call may work later.
    """
    missing: list[SampleDone] = []
    if done.log is not None and not fleet.ledger.matches(done, _digest_of):
        try:
            missing = _read_samples(fleet, done)
        except Exception as error:
            if _may_work_later(error):
                fleet.ledger.jobs[done.job_id].ending = None
                raise
            # A log that cannot be read must not keep the job from ending
            fleet.warn(f"the job's log could not be compared: {error}", job_id=done.job_id)
    fleet.stream.append(fleet.ledger.conclude(done, missing))
    fleet.roster.ended(done.job_id)


def as_recorded(fleet: Fleet, done: AttemptDone) -> AttemptDone:
    """What stands when a worker tells that an attempt has failed without a log: the end that is recorded, if there is one.

    Storage may have refused that worker just after it had recorded a complete one. Raises ServiceError as `conclude` does.
    """
    job = fleet.ledger.jobs.get(done.job_id)
    if job is None or job.done is not None or done.round != fleet.ledger.round:
        return done
    if done.status != "failed" or done.log is not None:
        return done
    return _recorded(fleet, done.job_id, done.attempt) or done


def _recorded(fleet: Fleet, job_id: str, attempt: int) -> AttemptDone | None:
    """The recorded end of this round's attempt, and what follows from it done as its worker would; None where it has none."""
    try:
        end = publish.find_end(fleet.storage, fleet.fleet_id, job_id, attempt)
        return publish.conclude(fleet.storage, end) if end is not None and end.round == fleet.ledger.round else None
    except Exception as error:
        if _may_work_later(error):
            raise
        fleet.warn(f"the recorded end of attempt {attempt} could not be used: {error}", job_id=job_id)
        return None


def _may_work_later(error: Exception) -> bool:
    return isinstance(error, ServiceError) and (error.retryable or error.credentials)


def end_job(fleet: Fleet, job: JobState, status: Literal["failed", "cancelled"], category: Category, why: str) -> None:
    """End a job in the controller's name, unless a worker has ended it: the done document decides, then its attempt's recorded end."""
    job_id, round_ = job.spec.job_id, fleet.ledger.round
    recorded = _recorded(fleet, job_id, job.attempt)
    if recorded is not None and recorded.ended:
        conclude(fleet, recorded)
        return
    done = AttemptDone(
        fleet_id=fleet.fleet_id,
        instance_id="controller",
        ts=now(),
        round=round_,
        job_id=job_id,
        attempt=job.attempt,
        status=status,
        ended=True,
        failure_category=category,
        error_summary=why,
        duration_s=round(fleet.roster.busy_s(job_id, time.monotonic()), 3),
        samples=fleet.ledger.counts_of(job),
    )
    record = JobDone(fleet_id=fleet.fleet_id, job_id=job_id, round=round_, log=None, attempt_done=done)
    try:
        fleet.storage.create(layout.job_done(fleet.fleet_id, job_id, round_), record.to_bytes())
    except AlreadyExists:
        found = publish.find_done(fleet.storage, fleet.fleet_id, job_id, round_)
        if found is not None:
            publish.publish(fleet.storage, found)
            done = found.attempt_done
    conclude(fleet, done)


def _read_samples(fleet: Fleet, done: AttemptDone) -> list[SampleDone]:
    from evalworker.results import Origin, read_log, sample_done

    spec = fleet.ledger.jobs[done.job_id].spec
    origin = Origin(fleet.fleet_id, done.round, done.job_id, done.attempt, spec.name, spec.model, done.instance_id)
    assert done.log is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.eval")
        fleet.storage.download(done.log, path)
        return [sample_done(summary, origin) for summary in read_log(path).summaries]


def _digest_of(job: JobState) -> str:
    return digest_of_keys((key, said.uuid) for key, said in job.said.items())
