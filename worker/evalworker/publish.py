"""The end of an attempt in storage, in an order that survives being killed at any point. Design, section 6.

Upload the attempt's log, create its `end.json`, create `done-<round>.json` if the job has ended, publish. Each step is idempotent, and
whoever loses a creation goes on with what the winner wrote: one result set, one published log, whoever is killed when.
"""

import contextlib
from pathlib import Path

from evalworker.contract import layout
from evalworker.contract.documents import JobDone
from evalworker.contract.messages import AttemptDone
from evalworker.storage import AlreadyExists, Missing, Storage, StorageError


def find_end(storage: Storage, fleet_id: str, job_id: str, attempt: int) -> AttemptDone | None:
    """The recorded end of an attempt, None while it has none."""
    try:
        return AttemptDone.from_json(storage.get(layout.attempt_end(fleet_id, job_id, attempt)).body)
    except Missing:
        return None


def find_done(storage: Storage, fleet_id: str, job_id: str, round_: int) -> JobDone | None:
    """The job's end in this round, None while it has not ended."""
    try:
        return JobDone.from_json(storage.get(layout.job_done(fleet_id, job_id, round_)).body)
    except Missing:
        return None


def record_end(storage: Storage, done: AttemptDone, log: Path | None) -> AttemptDone:
    """Upload the attempt's log and record its end; returns the recorded end, which is another worker's if that came first."""
    if log is not None:
        assert done.log is not None
        storage.upload(log, done.log)
    try:
        storage.create(layout.attempt_end(done.fleet_id, done.job_id, done.attempt), done.to_bytes())
        return done
    except AlreadyExists:
        return find_end(storage, done.fleet_id, done.job_id, done.attempt) or done


def conclude(storage: Storage, done: AttemptDone) -> AttemptDone:
    """What follows a recorded end: if the job has ended with it, mark the job done and publish its log.

    Returns the `attempt_done` to post: the one that the job's done document holds, if that is another attempt's.
    """
    if not done.ended:
        return done
    record = JobDone(fleet_id=done.fleet_id, job_id=done.job_id, round=done.round, log=done.log, attempt_done=done)
    try:
        storage.create(layout.job_done(done.fleet_id, done.job_id, done.round), record.to_bytes())
    except AlreadyExists:
        record = find_done(storage, done.fleet_id, done.job_id, done.round) or record
    publish(storage, record)
    return record.attempt_done


def publish(storage: Storage, record: JobDone) -> None:
    """Copy the job's log to where people look for it, and remove what an earlier round had published there.

    A shard's log goes no further than the fleet's prefix: the merged one is what people look for.
    """
    done = record.attempt_done
    if record.log is None:
        return
    storage.copy(record.log, layout.job_log(record.fleet_id, record.job_id))
    if done.log_name is None or done.shard:
        return
    working = layout.working(record.fleet_id)
    storage.copy(record.log, working + done.log_name)
    for round_ in range(1, record.round):
        earlier = find_done(storage, record.fleet_id, record.job_id, round_)
        name = earlier.attempt_done.log_name if earlier else None
        if name is not None and name != done.log_name:
            storage.delete(working + name)


def keep_unrecorded(storage: Storage, done: AttemptDone, recorded: AttemptDone) -> None:
    """Make the log of an attempt that has completed the job's partial one, if another end than a completed one was recorded.

    Whoever runs the job again then finds it finished.
    """
    if done.status == "completed" and done.ended and recorded.status != "completed" and done.log and done.log_name:
        storage.copy(done.log, layout.partial(done.fleet_id, done.job_id) + done.log_name)


def clear_partial(storage: Storage, fleet_id: str, job_id: str) -> None:
    """Remove the unfinished log of a job that has completed.

    What cannot be removed expires, and must not make a recorded end look like a failure.
    """
    with contextlib.suppress(StorageError):
        for info in list(storage.list(layout.partial(fleet_id, job_id))):
            storage.delete(info.key)
