"""Leaves a daemon behind: it is in another session, so only a cgroup or a search by environment finds it."""

import os
import time
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver


@solver
def leave_daemon(pid_file: str, seconds: int) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return state
        os.setsid()
        if os.fork():
            os._exit(0)
        Path(pid_file).write_text(str(os.getpid()))
        time.sleep(seconds)
        os._exit(0)

    return solve


@task
def daemon(pid_file: str, seconds: int = 120) -> Task:
    sample = Sample(id=1, input="What is 1 + 1?", target="2")
    return Task(dataset=[sample], solver=[leave_daemon(pid_file, seconds), generate()], scorer=includes())
