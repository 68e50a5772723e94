"""A few seeds of the storm; `make chaos SEEDS=N` runs more."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import ministack
from storm import Storm, storm_environment

SEEDS = range(1, 2 + int(os.environ.get("CHAOS_SEEDS", "5")) // 3)
"""Fewer than of the tempest, which kills too; here a sample may be run again only if it ended shortly before a kill."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 for all seeds."""
    with ministack() as url:
        yield url


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled(seed: int, endpoint: str, tmp_path: Path) -> None:
    """Kills of jobs, fork servers, agents, controllers and all of them at once."""
    storm = Storm(seed, tmp_path, storm_environment(endpoint, f"storm-{seed}"))
    storm.make_bucket()
    storm.run()
