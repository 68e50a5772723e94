"""From a run's jobs to jobs of AWS Batch: what is asked for, checked before anything is sent, and sent once.

Only the manifest's URL goes to Batch, whose overrides hold 8,192 characters. SubmitJob has no token against doubling, so a call that
was sent twice is looked for by the job's name, which no other job has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.batch import names
from evalops.infra.estate import Estate
from evalops.ui import fail
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, BatchSubmission, Manifest
from evalworker.contract.jsonio import dumps
from evalworker.storage import Storage

LARGEST_ARRAY = 10_000
LARGEST_OVERRIDES = 8_192
"""Characters of a job's container overrides. Batch's own limits, both."""

LARGEST_MANIFEST = 32 * 1024 * 1024
"""Bytes: every child of an array reads the manifest whole."""

SHORTEST_TIMEOUT_S = 60
"""Batch refuses less."""


@dataclass(frozen=True)
class Wanted:
    """What a submission asks for; None takes what the estate's job definition says. Memory is in MiB, times in seconds."""

    queue: str
    array: bool = False
    vcpus: int | None = None
    memory: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Request:
    """One SubmitJob call, and which jobs of the round it runs."""

    call: dict[str, Any]
    offset: int
    size: int | None


def queue_of(estate: Estate, market: str | None, queue: str | None) -> str:
    """The queue to submit to; ends with the estate's queues when there is no such one."""
    assert estate.batch is not None
    queues = estate.batch.queues
    if queue is None:
        return queues[market or "spot"]
    if queue in queues:
        return queues[queue]
    if queue not in queues.values():
        shown = ", ".join(f"{name} ({kind})" for kind, name in queues.items())
        fail(f"--queue {queue}: the estate {estate.name} has no such queue, only {shown}")
    return queue


def requests(estate: Estate, root: str, manifest: Manifest, round_: BatchRound, wanted: Wanted) -> list[Request]:
    """The SubmitJob calls of a round: one for one `eval_set`, or arrays of at most 10,000 children. Pure."""
    assert estate.batch is not None
    count = len(round_.jobs)
    parts = [(0, None)] if not round_.array else _parts(count)
    made = []
    for number, (offset, size) in enumerate(parts):
        jobs = [manifest.jobs[place] for place in round_.jobs[offset : offset + (size or count)]]
        command = ["python", "-P", "-m", "evalworker.batch_job", f"{root}/{layout.manifest(manifest.fleet_id)}"]
        command += ["--round", str(round_.number), *(["--child", str(offset)] if round_.array else [])]
        resources = {"VCPU": wanted.vcpus, "MEMORY": wanted.memory}
        overrides: dict[str, Any] = {"command": command}
        if asked := [{"type": kind, "value": str(value)} for kind, value in resources.items() if value is not None]:
            overrides["resourceRequirements"] = asked
        call: dict[str, Any] = {
            "jobName": names.job_name(manifest.fleet_id, round_.number, jobs, number),
            "jobQueue": wanted.queue,
            "jobDefinition": estate.batch.job_definition,
            "containerOverrides": overrides,
        }
        if size is not None:
            call["arrayProperties"] = {"size": size}
        if wanted.timeout_s is not None:
            call["timeout"] = {"attemptDurationSeconds": int(wanted.timeout_s)}
        made.append(Request(call, offset, size))
    return made


def _parts(count: int) -> list[tuple[int, int | None]]:
    """(offset, size) of each submission of an array; a single job is a plain one, because Batch refuses an array of one."""
    starts = range(0, count, LARGEST_ARRAY)
    sizes = [min(LARGEST_ARRAY, count - start) for start in starts]
    return [(start, None if size == 1 else size) for start, size in zip(starts, sizes, strict=True)]


def check(manifest: Manifest, made: Sequence[Request]) -> None:
    """Refuse what Batch would refuse, or no container could read; nothing has been written or sent yet."""
    size = len(manifest.to_bytes())
    if size > LARGEST_MANIFEST:
        fail(
            f"the run's manifest has {size / 1e6:.1f} MB and {LARGEST_MANIFEST / 1e6:.1f} MB is the most: "
            f"put large arguments into a file of the code, or split its {len(manifest.jobs)} jobs into several runs"
        )
    for each in made:
        length = len(dumps(each.call["containerOverrides"]))
        if length > LARGEST_OVERRIDES:
            fail(
                f"the job's overrides have {length} characters and Batch takes {LARGEST_OVERRIDES}: use a shorter bucket name"
            )


def submit(client: Any, storage: Storage, run: BatchRun, round_: BatchRound, made: Sequence[Request]) -> BatchRun:
    """Submit a round, recorded before and after; on a failure nothing of it is left running and nothing is recorded.

    Ends with one sentence that names what was refused.
    """
    key, before = layout.batch(run.fleet_id), run
    submitted: list[BatchSubmission] = []
    storage.put(key, run.model_copy(update={"rounds": [*run.rounds, round_]}).to_bytes())
    try:
        for each in made:
            job_id = _submit_once(client, each)
            submitted.append(
                BatchSubmission(job_id=job_id, name=each.call["jobName"], offset=each.offset, size=each.size)
            )
    except (ClientError, BotoCoreError) as error:
        undone = _undo(client, submitted)
        if before.rounds:
            storage.put(key, before.to_bytes())
        else:
            storage.delete(key)
        fail(f"AWS Batch took no job (batch:SubmitJob to {each.call['jobQueue']}): {aws.explain(error).text}{undone}")
    run = run.model_copy(update={"rounds": [*run.rounds, round_.model_copy(update={"submissions": submitted})]})
    storage.put(key, run.to_bytes())
    return run


def _submit_once(client: Any, request: Request) -> str:
    """Submit; the job's id. A doubled submission is ended, a lost answer is looked up."""
    try:
        answer = client.submit_job(**request.call)
    except (ClientError, BotoCoreError) as error:
        if not aws.explain(error).retryable:
            raise
        found = _named(client, request)
        if not found:
            raise
        answer = {"jobId": found[0], "ResponseMetadata": {"RetryAttempts": 1}}
    job_id: str = answer["jobId"]
    if answer.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0:
        for other in _named(client, request):
            if other != job_id:
                client.terminate_job(jobId=other, reason="submitted twice by a repeated request")
    return job_id


def _named(client: Any, request: Request) -> list[str]:
    filters = [{"name": "JOB_NAME", "values": [request.call["jobName"]]}]
    pages = client.get_paginator("list_jobs").paginate(jobQueue=request.call["jobQueue"], filters=filters)
    return [found["jobId"] for page in pages for found in page["jobSummaryList"]]


def _undo(client: Any, submitted: Sequence[BatchSubmission]) -> str:
    """End what an incomplete round has submitted; a clause about it."""
    left = []
    for each in submitted:
        try:
            client.terminate_job(jobId=each.job_id, reason="the rest of its run could not be submitted")
        except (ClientError, BotoCoreError):
            left.append(each.job_id)
    if left:
        return f"; end these yourself: {', '.join(left)}"
    return f"; the {len(submitted)} submitted before it were terminated" if submitted else ""
