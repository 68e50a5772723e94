"""From what was typed to the jobs of a run: the one step between Inspect's options and a backend, the same for all of them."""

from collections.abc import Callable
from pathlib import Path

import click

from evalops import planner, shipping, ui
from evalops.inspect_options import TypedArguments, typed_names, typed_options
from evalops.sandbox.docker import DockerError, docker
from evalops.shards import Wish
from evalworker.contract.documents import JobSpec, Manifest


def no_docker() -> str:
    """Why no Docker sandbox can run on this machine, empty when one can: a clause."""
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except DockerError as error:
        return f"{error}; `ies sandbox check` says what this machine needs"
    return ""


def check_alone(ctx: click.Context) -> None:
    """Without tasks a resume keeps the run's own options, code and packages: what says otherwise is refused, not ignored."""
    if typed := typed_options(ctx, shipping.OPTIONS):
        ui.fail(
            f"with --run-id alone the run keeps its own options: to change {typed[0]}, repeat the whole command with --run-id"
        )


def check_models(ctx: click.Context, resumed: Manifest) -> None:
    """Without tasks a resume keeps the run's own models too."""
    models = typed_names(ctx)[1]
    if models and set(models) != {job.model for job in resumed.jobs}:
        ui.fail(f"the run {resumed.fleet_id} has other models: leave --model away, or start a new run")


def plan_jobs(
    typed: TypedArguments,
    luggage: shipping.Luggage,
    *,
    warn: Callable[[str], None] = lambda text: ui.note(f"warning: {text}"),
    wish: Wish | None = None,
    here: bool = False,
) -> list[JobSpec]:
    """The jobs of the tasks and models, found by a process that can load them. Ends with a sentence when they cannot be run.

    `wish`: how tasks are to be divided; None leaves them whole. `here`: the jobs will run on this machine, with its Docker.
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
            boxes=no_docker if here else lambda: "",
        )
    except planner.PlanError as error:
        raise ui.Failure(error.sentence, error.exit) from error
