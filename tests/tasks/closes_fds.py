"""Closes file descriptors that it did not open."""

import os

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def close_fds(first: int, end: int) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        os.closerange(first, end)
        return state

    return solve


def _closing(end: int) -> Task:
    sample = Sample(id=1, input="What is 1 + 1?", target="2")
    return Task(dataset=[sample], solver=[close_fds(0, end), generate()], scorer=includes())


@task
def closes_standard_fds() -> Task:
    return _closing(3)


@task
def closes_all_fds() -> Task:
    return _closing(4096)
