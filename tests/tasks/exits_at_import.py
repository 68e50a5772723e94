"""Ends the process while it is imported."""

import sys

from inspect_ai import Task, task


@task
def exits_at_import() -> Task:
    return Task()


sys.exit(3)
