"""Options and checks that the log commands share. Nothing here decides anything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from evalops import ui
from evalops.logs.archive import BadArchive
from evalops.logs.metadata import MetadataError
from evalworker.contract import ids
from evalworker.storage import StorageError

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """`--json`: one line of JSON on stdout."""
    return click.option("--json", "as_json_", is_flag=True, help="Print JSON for programs.")(function)


def dry_run_option(function: F) -> F:
    """`--dry-run`: say what would be done."""
    return click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")(function)


def model_metadata_option(function: F) -> F:
    """`--model-metadata FILE`, also from the environment."""
    return click.option(
        "--model-metadata",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="INSPECT_FLEET_MODEL_METADATA",
        help="A YAML file of models and prices that comes before the built-in one. Repeatable.",
    )(function)


def task_metadata_option(function: F) -> F:
    """`--task-metadata FILE`, also from the environment."""
    return click.option(
        "--task-metadata",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="INSPECT_FLEET_TASK_METADATA",
        help="A YAML file of evaluations that comes before the built-in ones. Repeatable.",
    )(function)


@contextmanager
def refused() -> Iterator[None]:
    """Turn the library's own errors, which are sentences, into the command's end."""
    try:
        yield
    except (StorageError, MetadataError, BadArchive, ids.BadId) as error:
        ui.fail(str(error))
