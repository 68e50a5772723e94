"""`ies view`: Inspect's viewer on one log file or on a run."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from evalops import ui
from evalops.commands.options import refused
from evalops.commands.params import RunId
from evalops.logs import places


@click.command()
@click.argument("file", required=False)
@click.option("--run-id", type=RunId(), help="All logs of a run.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the viewer listens on.")
@click.option(
    "--port", default=7575, show_default=True, type=click.IntRange(1, 65535), help="Port that the viewer listens on."
)
def view(file: str | None, run_id: str | None, host: str, port: int) -> None:
    """Start `inspect view` on FILE (a path or an s3:// URL of a .eval) or on a run; Ctrl-C ends it."""
    if bool(file) == bool(run_id):
        ui.fail("Say what to view: a FILE or --run-id, not both.")
    with refused(), tempfile.TemporaryDirectory(prefix="inspect-fleet-view-") as folder:
        directory = places.of_run(run_id).url if run_id else str(directory_of(file or "", Path(folder)))
        command = [
            sys.executable,
            "-m",
            "inspect_ai",
            "view",
            "start",
            "--log-dir",
            directory,
            "--host",
            host,
            "--port",
            str(port),
        ]
        ui.note(f"Viewing {file or run_id} at http://{host}:{port}")
        try:
            code = subprocess.run(command).returncode
        except KeyboardInterrupt:
            code = 0
    raise SystemExit(code)


def directory_of(file: str, folder: Path) -> Path:
    """A directory that holds just this log: today's viewer takes no single file."""
    if "://" in file:
        parent, _, name = file.rpartition("/")
        places.of_log_dir(parent).storage.download(name, folder / name)
        return folder
    path = Path(file).absolute()
    if not path.is_file():
        ui.fail(f"There is no file {path}.")
    try:
        os.link(path, folder / path.name)  # the viewer passes over symbolic links
    except OSError:  # another file system
        shutil.copyfile(path, folder / path.name)
    return folder
