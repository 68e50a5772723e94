"""What a person sees of a run on Batch between its log lines: one redrawn line with a bar on a terminal, a plain line now and then
elsewhere. Everything goes to stderr.
"""

from evalops.redrawn import RedrawnLine

WIDTH = 24


class ProgressLine(RedrawnLine):
    """`[12/40 samples] running for 1 m 02 s` under the notes; nothing at all when `quiet`."""

    at_once = False  # the change of state that has just been noted says the same

    def show(self, ended: int, planned: int, errored: int, text: str, *, force: bool = False) -> None:
        """Draw the line if it is time to, or if `force` says so."""
        if self._due(force):
            self._draw(line_of(ended, planned, errored, text, bar=self._terminal))

    def note(self, text: str) -> None:
        """A line of its own, above the progress line."""
        if not self._quiet:
            super().note(text)


def line_of(ended: int, planned: int, errored: int, text: str, *, bar: bool) -> str:
    """The line's text; without a plan there is no count."""
    if not planned:
        return text
    filled = min(WIDTH, WIDTH * ended // planned)
    drawn = f"{'█' * filled}{'░' * (WIDTH - filled)} " if bar else ""
    wrong = f", {errored} errored" if errored else ""
    return f"{drawn}[{ended}/{planned} samples{wrong}] {text}"
