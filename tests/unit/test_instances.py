"""The player of instances: whatever of the two ends first takes the other with it."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from instances import Player, playing


class Cloud:
    """Two instances, and who ended them."""

    def __init__(self) -> None:
        self.states = {"i-1": "running", "i-2": "running"}
        self.looked: list[str] = []

    def instances(self) -> list[dict[str, Any]]:
        return [{"InstanceId": name, "State": {"Name": state}} for name, state in self.states.items()]

    def end(self, name: str) -> None:
        self.states[name] = "terminated"

    def look(self, found: dict[str, Any], _machine: object) -> None:
        self.looked.append(found["InstanceId"])


def sleeper(_found: dict[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"])


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instances.LOOK_S", 0.02)


def test_a_machine_that_dies_terminates_its_instance_and_the_other_way_round() -> None:
    cloud = Cloud()
    with playing(Player(cloud.instances, cloud.end, sleeper, cloud.look)) as player:
        wait_for(lambda: {"i-1", "i-2"} <= set(cloud.looked))
        player.machines["i-1"].kill()
        wait_for(lambda: cloud.states["i-1"] == "terminated")
        assert player.machines["i-2"].poll() is None
        cloud.states["i-2"] = "shutting-down"
        wait_for(lambda: player.machines["i-2"].poll() is not None)
    assert len(player.machines) == 2


def test_nothing_runs_after_the_play_and_one_that_may_not_start_does_not() -> None:
    cloud = Cloud()
    with playing(
        Player(cloud.instances, cloud.end, lambda found: sleeper(found) if found["InstanceId"] == "i-1" else None)
    ) as player:
        wait_for(lambda: player.machines)
    assert list(player.machines) == ["i-1"]
    assert player.machines["i-1"].returncode is not None
