"""Intervals and differences for the report. Pure.

95 % intervals: 1.96 of the standard errors that Inspect reported. Where it reported none, or 0 (all right or all wrong, which says
nothing about the next sample), an accuracy gets Wilson's interval from the number of scored samples; anything else gets none.
"""

import math
from dataclasses import dataclass

from evalops.logs.facts import Facts

Z = 1.959963984540054

_ACCURACY = frozenset({"accuracy", "mean"})


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95 % interval; `low` and `high` are None where no interval is known, `se` likewise."""

    metric: str
    scorer: str
    value: float
    low: float | None
    high: float | None
    se: float | None
    n: int | None

    @property
    def half(self) -> float | None:
        """Half the interval's width."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Difference:
    """B minus A, with its 95 % interval (the two runs taken as independent) and what to make of it."""

    value: float
    low: float | None
    high: float | None
    verdict: str


def headline(facts: Facts) -> Estimate | None:
    """The log's headline metric with its interval; None without a finite one."""
    if facts.headline is None:
        return None
    return estimate(facts, *facts.headline)


def estimate(facts: Facts, score_index: int, metric_index: int) -> Estimate | None:
    """One metric of a log with its interval; None when it is not finite."""
    score = facts.scores[score_index]
    metric = score.metrics[metric_index]
    if metric.value is None:
        return None
    reported = next((one.value for one in score.metrics if one.name == "stderr"), None)
    n = score.scored if score.scored is not None else _samples(facts)
    is_share = metric.name in _ACCURACY and 0 <= metric.value <= 1
    low = high = se = None
    if metric.name in _ACCURACY and reported:
        se, low, high = reported, metric.value - Z * reported, metric.value + Z * reported
        if is_share:
            low, high = max(0.0, low), min(1.0, high)
    elif metric.name == "accuracy" and is_share and n:
        low, high = wilson(metric.value, n)
        se = (high - low) / (2 * Z)
    return Estimate(metric.name, score.name, metric.value, low, high, se, n)


def _samples(facts: Facts) -> int | None:
    """Scored samples: epochs are reduced to one score a sample before metrics are taken."""
    return None if facts.completed is None else round(facts.completed / max(1, facts.epochs))


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n."""
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference(before: Estimate, after: Estimate) -> Difference:
    """After minus before."""
    value = after.value - before.value
    if before.se is None or after.se is None:
        return Difference(value, None, None, "no interval known")
    half = Z * math.hypot(before.se, after.se)
    low, high = value - half, value + half
    verdict = "higher" if low > 0 else "lower" if high < 0 else "no clear difference"
    return Difference(value, low, high, verdict)
