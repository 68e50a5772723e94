"""A fleet on EC2 of ten jobs and 500 samples whose workers are killed every few seconds, on an AWS that fails and doubles.

5 % of all calls fail and 5 % of all messages come twice (`gateway.Faults`). Workers are real agents, as processes of this machine for each
instance of moto's EC2, or whatever else `machines` holds. What must hold afterwards is `storm.Storm.verify`, and that EC2 is empty.
`python tests/chaos/ec2_storm.py SEEDS [FIRST]` runs many seeds; `test_ec2_storm.py` runs a few.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for place in (HERE.parent, HERE.parent / "integration", HERE):
    if str(place) not in sys.path:
        sys.path.append(str(place))

import ec2_world  # noqa: E402
import fleets  # noqa: E402
import servers  # noqa: E402
from emulators import Emulator  # noqa: E402
from storm import Storm, check, play  # noqa: E402

from gateway import Faults, Gateway, gateway  # noqa: E402
from instances import Machine  # noqa: E402

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def sums(first: int) -> Task:
    samples = [Sample(id=n, input=f"{n} + 1 =", target=str(n + 1)) for n in range(first, first + 50)]
    return Task(dataset=samples, solver=generate(), scorer=match())
"""

NAMED = """

@task
def sums_{first}() -> Task:
    return sums({first})
"""

JOBS = 10
SAMPLES = 50 * JOBS
WORKERS = 3
RUN = (
    *("run", "eval", *(f"sums.py@sums_{first}" for first in range(0, SAMPLES, 50)), "--model", "scripted/good"),
    *("-M", "latency=1", "--json", "--ec2", "--max-workers", str(WORKERS), "--slots", "2"),
    *("--concurrency-per-worker", "10", "--log-shared", "1", "--deadline", "1h"),
)
KILLS = 6
"""Fewer than the losses that a fleet makes good."""


@dataclass
class Ec2Storm(Storm):
    """One seed. `machines` are the workers that can be killed, by instance; `running` says what EC2 still has."""

    kills: int = KILLS
    task: str = TASK + "".join(NAMED.format(first=first) for first in range(0, SAMPLES, 50))
    words: tuple[str, ...] = RUN
    samples: int = SAMPLES
    jobs: int = JOBS
    machines: Mapping[str, Machine] = field(default_factory=dict)
    gate: Gateway = field(default_factory=lambda: Gateway(""))
    running: Callable[[], list[Any]] = list
    pause_s: tuple[float, float] = (3.0, 7.0)

    def command(self, *words: str) -> list[str]:
        """The command with short intervals."""
        return [sys.executable, "-P", str(HERE / "quick_ct.py"), *words]

    def run(self) -> None:
        """Start, kill until it ends or enough have been killed, and check."""
        self.start_run()
        self.gate.faults = Faults(self.seed)
        try:
            end = time.monotonic() + 300
            following = float("inf")
            assert self.controller is not None
            while (status := self.controller.poll()) != 0:
                check(status is None, f"the controller ended: {self.tail()}")
                check(time.monotonic() < end, f"the fleet did not end: {self.tail()}")
                if following == float("inf"):  # when the first boots all fail, a fleet ends: that is another test
                    following = time.monotonic() if '"type":"result"' in self._live() else following
                elif len(self.killed) < self.kills and time.monotonic() > following:
                    self._kill_one()
                    following = time.monotonic() + self.random.uniform(*self.pause_s)
                time.sleep(0.2)
            self.gate.faults.on = False
            self.verify(redone_any_time=True)
            self._verify_nothing_left()
        finally:
            self.clean()

    def _verify_nothing_left(self) -> None:
        """No machine, and the lane is free: what failed at the end is made good by the workers themselves within seconds."""
        end = time.monotonic() + 60
        while left := self.running():
            check(time.monotonic() < end, f"EC2 still has {left}")
            time.sleep(0.5)
        bucket = self.environment["S3_BUCKET_NAME"]
        lane = json.loads(self._s3().get_object(Bucket=bucket, Key="lanes/lane-01.json")["Body"].read())
        check(lane["fleet_id"] is None, f"the lane is still held by {lane['fleet_id']}")

    def _kill_one(self) -> None:
        """One of the workers: three times in four without a word."""
        alive = sorted(name for name, machine in self.machines.items() if machine.poll() is None)
        if not alive:
            return
        victim = self.machines[self.random.choice(alive)]
        if self.random.random() < 0.75:
            victim.kill()
            self.killed.append((time.time(), "killed"))
        else:
            victim.terminate()
            self.killed.append((time.time(), "told"))


@contextmanager
def storm(seed: int, moto: Emulator, folder: Path) -> Iterator[Ec2Storm]:
    """A seed with processes for instances."""
    with gateway(moto.endpoint) as gate:
        world = ec2_world.make(moto, f"storm-{seed}", folder, lanes=1, visibility_s=15)
        with ec2_world.playing(world, endpoint=gate.endpoint) as played:
            yield Ec2Storm(
                seed,
                folder,
                fleets.environment(folder, **world.environment(gate.endpoint, S3_BUCKET_NAME=world.estate.bucket)),
                machines=played.agents,
                gate=gate,
                running=lambda: world.instances("pending", "running"),
            )


def told(made: Ec2Storm) -> str:
    """What a seed has met."""
    faults = made.gate.faults or Faults(made.seed)
    return (
        f"{len(made.killed)} workers killed, {faults.failed} answers of {len(made.gate.calls)} failed, "
        f"{faults.doubled} messages doubled"
    )


def main(seeds: int, first: int = 1) -> int:
    """Play seeds on one emulator; the number of those that broke."""
    with servers.moto() as url:
        emulator = Emulator("moto", url)
        return play("ec2-storm", range(first, first + seeds), lambda seed, folder: storm(seed, emulator, folder), told)


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), *(int(word) for word in sys.argv[2:]))))
