"""Prints a great deal in a solver."""

import sys

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def shout(megabytes: int) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        line = "noise " * 20
        for _ in range(megabytes * 1_000_000 // (2 * len(line))):
            print(line)
            print(line, file=sys.stderr)
        return state

    return solve


@task
def noisy(megabytes: int = 10) -> Task:
    sample = Sample(id=1, input="What is 1 + 1?", target="2")
    return Task(dataset=[sample], solver=[shout(megabytes), generate()], scorer=includes())
