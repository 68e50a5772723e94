"""Sample ids and outputs that are legal and that break careless code."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, solver

IDS: list[int | str] = [
    "a:b",
    "001",
    1,
    "../../x",
    "naïve-日本-🙂",
    "x" * 200,
    "line\nfeed",
    "<b>&'\"$(id)`",
    "a[1]",
    "*",
    " ",
]


@task
def hostile_ids() -> Task:
    return Task(
        dataset=[
            Sample(id=each, input=f"Question {n}. What is {n} + 1?", target=str(n + 1)) for n, each in enumerate(IDS)
        ],
        scorer=includes(),
    )


@solver
def half_a_pair() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = ModelOutput.from_content("scripted", "yes \ud83d")
        state.messages.append(state.output.message)
        return state

    return solve


@task
def lone_surrogate() -> Task:
    return Task(dataset=[Sample(id=1, input="Say yes.", target="yes")], solver=half_a_pair(), scorer=includes())
