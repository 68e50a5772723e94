"""Scores that are legal and that break careless code."""

import math
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState

_ODD: list[Any] = [True, 0, "C", [1, 2.5, "x"], {"a": None, "b": False}, "t" * 100_000]
_NAN: list[Any] = [math.nan, math.inf, {"a": math.nan, "b": -math.inf}]


@scorer(metrics=[mean()])
def give(values: list[Any], explanation: str = "") -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=values[(int(state.sample_id) - 1) % len(values)], explanation=explanation or None)

    return score


@scorer(metrics=[])
def give_unmeasured(values: list[Any]) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=values[int(state.sample_id) - 1])

    return score


def _samples(count: int) -> list[Sample]:
    return [Sample(id=n, input=f"What is {n} + 1?", target=str(n + 1)) for n in range(1, count + 1)]


@task
def long_explanation(n: int = 2) -> Task:
    return Task(dataset=_samples(n), scorer=give([1.0], "because " * 50_000))


@task
def nan_score() -> Task:
    return Task(dataset=_samples(len(_NAN)), scorer=give_unmeasured(_NAN))


@task
def odd_value() -> Task:
    return Task(dataset=_samples(len(_ODD)), scorer=give_unmeasured(_ODD))
