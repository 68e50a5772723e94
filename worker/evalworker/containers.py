"""A job's sandbox containers, networks and volumes: their Compose projects are named after the job, and go with it.

The job process records each project's name before it is used (`inspect_internals.name_sandbox_projects`); the agent removes what is
left of exactly these projects after the job. What is not surely gone then (the engine was away; a killed job's last command may yet be
carried out) is looked at again until it is: by the agent, by the next one in its directory, by the controller for workers of this
machine. A job without Docker sandboxes records nothing, and costs nothing here.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from evalworker.contract.labels import PROJECT_LABEL

RECORD = "compose-projects"
"""The file in an attempt's directory that names its Compose projects, one a line."""

LEFT = "left-sandboxes"
"""The directory, beside those of attempts, with the records of ended attempts that are to be looked at again."""

UNSETTLED_S = 5.0
"""How long after an attempt's end a command of its killed job may still be carried out by the engine."""

PATIENCE_S = 60
"""For one call of the Docker command."""

# What there is of each kind, and how it is removed; networks and volumes can only go after the containers that use them.
_KINDS = (
    ("container", ["ps", "--all", "--quiet"], ["rm", "--force", "--volumes"]),
    ("network", ["network", "ls", "--quiet"], ["network", "rm"]),
    ("volume", ["volume", "ls", "--quiet"], ["volume", "rm", "--force"]),
)


class _Failed(Exception):
    """Docker did not do what it was told; the text says what."""


def recorded(record: Path) -> list[str]:
    """The projects that a record names."""
    try:
        return list(dict.fromkeys(record.read_text().split()))
    except OSError:
        return []


def clean_up(folder: Path, log: Callable[[str], None]) -> bool:
    """Remove what is left of the projects of an attempt in this directory, and nothing else; whether that could be done.

    Never raises: a failure is logged.
    """
    return _clean(folder / RECORD, log)


def set_aside(folder: Path) -> None:
    """Keep the record of an attempt that has ended, for `clean_up_after`. Raises OSError."""
    if (folder / RECORD).exists():
        place = folder.with_name(LEFT)
        place.mkdir(exist_ok=True)
        (folder / RECORD).rename(place / f"{folder.name}-{time.monotonic_ns()}")


def inherit(work: Path) -> None:
    """Set aside the records of all attempts below the directory of a worker that has died."""
    for record in work.glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError):
            set_aside(record.parent)


def clean_up_after(work: Path, log: Callable[[str], None]) -> bool:
    """Remove what is left of the sandboxes that were set aside; whether no more look is due."""
    for record in (work / LEFT).glob("*"):
        age_s = time.monotonic() - int(record.name.rpartition("-")[2]) / 1e9
        if _clean(record, log) and not 0 <= age_s < UNSETTLED_S:
            with contextlib.suppress(OSError):
                record.unlink()
    return nothing_noted(work)


def nothing_noted(work: Path) -> bool:
    """Whether no sandboxes are set aside in a worker's directory."""
    return not any((work / LEFT).glob("*"))


def engine_answers() -> bool:
    """Whether the Docker engine does."""
    try:
        _docker("version", "--format", "{{.Server.Version}}")
    except _Failed:
        return False
    return True


def _clean(record: Path, log: Callable[[str], None]) -> bool:
    try:
        for project in recorded(record):
            _remove(project, log)
    except _Failed as error:
        log(str(error))
        return False
    return True


def _remove(project: str, log: Callable[[str], None]) -> None:
    """Remove all of a project. Raises _Failed."""
    removed = []
    for kind, listing, removal in _KINDS:
        if found := _docker(*listing, "--filter", f"label={PROJECT_LABEL}={project}"):
            _docker(*removal, *found)
            removed.append(f"{len(found)} {kind}{'s' if len(found) > 1 else ''}")
    # Images that Compose built for the project are named after it. Layers stay in the build cache.
    if images := _docker("image", "ls", "--quiet", f"{project}-*"):
        _docker("image", "rm", "--force", *dict.fromkeys(images))
    if removed:
        log(f"removed what the sandbox {project} had left: {', '.join(removed)}")


def _docker(*arguments: str) -> list[str]:
    """The words that a Docker command prints. Raises _Failed."""
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Failed(f"docker {arguments[0]}: {error}") from None
    if done.returncode != 0:
        raise _Failed(f"docker {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout.split()
