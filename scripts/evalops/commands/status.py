"""`ies status`: what a run, a log directory, or all recent runs are doing."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from evalops import ui
from evalops.commands.options import json_option, model_metadata_option, refused
from evalops.commands.params import RunId
from evalops.logs import places, rows, runs
from evalops.logs.metadata import Models
from evalops.logs.survey import Survey, as_json, survey

_COLUMNS = (
    "task",
    "model",
    "state",
    "done",
    "errors",
    "total",
    "score",
    "tokens",
    "cost",
    "last write",
    "old logs",
    "",
)
_NUMBERS = ("done", "errors", "total", "tokens", "cost", "last write", "old logs")


@click.group()
def status() -> None:
    """What a run is doing, what came out, and why nothing is happening."""


@status.command()
@click.option("--run-id", required=True, type=RunId(), help="The run to look at.")
@click.option(
    "--watch", type=click.FloatRange(min=1), is_flag=False, flag_value=5.0, help="Look again every N seconds."
)
@model_metadata_option
@json_option
def check(run_id: str, watch: float | None, model_metadata: tuple[Path, ...], as_json_: bool) -> None:
    """A row for each task and model of a run."""
    with refused():
        _show(places.of_run(run_id), watch, model_metadata, as_json_)


@status.command()
@click.option("--log-dir", required=True, help="A directory or s3:// URL that holds logs.")
@click.option(
    "--watch", type=click.FloatRange(min=1), is_flag=False, flag_value=5.0, help="Look again every N seconds."
)
@model_metadata_option
@json_option
def logs(log_dir: str, watch: float | None, model_metadata: tuple[Path, ...], as_json_: bool) -> None:
    """A row for each task and model of a log directory, wherever it is."""
    with refused():
        _show(places.of_log_dir(log_dir), watch, model_metadata, as_json_)


@status.command(name="list")
@click.option(
    "-n", "--number", default=20, show_default=True, type=click.IntRange(min=1), help="Runs to show, newest first."
)
@json_option
def list_(number: int, as_json_: bool) -> None:
    """The newest runs that have logs."""
    with refused():
        found = runs.newest(places.root(), number)
        shown = runs.look_at(found.shown)
    if as_json_:
        ui.emit_json({"runs": [item.as_json() for item in shown], "total": found.total})
        return
    ui.table(
        ("run", "logs", "tasks", "models", "states"),
        [(item.run_id, item.logs, item.tasks, item.models, item.states) for item in shown],
        right=("logs",),
    )
    if found.total > len(shown):
        ui.note(f"{found.total - len(shown)} older runs are not shown; -n {found.total} shows all.")
    if not shown:
        ui.note("There are no logs under the root yet.")


def _show(place: places.Place, watch: float | None, model_metadata: tuple[Path, ...], as_json_: bool) -> None:
    prices = Models(model_metadata).price
    while True:
        found = survey(place, prices)
        if as_json_:
            ui.emit_json(as_json(found))
        else:
            if watch and sys.stdout.isatty():
                click.clear()
            print_survey(found)
        if not watch or not _going_on(found):
            break
        time.sleep(watch)


def _going_on(found: Survey) -> bool:
    alive = found.around.alive
    waits = alive is not False
    return alive is True or any(row.state == "running" or (row.state == "waiting" and waits) for row in found.rows)


def print_survey(found: Survey) -> None:
    """The headline, what could not be read, and the table."""
    click.echo(ui.printable(found.headline))
    for problem in found.problems:
        ui.note(f"warning: {problem}")
    if not found.rows:
        return
    several = {(row.task, row.model) for row in found.rows}
    show_args = len(several) < len(found.rows)
    ui.table(_COLUMNS, [_cells(row, found.rows, show_args) for row in found.rows], right=_NUMBERS)


def _cells(row: rows.Row, all_rows: list[rows.Row], show_args: bool) -> tuple[Any, ...]:
    arguments = " ".join(f"{name}={value}" for name, value in row.args.items()) if show_args else ""
    age = (
        None if row.age_s is None else rows.ago(datetime.fromtimestamp(0, UTC), datetime.fromtimestamp(row.age_s, UTC))
    )
    return (
        " ".join(filter(None, (row.task, rows.file_beside(row, all_rows), arguments))),
        row.model,
        row.state,
        row.completed,
        row.errored,
        row.total,
        row.headline_text(),
        row.tokens,
        ui.money_text(row.cost_usd),
        age,
        row.superseded,
        row.remark,
    )
