"""One line at the bottom of stderr that is drawn again and again on a terminal, and written now and then elsewhere.

The commands that follow something long (a fleet, a run on Batch) say in a subclass what stands in it. Never writes to stdout.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from evalops import ui

PLAIN_EVERY_S = 30.0


class RedrawnLine:
    """The line, and notes above it. `quiet`: no line is drawn."""

    redraw_every_s = 0.0
    """On a terminal."""
    at_once = True
    """Whether the first line needs no waiting where lines are plain."""

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._console = Console(file=self._stream)
        self._quiet = quiet
        self._clock = clock
        self._started = clock()
        self._shown_at = self._started - (PLAIN_EVERY_S if self.at_once else 0.0)
        self._width = 0

    def began(self, ago_s: float) -> None:
        """What is followed began so long before the line."""
        self._started = self._clock() - max(0.0, ago_s)

    def _due(self, force: bool) -> bool:
        """Whether it is time to draw; counts as drawn."""
        passed = self._clock() - self._shown_at
        if self._quiet or not (force or passed >= (self.redraw_every_s if self._terminal else PLAIN_EVERY_S)):
            return False
        self._shown_at = self._clock()
        return True

    def _room(self) -> int:
        """Columns of the terminal that a line may take; one more, and the next drawing would begin below it."""
        return self._console.width - 1

    def _draw(self, text: str) -> None:
        text = ui.printable(text).replace("\n", " ").replace("\t", " ")
        if self._terminal:
            room, before = self._room(), self._width
            self._width = min(cell_len(text), room)
            self._stream.write(
                "\r" + set_cell_size(set_cell_size(text, self._width), max(self._width, min(before, room)))
            )
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """A remark on a line of its own, above the drawn one."""
        if self._width:
            self._stream.write("\r" + " " * min(self._width, self._room()) + "\r")
            self._width = 0
        self._stream.write(ui.printable(text) + "\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the last line standing."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
