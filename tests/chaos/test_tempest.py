"""A few seeds of all kinds of faults; `make chaos SEEDS=N` runs more. Five in a row meet every kind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tempest
from engine_bench import Engine
from servers import ministack
from tempest import COSTLY, DECK, HANDS, drawn

SEEDS = range(1, 1 + int(os.environ.get("CHAOS_SEEDS", "5")))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """S3 and SQS for all seeds."""
    with ministack() as url:
        yield url


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    """The engine for all seeds, gone at the end."""
    with tempest.boxes.engine() as made:
        yield made


def test_seeds_in_a_row_meet_every_kind() -> None:
    for first in (1, 1 + HANDS):
        hands = [drawn(seed) for seed in range(first, first + HANDS)]
        assert sorted(kind for hand in hands for kind in hand) == sorted(DECK)
        assert all(len(set(hand) & set(COSTLY)) in (1, 2) for hand in hands)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_whatever_happens(seed: int, endpoint: str, docker: Engine, tmp_path: Path) -> None:
    """Kills, a frozen worker, no disk, no memory, no Docker; SQS and S3 that fail, delay, double, lose answers, tell of the past."""
    with tempest.tempest(seed, endpoint, docker, tmp_path) as made:
        made.run()
        assert len(made.met) >= len(drawn(seed)) - 1, "the fleet had ended before it could be harmed"
