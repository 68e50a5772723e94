"""Takes memory and holds it."""

import asyncio

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def take(megabytes: int, hold: float) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        held = []
        for _ in range(0, megabytes, 16):
            held.append(b"\1" * (16 << 20))
            await asyncio.sleep(0)
        await asyncio.sleep(hold)
        return state

    return solve


@task
def memory_hog(megabytes: int = 512, hold: float = 0) -> Task:
    sample = Sample(id=1, input="What is 1 + 1?", target="2")
    return Task(dataset=[sample], solver=[take(megabytes, hold), generate()], scorer=includes())
