"""`ies report`: one HTML file that shows a run."""

from pathlib import Path

import click

from evalops import ui
from evalops.commands.options import json_option, model_metadata_option, refused
from evalops.commands.params import RunId
from evalops.logs import places
from evalops.report.build import render, write


@click.command()
@click.option("--run-id", required=True, type=RunId(), help="The run to show.")
@click.option("--compare", type=RunId(), metavar="RUN_ID", help="An earlier run to compare with.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write here instead of below the root."
)
@model_metadata_option
@json_option
def report(
    run_id: str, compare: str | None, output: Path | None, model_metadata: tuple[Path, ...], as_json_: bool
) -> None:
    """Write a run's report: heat map, intervals, time line, failures, tokens and cost. Prints where it is."""
    with refused():
        storage = places.root()
        if output is None:
            place = write(storage, run_id, compare=compare, model_files=model_metadata)
        else:
            body = render(storage, run_id, compare=compare, model_files=model_metadata)
            try:
                output.write_bytes(body)
            except OSError as error:
                ui.fail(f"cannot write {output}: {error.strerror}")
            place = str(output)
    if as_json_:
        ui.emit_json({"run_id": run_id, "report": place})
    else:
        click.echo(place)
