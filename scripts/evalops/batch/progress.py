"""What a person sees of a run on Batch between its log lines: one redrawn line with a bar on a terminal, a plain line now and then
elsewhere. Everything goes to stderr.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from evalops import ui

PLAIN_EVERY_S = 30.0
WIDTH = 24


class ProgressLine:
    """`[12/40 samples] running for 1 m 02 s` under the notes; nothing at all when `quiet`."""

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._clock = clock
        self._shown_at = clock()
        self._width = 0

    def show(self, ended: int, planned: int, errored: int, text: str, *, force: bool = False) -> None:
        """Draw the line if it is time to, or if `force` says so."""
        due = self._terminal or force or self._clock() - self._shown_at >= PLAIN_EVERY_S
        if self._quiet or not due:
            return
        self._shown_at = self._clock()
        line = line_of(ended, planned, errored, text, bar=self._terminal)
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line of its own, above the progress line."""
        if self._quiet:
            return
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._stream.write(ui.printable(text) + "\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the last line standing."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0


def line_of(ended: int, planned: int, errored: int, text: str, *, bar: bool) -> str:
    """The line's text; without a plan there is no count."""
    if not planned:
        return text
    filled = min(WIDTH, WIDTH * ended // planned)
    drawn = f"{'█' * filled}{'░' * (WIDTH - filled)} " if bar else ""
    wrong = f", {errored} errored" if errored else ""
    return f"{drawn}[{ended}/{planned} samples{wrong}] {text}"
