"""From what was typed to the jobs of a run: the one step between Inspect's options and a backend, the same for all of them."""

from collections.abc import Callable
from pathlib import Path

from evalops import planner, shipping, ui
from evalops.inspect_options import TypedArguments
from evalops.shards import Wish
from evalworker.contract.documents import JobSpec


def plan_jobs(
    typed: TypedArguments,
    luggage: shipping.Luggage,
    *,
    warn: Callable[[str], None] = lambda text: ui.note(f"warning: {text}"),
    wish: Wish | None = None,
) -> list[JobSpec]:
    """The jobs of the tasks and models, found by a process that can load them. Ends with a sentence when they cannot be run.

    `wish`: how tasks are to be divided; None leaves them whole.
    """
    try:
        return planner.plan(
            typed.tasks,
            typed.models,
            typed.arguments,
            typed.result_arguments,
            Path.cwd(),
            environment=typed.environment,
            path=luggage.import_path,
            warn=warn,
            wish=wish,
        )
    except planner.PlanError as error:
        raise ui.Failure(error.sentence, error.exit) from error
