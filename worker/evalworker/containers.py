"""A job's sandbox containers, networks and volumes: they carry the job's id in their Compose project, and go with the job.

The job process records each project's name before it is used (`inspect_internals.name_sandbox_projects`); the agent removes what is
left of exactly these projects after the job, and after its own restart. A job without Docker sandboxes records nothing, and costs
nothing here.
"""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

RECORD = "compose-projects"
"""The file in an attempt's directory that names its Compose projects, one a line."""

PROJECT = "com.docker.compose.project"
"""The label that Compose gives to all that belongs to a project."""

PATIENCE_S = 60
"""For one call of the Docker command."""

# What there is of each kind, and how it is removed; networks and volumes can only go after the containers that use them.
_KINDS = (
    ("container", ["ps", "--all", "--quiet"], ["rm", "--force", "--volumes"]),
    ("network", ["network", "ls", "--quiet"], ["network", "rm"]),
    ("volume", ["volume", "ls", "--quiet"], ["volume", "rm", "--force"]),
)


def recorded(folder: Path) -> list[str]:
    """The projects that an attempt in this directory has made."""
    try:
        return list(dict.fromkeys((folder / RECORD).read_text().split()))
    except OSError:
        return []


def clean_up(folder: Path, log: Callable[[str], None]) -> None:
    """Remove what is left of the attempt's projects, and nothing else. Never raises: failures are logged."""
    for project in recorded(folder):
        removed = []
        for kind, listing, removal in _KINDS:
            found = _docker([*listing, "--filter", f"label={PROJECT}={project}"], log)
            if found:
                _docker([*removal, *found], log)
                removed.append(f"{len(found)} {kind}{'s' if len(found) > 1 else ''}")
        # Images that Compose built for the project are named after it. Layers stay in the build cache.
        images = _docker(["image", "ls", "--quiet", f"{project}-*"], log)
        if images:
            _docker(["image", "rm", "--force", *dict.fromkeys(images)], log)
        if removed:
            log(f"removed what the sandbox {project} had left: {', '.join(removed)}")


def clean_up_after(work: Path, log: Callable[[str], None]) -> None:
    """The same for all attempts below a worker's directory: those of an agent that was killed."""
    for record in work.glob(f"*/{RECORD}"):
        clean_up(record.parent, log)
        with contextlib.suppress(OSError):
            record.unlink()


def _docker(arguments: list[str], log: Callable[[str], None]) -> list[str]:
    """The words that a Docker command prints; none when it fails."""
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log(f"docker {arguments[0]}: {error}")
        return []
    if done.returncode != 0:
        log(f"docker {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout.split()
