"""Cannot be imported: it needs a module that does not exist."""

import a_module_that_nobody_has  # noqa: F401
from inspect_ai import Task, task


@task
def missing_module() -> Task:
    return Task()
