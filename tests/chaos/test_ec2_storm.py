"""Two seeds of the storm over a fleet on EC2; `make chaos SEEDS=N` runs more."""

import os
from collections.abc import Iterator
from pathlib import Path

import ec2_storm
import pytest
import servers
from emulators import Emulator

SEEDS = range(1, 1 + int(os.environ.get("EC2_CHAOS_SEEDS", "2")))


@pytest.fixture(scope="module")
def moto() -> Iterator[Emulator]:
    """EC2 and all else for every seed."""
    with servers.moto() as url:
        yield Emulator("moto", url)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_has_one_result_and_nothing_is_left(seed: int, moto: Emulator, tmp_path: Path) -> None:
    """Workers die every few seconds, calls fail, messages come twice."""
    with ec2_storm.storm(seed, moto, tmp_path) as storm:
        storm.run()
        assert storm.killed
        assert storm.gate.faults is not None
        assert storm.gate.faults.failed > 0
        assert storm.gate.faults.doubled > 0
