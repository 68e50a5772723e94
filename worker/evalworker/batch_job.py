"""The container's side of a Batch job: from the manifest's URL to finished logs. `python -m evalworker.batch_job URL --round N`.

One process, one `eval_set`: of all tasks and models of the run, or (in an array) of one. Logs are on S3 while they are written, so an
attempt on another host goes on from them. SIGTERM and SIGINT end the eval as Ctrl-C does.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalworker import boot, code, credentials, redact
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, JobDone, JobSpec, Manifest
from evalworker.contract.failures import EXIT_CONFIG
from evalworker.contract.ids import BadId, check_run_id, slug
from evalworker.contract.messages import AttemptDone
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import AlreadyExists, Missing, Storage, StorageError, open_storage

EXIT_FAILURES = 1
EXIT_STORAGE = 74
EXIT_INTERRUPTED = 130
ARRAY_INDEX, ATTEMPT, JOB_ID = "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ATTEMPT", "AWS_BATCH_JOB_ID"


class JobRefused(RuntimeError):
    """The container cannot run what it was sent; the text is one sentence."""


@dataclass(frozen=True)
class Work:
    """What this container runs: the run's manifest, the round, its own jobs, and where their logs lie."""

    storage: Storage
    manifest: Manifest
    round: BatchRound
    jobs: list[JobSpec]
    log_dir: str
    attempt: int
    name: str

    @property
    def prefix(self) -> str:
        """The prefix of the log directory's keys."""
        return f"{self.log_dir}/"


def say(text: str) -> None:
    """One line for whoever reads the job's log."""
    sys.stdout.write(f"inspect-fleet: {redact.text(text)}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the job; its exit status: 0 all complete, 1 with failures, 74 when S3 failed after the eval, 78 for what can never run,
    130 interrupted.
    """
    words = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(words)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    redact.learn_environment()
    try:
        root, run_id = place_of(options.manifest)
        storage = open_storage(root)
        # It may replace this process, whose threads end then: only what is here to stay reads its own output.
        boot.settle(storage, run_id, options.work, words, say, module="evalworker.batch_job")
        with redacted_output():
            return _run(storage, run_id, options)
    except KeyboardInterrupt:
        say("interrupted before the eval began")
        return EXIT_INTERRUPTED
    except (JobRefused, Unreadable, boot.BootError, code.CodeError, ServiceError) as error:
        say(f"the job cannot run: {error}")
        return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evalworker.batch_job", description="Run one job of AWS Batch.")
    parser.add_argument("manifest", help="s3://bucket/RUN_ID/manifest.json")
    parser.add_argument("--round", type=int, required=True, help="which submission of the run")
    parser.add_argument("--child", type=int, help="this job's place in the round, plus the array index")
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="a directory of its own")
    return parser


def place_of(url: str) -> tuple[str, str]:
    """(root, run id) of a manifest's URL. Raises JobRefused."""
    root, _, rest = url.removesuffix("/manifest.json").rpartition("/")
    try:
        if not root or not url.endswith("/manifest.json"):
            raise BadId(f"{url!r} is not the URL of a manifest")
        return root, check_run_id(rest)
    except BadId as error:
        raise JobRefused(str(error)) from None


def _run(storage: Storage, run_id: str, options: argparse.Namespace) -> int:
    manifest = Manifest.from_json(storage.get(layout.manifest(run_id)).body)
    submitted = BatchRun.from_json(storage.get(layout.batch(run_id)).body)
    work = choose(storage, manifest, submitted, options.round, options.child)
    _settle(work, options.work)
    what = f"{len(work.jobs)} jobs" if len(work.jobs) > 1 else f"{work.jobs[0].name} with {work.jobs[0].model}"
    say(f"run {run_id}, attempt {work.attempt}: {what}; logs in {storage.url(work.log_dir)}")
    return _evaluate(work)


def choose(storage: Storage, manifest: Manifest, run: BatchRun, number: int, child: int | None) -> Work:
    """What this container has to run, from the round and the array index that Batch gives it. Raises JobRefused."""
    round_ = next((found for found in run.rounds if found.number == number), None)
    if round_ is None:
        raise JobRefused(f"the run {run.fleet_id} has no round {number}")
    if child is None:
        jobs, log_dir = [manifest.jobs[place] for place in round_.jobs], layout.working(run.fleet_id).rstrip("/")
    else:
        place = child + int(os.environ.get(ARRAY_INDEX, "0"))
        if not 0 <= place < len(round_.jobs):
            raise JobRefused(
                f"round {number} of {run.fleet_id} has {len(round_.jobs)} jobs, and none is number {place}"
            )
        jobs = [manifest.jobs[round_.jobs[place]]]
        log_dir = layout.partial(run.fleet_id, jobs[0].job_id).rstrip("/")
    attempt = int(os.environ.get(ATTEMPT, "1"))
    return Work(storage, manifest, round_, jobs, log_dir, attempt, slug(os.environ.get(JOB_ID, "batch")))


def _settle(work: Work, folder: Path) -> None:
    """Become what the run's code expects: its secrets and variables, its directory, its import path."""
    manifest = work.manifest
    found = credentials.of_run(manifest)
    if missing := sorted(set(manifest.secrets) - set(found)):
        names = ", ".join(credentials.parameter(name) for name in missing)
        raise JobRefused(f"SSM has no {names}: store it with `ies secrets push` and submit the run again")
    os.environ.update(manifest.environment | found)
    redact.learn(found)
    path = code.import_path(manifest, code.root_of(work.storage, manifest, folder))
    os.chdir(path[0])
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """While this holds, what this process and its children print passes a thread that hides secrets' values."""
    kept = [os.dup(1), os.dup(2)]
    reader, writer = os.pipe()
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(writer)

    def pump() -> None:
        hidden = redact.stream()
        while piece := os.read(reader, 65536):
            os.write(kept[0], hidden.feed(piece))
        os.write(kept[0], hidden.end())

    thread = threading.Thread(target=pump, daemon=True, name="output")
    thread.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
        thread.join(2)  # a daemon of user code may hold the pipe open for ever


def _evaluate(work: Work) -> int:
    """One `eval_set`, then what came of it: said, recorded, published."""
    from evalworker import batch_logs

    _clear_the_way(work)
    _start_from(work)
    logs = batch_logs.read_directory(work.storage, work.prefix)
    names = {found.key for found in logs}
    before = batch_logs.samples_in(work.storage, logs)
    if before.finished:
        say(f"{len(before.finished)} samples of an earlier attempt are kept")
    started, failure = time.monotonic(), None
    try:
        eval_set(work)
    except BaseException as error:
        failure = error
    try:
        return _judge(work, failure, before, names, time.monotonic() - started)
    except ServiceError as error:
        say(f"the eval has ended, but its logs cannot be read or published: {error}")
        return EXIT_STORAGE


def _judge(work: Work, failure: BaseException | None, before: Any, names: set[str], duration_s: float) -> int:
    """What came of the `eval_set`, by its stored logs: said, recorded and published job by job; the exit status."""
    from evalworker import batch_logs

    logs = batch_logs.read_directory(work.storage, work.prefix)
    after = batch_logs.samples_in(work.storage, logs)
    if before.finished or before.begun:
        total = sum(job.samples for job in work.jobs)
        kept, redone = len(before.kept(after)), before.redone(after)
        say(f"kept {kept} of {total} samples from earlier attempts; {redone} that had begun ran again")
    ends = [_end_of(work, job, batch_logs.best(logs, job), failure, before, duration_s) for job in work.jobs]
    unrecorded = False
    for job, end in zip(work.jobs, ends, strict=True):
        try:
            _conclude(work, job, end, names | {found.key for found in logs})
        except ServiceError as error:
            unrecorded = True
            say(f"{job.name} with {job.model} has ended, but its end could not be recorded: {error}")
    for end in ends:
        if end.status != "completed":
            say(f"{end.status}: {end.error_summary}")
    if isinstance(failure, KeyboardInterrupt) or any(end.status == "cancelled" for end in ends):
        return EXIT_INTERRUPTED
    if unrecorded:
        return EXIT_STORAGE
    if all(end.status == "completed" for end in ends):
        return 0
    return EXIT_CONFIG if failure is not None and not logs else EXIT_FAILURES


def eval_set(work: Work) -> None:
    """Run Inspect. Raises what Inspect raises for what it refuses, KeyboardInterrupt when it was interrupted before it began."""
    import inspect_ai

    from evalworker import prices
    from evalworker.arguments import decode

    manifest = work.manifest
    arguments: dict[str, Any] = decode(manifest.arguments)
    prices.introduce(prices.read(arguments.get(prices.ARGUMENT)))
    models = [decode({"model": model})["model"] for model in manifest.models]
    arguments |= {
        "tasks": list(dict.fromkeys(job.task for job in work.jobs)),
        "model": [models[index] for index in dict.fromkeys(job.model_index for job in work.jobs)],
        "log_dir": work.storage.url(work.log_dir),
        "log_dir_allow_dirty": True,
    }
    if len(work.jobs) == 1:
        arguments["task_args"] = work.jobs[0].task_args
    inspect_ai.eval_set(**arguments)


def _clear_the_way(work: Work) -> None:
    """Remove what `ies summarize` has put beside the logs: Inspect takes it for logs and fails. It is made again at the end."""
    for info in list(work.storage.list(work.prefix)):
        if layout.is_derived(info.key):
            work.storage.delete(info.key)


def _start_from(work: Work) -> None:
    """A child goes on from the log that the run has of its job, unless its own directory holds one that is as far.

    What is copied is the newest then, and Inspect goes on from the newest.
    """
    from evalworker import batch_logs

    source = next((work.round.logs.get(i) for i in work.round.jobs if work.manifest.jobs[i] is work.jobs[0]), None)
    if source is None or work.log_dir == layout.working(work.manifest.fleet_id).rstrip("/"):
        return
    own = batch_logs.best(batch_logs.read_directory(work.storage, work.prefix), work.jobs[0])
    if own is not None:
        named = batch_logs.read_one(work.storage, source)
        if batch_logs.progress(work.storage, named) <= batch_logs.progress(work.storage, own):
            return
    with contextlib.suppress(Missing):
        batch_logs.copy(work.storage, source, work.prefix + source.rsplit("/", 1)[-1])


def _end_of(
    work: Work, job: JobSpec, found: Any, failure: BaseException | None, before: Any, duration_s: float
) -> AttemptDone:
    """How one job ended, judged by its stored log as everywhere else."""
    from evalworker.contract.failures import exception_type
    from evalworker.job import JobEnd
    from evalworker.verdict import ProcessEnd, category_of, summary_of

    facts: dict[str, Any] = {"samples": {"total": job.samples}}
    interrupted = isinstance(failure, KeyboardInterrupt)
    if failure is not None and not interrupted:
        facts |= {"error_type": type(failure).__name__, "error_message": str(failure)[:4096] or repr(failure)}
    if found is not None:
        log = found.log
        errors = [summary.error for summary in log.summaries if summary.error is not None]
        facts |= {
            "log_status": log.header.status,
            "samples": log.counts(job.samples),
            "metrics": log.metrics,
            "digest": log.digest,
            "sample_errors": [(exception_type("", str(error)), str(error)[:1024], None) for error in errors[:20]],
        }
        if log.header.error is not None and not errors and "error_type" not in facts:
            message = log.header.error.message
            facts |= {"error_type": exception_type(log.header.error.traceback, message), "error_message": message}
    said = JobEnd(**facts)
    ending = ProcessEnd(said, EXIT_CONFIG if failure is not None and found is None else 0)
    category = category_of(ending)
    cancelled = category is not None and (interrupted or said.log_status in ("cancelled", "started"))
    status = "completed" if category is None else "cancelled" if cancelled else "failed"
    why = "interrupted" if category is None or cancelled else summary_of(ending, category)
    kept = [sample for sample in before.finished if found is not None and sample[:-1] == found.identity]
    return AttemptDone(
        fleet_id=work.manifest.fleet_id,
        instance_id=work.name,
        ts=now(),
        round=work.round.number,
        job_id=job.job_id,
        attempt=work.attempt,
        status=status,
        ended=not cancelled,
        failure_category=category,
        error_summary=None if status == "completed" else f"{job.name} with {job.model}: {why}",
        duration_s=duration_s,
        samples=said.samples,
        kept=len(kept),
        metrics=said.metrics,
        log=found.key if found is not None else None,
        log_name=found.key.rsplit("/", 1)[-1] if found is not None else None,
        digest=said.digest,
    )


def _conclude(work: Work, job: JobSpec, end: AttemptDone, directory: set[str]) -> None:
    """Publish a child's log to where all logs of the run lie, and record the job's end. Each step is idempotent.

    `directory`: the keys of all logs that its own directory has had, whose published copies the new one replaces.
    """
    run_id = work.manifest.fleet_id
    working = layout.working(run_id)
    if end.log is not None and end.log_name is not None and not end.log.startswith(working):
        work.storage.copy(end.log, working + end.log_name)
        for name in {key.rsplit("/", 1)[-1] for key in directory} - {end.log_name}:
            work.storage.delete(working + name)
    if not end.ended:
        return
    record = JobDone(fleet_id=run_id, job_id=job.job_id, round=work.round.number, log=end.log, attempt_done=end)
    with contextlib.suppress(AlreadyExists):
        work.storage.create(layout.job_done(run_id, job.job_id, work.round.number), record.to_bytes())
    if end.status == "completed" and end.log is not None and not end.log.startswith(working):
        with contextlib.suppress(StorageError):  # what cannot be removed expires
            for info in list(work.storage.list(work.prefix)):
                work.storage.delete(info.key)


if __name__ == "__main__":
    sys.exit(main())
