"""`ies run aws`: tasks and models as a job of AWS Batch, or (with --array) a child of one for each."""

import contextlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from evalops import code, hints, shipping, ui
from evalops.batch import record, request
from evalops.commands import batch as following
from evalops.commands.options import refused
from evalops.commands.params import Duration, RunId
from evalops.commands.planning import check_alone, check_models, plan_jobs
from evalops.ec2 import preflight
from evalops.fleet import preflight as run_checks
from evalops.infra.estate import Estate
from evalops.inspect_options import InspectCommand, TypedArguments, typed_arguments
from evalops.logs import local_run, places
from evalops.logs import rows as log_rows
from evalops.logs.metadata import Models
from evalops.logs.survey import promoted, survey
from evalops.settings import Settings, settings
from evalworker import aws, prices
from evalworker.arguments import encode
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, JobSpec, Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import now
from evalworker.storage import Storage

_STAY = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


@click.command(name="aws", cls=InspectCommand)
@click.option(
    "--array/--no-array", default=None, help="A job for each task and model (an array) instead of one for all."
)
@click.option("--vcpus", type=click.IntRange(1), help="vCPUs of each job (default: the estate's).")
@click.option(
    "--memory", type=click.IntRange(4), metavar="MIB", help="Memory of each job in MiB (default: the estate's)."
)
@click.option("--spot", "market", flag_value="spot", help="On spot hosts (the default).")
@click.option("--on-demand", "market", flag_value="on-demand", help="On on-demand hosts.")
@click.option("--queue", metavar="QUEUE", help="A queue of the estate by its name, in place of --spot and --on-demand.")
@click.option("--job-timeout", type=Duration(), help="The longest that one attempt of a job may run (from 60s on).")
@click.option("--monitor", is_flag=True, help="Follow the job to its end: states, log lines, results, the table.")
@click.option(
    "--runnable-timeout", type=Duration(), help="With --monitor: terminate a job that waits for a host for so long."
)
@click.option("--run-id", type=RunId(), help="Submit this run again: only what has not completed runs.")
@click.option("--force", is_flag=True, help="With --run-id: under another version of Inspect.")
@click.option("--package", "packages", multiple=True, metavar="REQ", help="A package that the run needs; repeatable.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="A key of the estate that must be set; repeatable."
)
@click.option("--require-clean", is_flag=True, help="Refuse uncommitted changes, and dependencies without a lock.")
@click.option(
    "--json", "json_output", is_flag=True, help="Print a launch record, and with --monitor a done record, as JSON."
)
@click.pass_context
def run_aws(ctx: click.Context, /, **options: Any) -> None:
    """Run TASKS with every model on AWS Batch; the logs go to logs/working/<RUN_ID>/ of the estate's bucket.

    Prints the RUN_ID, the job's id, and links to the Batch console and to CloudWatch. Takes every option of
    `inspect eval-set` under its own name.
    """
    _check(options)
    with refused():
        try:
            submitted = _submit(ctx, options)
        except (ServiceError, prices.BadPrices) as error:
            raise ui.Failure(str(error)) from error
        if submitted is None:
            return
        _tell(submitted, options)
        if options["monitor"]:
            following.follow(
                submitted.estate,
                submitted.storage,
                submitted.target,
                submitted.manifest,
                options["runnable_timeout"],
                as_json_=options["json_output"],
            )


def _check(options: dict[str, Any]) -> None:
    """Refuse options that contradict each other, or that Batch would refuse."""
    if options["queue"] and options["market"]:
        ui.fail(f"--queue and --{options['market']} exclude each other")
    if options["runnable_timeout"] and not options["monitor"]:
        ui.fail(
            "--runnable-timeout needs --monitor: without it nobody looks (the estate's own is batch.runnable_minutes)"
        )
    shortest = timedelta(seconds=request.SHORTEST_TIMEOUT_S)
    if options["job_timeout"] is not None and options["job_timeout"] < shortest:
        ui.fail(f"--job-timeout: Batch takes {request.SHORTEST_TIMEOUT_S} seconds at the least")


@dataclass(frozen=True)
class Submitted:
    """What was submitted, and where."""

    estate: Estate
    storage: Storage
    manifest: Manifest
    target: record.Target


def _submit(ctx: click.Context, options: dict[str, Any]) -> Submitted | None:
    """Check, plan, ship and submit; None when there is nothing to run."""
    given = _typed(ctx, options)
    if options["run_id"] and not given.tasks:
        check_alone(ctx)
    surroundings, estate = preflight.surroundings(settings())
    if estate.batch is None:
        ui.fail(f"the estate {estate.name} was made without Batch: set batch.enabled and run `make apply`")
    if estate.batch.image is None:
        ui.fail(
            "no worker image was pushed for Batch: `make image`, `make push-image`, put the digest into batch.image_digest, `make apply`"
        )
    request.queue_of(estate, options["market"], options["queue"])
    wishes = shipping.Wishes(options["packages"], options["secrets"], options["require_clean"])
    luggage = shipping.prepare(wishes, "batch", surroundings.estate, Path.cwd(), estate)
    storage = run_checks.open_root(surroundings)
    # read before it is seen that nothing of the run lives: what somebody else submits from here on is noticed
    found = record.read(storage, options["run_id"]) if options["run_id"] is not None else None
    resumed = _resumed(ctx, options, given, storage, surroundings)
    planned = resumed is None or bool(given.tasks)
    models = {job.model for job in resumed.jobs} if resumed else {str(getattr(m, "name", m)) for m in given.models}
    preflight.check_keys(estate, sorted(models), luggage.secrets)
    if planned and not options["json_output"]:
        ui.note("loading the tasks …")
    jobs = plan_jobs(given, luggage) if planned or resumed is None else resumed.jobs
    if resumed is None:
        fields = shipping.ship(wishes, luggage, "batch", storage)
        manifest = _manifest(given, jobs, surroundings, fields)
        run = BatchRun(
            fleet_id=manifest.fleet_id,
            estate=estate.name,
            region=estate.region,
            log_group=estate.batch.log_group,
            rounds=[],
        )
    else:
        run_checks.check_same(resumed, jobs)
        if found is None:
            ui.fail(
                f"the run {resumed.fleet_id} has lost its {layout.batch(resumed.fleet_id)}: resume it by ies run local"
            )
        run = found
        changed = shipping.ship(wishes, luggage, "batch", storage) if planned else shipping.same_code(luggage, resumed)
        manifest = resumed.model_copy(
            update=changed | ({"arguments": encode(prices.resolved(given.arguments))} if planned else {})
        )
    shipping.check_no_secret(manifest)
    wanted = _wanted(estate, options, run.rounds[-1] if run.rounds else None)
    round_ = _round(storage, manifest, run, wanted)
    if round_ is None:
        ui.note(f"every job of {manifest.fleet_id} has completed: nothing to run")
        return None
    made = request.requests(estate, surroundings.root, manifest, round_, wanted)
    request.check(manifest, made)
    run = _send(storage, estate, manifest, resumed, run, round_, made)
    target = record.Target(run.rounds[-1].submissions, run, run.rounds[-1], whole=True)
    return Submitted(estate, storage, manifest, target)


def _typed(ctx: click.Context, options: dict[str, Any]) -> TypedArguments:
    """What was asked of Inspect. One `eval_set` runs the whole set here, so its display and its clean-up stay Inspect's own."""
    given = typed_arguments(ctx, resuming=options["run_id"] is not None)
    if ctx.get_parameter_source("display") not in _STAY:
        given.arguments["display"] = "plain"
    if ctx.get_parameter_source("no_retry_cleanup") not in _STAY:
        given.arguments.pop("retry_cleanup", None)
    return given


def _resumed(
    ctx: click.Context, options: dict[str, Any], given: TypedArguments, storage: Storage, surroundings: Settings
) -> Manifest | None:
    """The manifest of the run that is submitted again; refuses one of another backend, and one that still runs."""
    if options["run_id"] is None:
        return None
    manifest = run_checks.read_manifest(storage, surroundings, options["run_id"])
    if manifest.backend != "batch":
        how = hints.at_root(hints.resume(manifest.fleet_id, manifest.backend), surroundings.bucket)
        ui.fail(f"the run {manifest.fleet_id} began on {manifest.backend}: resume it by {how}")
    if not given.tasks:
        check_models(ctx, manifest)
    shipping.check_versions(manifest, force=options["force"])
    if busy := local_run.living_owner(storage, manifest.fleet_id, local_run.last_seen(storage, manifest.fleet_id)):
        ui.fail(f"{busy}; `ies batch terminate-job {manifest.fleet_id}` ends a job of Batch")
    return manifest


def _manifest(given: TypedArguments, jobs: list[JobSpec], surroundings: Settings, fields: dict[str, Any]) -> Manifest:
    return Manifest(
        fleet_id=new_run_id(),
        created=now(),
        backend="batch",
        jobs=jobs,
        arguments=encode(prices.resolved(given.arguments)),
        models=encode({"models": given.models})["models"],
        environment=given.environment,
        git=code.state(Path.cwd()),
        owner=surroundings.owner,
        **fields,
    )


def _wanted(estate: Estate, options: dict[str, Any], before: BatchRound | None) -> request.Wanted:
    """The shape of the submission: what is given; of a run that is submitted again, else what it was."""
    timeout = options["job_timeout"].total_seconds() if options["job_timeout"] else None
    chosen = options["queue"] or options["market"]
    assert estate.batch is not None
    if before is None or chosen or before.queue not in estate.batch.queues.values():
        queue = request.queue_of(estate, options["market"], options["queue"])
    else:
        queue = before.queue
    given: dict[str, Any] = {
        "array": options["array"],
        "vcpus": options["vcpus"],
        "memory": options["memory"],
        "timeout_s": timeout,
    }
    shape: dict[str, Any] = {
        name: getattr(before, name, None) if value is None else value for name, value in given.items()
    }
    return request.Wanted(queue, bool(shape.pop("array")), **shape)


def _round(storage: Storage, manifest: Manifest, run: BatchRun, wanted: request.Wanted) -> BatchRound | None:
    """What this submission runs: everything, or of an array that is submitted again what has not completed. None for nothing."""
    array = wanted.array
    number = max((each.number for each in run.rounds), default=0) + 1
    shape = asdict(wanted)
    if number == 1:
        return BatchRound(number=1, jobs=list(range(len(manifest.jobs))), **shape)
    place = places.of_run(manifest.fleet_id, storage)
    _check_promoted(place, manifest, array)
    for said in local_run.clear_the_way(place):
        ui.note(said)
    if not array and any(each.array for each in run.rounds):
        local_run.fetch_partials(place)
    seen = survey(place, Models().price, cached=False)
    own = {row.job_id: row for row in seen.rows if row.job_id is not None}
    open_ = [index for index, job in enumerate(manifest.jobs) if own[job.job_id].state not in log_rows.GOOD]
    keys = {index: own[manifest.jobs[index].job_id].log or "" for index in open_}
    logs = {index: key for index, key in keys.items() if key.startswith(place.prefix)}
    if not open_:
        return None
    every = open_ if array else list(range(len(manifest.jobs)))
    return BatchRound(number=number, jobs=every, logs=logs if array else {}, **shape)


def _check_promoted(place: places.Place, manifest: Manifest, array: bool) -> None:
    """One `eval_set` for all cannot leave out what was promoted with its log: it would run that as if it never had."""
    if array:
        return
    seen = survey(place, Models().price)
    again = promoted(seen, manifest.jobs)
    if again and not all(row.state in log_rows.GOOD for row in seen.rows):
        ui.fail(f"{again}one job for all would run it again: --array runs the others alone.")


def _send(
    storage: Storage,
    estate: Estate,
    manifest: Manifest,
    resumed: Manifest | None,
    run: BatchRun,
    round_: BatchRound,
    made: list[request.Request],
) -> BatchRun:
    """Write the manifest and submit; when nothing was submitted, nothing stays written."""
    key, written = layout.manifest(manifest.fleet_id), []

    def write() -> None:
        written.append(key)
        if resumed is None:
            storage.create(key, manifest.to_bytes())
        else:
            storage.put(key, manifest.to_bytes())

    try:
        return request.submit(aws.client("batch", estate.region), storage, run, round_, made, write)
    except BaseException:
        with contextlib.suppress(ServiceError):
            if written and resumed is None:
                storage.delete(key)
            elif written:
                storage.put(key, resumed.to_bytes())  # type: ignore[union-attr]
        raise


def _tell(submitted: Submitted, options: dict[str, Any]) -> None:
    """The run's id on stdout; job, links and what to type next on stderr."""
    target, estate = submitted.target, submitted.estate
    run_id = submitted.manifest.fleet_id
    if options["json_output"]:
        ui.emit_json(launch_record(submitted))
        return
    click.echo(run_id)
    assert target.round is not None
    samples = sum(submitted.manifest.jobs[place].samples for place in target.round.jobs)
    count = len(target.round.jobs)
    ui.note(f"queue   {target.round.queue}: {count} task{'s' * (count != 1)} with a model, {samples} samples")
    following.banner(estate, target)
    if not options["monitor"]:
        status = hints.at_root(f"ies status check --run-id {run_id}", estate.bucket)
        ui.note(f"watch   ies batch monitor-job {run_id}    or: {status}")
    ui.note(f"stop    ies batch terminate-job {run_id}")


def launch_record(submitted: Submitted) -> dict[str, Any]:
    """What was submitted, for programs."""
    from evalops.batch import names

    place = following.where(submitted.estate)
    assert submitted.target.round is not None
    return {
        "type": "launch",
        "run_id": submitted.manifest.fleet_id,
        "round": submitted.target.round.number,
        "queue": submitted.target.round.queue,
        "log_dir": submitted.storage.url(layout.working(submitted.manifest.fleet_id).rstrip("/")),
        "logs": names.logs_link(place.region, place.group),
        "jobs": [
            {"job_id": job.job_id, "name": job.name, "size": job.size, "link": names.job_link(place.region, job.job_id)}
            for job in submitted.target.jobs
        ],
    }
