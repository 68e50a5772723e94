"""`--detach`: the same command again in a session of its own, with its launch record passed on to whoever called."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from evalops.fleet import preflight
from evalops.ui import emit_json


def detach() -> None:
    """Start the same command in a session of its own, pass on its launch record, and leave it running.

    Until the record has come, Ctrl-C and SIGTERM are for the command, and its end is this one's.
    """
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
    with _passing_on(process) as passed:
        first = process.stdout.readline()
        record = json.loads(first) if first else {}
        if record.get("type") == "launch":
            kept = folder / record["fleet_id"] / "controller.log"
            Path(log.name).rename(kept)
            emit_json(record | {"log": str(kept.absolute())})
            if not passed:
                return
            first = b""
        else:  # nothing was started: it failed, was interrupted, or printed an estimate
            kept = Path(log.name)
        rest, _ = process.communicate()
    click.echo((first + rest).decode("utf-8", "replace"), nl=False)
    click.echo(kept.read_text("utf-8", "replace"), err=True, nl=False)
    if kept == Path(log.name):
        kept.unlink()
    code = process.returncode
    sys.exit(code if code >= 0 else 128 - code)


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass signals on to a command that a terminal's Ctrl-C does not reach; the list holds those that were."""
    passed: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        passed.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
