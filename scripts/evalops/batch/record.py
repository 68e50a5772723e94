"""Which Batch jobs a run has, as `<run>/batch.json` says, and the run that a job belongs to, also when Batch has forgotten the job.

Written by `request`, read by every `ies batch` command and by status, which asks Batch whether the run still lives.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, BatchSubmission
from evalworker.contract.ids import BadId, check_run_id
from evalworker.contract.wire import Unreadable
from evalworker.storage import Missing, Storage

SEARCHED = 1000
"""Runs that are searched, the newest first, for a job that Batch has forgotten."""

_JOB = re.compile(r"(?P<parent>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})(:\d+)?")


class UnknownJob(ValueError):
    """What was given names no job and no run; the text is one sentence."""


@dataclass(frozen=True)
class Target:
    """What a command is about: the Batch jobs, and the run if one is known.

    `jobs` are ids of plain jobs, arrays or one child; `whole` says that they are all of the run's newest round.
    """

    jobs: list[BatchSubmission]
    run: BatchRun | None
    round: BatchRound | None
    whole: bool


def read(storage: Storage, run_id: str) -> BatchRun | None:
    """A run's record; None for a run that never went to Batch. Raises StorageError, Unreadable."""
    try:
        return BatchRun.from_json(storage.get(layout.batch(run_id)).body)
    except Missing:
        return None


def target(storage: Storage, text: str) -> Target:
    """The jobs that a user named by RUN_ID or JOB_ID. Raises UnknownJob for what is neither, or a run without jobs."""
    try:
        run_id = check_run_id(text)
    except BadId:
        return _of_job(storage, text)
    run = read(storage, run_id)
    try:
        round_ = newest(run) if run is not None else None
    except (ClientError, BotoCoreError) as error:
        raise UnknownJob(
            f"the jobs of {run_id} cannot be listed (batch:ListJobs): {aws.explain(error).text}"
        ) from error
    if round_ is None:
        raise UnknownJob(f"the run {run_id} has no job on AWS Batch under {storage.url(run_id)}")
    return Target(round_.submissions, run, round_, whole=True)


def newest(run: BatchRun) -> BatchRound | None:
    """The run's newest round with jobs, None when there is none. Raises what botocore raises.

    A submitter who was killed in the middle has not recorded its last job: that is looked for by its name.
    """
    for round_ in reversed(run.rounds):
        found = list(round_.submissions)
        for name in round_.names[len(found) :]:
            offset = found[-1].offset + (found[-1].size or 1) if found else 0
            jobs = _summaries(aws.client("batch", run.region), round_.queue, name)
            found += [
                BatchSubmission(job_id=job["jobId"], name=name, offset=offset, size=(job.get("arrayProperties") or {}).get("size"))
                for job in jobs[:1]
            ]  # fmt: skip
        if found:
            return round_.model_copy(update={"submissions": found})
    return None


def named(client: Any, queue: str, name: str) -> list[str]:
    """The ids of the jobs of this name that Batch remembers. Raises what botocore raises."""
    return [found["jobId"] for found in _summaries(client, queue, name)]


def _summaries(client: Any, queue: str, name: str) -> list[dict[str, Any]]:
    filters = [{"name": "JOB_NAME", "values": [name]}]
    pages = client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=filters)
    return [found for page in pages for found in page["jobSummaryList"]]


def _of_job(storage: Storage, text: str) -> Target:
    found = _JOB.fullmatch(text)
    if found is None:
        raise UnknownJob(f"{text!r} is neither a job id of AWS Batch nor a run id: see `ies batch list`")
    run = find(storage, found["parent"])
    if run is None:
        return Target([BatchSubmission(job_id=text, name="")], None, None, whole=False)
    round_, submission = _submission(run, found["parent"])
    whole = text == submission.job_id and len(round_.submissions) == 1
    jobs = [submission if text == submission.job_id else BatchSubmission(job_id=text, name=submission.name)]
    return Target(jobs, run, round_, whole)


def _submission(run: BatchRun, job_id: str) -> tuple[BatchRound, BatchSubmission]:
    return next((r, s) for r in reversed(run.rounds) for s in r.submissions if s.job_id == job_id)


def find(storage: Storage, job_id: str) -> BatchRun | None:
    """The run with this job, looked for in the newest runs; None when it is in none of them."""
    runs = sorted((name for name in storage.list_dirs("") if _is_run(name)), reverse=True)[:SEARCHED]
    with ThreadPoolExecutor(16) as pool:
        for run in pool.map(lambda run_id: _quietly(storage, run_id), runs):
            if run is not None and any(s.job_id == job_id for r in run.rounds for s in r.submissions):
                return run
    return None


def _is_run(name: str) -> bool:
    try:
        return bool(check_run_id(name))
    except BadId:
        return False


def _quietly(storage: Storage, run_id: str) -> BatchRun | None:
    try:
        return read(storage, run_id)
    except Unreadable:
        return None


def children(jobs: list[BatchSubmission]) -> Iterator[str]:
    """The ids of what actually runs: plain jobs and the children of arrays."""
    for job in jobs:
        if job.size is None:
            yield job.job_id
        else:
            yield from (f"{job.job_id}:{index}" for index in range(job.size))


def places(round_: BatchRound) -> dict[str, int]:
    """Of each of the round's jobs that runs, plain or an array's child: the place in the manifest of what it runs."""
    found: dict[str, int] = {}
    for each in round_.submissions:
        for number, child in enumerate(children([each])):
            found[child] = round_.jobs[each.offset + number]
    return found
