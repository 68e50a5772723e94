"""From a run's jobs to jobs of AWS Batch: what is asked for, checked before anything is sent, and sent once.

Only the manifest's URL goes to Batch, whose overrides hold 8,192 characters. SubmitJob has no token against doubling, so a call that
was sent twice is looked for by the job's name, which no other job has.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.batch import names, record
from evalops.infra.estate import Estate
from evalops.ui import fail, note
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, BatchSubmission, Manifest
from evalworker.contract.jsonio import dumps
from evalworker.contract.wire import now
from evalworker.storage import AlreadyExists, Changed, Missing, Storage

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


def submit(
    client: Any,
    storage: Storage,
    run: BatchRun,
    round_: BatchRound,
    made: Sequence[Request],
    prepare: Callable[[], None] = lambda: None,
) -> BatchRun:
    """Submit a round, each job recorded as it is made; whatever breaks it off, nothing of it is left running or recorded.

    `prepare` is called once the round is ours and before anything is sent. Ends with one sentence that names what was refused;
    what else ends it (Ctrl-C) passes on.
    """
    round_ = round_.model_copy(update={"names": [each.call["jobName"] for each in made], "begun": now()})
    etag = _claim(storage, run, round_)
    submitted: list[BatchSubmission] = []
    begun: list[Request] = []
    try:
        prepare()
        for each in made:
            begun.append(each)
            job_id = _submit_once(client, each)
            submitted.append(
                BatchSubmission(job_id=job_id, name=each.call["jobName"], offset=each.offset, size=each.size)
            )
            etag = storage.replace(layout.batch(run.fleet_id), _with(run, round_, submitted).to_bytes(), etag)
    except BaseException as error:
        undone = _undo(client, submitted, begun[len(submitted) :] if _may_have_been_taken(error) else [])
        _forget(storage, run, etag)
        if isinstance(error, ClientError | BotoCoreError):
            queue = begun[-1].call["jobQueue"] if begun else round_.queue
            fail(f"AWS Batch took no job (batch:SubmitJob to {queue}): {aws.explain(error).text}{undone}")
        if isinstance(error, ServiceError):
            fail(f"{error}; nothing runs on AWS Batch{undone}")
        if undone:
            note(f"nothing was submitted{undone}")
        raise
    return _with(run, round_, submitted)


def _with(run: BatchRun, round_: BatchRound, submitted: Sequence[BatchSubmission]) -> BatchRun:
    return run.model_copy(update={"rounds": [*run.rounds, round_.model_copy(update={"submissions": list(submitted)})]})


def _claim(storage: Storage, run: BatchRun, round_: BatchRound) -> str:
    """Write the round over exactly the record that was read, so that of several who submit the run again one does; the record's tag."""
    key, body = layout.batch(run.fleet_id), _with(run, round_, []).to_bytes()
    with contextlib.suppress(AlreadyExists, Changed, Missing):
        if not run.rounds:
            return storage.create(key, body)
        stored = storage.get(key)
        if BatchRun.from_json(stored.body) == run:
            return storage.replace(key, body, stored.etag)
    return fail(f"somebody else is submitting the run {run.fleet_id} just now: see `ies batch list`")


def _forget(storage: Storage, run: BatchRun, etag: str) -> None:
    """The record as it was before; when that cannot be, the round's jobs are looked for by their names, and none is there."""
    key = layout.batch(run.fleet_id)
    with contextlib.suppress(ServiceError):
        if run.rounds:
            storage.replace(key, run.to_bytes(), etag)
        else:
            storage.delete(key)


def _may_have_been_taken(error: BaseException) -> bool:
    """Whether the job in hand may run although its submission broke off: not when Batch has refused it."""
    return not isinstance(error, ClientError) or aws.explain(error).retryable


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
    return record.named(client, request.call["jobQueue"], request.call["jobName"])


def _undo(client: Any, submitted: Sequence[BatchSubmission], in_hand: Sequence[Request]) -> str:
    """End what an incomplete round has submitted, and what it may have; a clause about it."""
    ids, left = [each.job_id for each in submitted], []
    for each in in_hand:
        try:
            ids += [job_id for job_id in _named(client, each) if job_id not in ids]
        except (ClientError, BotoCoreError):
            left.append(f"what `ies batch list` shows as {each.call['jobName']}")
    for job_id in ids:
        try:
            client.terminate_job(jobId=job_id, reason="the rest of its run could not be submitted")
        except (ClientError, BotoCoreError):
            left.append(job_id)
    if left:
        return f"; end these yourself: {', '.join(left)}"
    return f"; the {len(ids)} submitted before it were terminated" if ids else ""
