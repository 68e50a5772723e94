"""`ies log`: a run's logs on this machine."""

from pathlib import Path

import click

from evalops import ui
from evalops.commands.options import json_option, refused
from evalops.commands.params import RunId
from evalops.logs import places
from evalops.logs.rows import RETRYABLE
from evalops.logs.survey import Survey, survey


@click.group()
def log() -> None:
    """A run's logs on this machine."""


@log.command()
@click.option("--run-id", required=True, type=RunId(), help="The run whose logs are fetched.")
@click.option("--failed", is_flag=True, help="Only the logs of tasks and models in which something failed.")
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), help="Directory; default logs/pulled/<run>."
)
@json_option
def pull(run_id: str, failed: bool, folder: Path | None, as_json_: bool) -> None:
    """Download the logs that count (one for each task and model); what is here already is not fetched again."""
    with refused():
        place = places.of_run(run_id)
        seen = survey(place, lambda model: None)
        wanted = _wanted(seen, failed)
        target = folder or Path("logs", "pulled", run_id)
        fetched = [_fetch(place, key, target) for key in wanted]
    if as_json_:
        ui.emit_json({"run_id": run_id, "logs": [str(path) for path in fetched]})
        return
    for path in fetched:
        click.echo(path)
    if not fetched:
        ui.note(f"There are no {'failed ' if failed else ''}logs in {place.url}.")


def _wanted(seen: Survey, failed: bool) -> list[str]:
    return [row.log for row in seen.rows if row.log and (not failed or row.state in {*RETRYABLE, "partial"})]


def _fetch(place: places.Place, key: str, folder: Path) -> Path:
    path = folder / key.rsplit("/", 1)[-1]
    info = place.storage.head(key)
    if (
        info is None
        or not path.is_file()
        or path.stat().st_size != info.size
        or path.stat().st_mtime < info.modified.timestamp()
    ):
        place.storage.download(key, path)
    return path
