"""`ies run local`: tasks and models in this process, by one call of Inspect's `eval_set`."""

import os
import sys
from datetime import datetime
from pathlib import Path

import click

from evalops import shipping, ui
from evalops.commands.options import refused
from evalops.commands.params import RunId
from evalops.commands.planning import plan_jobs
from evalops.hints import resume
from evalops.inspect_options import (
    InspectCommand,
    apply_common_options,
    suppose,
    typed_arguments,
    typed_names,
)
from evalops.logs import local_run, places, rows
from evalops.logs.metadata import Models
from evalops.logs.survey import document, promoted, survey
from evalops.settings import settings
from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import now
from evalworker.inspect_internals import InspectRefused
from evalworker.storage import Storage


@click.command(name="local", cls=InspectCommand, in_process=True)
@click.option("--run-id", type=RunId(), help="Retry this run, wherever it failed: what is finished is kept.")
@click.option("--force", is_flag=True, help="Retry although tasks, models or Inspect's version differ from the run's.")
@click.option("--json", "as_json_", is_flag=True, help="Print the run's id and directory as one line of JSON.")
@click.pass_context
def run_local(ctx: click.Context, run_id: str | None, force: bool, as_json_: bool) -> None:
    """Run tasks here; the logs go to <root>/logs/working/<RUN_ID>/, as those of every other way to run.

    Prints the RUN_ID first. With --run-id alone, the run's own tasks and models are retried.
    """
    with refused():
        storage = places.root()
        manifest = _manifest(storage, run_id) if run_id else None
        bare = manifest is not None and _as_before(ctx, manifest)
        typed = typed_arguments(ctx)
        apply_common_options(ctx)
        if manifest is not None and bare:
            typed = local_run.as_before(typed, manifest)
        os.environ.update(typed.environment)
        luggage = shipping.prepare(shipping.Wishes(), "local", settings().estate, Path.cwd())
        sys.path[:0] = [folder for folder in luggage.import_path if folder not in sys.path]
        submission = local_run.Submission(
            typed.tasks, typed.models, typed.arguments, plan_jobs(typed, luggage, here=True)
        )
        if manifest is not None:
            _check(manifest, submission, force)
        storage.probe()
        seen = local_run.last_seen(storage, run_id) if run_id else None
        if run_id and not force and (busy := local_run.living_owner(storage, run_id, seen)):
            ui.fail(f"{busy}; stop it first, or --force if you know that it has gone.")
        if manifest is not None and not force:
            if _nothing_left(storage, manifest, submission):
                _announce(manifest, places.of_run(manifest.fleet_id, storage), 0, as_json_)
                return
            _check_merged(storage, manifest, submission)
        if manifest is None:
            shipped = shipping.ship(shipping.Wishes(), luggage, "local", storage)
            manifest = local_run.new_manifest(
                run_id or new_run_id(), submission, typed.environment, settings().owner, shipped
            )
            storage.put(layout.manifest(manifest.fleet_id), manifest.to_bytes())
        code = _run(storage, manifest, submission, seen, retry=run_id is not None, as_json_=as_json_)
    raise SystemExit(code)


def _manifest(storage: Storage, run_id: str) -> Manifest | None:
    problems: list[str] = []
    manifest = document(storage, layout.manifest(run_id), Manifest, problems)
    if problems:
        ui.fail(problems[0])
    return manifest


def _as_before(ctx: click.Context, manifest: Manifest) -> bool:
    """Take from the manifest what was not typed, and go to where the run was submitted. True when nothing was typed."""
    tasks, models = typed_names(ctx)
    suppose(
        ctx,
        tasks=None if tasks else list(dict.fromkeys(job.task for job in manifest.jobs)),
        models=None if models else list(dict.fromkeys(job.model for job in manifest.jobs)),
    )
    folder = local_run.submit_directory(manifest)
    if folder is not None:
        os.chdir(folder)
    else:
        ui.note(f"warning: the run was submitted from another machine ({manifest.submit_dir}); this directory is used")
    return not tasks and not models


def _check(manifest: Manifest, submission: local_run.Submission, force: bool) -> None:
    found = local_run.differences(manifest, submission.jobs)
    if found and not force:
        ui.fail(f"This is not the run {manifest.fleet_id}: {'; '.join(found)}. --force retries it all the same.")
    for difference in found:
        ui.note(f"warning: {difference}")


def _announce(manifest: Manifest, place: places.Place, jobs: int, as_json_: bool) -> None:
    """The run's id, before anything else; `jobs`: how many are run."""
    if as_json_:
        ui.emit_json({"run_id": manifest.fleet_id, "log_dir": place.url, "jobs": jobs})
    else:
        click.echo(manifest.fleet_id)


def _nothing_left(storage: Storage, manifest: Manifest, submission: local_run.Submission) -> bool:
    """Whether all is done and some of it was promoted with its logs, which Inspect cannot see here; refuses to run that part again."""
    seen = survey(places.of_run(manifest.fleet_id, storage), Models().price)
    for problem in seen.problems:
        ui.note(f"warning: {problem}")
    again = promoted(seen, submission.jobs)
    if not again:
        return False
    done = {row.job_id for row in seen.rows if row.state in rows.GOOD}
    if all(job.job_id in done for job in submission.jobs):
        ui.note(f"every job of {manifest.fleet_id} has completed, and logs of it were promoted: nothing to run")
        return True
    raise ui.Failure(
        f"{again}it would run as if it never had. Name the tasks and models that are to run; --force runs all of them."
    )


def _check_merged(storage: Storage, manifest: Manifest, submission: local_run.Submission) -> None:
    """Shards go on as shards: alone their logs are not the task's."""
    place = places.of_run(manifest.fleet_id, storage)
    if found := local_run.unmerged(place, manifest, submission.jobs):
        ui.fail(
            f"{found[0]} ran in shards whose logs are not merged yet: `{resume(manifest.fleet_id, manifest.backend)}` goes on "
            "from them; --force runs the whole task again."
        )


def _run(
    storage: Storage,
    manifest: Manifest,
    submission: local_run.Submission,
    seen: local_run.Seen | None,
    *,
    retry: bool,
    as_json_: bool,
) -> int:
    """Run it; the exit code that its logs call for."""
    begun = now().replace(microsecond=0)
    place = places.of_run(manifest.fleet_id, storage)
    _announce(manifest, place, len(submission.jobs), as_json_)
    with local_run.alive(storage, manifest.fleet_id, seen):
        for said in local_run.clear_the_way(place) if retry else []:
            ui.note(said)
        if retry and (came := local_run.fetch_partials(place)):
            ui.note(f"{came} unfinished logs of the run's jobs were brought here")
        try:
            local_run.run(place, submission, dirty=retry)
        except InspectRefused as error:
            ui.fail(str(error))
        except Exception as error:  # it may stumble when every log is stored already: they decide
            ui.note(f"warning: Inspect's eval_set ended with {type(error).__name__}: {rows.shorten(str(error), 400)}")
    return _exit_code(place, submission, begun)


def _exit_code(place: places.Place, submission: local_run.Submission, begun: datetime) -> int:
    """What the stored logs say: an interrupted eval_set returns success, and leaves a cancelled log of this call."""
    seen = survey(place, Models().price)
    ui.note(seen.headline)
    logs = [log.facts for one in seen.chosen for log in (one.log, *one.superseded)]
    if any(facts.status == "cancelled" and facts.created and facts.created >= begun for facts in logs):
        return ui.EXIT_INTERRUPTED
    good = {row.log for row in seen.rows if row.state in rows.GOOD}
    done = [one.log.facts for one in seen.chosen if one.log.info.key in good]
    well = all(any(rows.fits(job, facts) for facts in done) for job in submission.jobs)
    return 0 if well else ui.EXIT_FAILURES
