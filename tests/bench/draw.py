"""Draws the history of the benchmarks: `python tests/bench/draw.py docs/bench.svg`.

A bar for each bounded figure: how much of its bound the newest run used; dots are earlier runs. run.py calls it when the history has
grown. Plain SVG, no library: what it shows is a few dozen bars.
"""

import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent / "history.jsonl"

LABELS, BARS, ROW, HEAD = 360, 400, 26, 40
"""Pixels: width of the labels, length of a bar that is as long as its bound, height of a row and of the heading."""

LONGEST = 1.25
"""Bars are cut at this share of the bound."""


def read(history: Path) -> list[dict[str, Any]]:
    """The runs of a history file, oldest first."""
    return [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []


def used(figure: dict[str, Any]) -> float:
    """The share of its bound that a figure uses: above 1 the bound is missed."""
    measured = figure["value"] if figure["ratio"] is None else figure["ratio"]
    return float(figure["bound"] / measured if figure["at_least"] else measured / figure["bound"])


def shares(records: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """By figure, in the order of their first appearance: the share used in each run, oldest first, with the figure."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for record in records:
        for figure in record["figures"]:
            if figure["bound"] is not None:
                found.setdefault(figure["name"], []).append((used(figure), figure))
    return found


def svg(records: list[dict[str, Any]]) -> str:
    """The drawing. Raises ValueError when nothing has been measured."""
    found = shares(records)
    if not found:
        raise ValueError("nothing has been measured yet: run `make bench`")
    width, height = LABELS + int(BARS * LONGEST) + 150, HEAD + ROW * len(found) + 16
    bound = LABELS + BARS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{bound}" y="{HEAD - 14}" text-anchor="middle" fill="#555">bound</text>',
    ]
    for row, (name, runs) in enumerate(found.items()):
        parts += _row(HEAD + row * ROW, name, runs)
    parts.append(f'<line x1="{bound}" y1="{HEAD - 8}" x2="{bound}" y2="{height - 12}" stroke="#555"/>')
    return "\n".join([*parts, "</svg>", ""])


def _row(top: int, name: str, runs: list[tuple[float, dict[str, Any]]]) -> list[str]:
    newest, figure = runs[-1]
    measured = figure["value"] if figure["ratio"] is None else figure["ratio"]
    unit = figure["unit"] if figure["ratio"] is None else "×"
    bar, colour = _length(newest), "#c0392b" if newest > 1 else "#2e7d5b"
    middle = top + ROW / 2
    return [
        f'<text x="{LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{LABELS}" y="{top + 5}" width="{bar:.1f}" height="{ROW - 10}" fill="{colour}"/>',
        *(f'<circle cx="{LABELS + _length(one):.1f}" cy="{middle}" r="2" fill="#0006"/>' for one, _ in runs[:-1]),
        f'<text x="{LABELS + int(BARS * LONGEST) + 8}" y="{middle + 4}" fill="#555">'
        f"{_number(measured)} of {_number(figure['bound'])} {escape(unit)}</text>",
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _length(share: float) -> float:
    return min(share, LONGEST) * BARS


def main() -> None:
    """Write the drawing to the path that is given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/bench/draw.py FILE.svg")
    try:
        Path(sys.argv[1]).write_text(svg(read(HISTORY)))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
