"""Whole fleets on EC2: the real command on moto's EC2, SQS, S3, SSM and SNS, with an agent of this machine for each instance."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ec2_world
import fleets
import pytest
from ec2_world import SECRET, World, playing, wait_for
from emulators import Emulator

TASK = ("examples/arithmetic.py", "--model", "scripted/good", "--limit", "4")


@pytest.fixture
def world(moto: Emulator, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:40].strip("-")
    return ec2_world.make(moto, name, fleets.prepare(tmp_path / "here"))


def ct(world: World, *arguments: str, folder: Path | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
    """A `ct` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "evalops", "ct", *arguments],
        cwd=folder or world.folder,
        env=fleets.environment(world.folder, **world.environment(**more)),
        capture_output=True,
        text=True,
        timeout=fleets.PATIENCE_S,
    )


def test_a_run_from_launch_to_summary(world: World) -> None:
    environment = world.environment(PLANTED_API_KEY=SECRET)
    with playing(world) as player:
        fleet = fleets.run(world.folder, *TASK, "--model", "scripted/mixed", "--ec2", **environment)
    assert fleet.code in (0, 1), fleet.err
    fleets.check(fleet, stored=world.segments(fleet.fleet_id))
    print(fleet.err)
