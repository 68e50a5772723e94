"""`ies promote`: move a run's dashboard files to where the dashboard reads them."""

import click

from evalops import ui
from evalops.commands.options import dry_run_option, json_option, refused
from evalops.commands.params import RunId
from evalops.logs import places
from evalops.logs.promote import Move, PromoteError, Step, carry_out, plan
from evalworker.contract import layout


@click.command()
@click.option("--run-id", required=True, type=RunId(), help="The run whose files are promoted.")
@click.option(
    "--to", "environment", type=click.Choice(layout.ENVIRONMENTS), default="stage", show_default=True, help="Where to."
)
@click.option("--with-logs", is_flag=True, help="Move the .eval logs along with their zips.")
@click.option("--replace", is_flag=True, help="Take the place of other runs of the same task and model.")
@dry_run_option
@json_option
def promote(run_id: str, environment: str, with_logs: bool, replace: bool, dry_run: bool, as_json_: bool) -> None:
    """Move the .dashboard.json and .zip files that `summarize` made to <root>/logs/stage/<task>/<model>/<run>/.

    May be cut off at any time; the same command again finishes it. A run that takes another's place needs --replace: the other's
    dashboard file is then renamed to .replaced.json, so that the dashboard no longer lists it and nothing is lost.
    """
    with refused():
        place = places.of_run(run_id)
        moves, problems = plan(place, environment, with_logs=with_logs)
        blocked = [move for move in moves if move.instead_of and not replace]
        going = [move for move in moves if move not in blocked]
        for problem in map(str, problems):
            ui.note(problem)
        for move in blocked:
            ui.note(
                f"{move.task} {move.model}: {', '.join(move.instead_of)} is in {environment} already; "
                "--replace puts this run in its place."
            )
        if not dry_run:
            _carry_out(place, going)
    _print(going, dry_run, as_json_, environment)
    if blocked or problems:
        raise SystemExit(ui.EXIT_FAILURES)


def _carry_out(place: places.Place, moves: list[Move]) -> None:
    with ui.progress("promoting") as bar:
        bar.update(bar.task_ids[0], total=sum(len(move.steps) for move in moves))

        def done(move: Move, step: Step) -> None:
            bar.advance(bar.task_ids[0])

        try:
            carry_out(place.storage, moves, done)
        except PromoteError as error:
            ui.fail(str(error), ui.EXIT_FAILURES)


def _print(moves: list[Move], dry_run: bool, as_json_: bool, environment: str) -> None:
    if as_json_:
        ui.emit_json({"dry_run": dry_run, "moves": [move.as_json() for move in moves]})
    elif not moves:
        ui.note(
            f"There is nothing to promote to {environment}: what `ies summarize` made has been moved, or it has made nothing yet."
        )
    elif dry_run:
        rows = [(step.kind, step.source, step.target) for move in moves for step in move.steps]
        ui.table(("step", "from", "to"), rows)
    else:
        ui.table(("task", "model", "to"), [(move.task, move.model, f"{move.target}{move.name}") for move in moves])
