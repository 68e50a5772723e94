"""What `scripts/cron/publish` runs: summarise and promote the runs that have finished."""

from pathlib import Path

import click

from evalops import ui
from evalops.commands.options import model_metadata_option, refused, task_metadata_option
from evalops.logs import places
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.publish import Busy, lock, publish_all
from evalops.settings import load_env
from evalworker.contract import layout


@click.command()
@click.option(
    "--to", "environment", type=click.Choice(layout.ENVIRONMENTS), default="stage", show_default=True, help="Where to."
)
@click.option("--again", is_flag=True, help="Look again at runs whose logs have not changed since the last time.")
@click.option("--replace", is_flag=True, help="A newer run takes the place of an older one of the same task and model.")
@model_metadata_option
@task_metadata_option
def publish(
    environment: str, again: bool, replace: bool, model_metadata: tuple[Path, ...], task_metadata: tuple[Path, ...]
) -> None:
    """Summarise and promote the runs that have finished.

    A line for each action, nothing when there is none. Exit code 1 when a person must decide something, said once for each.
    """
    with refused():
        try:
            with lock(storage := places.root()) as renew:
                outcome = publish_all(
                    storage,
                    Models(model_metadata),
                    Evaluations(task_metadata),
                    environment,
                    again=again,
                    replace=replace,
                    renew=renew,
                )
        except Busy:
            return  # the other one does the work
    for line in outcome.done:
        click.echo(ui.printable(line))
    for line in outcome.todo:
        click.echo(ui.printable(line), err=True)
    if outcome.todo:
        raise SystemExit(ui.EXIT_FAILURES)


if __name__ == "__main__":
    load_env()
    publish()
