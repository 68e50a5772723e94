"""What a log's tokens cost, each model by its own entry. Pure.

An unknown price is None, never 0. Inspect's `input_tokens` leaves cache reads and writes out; older versions' OpenAI usage counts
them in, which `total_tokens` gives away.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MTOK = 1_000_000


@dataclass(frozen=True)
class Price:
    """USD for a million tokens. `cached` reads and cache `write`s cost as much as input where no own price is known."""

    input: float
    output: float
    cached: float | None = None
    write: float | None = None


@dataclass(frozen=True)
class Tokens:
    """A usage's tokens, disjoint: fresh input, output (reasoning included), cache reads and writes."""

    input: int
    output: int
    cached: int = 0
    write: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.input + self.output + self.cached + self.write


PriceOf = Callable[[str], Price | None]


def tokens(usage: Mapping[str, Any]) -> Tokens:
    """The disjoint counts of Inspect's `ModelUsage` as plain values."""
    given = {name: int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens", "total_tokens")}
    cached = int(usage.get("input_tokens_cache_read") or 0)
    write = int(usage.get("input_tokens_cache_write") or 0)
    fresh, output = given["input_tokens"], given["output_tokens"]
    if cached + write and given["total_tokens"] == fresh + output and cached + write <= fresh:
        fresh -= cached + write
    return Tokens(fresh, output, cached, write)


def parts(usage: Mapping[str, Any], price: Price) -> dict[str, float]:
    """USD by kind of token: `input_cost`, `output_cost`, and the cache's where there was any."""
    count = tokens(usage)
    costs = {"input_cost": count.input * price.input / MTOK, "output_cost": count.output * price.output / MTOK}
    if count.cached:
        costs["cache_read_cost"] = count.cached * (price.input if price.cached is None else price.cached) / MTOK
    if count.write:
        costs["cache_write_cost"] = count.write * (price.input if price.write is None else price.write) / MTOK
    return costs


def total(usage: Mapping[str, Mapping[str, Any]], price_of: PriceOf) -> float | None:
    """USD of all models of a log (graders too); None when one that used tokens has no known price."""
    sum_ = 0.0
    for model, used in usage.items():
        if tokens(used).total == 0:
            continue
        price = price_of(model)
        if price is None:
            return None
        sum_ += sum(parts(used, price).values())
    return sum_


def token_sum(usage: Mapping[str, Mapping[str, Any]]) -> int:
    """Tokens of all models of a log."""
    return sum(tokens(used).total for used in usage.values())
