"""The trivial tasks of the fleet's benchmarks, written as files into the directory where they run."""

from pathlib import Path

_HEAD = '''"""Trivial tasks."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes


def _samples(count):
    return [Sample(id=k, input=f"What is {k} + {k}?", target=str(2 * k)) for k in range(1, count + 1)]
'''

_TASK = """

@task
def {name}(n: int = {count}) -> Task:
    return Task(dataset=_samples(n), scorer=includes())
"""


def write(folder: Path, name: str, tasks: dict[str, int]) -> str:
    """A file with tasks of so many samples each, by name; returns its name."""
    path = folder / f"{name}.py"
    path.write_text(_HEAD + "".join(_TASK.format(name=task, count=count) for task, count in tasks.items()))
    return path.name
