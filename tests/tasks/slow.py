"""Samples that take their time."""

import time

import anyio
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def wait(seconds: float, blocking: bool) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if blocking:
            time.sleep(seconds)  # what a careless solver does: it holds the event loop
        else:
            await anyio.sleep(seconds)
        return state

    return solve


@task
def slow(n: int = 10, seconds: float = 1.0, blocking: bool = False) -> Task:
    return Task(
        dataset=[Sample(id=k, input=f"Question {k}. What is {k} + 1?", target=str(k + 1)) for k in range(1, n + 1)],
        solver=[wait(seconds, blocking), generate()],
        scorer=includes(),
    )
