"""The Docker side of a tempest: a task some of whose samples compute in a container, and what happens to containers and their engine."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import engine_bench
from engine_bench import Engine
from storm import TASK as SUMS

KINDS = ("container", "docker restart")

BOX = "tempest-box"
COMPOSE = f"""
services:
  default:
    image: {BOX}
    x-local: true
    command: tail -f /dev/null
    init: true
    stop_grace_period: 1s
    volumes: ["kept:/data"]
volumes:
  kept:
"""

BOXED = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.util import sandbox

ONE_IN = 11


@solver
def boxed() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id % ONE_IN == 0:
            script = f"sleep 3; echo $(({state.sample_id} + 1)) >/data/sum; cat /data/sum"
            done = await sandbox().exec(["sh", "-c", script])
            if not done.success:
                raise RuntimeError(f"the box says {done.returncode}: {done.stderr}")
            state.output.completion = done.stdout
        return state

    return solve


def _sums(first: int, count: int) -> Task:
    samples = [
        Sample(id=n, input=f"{n} + 1 =", target=str(n + 1), sandbox=None if n % ONE_IN else ("docker", "compose.yaml"))
        for n in range(first, first + count)
    ]
    return Task(dataset=samples, solver=[generate(), boxed()], scorer=match())
"""
TASK = BOXED + SUMS[SUMS.index("\n\n@task") :]
"""That of the storm, but each eleventh sample computes in a container with a network and a volume of its own."""

WAIT_S = 90.0
"""How long a container is waited for, so that there is one to harm: the first ones come when the workers are up."""

AWAY_S = 4.0
"""How long the engine is away."""

GONE_S = 30.0
"""How long after a fleet's end containers may still be there: a job whose agent was killed may flush for 20 s."""


@contextmanager
def engine() -> Iterator[Engine]:
    """An engine with the image of the boxes."""
    with engine_bench.engine() as made:
        made.make_image(BOX)
        yield made


def wait(docker: Engine, over: Callable[[], bool]) -> bool:
    """Wait until a container runs; False when none does in time, or all is over."""
    end = time.monotonic() + WAIT_S
    while not docker.running():
        if over() or time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def happen(kind: str, docker: Engine, chance: random.Random) -> None:
    """Kill a container, or take the engine away for a while: ended as systemd does, or as a crash does."""
    if kind == "container":
        if running := docker.running():
            docker.kill(chance.choice(running))
        return
    docker.stop(crash=chance.random() < 0.5)
    time.sleep(AWAY_S)
    docker.start()
