"""Ends the process from a solver."""

import sys

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def exit_at(sample: int, code: int) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == sample:
            sys.exit(code)
        return state

    return solve


@task
def exits_in_solver(code: int = 3) -> Task:
    return Task(
        dataset=[Sample(id=n, input=f"What is {n} + 1?", target=str(n + 1)) for n in (1, 2, 3)],
        solver=[exit_at(2, code), generate()],
        scorer=includes(),
    )
