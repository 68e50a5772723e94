"""Has no samples."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset
from inspect_ai.scorer import includes


@task
def empty() -> Task:
    return Task(dataset=MemoryDataset([]), scorer=includes())
