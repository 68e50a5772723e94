"""Samples that raise: all, one, one once, with a text that misleads, and with each kind of exception."""

import errno
from collections.abc import Callable
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

MISLEADING = """the model said: Error code: 429 - rate limit reached
Traceback (most recent call last):
  File "client.py", line 1, in call
openai.RateLimitError: too many requests

During handling of the above exception, another exception occurred:
TimeoutError: 401 timeout"""

KINDS: dict[str, Callable[[], Exception]] = {
    "disk": lambda: OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
    "file": lambda: OSError(errno.ENOENT, "No such file or directory", "/tmp/x"),
    "memory": lambda: MemoryError("no more"),
    "connection": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "timeout": lambda: TimeoutError("took too long"),  # Inspect takes it for a limit and scores the sample
    "lookup": lambda: LookupError("no such thing"),
    "key": lambda: KeyError("429"),
    "module": lambda: ModuleNotFoundError("No module named 'x'"),
    "runtime": lambda: RuntimeError("nothing to do with containers"),
    "daemon": lambda: RuntimeError(
        "No services started.\nCompose up stderr: Cannot connect to the Docker daemon at unix:///x"
    ),
    "pull": lambda: RuntimeError(
        "No services started.\nCompose up stderr: toomanyrequests: You have reached your pull rate limit"
    ),
    "pool": lambda: RuntimeError(
        "No services started.\nCompose up stderr: could not find an available, non-overlapping IPv4 address pool"
    ),
    "group": lambda: ExceptionGroup("unhandled errors in a TaskGroup", [ConnectionResetError("gone")]),
    "chained": lambda: _chained(),
}
"""What `raises(kind=…)` raises."""


def _chained() -> Exception:
    error = ValueError("the answer cannot be read")
    error.__cause__ = TimeoutError("took too long")
    return error


@solver
def raise_when(due: Callable[[TaskState], bool], error: Callable[[], Exception]) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if due(state):
            raise error()
        return state

    return solve


def _failing(due: Callable[[TaskState], bool], error: Callable[[], Exception]) -> Task:
    return Task(
        dataset=[Sample(id=n, input=f"What is {n} + 1?", target=str(n + 1)) for n in (1, 2, 3, 4)],
        solver=[raise_when(due, error), generate()],
        scorer=includes(),
    )


@task
def all_error() -> Task:
    return _failing(lambda state: True, lambda: ValueError("this sample always fails"))


@task
def one_error() -> Task:
    return _failing(lambda state: state.sample_id == 3, lambda: ValueError("this sample always fails"))


@task
def error_once(state_dir: str) -> Task:
    def due(state: TaskState) -> bool:
        if state.sample_id != 3:
            return False
        try:
            (Path(state_dir) / "sample-3-failed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    return _failing(due, lambda: ValueError("this sample fails once"))


@task
def misleading_error() -> Task:
    return _failing(lambda state: True, lambda: ValueError(MISLEADING))


@task
def raises(kind: str) -> Task:
    return _failing(lambda state: True, KINDS[kind])
