"""Raises while it is imported."""

from inspect_ai import Task, task


@task
def raises_at_import() -> Task:
    return Task()


raise RuntimeError("this file always raises")
