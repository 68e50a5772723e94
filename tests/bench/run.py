"""Runs the benchmarks of this directory: `python tests/bench/run.py [NAME…]`, or `make bench NAMES="…"`.

A name selects what contains it: `fleet` all of bench_fleet.py, `fleet.forty` one of its functions. Prints a table of figures with the
bounds that they should keep and writes `results/<time>.json`, which git does not see. On a machine that had nothing else to do the run also
becomes a line of `history.jsonl`, and `docs/bench.svg` is drawn anew from that. The exit code is 1 when a bound is missed or a
benchmark broke. How to add one: see figures.py.
"""

import argparse
import importlib
import multiprocessing
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HISTORY = HERE / "history.jsonl"
DRAWING = HERE.parents[1] / "docs" / "bench.svg"
QUIET = 0.5
"""Load average up to which the machine counts as having nothing else to do."""

sys.path[:0] = [str(HERE), str(HERE.parent)]

import draw  # noqa: E402
from figures import Figure  # noqa: E402

from evalops import ui  # noqa: E402
from evalworker.contract.jsonio import dumps  # noqa: E402

Benchmark = Callable[[], list[Figure]]


def benchmarks(names: list[str]) -> Iterator[tuple[str, Benchmark]]:
    """The benchmarks whose name contains one of `names`, or all: `<file>.<function>` without their `bench_`."""
    for path in sorted(HERE.glob("bench_*.py")):
        module = path.stem.removeprefix("bench_")
        if names and not any(name.partition(".")[0] in module for name in names):
            continue  # its imports may need what is not installed here
        for attribute, value in vars(importlib.import_module(path.stem)).items():
            name = f"{module}.{attribute.removeprefix('bench_')}"
            if attribute.startswith("bench_") and callable(value) and _selected(name, names):
                yield name, value


def _selected(name: str, names: list[str]) -> bool:
    return not names or any(wanted in name for wanted in names)


def play(name: str) -> list[Figure]:
    """One benchmark, in a process of its own: the peak memory of what it starts begins with that of the process that starts it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_measure, name).result()


def _measure(name: str) -> list[Figure]:
    (benchmark,) = (benchmark for found, benchmark in benchmarks([name]) if found == name)
    return benchmark()


def show(figures: list[Figure]) -> None:
    """The table."""
    columns = ["figure", "value", "baseline", "ratio", "bound", "holds", "how"]
    right = ["value", "baseline", "ratio", "bound"]
    ui.table(columns, [_row(figure) for figure in figures], right=right)


def _row(figure: Figure) -> list[object]:
    baseline = None if figure.baseline is None else f"{_number(figure.baseline)} {figure.unit}"
    ratio = None if figure.ratio is None else f"{figure.ratio:.3f}"
    bound = None
    if figure.bound is not None:
        unit = f" {figure.unit}" if figure.baseline is None else ""
        bound = f"{'≥' if figure.at_least else '≤'} {figure.bound:g}{unit}"
    holds = {True: "yes", False: "NO", None: None}[figure.holds]
    how = "; ".join(part for part in (figure.against and f"against {figure.against}", figure.note) if part)
    return [figure.name, f"{_number(figure.value)} {figure.unit}", baseline, ratio, bound, holds, how or None]


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def save(figures: dict[str, list[Figure]], moment: datetime, load: float) -> Path:
    """Write this run's figures to a file of its own, and to the history if they are worth keeping. `load`: before it began."""
    RESULTS.mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "ts": moment.isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load": round(load, 2),
        "python": platform.python_version(),
        "figures": [{"benchmark": name} | figure.to_dict() for name, found in figures.items() for figure in found],
    }
    path = RESULTS / f"{moment:%Y-%m-%dT%H-%M-%S}.json"
    path.write_text(dumps(record) + "\n")
    if load <= QUIET:
        with HISTORY.open("a") as file:
            file.write(dumps(record) + "\n")
        DRAWING.write_text(draw.svg(draw.read(HISTORY)))
        ui.note(f"added to {os.path.relpath(HISTORY)}; {os.path.relpath(DRAWING)} is drawn anew")
    return path


def _load() -> float:
    """What the machine does beside; ratios and CPU bear it, plain times do not."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > QUIET:
        ui.note(
            f"the machine is busy (load {load:.1f} on {cpus} CPUs): times in seconds are longer, and the history is not touched"
        )
    return load


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of what to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    moment = datetime.now(UTC)
    load = 0.0 if options.list else _load()
    found: dict[str, list[Figure]] = {}
    broken = False
    for name in [name for name, _ in benchmarks(options.names)]:
        if options.list:
            print(name)
            continue
        ui.note(f"{name} …")
        try:
            found[name] = play(name)
        except Exception:
            broken = True
            ui.note(f"{name} broke:\n{traceback.format_exc()}")
    if not found:
        sys.exit(broken)
    show([figure for figures in found.values() for figure in figures])
    ui.note(f"written to {os.path.relpath(save(found, moment, load))}")
    missed = any(figure.holds is False for figures in found.values() for figure in figures)
    sys.exit(broken or missed)


if __name__ == "__main__":
    main()
