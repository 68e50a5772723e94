"""`ct fleet …`: look at fleets, read their workers' logs, drive one on, stop one."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import click

from evalops import ui
from evalops.commands.follow import follow
from evalops.commands.options import json_option
from evalops.commands.params import RunId
from evalops.ec2 import backend
from evalops.ec2 import preflight as ec2_preflight
from evalops.ec2.reaper import Reaper
from evalops.fleet import look, preflight, takeover
from evalops.fleet.ledger import JobState
from evalops.fleet.ownership import controller_gone
from evalops.fleet.request import Request
from evalops.fleet.spending import Spending, spending
from evalops.fleet.standing import WorkerRow
from evalops.fleet.stream import Fenced
from evalops.fleet.view import line_of, scores_text
from evalops.settings import settings
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, MachineRecord, total_samples
from evalworker.contract.wire import Unreadable, now, stamp
from evalworker.storage import Changed, Missing, Storage, open_storage

STOP_WAIT_S = 120.0
"""How long `stop` waits for the controller to write the summary before it says so and leaves."""


def _storage() -> Storage:
    return open_storage(settings().root)


def _look(storage: Storage, fleet_id: str) -> look.Sight:
    try:
        return look.look(storage, fleet_id)
    except Missing:
        ui.fail(f"there is no fleet {fleet_id} under {settings().root}: check the id and S3_BUCKET_NAME")
    except Unreadable as error:
        ui.fail(f"the fleet {fleet_id} cannot be read by this version: {error}")


class FleetGroup(click.Group):
    """Turns errors of the stores into one sentence, for every command below."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ServiceError as error:
            ui.fail(str(error))
        except Fenced as error:
            ui.fail(str(error), ui.EXIT_LEFT_RUNNING)


@click.group(cls=FleetGroup)
def fleet() -> None:
    """Watch, attach to and stop fleets."""


@fleet.command("list")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="How many of the newest.")
@json_option
def list_(limit: int, as_json_: bool) -> None:
    """List the newest fleets."""
    rows = [_list_row(*found) for found in look.fleets(_storage(), limit)]
    if as_json_:
        ui.emit_json({"fleets": rows})
        return
    columns = ["fleet", "state", "outcome", "round", "jobs", "samples", "backend", "owner", "deadline"]
    ui.table(columns, [[row[column] for column in columns] for row in rows], right=["round", "jobs", "samples"])


def _list_row(fleet_id: str, manifest: Any, control: Control | None) -> dict[str, Any]:
    return {
        "fleet": fleet_id,
        "state": look.state_of(control) if control else "unreadable",
        "outcome": control.outcome if control else None,
        "round": control.round if control else None,
        "jobs": len(manifest.jobs) if manifest else None,
        "samples": total_samples(manifest.jobs) if manifest else None,
        "backend": manifest.backend if manifest else None,
        "owner": manifest.owner if manifest else None,
        "deadline": stamp(control.deadline) if control else None,
    }


@fleet.command()
@click.argument("fleet_id", type=RunId())
@json_option
def status(fleet_id: str, as_json_: bool) -> None:
    """Show a fleet's jobs and workers, and what it waits for."""
    sight = _look(_storage(), fleet_id)
    if as_json_:
        ui.emit_json(_status_record(sight))
        return
    online = sum(worker.state == "online" for worker in sight.workers.values())
    elapsed = ((sight.last_event or now()) - sight.manifest.created).total_seconds()
    ui.say(f"{fleet_id}  {sight.state}, round {sight.control.round}, deadline {stamp(sight.control.deadline)}")
    ui.say(line_of(sight.ledger, 0 if sight.control.state == "ended" else online, elapsed, None))
    if sight.control.state != "ended":
        ui.say(f"{sight.samples_per_minute:.1f} samples a minute, {sight.ledger.tokens} tokens so far")
        if sight.control.rate_limited:
            ui.say(f"{sight.control.rate_limited} calls of running jobs were answered with a rate limit")
        if sight.control.limits.fleet_connections is not None:
            ui.say(_connections_line(sight.control))
    for line in _money_lines(sight):
        ui.say(line)
    if sight.waiting_for:
        ui.say(f"waiting for: {sight.waiting_for}")
    if sight.summary and sight.summary.get("reason"):
        ui.say(f"ended early: {sight.summary['reason']}")
    click.echo()
    ui.table(
        ["task", "model", "status", "scores", "completed", "errored", "total", "attempts"],
        [_job_row(job, sight.ledger.shards_of(job)) for job in sight.ledger.wholes],
        right=["completed", "errored", "total", "attempts"],
    )
    if sight.workers:
        click.echo()
        columns = ["worker", "type", "lifecycle", "slots", "state", "online since", "uptime"]
        ui.table(columns, [_worker_row(sight, worker) for worker in sight.workers.values()], right=["slots", "uptime"])


def _connections_line(control: Control) -> str:
    """How the fleet's model connections are divided, and where calls are refused."""
    shares = [
        f"{name} {share}" + (f" ({control.pressure[name]} calls refused)" if name in control.pressure else "")
        for name, share in control.connections.items()
    ]
    return f"{control.limits.fleet_connections} model connections: {', '.join(shares) or 'no worker has any yet'}"


def _worker_row(sight: look.Sight, worker: WorkerRow) -> list[object]:
    state = _worker_state(sight, worker)
    runs = sight.control.state != "ended" and worker.state == "online"
    uptime = ui.seconds_text((now() - worker.since).total_seconds()) if runs else None
    shown = [worker.instance_id, worker.instance_type, worker.lifecycle, worker.slots, state]
    return [*shown, stamp(worker.since), uptime]


def _money_lines(sight: look.Sight) -> list[str]:
    """What a fleet on EC2 has cost, what it costs now, and what is to come at the present rate."""
    spent = sight.spending
    if spent is None:
        return []
    tokens, samples = sight.ledger.token_cost, sight.ledger.samples
    lines = [f"spent: machines {_usd(spent)}, tokens {ui.money_text(tokens) or 'not known'}"]
    if spent.running and sight.control.state != "ended":
        lines[0] += f"; {spent.running} machines run for {ui.money_text(spent.per_hour) or 'an unknown price'} an hour"
    if (minutes := sight.minutes_left) is not None:
        machines = None if spent.per_hour is None else spent.per_hour * minutes / 60
        ended = samples.completed + samples.errored
        rest = None if tokens is None or not ended else tokens / ended * (samples.total - ended)
        lines.append(
            f"to go: about {ui.seconds_text(minutes * 60)}, machines {ui.money_text(machines) or 'not known'}, "
            f"tokens {ui.money_text(rest) or 'not known'}"
        )
    if spent.note:
        lines.append(f"note: {spent.note}")
    return lines


def _usd(spent: Spending) -> str:
    if spent.usd is not None:
        return ui.money_text(spent.usd) or ""
    return f"not known ({ui.money_text(spent.known_usd)} of them is)" if spent.known_usd else "not known"


def _worker_state(sight: look.Sight, worker: WorkerRow) -> str:
    """A worker that leaves when its fleet ends sends no word of it."""
    if worker.state != "online":
        return worker.state
    if sight.control.state == "ended":
        return "ended"
    reason = sight.control.draining.get(worker.instance_id)
    return "online" if reason is None else f"draining ({reason})"


def _job_row(job: JobState, shards: list[JobState]) -> list[object]:
    heard = [part.counts for part in (*shards, job)] if job.done is None else [job.done.samples]
    counts = (sum(each.completed for each in heard), sum(each.errored for each in heard), job.spec.samples)
    shown = job.status
    if job.done is not None and job.done.failure_category not in (None, job.status):
        shown += f": {job.done.failure_category}"
    if shards and job.done is None:
        shown += f" ({sum(shard.done is not None for shard in shards)} of {len(shards)} shards)"
    return [
        job.spec.name,
        job.spec.model,
        shown,
        scores_text(job.done.metrics) if job.done else None,
        *counts,
        job.attempt,
    ]


def _status_record(sight: look.Sight) -> dict[str, Any]:
    return {
        "fleet_id": sight.manifest.fleet_id,
        "state": sight.state,
        "round": sight.control.round,
        "deadline": stamp(sight.control.deadline),
        "controller": sight.control.controller,
        "beat_age_s": round(sight.beat_age_s, 1),
        "samples": sight.ledger.samples.model_dump(),
        "samples_per_minute": round(sight.samples_per_minute, 2),
        "tokens": sight.ledger.tokens,
        "cost_usd": {
            "tokens": sight.ledger.token_cost,
            "machines": sight.spending.usd if sight.spending else None,
            "machines_per_hour": sight.spending.per_hour if sight.spending else None,
            "note": sight.spending.note if sight.spending else None,
        },
        "minutes_left": sight.minutes_left,
        "rate_limited": sight.control.rate_limited if sight.control.state != "ended" else 0,
        "connections": {
            "total": sight.control.limits.fleet_connections,
            "shares": sight.control.connections,
            "refused": sight.control.pressure,
        },
        "waiting_for": sight.waiting_for,
        "summary": sight.summary,
        "jobs": [job.record() | {"attempt": job.attempt} for job in sight.ledger.jobs.values()],
        "workers": [
            {
                "instance_id": w.instance_id,
                "instance_type": w.instance_type,
                "lifecycle": w.lifecycle,
                "slots": w.slots,
                "state": _worker_state(sight, w),
                "since": stamp(w.since),
            }
            for w in sight.workers.values()
        ],
    }


@fleet.command()
@click.argument("fleet_id", type=RunId())
@click.option("--max-workers", type=click.IntRange(1), help="Workers at the most (default: as at its start).")
@click.option("--json", "json_output", is_flag=True, help="Print a launch record and a done record.")
def attach(fleet_id: str, max_workers: int | None, json_output: bool) -> None:
    """Drive a fleet on whose controller has gone, from any directory that has the same root."""
    surroundings = settings()
    storage = preflight.open_root(surroundings)
    manifest = preflight.read_manifest(storage, surroundings, fleet_id)
    preflight.live_folder()
    controller = takeover.attach(surroundings, storage, Request(workers=max_workers, quiet=json_output), manifest)
    follow(controller, surroundings, json_output=json_output)


@fleet.command()
@click.argument("fleet_id", type=RunId())
@click.option("--now", "at_once", is_flag=True, help="End running jobs without letting them flush.")
@json_option
def stop(fleet_id: str, at_once: bool, as_json_: bool) -> None:
    """Stop a fleet: running jobs keep their partial logs, what is open is cancelled, --run-id resumes."""
    storage = _storage()
    control = _ask_to_stop(storage, fleet_id, at_once)
    surroundings = settings()
    if control.state != "ended":
        if controller_gone(control):
            manifest = preflight.read_manifest(storage, surroundings, fleet_id)
            preflight.live_folder()
            verdict = takeover.attach(surroundings, storage, Request(quiet=True), manifest).run()
            if verdict.ending == "left":
                ui.fail(f"the fleet {fleet_id} has not been stopped: {verdict.reason}", ui.EXIT_LEFT_RUNNING)
        else:
            _wait_for_end(storage, fleet_id)
    sight = _look(storage, fleet_id)
    if as_json_:
        ui.emit_json(_status_record(sight))
    else:
        samples = sight.ledger.samples
        ui.say(f"{fleet_id} {sight.state}: {samples.completed} of {samples.total} samples completed")


def _ask_to_stop(storage: Storage, fleet_id: str, at_once: bool) -> Control:
    """Write the wish into control.json, between the controller's own writes."""
    key = layout.control(fleet_id)
    while True:
        try:
            stored = storage.get(key)
        except Missing:
            ui.fail(f"there is no fleet {fleet_id} under {settings().root}: check the id and S3_BUCKET_NAME")
        control = Control.from_json(stored.body)
        if control.state == "ended":
            return control
        wish = control.model_copy(update={"state": "stopping", "at_once": at_once or control.at_once})
        try:
            storage.replace(key, wish.to_bytes(), stored.etag)
            return wish
        except Changed:
            continue


def _wait_for_end(storage: Storage, fleet_id: str) -> None:
    end = time.monotonic() + STOP_WAIT_S
    while Control.from_json(storage.get(layout.control(fleet_id)).body).state != "ended":
        if time.monotonic() > end:
            ui.fail(
                f"the fleet {fleet_id} has been told to stop and has not ended yet: see ct fleet status {fleet_id}",
                ui.EXIT_LEFT_RUNNING,
            )
        time.sleep(0.5)


@fleet.command()
@click.argument("fleet_id", type=RunId())
@click.option("--worker", help="Only this worker.")
@click.option("--lines", type=click.IntRange(1), default=50, show_default=True, help="The last lines of each log.")
@json_option
def logs(fleet_id: str, worker: str | None, lines: int, as_json_: bool) -> None:
    """Print the workers' logs: of ended ones from storage, of those on this machine as they grow."""
    storage = _storage()
    manifest = preflight.read_manifest(storage, settings(), fleet_id)
    found: dict[str, bytes] = {}
    for info in storage.list(layout.worker_logs(fleet_id)):
        name = Path(info.key).stem
        if worker is None or name == worker:
            start = max(0, info.size - lines * 400)
            found[name] = storage.read_range(info.key, start, info.size - start) if info.size else b""
    live = Path(manifest.work_dir) if manifest.work_dir else None
    for path in sorted(live.glob("*/worker.log")) if live is not None and live.is_dir() else ():
        if worker is None or path.parent.name == worker:
            found[path.parent.name] = path.read_bytes()[-lines * 400 :]
    if worker is not None and not found:
        ui.fail(f"the fleet {fleet_id} has no log of a worker {worker}: see ct fleet status {fleet_id}")
    texts = {name: body.decode("utf-8", "replace").splitlines()[-lines:] for name, body in sorted(found.items())}
    if as_json_:
        logs_ = [{"worker": name, "lines": text} for name, text in texts.items()]
        ui.emit_json({"fleet_id": fleet_id, "logs": logs_})
        return
    for name, text in texts.items():
        ui.say(f"== {name}")
        ui.say("\n".join(text))


@fleet.command()
@click.argument("fleet_id", type=RunId())
@json_option
def cost(fleet_id: str, as_json_: bool) -> None:
    """Show what a fleet has cost: each EC2 machine, and the tokens."""
    sight = _look(_storage(), fleet_id)
    spent, tokens = sight.spending, sight.ledger.token_cost
    if as_json_:
        ui.emit_json(_cost_record(sight))
        return
    if sight.book is not None:
        columns = ["machine", "type", "market", "zone", "hours", "$/hour", "cost"]
        ui.table(columns, [_machine_row(sight, record) for record in sight.book.machines], right=columns[4:])
        click.echo()
    machines = "none of its own" if spent is None else _usd(spent)
    ui.say(f"machines {machines}, tokens {ui.money_text(tokens) or 'not known'}")
    if tokens is None:
        ui.say(f"note: no price is known for the tokens of {', '.join(sorted(sight.ledger.spend.unpriced))}")
    if spent is not None and spent.note:
        ui.say(f"note: {spent.note}")


def _cost_record(sight: look.Sight) -> dict[str, Any]:
    spent, tokens = sight.spending, sight.ledger.token_cost
    machines = spent.usd if spent else None
    return {
        "fleet_id": sight.manifest.fleet_id,
        "machines_usd": machines,
        "tokens_usd": tokens,
        "total_usd": machines + tokens if machines is not None and tokens is not None else None,
        "unpriced_models": sorted(sight.ledger.spend.unpriced),
        "unpriced_machines": spent.unpriced if spent else [],
        "note": spent.note if spent else None,
        "machines": [record.model_dump(mode="json") for record in (sight.book.machines if sight.book else [])],
    }


def _machine_row(sight: look.Sight, record: MachineRecord) -> list[object]:
    assert sight.book is not None
    end = record.ended or (sight.last_event if sight.control.state == "ended" else None) or now()
    hours = (end - record.launched).total_seconds() / 3600
    spent = spending([record], sight.book.as_of, end).usd
    rate = None if record.usd_per_hour is None else f"{record.usd_per_hour:.4f}"
    shown = [record.instance_id, record.instance_type, record.market, record.zone]
    return [*shown, f"{hours:.2f}", rate, ui.money_text(spent)]


@fleet.command()
@click.argument("fleet_id", type=RunId())
@click.argument("worker", required=False)
def ssh(fleet_id: str, worker: str | None) -> None:
    """Open a shell on a WORKER of a fleet on EC2, by Systems Manager: no port is open, no key is needed."""
    sight = _look(_storage(), fleet_id)
    if sight.manifest.machines is None:
        ui.fail(f"the fleet {fleet_id} does not run on EC2: its workers are processes, see ct fleet logs {fleet_id}")
    running = [] if sight.book is None else [each.instance_id for each in sight.book.machines if each.ended is None]
    if worker is None and len(running) != 1:
        ui.fail(f"name a worker of {fleet_id}: {', '.join(running) or 'none of its machines runs'}")
    if worker is not None and worker not in running:
        ui.fail(f"{worker} is no running worker of {fleet_id}: {', '.join(running) or 'none of its machines runs'}")
    for program, package in (("aws", "the AWS command line"), ("session-manager-plugin", "the Session Manager plugin")):
        if shutil.which(program) is None:
            ui.fail(f"{program} is not installed: ct fleet ssh needs {package}")
    region = backend.estate_of(sight.manifest.machines.estate).region
    command = ["aws", "ssm", "start-session", "--target", worker or running[0], "--region", region]
    os.execvp(command[0], command)  # noqa: S606 - arguments of our own


@fleet.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done and change nothing.")
@click.option("--quiet", is_flag=True, help="Say nothing of what is kept.")
@json_option
def reap(dry_run: bool, quiet: bool, as_json_: bool) -> None:
    """End what nobody owns: machines and disks of ended fleets, lanes past their deadline, broken uploads.

    A machine or disk is marked on one pass and ended on a later one; a fleet without a controller gets its summary.
    """
    surroundings, estate = ec2_preflight.surroundings(settings())
    reaper = Reaper(surroundings, estate, preflight.open_root(surroundings), dry_run)
    for decision in reaper.run():
        thing = decision.thing
        if quiet and decision.action == "keep":
            continue
        if as_json_:
            ui.emit_json({"kind": thing.kind, "name": thing.name, "action": decision.action, "reason": decision.reason})
        else:
            verb = f"would {decision.action}" if dry_run and decision.action != "keep" else decision.action
            ui.say(f"{verb:<12} {thing.kind} {thing.name}: it {decision.reason}")
    for sentence in reaper.failed:
        ui.note(sentence)
    if reaper.failed:
        raise SystemExit(ui.EXIT_FAILURES)
