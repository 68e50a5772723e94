"""Multiple choice, asked twice, judged by two scorers: what epochs, reducers and several scores look like in a stream.

ct run eval examples/choices.py --model scripted/good
"""

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, choice, scorer
from inspect_ai.solver import TaskState, multiple_choice


@scorer(metrics=[accuracy()])
def in_form() -> Scorer:
    """Whether the reply has the form that was asked for, right or wrong."""

    async def score(state: TaskState, target: Target) -> Score:
        asked_for = state.output.completion.startswith("ANSWER: ")
        return Score(value=CORRECT if asked_for else INCORRECT, answer=state.output.completion)

    return score


@task
def choices(n: int = 5) -> Task:
    """`n` questions of four options, in two epochs."""
    return Task(
        dataset=[_question(number) for number in range(1, n + 1)],
        solver=multiple_choice(),
        scorer=[choice(), in_form()],
        epochs=Epochs(2, "mean"),
    )


def _question(number: int) -> Sample:
    place = number % 4
    options = [str(number * 12 + offset - place) for offset in range(4)]
    return Sample(id=number, input=f"What is {number} * 12?", choices=options, target="ABCD"[place])
