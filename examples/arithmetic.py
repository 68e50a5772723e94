"""Sums and products that `scripted/good` gets right: the task that `make eval` runs when nothing else is named.

ct run eval examples/arithmetic.py --model scripted/mixed -T n=50
"""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match


@task
def arithmetic(n: int = 20) -> Task:
    """`n` questions, the same at every run; ids are 1 to n."""
    return Task(dataset=[_question(number) for number in range(1, n + 1)], scorer=match(numeric=True))


def _question(number: int) -> Sample:
    left, right = 7 * number % 50 + 1, 11 * number % 30 + 1
    value, sign = (left * right, "*") if number % 3 == 0 else (left + right, "+")
    return Sample(id=number, input=f"Question {number}. What is {left} {sign} {right}?", target=str(value))
