"""A score that breaks whoever streams it: Inspect can read it, the worker cannot."""

import sys
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState


class Unreadable(Score):
    """A score that raises when a module of the worker reads anything of it."""

    def __getattribute__(self, name: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("evalworker."):
            raise RuntimeError("this score does not want to be read")
        return super().__getattribute__(name)


@scorer(metrics=[accuracy()])
def unreadable() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Unreadable(value="C", explanation="x")

    return score


@task
def hook_breaker() -> Task:
    return Task(
        dataset=[Sample(id=n, input=f"What is {n} + 1?", target=str(n + 1)) for n in (1, 2, 3)],
        scorer=unreadable(),
    )
