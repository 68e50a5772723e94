"""What a benchmark gives back: one measured figure, what it is compared with, and the bound that it should keep.

To add one, write a function `bench_<what>` without arguments in a file `bench_<topic>.py` of this directory that returns a list of these:
run.py finds it as `<topic>.<what>`. State a bound wherever something was promised. A comparison is a ratio within one run, both sides
measured back to back, so that a slow or busy machine does not decide. Names of figures say what was measured; where two figures
share one, `against` tells them apart.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: what was measured, as a person reads it.
        value: in `unit`, such as "s" or "CPU s".
        bound: what `measured` may be at the most (with `at_least`: must be at the least); None for a figure that only informs.
        baseline: the same thing done the plain way, in the same unit; None where the value itself is bounded.
        against: what the baseline is.
        note: how it was taken, where the name does not say it.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None
    baseline: float | None = None
    against: str = ""
    at_least: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The value in parts of its baseline."""
        return None if self.baseline is None else self.value / self.baseline

    @property
    def measured(self) -> float:
        """What the bound is about: the ratio where there is a baseline, else the value."""
        return self.value if self.ratio is None else self.ratio

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None without one."""
        if self.bound is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        shown = ("name", "value", "unit", "baseline", "against", "ratio", "bound", "at_least", "holds", "note")
        return {name: getattr(self, name) for name in shown}
