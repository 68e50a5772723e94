"""`--detach`: the same command again in a session of its own, with its launch record passed on to whoever called."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from evalops.fleet import preflight
from evalops.ui import emit_json


def detach() -> None:
    """Start the same command in a session of its own, pass on its launch record, and leave it running."""
    words = ["--json" if word == "--detach" else word for word in sys.argv[1:]]
    folder = preflight.live_folder()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="detached-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evalops", Path(sys.argv[0]).name, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    first = process.stdout.readline()
    if not first:
        status = process.wait()
        click.echo(Path(log.name).read_text("utf-8", "replace"), err=True, nl=False)
        Path(log.name).unlink()
        sys.exit(status)
    record = json.loads(first)
    if record.get("type") != "launch":  # nothing was started: an estimate, for example
        rest, _ = process.communicate()
        click.echo((first + rest).decode("utf-8", "replace"), nl=False)
        click.echo(Path(log.name).read_text("utf-8", "replace"), err=True, nl=False)
        Path(log.name).unlink()
        sys.exit(process.returncode)
    kept = folder / record["fleet_id"] / "controller.log"
    Path(log.name).rename(kept)
    emit_json(record | {"log": str(kept.absolute())})
