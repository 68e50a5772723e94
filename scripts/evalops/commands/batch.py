"""`ies batch`: follow, terminate and list jobs of AWS Batch; and how following ends, which `ies run aws --monitor` shares."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from botocore.exceptions import BotoCoreError, ClientError

from evalops import hints, ui
from evalops.batch import names, record, states, terminate
from evalops.commands.options import json_option, refused
from evalops.commands.params import Duration
from evalops.commands.status import print_survey
from evalops.ec2 import preflight
from evalops.infra.estate import Estate
from evalops.logs import places
from evalops.logs.metadata import Models
from evalops.logs.rows import GOOD
from evalops.logs.survey import Survey, as_json, survey
from evalops.monitor import monitor
from evalops.settings import settings
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Missing, Storage, open_storage

EVERY_JOB = [{"name": "AFTER_CREATED_AT", "values": ["0"]}]
"""The filter with which ListJobs answers with jobs in all states."""


@click.group()
def batch() -> None:
    """Follow, terminate and list jobs of AWS Batch."""


def surroundings() -> tuple[Estate, Storage]:
    """The estate in use, which must have Batch, and its bucket. Ends with one sentence."""
    here, estate = preflight.surroundings(settings())
    if estate.batch is None:
        ui.fail(f"the estate {estate.name} was made without Batch: set batch.enabled and run `make apply`")
    return estate, open_storage(here.root)


def where(estate: Estate) -> monitor.Where:
    """The estate's region and log group."""
    assert estate.batch is not None
    return monitor.Where(estate.region, estate.batch.log_group)


@batch.command("monitor-job")
@click.argument("job", metavar="JOB_ID|RUN_ID")
@click.option(
    "--runnable-timeout", type=Duration(), help="Terminate the job when it has waited for a host for so long."
)
@json_option
def monitor_job(job: str, runnable_timeout: timedelta | None, as_json_: bool) -> None:
    """Follow a job, or all jobs of a run, to the end: states, log lines, results, and the table.

    Ends with 0 when all is complete, 1 with failures, 3 when it was terminated, 4 when it is left running (Ctrl-C).
    """
    with refused():
        estate, storage = surroundings()
        target = _target(storage, job)
        manifest = manifest_of(storage, target)
        if not as_json_:
            banner(estate, target)
        follow(estate, storage, target, manifest, runnable_timeout, as_json_=as_json_)


@batch.command("terminate-job")
@click.argument("job", metavar="JOB_ID|RUN_ID")
@click.option(
    "--reason", default="terminated by ies batch terminate-job", show_default=True, help="What Batch records."
)
@json_option
def terminate_job(job: str, reason: str, as_json_: bool) -> None:
    """Terminate a job, an array with all its children, or all jobs of a run, and wait for the final state.

    What has finished stays: `ies run aws --run-id` or `ies run local --run-id` go on from it.
    """
    with refused():
        estate, storage = surroundings()
        target = _target(storage, job)
        if not as_json_:
            ui.note("terminating: a container has 30 seconds to flush its logs …")
        jobs, was_living = terminate.terminate(aws.client("batch", estate.region), target, reason)
    if not jobs:
        ui.fail(f"AWS Batch knows no job {job}: it forgets jobs some days after their end; see `ies batch list`")
    if as_json_:
        ui.emit_json({"jobs": [job_record(each) for each in jobs], "terminated": was_living})
        return
    ended = [each for each in jobs if each.why == "terminated"]
    others = [each for each in jobs if each.why != "terminated"]
    if not was_living:
        ui.note("it had ended before: nothing to terminate")
    for each in others[: monitor.SHOWN]:
        ui.say(f"{each.id}  {states.words(each, now())}")
    if ended:
        count = f"{ended[0].id}  terminated" if len(ended) == 1 else f"{len(ended)} jobs terminated"
        ui.say(f"{count}: {reason}" if was_living else count)
    if target.run is not None:
        run_id = target.run.fleet_id
        here = hints.at_root(f"ies run local --run-id {run_id}", estate.bucket)
        ui.note(f"resume  {hints.resume(run_id, 'batch')}    or here: {here}")


@batch.command("list")
@click.option("-n", "--number", default=20, show_default=True, type=click.IntRange(min=1), help="Jobs, newest first.")
@click.option("--queue", "only", metavar="QUEUE", help="Of this queue alone: its name, or spot or on-demand.")
@json_option
def list_jobs(number: int, only: str | None, as_json_: bool) -> None:
    """The jobs that Batch remembers, of all runs of this estate, the newest first."""
    with refused():
        estate, _ = surroundings()
        assert estate.batch is not None
        queues = estate.batch.queues
        if only is not None and only not in queues and only not in queues.values():
            ui.fail(f"--queue {only}: the estate has {', '.join(f'{name} ({kind})' for kind, name in queues.items())}")
        wanted = [name for kind, name in queues.items() if only in (None, kind, name)]
        found = sorted(_listed(estate, wanted), key=lambda entry: -entry.get("createdAt", 0))
    shown = found[:number]
    if as_json_:
        ui.emit_json({"jobs": [_summary(entry) for entry in shown], "total": len(found)})
        return
    rows = [_summary(entry) for entry in shown]
    columns = ("job", "run", "state", "created", "queue", "reason")
    ui.table(columns, [[row[name] for name in columns] for row in rows])
    if len(found) > number:
        ui.note(f"{len(found) - number} older jobs are not shown; -n {len(found)} shows all")
    if not found:
        ui.note("Batch remembers no job of this estate.")


def _listed(estate: Estate, queues: list[str]) -> list[dict[str, Any]]:
    """All jobs of the queues in any state (the filter by name asks for all states at once)."""
    client = aws.client("batch", estate.region)
    try:
        return [
            entry | {"queue": queue}
            for queue in queues
            for page in client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=EVERY_JOB)
            for entry in page["jobSummaryList"]
            if ":" not in entry["jobId"]
        ]
    except (ClientError, BotoCoreError) as error:
        ui.fail(f"the jobs cannot be listed (batch:ListJobs): {aws.explain(error).text}")


def _summary(entry: dict[str, Any]) -> dict[str, Any]:
    created = entry.get("createdAt")
    array = (entry.get("arrayProperties") or {}).get("size")
    return {
        "job": entry["jobId"],
        "name": entry["jobName"],
        "run": names.run_of(entry["jobName"]),
        "state": entry.get("status", "").lower() + (f" (array of {array})" if array else ""),
        "created": datetime.fromtimestamp(created / 1000, UTC).strftime("%F %H:%M") if created else None,
        "queue": entry["queue"],
        "reason": entry.get("statusReason"),
    }


def _target(storage: Storage, text: str) -> record.Target:
    try:
        return record.target(storage, text)
    except (record.UnknownJob, Unreadable) as error:
        ui.fail(str(error))


def manifest_of(storage: Storage, target: record.Target) -> Manifest | None:
    """The manifest of the jobs' run, None when there is no run or no readable manifest."""
    if target.run is None:
        return None
    try:
        return Manifest.from_json(storage.get(layout.manifest(target.run.fleet_id)).body)
    except (Missing, Unreadable) as error:
        ui.note(f"warning: the manifest of {target.run.fleet_id} cannot be read: {error}")
        return None


def banner(estate: Estate, target: record.Target) -> None:
    """Where to look and what to type, on stderr."""
    place = where(estate)
    if target.run is not None:
        ui.note(f"run     {target.run.fleet_id}")
    for job in target.jobs[: monitor.SHOWN]:
        ui.note(f"job     {job.job_id}" + (f" (array of {job.size})" if job.size else ""))
        ui.note(f"batch   {names.job_link(place.region, job.job_id)}")
        if job.size:
            ui.note(f"child   ies batch monitor-job {job.job_id}:INDEX    (0 to {job.size - 1}) shows a child's log")
    if len(target.jobs) > monitor.SHOWN:
        ui.note(f"and {len(target.jobs) - monitor.SHOWN} more jobs: ies batch list")
    ui.note(f"logs    {names.logs_link(place.region, place.group)}")


def follow(
    estate: Estate,
    storage: Storage,
    target: record.Target,
    manifest: Manifest | None,
    runnable_timeout: timedelta | None,
    *,
    as_json_: bool,
) -> None:
    """Follow to the end, show the results table, and end with the exit code."""
    results = monitor.results_of(storage, target, manifest)
    root = storage.url("x")[:-2]
    watching = monitor.Monitor(
        target,
        where(estate),
        results,
        runnable_timeout=runnable_timeout,
        quiet=as_json_,
        reopen=lambda: open_storage(root),
    )
    try:
        outcome = watching.run()
    except KeyboardInterrupt:
        watching.view.end()
        raise ui.Failure(watching.leave(), ui.EXIT_LEFT_RUNNING) from None
    seen = survey(places.of_run(target.run.fleet_id, storage), Models().price) if target.run is not None else None
    if outcome.ending == "forgotten" and (seen is None or not seen.rows):
        ui.fail(f"AWS Batch knows no job {target.jobs[0].job_id}, and no run under {root} has it: see `ies batch list`")
    if as_json_:
        _done_record(estate, outcome, target, seen)
    else:
        _closing(estate, outcome, target, seen, followed=watching.lines > 0)
    sys.exit(exit_code(outcome, seen, whole=target.whole))


def exit_code(outcome: monitor.Outcome, seen: Survey | None, *, whole: bool) -> int:
    """0 all complete, 1 with failures, 3 terminated. The stored logs decide; of a part of a run, and without logs, Batch does."""
    if outcome.terminated:
        return ui.EXIT_STOPPED
    if whole and seen is not None and seen.rows:
        complete = all(row.state in GOOD for row in seen.rows)
        return 0 if complete and outcome.ending != "stuck" else ui.EXIT_FAILURES
    return 0 if outcome.succeeded else ui.EXIT_FAILURES


def _closing(
    estate: Estate, outcome: monitor.Outcome, target: record.Target, seen: Survey | None, *, followed: bool
) -> None:
    if outcome.ending == "forgotten":
        ui.note("AWS Batch has forgotten the job; this is what the run's logs say:")
    client = lambda service: aws.client(service, estate.region)  # noqa: E731
    for line in monitor.explain_failures(client, where(estate), outcome.jobs, followed=followed):
        ui.note(line)
    if outcome.again:
        ui.note(f"{outcome.again} samples that had finished ran again")
    if seen is None:
        return
    print_survey(seen)
    assert target.run is not None
    ui.note(f"logs    {seen.place.url}")
    if any(row.state not in GOOD for row in seen.rows):
        ui.note(f"resume  {hints.resume(target.run.fleet_id, 'batch')}")
    if any(row.state == "error" for row in seen.rows):
        ui.note(f"mended  {hints.SHIP_ANEW}")


def job_record(job: states.Job) -> dict[str, Any]:
    """A job for programs."""
    return {
        "job_id": job.id,
        "name": job.name,
        "state": job.state,
        "words": states.words(job, now()),
        "reason": job.reason or None,
        "why": job.why,
        "exit_code": job.exit_code,
        "attempts": len(job.attempts),
    }


def _done_record(estate: Estate, outcome: monitor.Outcome, target: record.Target, seen: Survey | None) -> None:
    client = lambda service: aws.client(service, estate.region)  # noqa: E731
    failed = [job for job in outcome.jobs if job.state == "FAILED"][: monitor.SHOWN]
    tails = {job.id: monitor.last_lines(client, where(estate), job) for job in failed}
    ui.emit_json(
        {
            "type": "done",
            "run_id": target.run.fleet_id if target.run else None,
            "ending": outcome.ending,
            "success": exit_code(outcome, seen, whole=target.whole) == 0,
            "jobs": [job_record(job) | {"log_tail": tails.get(job.id)} for job in outcome.jobs],
            "again": outcome.again,
            "results": as_json(seen) if seen is not None else None,
        }
    )
