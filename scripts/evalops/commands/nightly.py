"""What `scripts/cron/nightly` runs: the evaluations of a list, each only when something of it has changed."""

from pathlib import Path

import click

from evalops import nightly, ui
from evalops.settings import load_env


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="nightly.yaml")
@click.option("--again", is_flag=True, help="Run also what has not changed since its last success.")
def main(file: Path, again: bool) -> None:
    """Run the evaluations of FILE one after the other and print a line for each.

    Exit code 1 when one did not complete.
    """
    runs = nightly.read(file)
    well = True
    try:
        with nightly.lock():
            digest = nightly.code_digest(Path.cwd())
            for line, good in nightly.work(runs, digest, nightly.run_eval, again=again):
                ui.say(line)
                well = well and good
    except nightly.Busy:
        ui.note("another one is working through a list here: this one leaves it the work")
    if not well:
        raise SystemExit(ui.EXIT_FAILURES)


if __name__ == "__main__":
    load_env()
    main()
