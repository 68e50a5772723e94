"""`ies summarize`: make the dashboard's files beside a run's logs."""

from pathlib import Path

import click

from evalops import ui
from evalops.commands.options import json_option, model_metadata_option, refused, task_metadata_option
from evalops.commands.params import RunId
from evalops.logs import dashboard, places
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.summarise import Result, Work, summarise
from evalops.logs.survey import survey


@click.command()
@click.option("--run-id", type=RunId(), help="The run whose logs are summarised.")
@click.option("--log-dir", help="Its logs, where they are not under the root.")
@click.option(
    "--max-error-rate",
    type=click.FloatRange(0, 1),
    default=dashboard.MAX_ERROR_RATE,
    show_default=True,
    help="Share of errored samples that is still published.",
)
@click.option(
    "--force",
    "forced",
    metavar="REASON",
    multiple=True,
    type=click.Choice(sorted(dashboard.FORCIBLE)),
    help=f"Publish in spite of one kind of reason. Repeatable: {', '.join(sorted(dashboard.FORCIBLE))}.",
)
@model_metadata_option
@task_metadata_option
@json_option
def summarize(
    run_id: str | None,
    log_dir: str | None,
    max_error_rate: float,
    forced: tuple[str, ...],
    model_metadata: tuple[Path, ...],
    task_metadata: tuple[Path, ...],
    as_json_: bool,
) -> None:
    """Write a .dashboard.json and a .zip beside each log that may be published, and say why the others may not.

    Exit code 1 when a log was refused.
    """
    if not run_id and not log_dir:
        ui.fail("Say which logs: --run-id or --log-dir.")
    with refused():
        place = places.of_log_dir(log_dir, run_id) if log_dir else places.of_run(run_id or "")
        models, evaluations = Models(model_metadata), Evaluations(task_metadata)
        seen = survey(place, models.price)
        if not seen.directory.logs:
            ui.fail(f"There are no logs in {place.url}{'; they were promoted' if seen.chosen else ''}.")
        if seen.current is not None and seen.current.in_place:
            ui.fail(
                f"{run_id} is still running ({seen.around.owner}), and Inspect would take for logs what is written beside its logs: "
                "summarize it when it has ended."
            )
        with ui.progress("packing") as bar:
            work = Work(
                place.storage,
                models,
                evaluations,
                forced,
                max_error_rate,
                lambda size: bar.advance(bar.task_ids[0], size),
            )
            results = summarise(work, seen.directory, seen.chosen)
    if as_json_:
        ui.emit_json({"run_id": run_id, "log_dir": place.url, "results": [result.as_json() for result in results]})
    else:
        _print(results)
    if any(result.outcome == "refused" for result in results):
        raise SystemExit(ui.EXIT_FAILURES)


def _print(results: list[Result]) -> None:
    rows = [
        (
            result.task or result.log,
            result.model,
            result.outcome,
            "; ".join([*(f"{item.kind}: {item.text}" for item in result.refusals), *result.remarks]),
        )
        for result in results
    ]
    ui.table(("task", "model", "outcome", "why"), rows)
    shown: set[str] = set()
    for help_ in (item.help for result in results for item in result.refusals if item.help):
        if help_ not in shown:
            shown.add(help_)
            option = "--model-metadata" if help_.startswith("models:") else "--task-metadata"
            ui.note(f"\nFill this in, save it to a file, and name the file with {option}:\n\n{help_}")
    kinds = {item.kind for result in results for item in result.refusals} & dashboard.FORCIBLE.keys()
    if kinds:
        ui.note(f"To publish in spite of it: {' '.join(f'--force {kind}' for kind in sorted(kinds))}")
