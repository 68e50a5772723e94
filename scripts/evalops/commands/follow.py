"""Drives a fleet in the foreground of a command: where to look at the start, the results and what to type at the end.

Called by `ct run eval` and `ct fleet attach`. With `--json` both print a launch record and a done record, one JSON object a line.
"""

import os
import sys
from typing import Any

from evalops.fleet.controller import Controller
from evalops.fleet.fleet import Fleet
from evalops.fleet.guards import Verdict
from evalops.fleet.stream import Fenced
from evalops.fleet.view import results_table
from evalops.hints import SHIP_ANEW, at_root, resume
from evalops.report import build as report
from evalops.settings import Settings
from evalops.ui import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_LEFT_RUNNING, EXIT_STOPPED, Failure, emit_json, note
from evalworker.aws import ServiceError
from evalworker.contract import layout

EXIT_CODES = {
    "complete": 0,
    "failures": EXIT_FAILURES,
    "stopped": EXIT_STOPPED,
    "left": EXIT_LEFT_RUNNING,
    "cancelled": EXIT_INTERRUPTED,
}


def follow(controller: Controller, surroundings: Settings, *, json_output: bool) -> None:
    """Show where to look, drive the fleet to its end, show the results, and end with the exit code."""
    fleet = controller.fleet
    if json_output:
        emit_json(_launch_record(fleet, surroundings.root))
    else:
        _banner(fleet, surroundings)
    try:
        verdict = controller.run()
    except ServiceError as error:
        attach = at_root(f"ct fleet attach {fleet.fleet_id}", surroundings.bucket)
        raise Failure(f"{error}; the fleet has no controller now: {attach} drives it on", EXIT_LEFT_RUNNING) from error
    except Fenced as error:
        raise Failure(str(error), EXIT_LEFT_RUNNING) from error
    shown = None if verdict.ending == "left" else _write_report(fleet)
    if json_output:
        emit_json(_done_record(fleet, verdict) | {"report": shown})
    elif verdict.ending == "left":
        _left(fleet, verdict, surroundings)
    else:
        results_table(fleet.ledger)
        _closing(fleet, verdict, shown)
    code = EXIT_CODES[verdict.ending]
    if verdict.ending == "cancelled" and controller.ending.signal_number is not None:
        code = 128 + controller.ending.signal_number
    sys.exit(code)


def _launch_record(fleet: Fleet, root: str) -> dict[str, Any]:
    """The first line of `--json` and `--detach`: the fleet has started."""
    return {
        "type": "launch",
        "fleet_id": fleet.fleet_id,
        "run_id": fleet.fleet_id,
        "pid": os.getpid(),
        "root": root,
        "events": str(fleet.stream.path),
        "logs": layout.working(fleet.fleet_id),
    }


def _banner(fleet: Fleet, surroundings: Settings) -> None:
    fleet_id, bucket = fleet.fleet_id, surroundings.bucket
    shown = os.path.relpath(fleet.stream.path)
    jobs, samples = len(fleet.ledger.open_jobs), fleet.ledger.samples.total
    note(f"fleet   {fleet_id}: {jobs} job{'s' * (jobs != 1)}, {samples} samples")
    note(f"events  {shown}")
    note(f"watch   tail -f {shown}    or: {at_root(f'ct fleet status {fleet_id}', bucket)}")
    leave = "Ctrl-C twice       " if fleet.pool.stays else "Ctrl-C             "
    note(f"stop    {leave}or: {at_root(f'ct fleet stop {fleet_id}', bucket)}")
    if fleet.pool.stays:
        note(f"leave   Ctrl-C             and: {at_root(f'ct fleet attach {fleet_id}', bucket)}")


def _left(fleet: Fleet, verdict: Verdict, surroundings: Settings) -> None:
    """The fleet goes on without us: what to type."""
    fleet_id, bucket = fleet.fleet_id, surroundings.bucket
    note(
        f"the fleet {fleet_id} goes on without this command ({verdict.reason}), until {fleet.control.deadline:%F %H:%M} UTC"
    )
    note(f"attach  {at_root(f'ct fleet attach {fleet_id}', bucket)}")
    note(f"stop    {at_root(f'ct fleet stop {fleet_id}', bucket)}")
    if fleet.control.budgeted:
        note("with a budget, workers take no new jobs when nobody has counted for 10 minutes: attach before")


def _write_report(fleet: Fleet) -> str | None:
    """The run's HTML report beside its logs; what goes wrong there must not hide how the fleet ended."""
    try:
        return report.write(fleet.storage, fleet.fleet_id)
    except Exception as error:
        note(f"the report was not written: {type(error).__name__}: {error}")
        return None


def _closing(fleet: Fleet, verdict: Verdict, shown: str | None) -> None:
    fleet_id = fleet.fleet_id
    for job in fleet.ledger.jobs.values():
        if job.done is not None and job.status == "failed":
            note(f"{job.name} with {job.spec.model} failed ({job.done.failure_category}): {job.done.error_summary}")
    if verdict.reason:
        note(f"the fleet ended early: {verdict.reason}")
    note(f"logs    {fleet.storage.url(layout.working(fleet_id).rstrip('/'))}")
    note(f"events  {os.path.relpath(fleet.stream.path)}")
    if shown:
        note(f"report  {shown}")
    if verdict.ending != "complete" and _has_partials(fleet):
        note(f"partial {fleet.storage.url(layout.partials(fleet_id).rstrip('/'))} (where a resume goes on)")
    if verdict.ending != "complete":
        note(f"resume  {resume(fleet_id, fleet.manifest.backend)}")
        if fleet.manifest.code is not None and any(job.status == "failed" for job in fleet.ledger.jobs.values()):
            note(f"mended  {SHIP_ANEW}")


def _has_partials(fleet: Fleet) -> bool:
    """Whether there are unfinished logs; a storage that is away now must not hide how the fleet ended."""
    try:
        return next(fleet.storage.list(layout.partials(fleet.fleet_id)), None) is not None
    except ServiceError as error:
        note(f"whether there are unfinished logs is not known: {error}")
        return False


def _done_record(fleet: Fleet, verdict: Verdict) -> dict[str, Any]:
    ledger = fleet.ledger
    return {
        "type": "done",
        "fleet_id": fleet.fleet_id,
        "outcome": verdict.ending,
        "reason": verdict.reason,
        "success": verdict.ending == "complete",
        "samples": ledger.samples.model_dump(),
        "jobs": [
            job.record()
            | {
                "samples": job.done.samples.model_dump() if job.done else None,
                "log": fleet.storage.url(layout.job_log(fleet.fleet_id, job.spec.job_id))
                if job.done and job.done.log
                else None,
            }
            for job in ledger.jobs.values()
        ],
    }
