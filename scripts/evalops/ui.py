"""How the commands speak: tables and JSON on stdout, progress and remarks on stderr, colour only on a terminal.

The one table printer and the one way to end with a sentence. Text that came from a log or a message is escaped here, so that
no control sequence of a model's reaches a terminal.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from evalworker import redact
from evalworker.contract.jsonio import dumps

EXIT_FAILURES = 1
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_LEFT_RUNNING = 4
EXIT_INTERRUPTED = 130
"""Exit codes of `ct` and `ies`; 0 is complete, 143 is SIGTERM. Design, section 7."""


class Failure(click.ClickException):
    """A user's mistake or a failure that a user can act on: one sentence, no traceback."""

    def __init__(self, sentence: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(printable(sentence))
        self.exit_code = exit_code  # type: ignore[misc]


def fail(sentence: str, exit_code: int = EXIT_USAGE) -> NoReturn:
    """End with one sentence that says what, where and what to do."""
    raise Failure(sentence, exit_code)


def printable(text: str) -> str:
    """The text without secrets, control characters (escape sequences among them) made visible; line feeds and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in redact.text(text))


def say(text: str) -> None:
    """A line of the answer, on stdout."""
    click.echo(printable(text))


def note(text: str) -> None:
    """A remark for the person at the terminal, on stderr."""
    click.echo(printable(text), err=True)


def emit_json(value: Any) -> None:
    """One line of strict JSON on stdout, for programs."""
    click.echo(redact.text(dumps(value)))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """An aligned table on stdout. `right` names the columns of numbers; None is shown as a dash.

    Without a terminal the table is as wide as its content, so that nothing is cut in a log.
    """
    grid = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text("-" if cell is None else printable(str(cell))) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=10_000)
        with console.capture() as printed:
            console.print(grid)
        click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))
        return
    console.print(grid)


def progress(description: str) -> Progress:
    """A progress bar on stderr for long work; silent without a terminal. Use as a context manager."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(description, total=None)
    return bar


def bytes_text(count: float) -> str:
    """A number of bytes for people: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def seconds_text(seconds: float | None) -> str | None:
    """A duration for people: `0.4 s`, `3 m 05 s`, `2 h 10 m`."""
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"


def money_text(dollars: float | None) -> str | None:
    """A cost for people; zero is a value, None is unknown."""
    if dollars is None:
        return None
    return f"${dollars:.2f}" if dollars >= 1 or dollars == 0 else f"${dollars:.4f}"
