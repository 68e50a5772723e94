"""`ct run eval` and `ies run fleet`: submit an evaluation to a fleet and follow it to its end."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from evalops import planner, shipping
from evalops.commands.detach import detach
from evalops.commands.follow import follow
from evalops.commands.params import Duration, RunId
from evalops.commands.planning import check_alone, check_models, plan_jobs
from evalops.fleet import preflight, submit
from evalops.fleet.request import DEFAULT_WORKERS, FAR_SLOTS, Request, workers_of
from evalops.fleet.stream import Fenced
from evalops.fleet.workers import default_slots
from evalops.infra.estate import Estate
from evalops.inspect_options import InspectCommand, TypedArguments, typed_arguments
from evalops.settings import Settings, settings
from evalops.shards import Wish
from evalops.ui import EXIT_USAGE, Failure, emit_json, fail, note
from evalworker import prices
from evalworker.arguments import decode, encode
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Backend, Control, Guards, JobSpec, Machines, Manifest, Market
from evalworker.storage import Storage


def machine_options(command: Any) -> Any:
    """The options that only workers on EC2 have."""
    for option in reversed(
        [
            click.option(
                "--spot", "market", flag_value="spot", help="Spot, on-demand where there is none (the default)."
            ),
            click.option("--spot-only", "market", flag_value="spot-only", help="Spot instances or none."),
            click.option("--on-demand", "market", flag_value="on-demand", help="On-demand instances alone."),
            click.option("--on-demand-base", type=click.IntRange(0), help="So many on-demand ones in any case."),
            click.option(
                "--instance-type",
                "instance_types",
                multiple=True,
                metavar="TYPE",
                help="In place of the estate's; repeatable.",
            ),
            click.option("--ami", metavar="AMI", help="The image of this fleet's workers."),
            click.option("--wait", is_flag=True, help="Wait for a lane when all are in use."),
        ]
    ):
        command = option(command)
    return command


@click.command(cls=InspectCommand)
@click.option("--local", "local", is_flag=True, help="Workers on this machine (the default).")
@click.option("--ec2", "ec2", is_flag=True, help="Workers on EC2 instances, as Terraform prepared them.")
@click.option("--max-workers", type=click.IntRange(1), help="Workers at the most (default: 2, or what the run had).")
@machine_options
@click.option(
    "--concurrency-per-worker",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Samples in flight on each worker, shared by its running jobs.",
)
@click.option("--slots", type=click.IntRange(1), help="Jobs at once on each worker (default: its share of the CPUs).")
@click.option(
    "--shards",
    type=click.IntRange(1),
    help="Run each task in so many parts (default: as many as help); 1 divides none.",
)
@click.option("--shard-size", type=click.IntRange(1), help="Run each task in parts of so many samples.")
@click.option(
    "--fleet-connections",
    type=click.IntRange(1),
    metavar="N",
    help="Connections to each model of all running jobs together, divided over them as they come and go.",
)
@click.option(
    "--run-id",
    type=RunId(),
    help="Resume this run: only what has not completed runs again, bounded as before where nothing else is typed.",
)
@click.option("--new-fleet", is_flag=True, help="Start a fleet even if one with the same jobs is running.")
@click.option("--force", is_flag=True, help="With --run-id: resume under another version of Inspect.")
@click.option("--package", "packages", multiple=True, metavar="REQ", help="A package that the run needs; repeatable.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="A variable that jobs need beside known keys; repeatable.",
)
@click.option("--require-clean", is_flag=True, help="Refuse uncommitted changes, and dependencies without a lock.")
@click.option("--ship-code", is_flag=True, help="Pack the code for local workers too, as for other machines.")
@click.option("--estimate", is_flag=True, help="Print jobs, samples and workers, and stop.")
@click.option("--yes", is_flag=True, help="For scripts; nothing is asked so far.")
@click.option(
    "--deadline",
    type=Duration(),
    default="12h",
    show_default=True,
    help="When the fleet ends whatever happens; a resume counts it anew.",
)
@click.option("--job-timeout", type=Duration(), help="The longest that one attempt of a job may run.")
@click.option(
    "--budget",
    type=click.FloatRange(0, min_open=True),
    metavar="USD",
    help="Stop when the run's tokens have cost so much, by the prices of --model-cost-config.",
)
@click.option("--token-budget", type=click.IntRange(1), help="Stop when the run has used so many tokens.")
@click.option("--canary/--no-canary", help="Run one sample per task and model first; all must pass.")
@click.option(
    "--max-failed-share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Stop when more of the ended jobs failed (from ten on), or the first three all failed alike; 1 never stops.",
)
@click.option(
    "--stall-after",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Say what is waited for when nothing has happened for so long, and stop after twice that.",
)
@click.option(
    "--hung-after",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Call a sample hung in which nothing has happened for so long.",
)
@click.option(
    "--on-hung",
    type=click.Choice(["wait", "error"]),
    default="wait",
    show_default=True,
    help="What to do with a hung sample beside reporting it: wait, or end it with an error.",
)
@click.option(
    "--queues",
    type=click.Choice(["local", "estate"]),
    default="local",
    show_default=True,
    help="Queues on this machine, or a lane that Terraform made.",
)
@click.option(
    "--json", "json_output", is_flag=True, help="Print a launch record and a done record, one JSON object a line."
)
@click.option("--detach", is_flag=True, help="Print the launch record as JSON and go on in the background.")
@click.pass_context
def run_eval(ctx: click.Context, /, **options: Any) -> None:
    """Run TASKS with every model on a fleet of workers, and stream each sample's score as it lands.

    Takes every option of `inspect eval-set` under its own name. Watch with `tail -f logs/fleet/RUN_ID/events.jsonl`.
    """
    _check_backend(options)
    if options["detach"]:
        detach()
        return
    try:
        _run(ctx, options, settings())
    except (ServiceError, Fenced, prices.BadPrices) as error:
        raise Failure(str(error), EXIT_USAGE) from error


def _request(options: dict[str, Any], typed: frozenset[str]) -> Request:
    """What is asked of the fleet beside what is said to Inspect."""
    return Request(
        workers=options["max_workers"],
        concurrency=options["concurrency_per_worker"],
        slots=options["slots"],
        connections=options["fleet_connections"],
        deadline=options["deadline"],
        job_timeout_s=options["job_timeout"].total_seconds() if options["job_timeout"] else None,
        hung_after_s=options["hung_after"].total_seconds(),
        on_hung=options["on_hung"],
        guards=Guards(
            budget_usd=options["budget"],
            token_budget=options["token_budget"],
            canary=options["canary"],
            max_failed_share=options["max_failed_share"],
            stall_after_s=options["stall_after"].total_seconds(),
        ),
        queues="estate" if options["ec2"] else options["queues"],
        wait=options["wait"],
        quiet=options["json_output"],
        typed=typed,
    )


MACHINE_OPTIONS = {
    "market": "--spot, --spot-only and --on-demand",
    "on_demand_base": "--on-demand-base",
    "instance_types": "--instance-type",
    "ami": "--ami",
}


def _check_backend(options: dict[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if options["local"] and options["ec2"]:
        fail("--local and --ec2 exclude each other")
    given = [shown for name, shown in MACHINE_OPTIONS.items() if options[name] not in (None, ())]
    if given and not options["ec2"]:
        fail(f"{given[0]}: only workers on EC2 have that; add --ec2")
    if options["on_demand_base"] and options["market"] == "spot-only":
        fail("--on-demand-base and --spot-only exclude each other")
    if options["shards"] and options["shard_size"]:
        fail("--shards and --shard-size exclude each other")
    if options["run_id"] and (options["shards"] or options["shard_size"]):
        fail("a run goes on in the shards that it began with: leave --shards and --shard-size away")


@dataclass(frozen=True)
class Target:
    """Where a run goes: the backend, the settings that hold for it, and the estate of a backend on AWS."""

    backend: Backend
    surroundings: Settings
    estate: Estate | None = None


def _target(options: dict[str, Any], surroundings: Settings) -> Target:
    """Check who we are on AWS, and with what estate."""
    if not options["ec2"]:
        return Target("local", surroundings)
    from evalops.ec2 import preflight as ec2_preflight

    surroundings, estate = ec2_preflight.surroundings(surroundings)
    return Target("ec2", surroundings, estate)


def _check_deadline(target: Target, request: Request) -> None:
    """Refuse what the estate's machines would not live to see."""
    if target.estate is not None:
        from evalops.ec2 import preflight as ec2_preflight

        ec2_preflight.check_deadline(request.deadline, target.estate)


def _machines(
    options: dict[str, Any], target: Target, request: Request, jobs: list[JobSpec], before: Machines | None
) -> Machines | None:
    """What workers are launched from; None for workers of this machine. `before`: what those of a resumed run were."""
    if target.estate is None:
        return None
    from evalops.ec2 import preflight as ec2_preflight

    return ec2_preflight.machines(target.estate, _wanted(options, request, jobs, before))


def _wanted(options: dict[str, Any], request: Request, jobs: list[JobSpec], before: Machines | None) -> Any:
    """What the options say of the machines; where they say nothing, a run goes on as it began."""
    from evalops.ec2.preflight import SPOT_FIRST, Wanted

    named: dict[str, list[Market]] = {"spot": SPOT_FIRST, "spot-only": ["spot"], "on-demand": ["on-demand"]}
    kept = before or Machines(estate="", markets=SPOT_FIRST, images={}, instance_types={}, workers=DEFAULT_WORKERS)
    markets = named[options["market"]] if options["market"] else kept.markets
    base = options["on_demand_base"]
    if base and markets == ["spot"]:
        fail("the run has --spot-only, which --on-demand-base contradicts: add --spot")
    if base is None:
        base = 0 if markets == ["spot"] else kept.on_demand_base
    types = [name for some in kept.instance_types.values() for name in some]
    return Wanted(
        workers=min(request.workers or kept.workers, max(1, _at_once(jobs))),
        markets=markets,
        on_demand_base=base,
        instance_types=options["instance_types"] or tuple(types),
        image=options["ami"],
        images={} if options["ami"] else kept.images,
    )


def _at_once(jobs: list[JobSpec]) -> int:
    """Jobs that may run at once: the merge of a task's shards comes after them."""
    return sum(not job.merges for job in jobs)


def _run(ctx: click.Context, options: dict[str, Any], surroundings: Settings) -> None:
    given = typed_arguments(ctx, resuming=options["run_id"] is not None)
    if options["run_id"] and not given.tasks:
        check_alone(ctx)
    typed = _typed(ctx)
    wishes = shipping.Wishes(options["packages"], options["secrets"], options["require_clean"], options["ship_code"])
    target = _target(options, surroundings)
    surroundings, backend = target.surroundings, target.backend
    luggage = shipping.prepare(wishes, backend, surroundings.estate, Path.cwd(), target.estate)
    resumed: Manifest | None = None
    storage: Storage | None = None
    if options["run_id"]:
        storage = preflight.open_root(surroundings)
        resumed = preflight.read_manifest(storage, surroundings, options["run_id"])
        _check_same_backend(resumed, backend)
        options |= _as_before(typed, Control.from_json(storage.get(layout.control(resumed.fleet_id)).body))
        shipping.check_versions(resumed, force=options["force"])
    request = _request(options, typed)
    _check_deadline(target, request)
    planned = resumed is None or bool(given.tasks)
    if resumed is not None and not planned:
        check_models(ctx, resumed)
    if planned and not options["json_output"]:
        note("loading the tasks …")
    slots = _check_connections(options, request, resumed)
    wish = _wish(options, slots) if resumed is None else None  # in what shards a run goes on was decided at its start
    here = target.estate is None and not options["estimate"]
    jobs = plan_jobs(given, luggage, warn=note, wish=wish, here=here) if resumed is None or planned else resumed.jobs
    machines = _machines(options, target, request, jobs, resumed.machines if resumed else None)
    if options["estimate"]:
        _print_estimate(jobs, request, machines, target, options["json_output"])
        return
    arguments = _arguments(given, resumed)
    if request.guards.budget_usd is not None:
        preflight.check_prices((spec.model for spec in jobs), arguments)
    storage = storage or preflight.open_root(surroundings)
    preflight.live_folder()
    if machines is not None and target.estate is not None:
        from evalops.ec2 import preflight as ec2_preflight

        ec2_preflight.check_keys(target.estate, (spec.model for spec in jobs), luggage.secrets)
        ec2_preflight.prepare_boot(storage, machines, target.estate)
    if resumed is None:
        if not options["new_fleet"]:
            preflight.check_not_running(storage, jobs, surroundings)
        encoded = encode(arguments)
        models = encode({"models": given.models})["models"]
        shipped = shipping.ship(wishes, luggage, backend, storage)
        controller = submit.start(
            surroundings, storage, request, jobs, encoded, models, given.environment, shipped, machines
        )
    else:
        preflight.check_same(resumed, jobs)
        again = shipping.ship(wishes, luggage, backend, storage) if planned else shipping.same_code(luggage, resumed)
        if planned:  # the same jobs, so what differs changes no result: retries, time-outs, buffers
            again |= {"arguments": encode(arguments)}
        found = submit.resume(surroundings, storage, request, resumed, again | _changed(machines))
        if found is None:
            note(f"every job of {resumed.fleet_id} has completed: nothing to run")
            return
        controller = found
    follow(controller, surroundings, json_output=options["json_output"])


def _changed(machines: Machines | None) -> dict[str, Any]:
    """What a resume changes in the manifest about the machines."""
    return {} if machines is None else {"machines": machines}


def _check_same_backend(manifest: Manifest, backend: Backend) -> None:
    """A run goes on where it began: what was shipped, and for whom, belongs to its backend."""
    if manifest.backend != backend:
        how = {"local": "without --ec2", "ec2": "with --ec2"}.get(manifest.backend, f"on {manifest.backend}")
        fail(f"the run {manifest.fleet_id} began on {manifest.backend}: resume it {how}")


def _arguments(given: TypedArguments, resumed: Manifest | None) -> dict[str, Any]:
    """`eval_set`'s arguments of the run, with its prices instead of the name of their file."""
    return prices.resolved(given.arguments if resumed is None or given.tasks else decode(resumed.arguments))


def _as_before(typed: frozenset[str], control: Control) -> dict[str, Any]:
    """The options of a resume that were not typed, as the run had them; what its record does not know is left out."""
    limits, guards = control.limits, control.guards
    had = {
        "max_workers": limits.workers,
        "concurrency_per_worker": limits.concurrency_per_worker,
        "slots": limits.slots,
        "fleet_connections": limits.fleet_connections,
        "deadline": _duration(limits.deadline_s),
        "job_timeout": _duration(limits.job_timeout_s),
        "hung_after": _duration(limits.hung_after_s),
        "on_hung": limits.on_hung,
        "budget": guards.budget_usd,
        "token_budget": guards.token_budget,
        "canary": guards.canary,
        "max_failed_share": guards.max_failed_share,
        "stall_after": _duration(guards.stall_after_s),
    }
    return {name: value for name, value in had.items() if value is not None and name not in typed}


def _typed(ctx: click.Context) -> frozenset[str]:
    """The command's own parameters that stand on the command line."""
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE)


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _check_connections(options: dict[str, Any], request: Request, resumed: Manifest | None) -> int:
    """How many jobs may run at once. Each needs a connection."""
    workers = (request.workers or DEFAULT_WORKERS) if resumed is None else workers_of(request, resumed)
    slots = workers * (request.slots or (FAR_SLOTS if options["ec2"] else default_slots(workers)))
    if resumed is not None:
        slots = min(slots, _at_once(resumed.jobs))
    if request.connections is not None and request.connections < slots:
        fail(
            f"--fleet-connections {request.connections} is less than the {slots} jobs that may run at once, which need one each: "
            "give more, or fewer --max-workers or --slots"
        )
    return slots


def _wish(options: dict[str, Any], slots: int) -> Wish:
    """What is known of shards before the tasks are: how many jobs will run at once."""
    return Wish(size=options["shard_size"], count=options["shards"], slots=slots)


def _print_estimate(
    jobs: list[JobSpec], request: Request, machines: Machines | None, target: Target, json_output: bool
) -> None:
    workers = min(request.workers or DEFAULT_WORKERS, _at_once(jobs))
    found: dict[str, Any] = planner.totals(jobs) | {"workers": workers}
    if target.estate is not None and machines is not None:
        from evalops.ec2 import estimate

        storage, slots = preflight.open_root(target.surroundings), request.slots or FAR_SLOTS
        seen = estimate.estimate(storage, target.estate, machines, jobs, workers, slots)
        found |= seen.record()
    if json_output:
        emit_json(found)
        return
    click.echo(
        ", ".join(f"{found[name]} {name[: -(found[name] == 1) or None]}" for name in ("jobs", "samples", "workers"))
    )
    if target.estate is not None and machines is not None:
        for line in seen.lines():
            click.echo(line)
