"""Tasks whose results are computed in as many ways as Inspect knows: what a merge of shards must give the same of.

All have the samples 1 to 9 (the ids of `odd_ids` are those texts that patterns could mistake), none calls a model.
"""

import math
from collections.abc import Callable
from typing import Any

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.log import HeadlineMetric
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    grouped,
    includes,
    match,
    mean,
    metric,
    scorer,
    std,
    stderr,
    var,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import EarlyStop

N = 9


def samples() -> list[Sample]:
    return [
        Sample(
            id=n,
            input=f"What is {n}?",
            target=str(n % 4),
            metadata={"group": "ab"[n % 2], "weight": n, "long": [f"{n} " * 400]},
        )
        for n in range(1, N + 1)
    ]


@solver
def answer(fails: list[int] | None = None, fails_in_epoch: int = 0, scores: bool = False) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        n = int(state.sample_id)
        if n in (fails or []) and fails_in_epoch in (0, state.epoch):
            raise ValueError(f"sample {n} cannot be solved")
        state.output = ModelOutput.from_content("none", f"it is  {(n + state.epoch) % 3}\nor so")
        if scores:
            state.scores = {"by_solver": Score(value=n / 10)}
        return state

    return solve


def _number(state: TaskState) -> float:
    return math.sin(int(state.sample_id) * 7.3 + state.epoch)


@scorer(metrics=[mean(), std(), var(), stderr()])
def number() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(
            value=_number(state),
            answer=" two  blanks ",
            explanation=f"line\n{state.sample_id} " * 600,
            metadata={"n": 1},
        )

    return score


@scorer(metrics=[accuracy(), stderr(cluster="group")])
def clustered() -> Scorer:
    return _right()


def _right() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=CORRECT if _number(state) > 0 else INCORRECT)

    return score


def _of_value(value: Callable[[TaskState], Any]) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score | None:
        found = value(state)
        return found if found is None or isinstance(found, Score) else Score(value=found)

    return score


@scorer(metrics={"a": [mean(), stderr()], "b": [accuracy()]})
def keyed() -> Scorer:
    return _of_value(lambda state: {"a": _number(state), "b": _number(state) > 0})


@scorer(metrics={"*": [mean(), std()]})
def any_key() -> Scorer:
    return _of_value(lambda state: {"x": _number(state), "y": int(state.sample_id)})


@scorer(metrics=[mean(), {"x": [std()], "y": [mean()]}])
def mixed() -> Scorer:
    return _of_value(lambda state: {"x": _number(state), "y": int(state.sample_id)})


@scorer(metrics=[accuracy()])
def listed() -> Scorer:
    return _of_value(lambda state: [_number(state), int(state.sample_id)])


@scorer(metrics=[grouped(mean(), "group"), grouped(accuracy(), "group", all="groups", name_template="of_{group_name}")])
def by_group() -> Scorer:
    return _of_value(_number)


@metric
def weighted() -> Metric:
    def compute(scores: list[SampleScore]) -> float:
        assert all(len(s.sample_metadata["long"][0]) > 400 for s in scores), "metadata was cut"
        return sum(s.score.as_float() * s.sample_metadata["weight"] for s in scores)

    return compute


@metric
def in_order() -> Metric:
    """Depends on the order in which it gets the scores."""

    def compute(scores: list[SampleScore]) -> float:
        return sum(place * int(s.sample_id) for place, s in enumerate(scores))

    return compute


@metric(scores="unreduced")
def how_many() -> Metric:
    def compute(scores: list[SampleScore]) -> float:
        return float(len(scores))

    return compute


@scorer(metrics=[weighted(), in_order()])
def own_metrics() -> Scorer:
    return _of_value(_number)


@scorer(metrics=[mean(), how_many()])
def unreduced() -> Scorer:
    return _of_value(_number)


@scorer(metrics=[accuracy(to_float=lambda value: 0.25 if value == CORRECT else 0.0)])
def with_callable() -> Scorer:
    return _right()


@scorer(metrics=[mean(), stderr()])
def with_nan() -> Scorer:
    return _of_value(lambda state: math.nan if int(state.sample_id) % 4 == 0 else _number(state))


@scorer(metrics=[mean(), stderr()])
def with_unscored() -> Scorer:
    return _of_value(
        lambda state: Score.unscored(reason="no reply") if int(state.sample_id) % 3 == 0 else _number(state)
    )


@scorer(metrics=[mean()])
def sometimes_none() -> Scorer:
    return _of_value(lambda state: None if int(state.sample_id) % 2 else _number(state))


@scorer(metrics=[mean()])
def raises() -> Scorer:
    def value(state: TaskState) -> float:
        if int(state.sample_id) == 5:
            raise ValueError("no score for sample 5")
        return _number(state)

    return _of_value(value)


class StopLate:
    """An early stopping that skips the samples 8 and 9."""

    async def start_task(self, task: Any, samples: list[Sample], epochs: int) -> str:
        return "stop-late"

    async def schedule_sample(self, id: str | int, epoch: int) -> EarlyStop | None:
        return EarlyStop(id=id, epoch=epoch, reason="enough") if int(id) >= 8 else None

    async def complete_sample(self, id: str | int, epoch: int, scores: dict[str, Any]) -> None:
        return None

    async def complete_task(self) -> dict[str, Any]:
        return {"kept": 7}


def made(scorer: Any = None, *, solver: Solver | None = None, **more: Any) -> Task:
    return Task(dataset=samples(), solver=solver or answer(), scorer=scorer, **more)


@task
def one_scorer() -> Task:
    return made(match())


@task
def numbers() -> Task:
    return made(number())


@task
def clusters() -> Task:
    return made(clustered())


@task
def epochs_mean() -> Task:
    return made(number(), epochs=3)


@task
def epochs_reducers() -> Task:
    return made(
        _of_scorer_for_reducers(), epochs=Epochs(3, ["mean", "median", "mode", "max", "at_least_2", "pass_at_2"])
    )


@scorer(metrics=[mean(), stderr()])
def _of_scorer_for_reducers() -> Scorer:
    return _of_value(lambda state: 1.0 if _number(state) > 0 else 0.0)


@task
def epochs_unreduced() -> Task:
    return made(unreduced(), epochs=Epochs(2, "mean"))


@task
def dict_score() -> Task:
    return made(keyed())


@task
def dict_any_key() -> Task:
    return made(any_key(), epochs=2)


@task
def dict_mixed() -> Task:
    return made(mixed())


@task
def list_score() -> Task:
    return made(listed())


@task
def groups() -> Task:
    return made(by_group())


@task
def groups_epochs() -> Task:
    return made(by_group(), epochs=2)


@task
def two_scorers() -> Task:
    return made([match(), number()])


@task
def same_scorer_twice() -> Task:
    return made([includes(), includes(ignore_case=False)])


@task
def custom_metrics() -> Task:
    return made(own_metrics(), epochs=2)


@task
def callable_argument() -> Task:
    return made(with_callable())


@task
def task_metrics() -> Task:
    return made(number(), metrics=[in_order(), mean()])


@task
def headline() -> Task:
    return made([match(), number()], headline_metric=HeadlineMetric(scorer="number", metric="std"))


@task
def nan() -> Task:
    return made(with_nan(), epochs=2)


@task
def unscored() -> Task:
    return made(with_unscored())


@task
def none_scores() -> Task:
    return made(sometimes_none())


@task
def no_scorer() -> Task:
    return made()


@task
def solver_scores() -> Task:
    return made(match(), solver=answer(scores=True))


@task
def one_error() -> Task:
    return made(number(), solver=answer([4]))


@task
def error_in_one_epoch() -> Task:
    return made(number(), solver=answer([2, 7], 2), epochs=3)


@task
def errors_allowed() -> Task:
    return made(number(), solver=answer([1, 4, 7]), fail_on_error=0.5)


@task
def errors_counted() -> Task:
    """Two in the whole, one in each shard."""
    return made(number(), solver=answer([1, 2]), fail_on_error=2)


@task
def errors_ignored() -> Task:
    return made(number(), solver=answer([3, 4]), fail_on_error=False)


@task
def all_errors() -> Task:
    return made(number(), solver=answer(list(range(1, N + 1))), fail_on_error=False)


@task
def errors_scored() -> Task:
    return made(number(), solver=answer([5]), score_on_error=True)


@task
def scorer_raises() -> Task:
    return made([number(), raises()])


@task
def stops_early() -> Task:
    return made(number(), early_stopping=StopLate())


@task
def odd_ids() -> Task:
    ids = ["a[1]", "a1", "*", "?", "[!a]", "a:b", "odd_ids:x", "x y", "../../up"]
    dataset = [Sample(id=each, input="hi", target="hi", metadata={"group": "a"}) for each in ids]
    return Task(dataset=dataset, solver=say(), scorer=includes())


@solver
def say() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = ModelOutput.from_content("none", "hi" if len(str(state.sample_id)) % 2 else "no")
        return state

    return solve
