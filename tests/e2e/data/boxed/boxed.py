"""A task with a Compose project as its sandbox: it computes in there, and tries to reach the metadata service from in there."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox


@solver
def work_in_the_box() -> Solver:
    """Run two commands in the sandbox; their answers are the completion."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        added = await sandbox().exec(["sh", "-c", "echo $((40 + 2)) >/data/sum; cat /data/sum"])
        asked = await sandbox().exec(
            ["sh", "-c", "nc -w 3 169.254.169.254 80 </dev/null"]
        )  # a static busybox's wget crashes
        state.metadata |= {"sum": added.stdout.strip(), "metadata": "open" if asked.success else "closed"}
        return state

    return solve


@scorer(metrics=[accuracy()])
def boxed_scorer() -> Scorer:
    """Right sum, and a metadata service that cannot be reached."""

    async def score(state: TaskState, target: Target) -> Score:
        said = f"{state.metadata['sum']} {state.metadata['metadata']}"
        return Score(value=CORRECT if said == target.text else INCORRECT, answer=said)

    return score


@task
def boxed() -> Task:
    """One sample."""
    sample = Sample(id="box", input="add", target="42 closed")
    return Task(dataset=[sample], solver=work_in_the_box(), scorer=boxed_scorer(), sandbox=("docker", "compose.yaml"))
