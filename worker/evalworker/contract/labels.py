"""How Docker objects that a job made are known: Compose labels all of them with the name of their project, which we give.

They and only they are removed after the job, by its agent and by `ies sandbox cleanup`.
"""

import hashlib
import re

from evalworker.contract.ids import check_job_id, check_run_id

PROJECT_LABEL = "com.docker.compose.project"
"""The label that Compose gives to each container, network and volume of a project; its value is the project's name."""

_OURS = re.compile(r"inspect-.*-i(?P<run>[0-9a-f]{8})[0-9a-f]{16}[a-z0-9]{6}")


def project_mark(run_id: str, job_id: str) -> str:
    """What the names of a job's projects hold: `inspect-<task>-i<mark><random>`, in the pattern of Inspect's own names."""
    return run_mark(run_id) + check_job_id(job_id)


def run_mark(run_id: str) -> str:
    """The part of the mark that all jobs of a run share: 8 hex digits."""
    return hashlib.sha256(check_run_id(run_id).encode()).hexdigest()[:8]


def marked(name: str, mark: str) -> str:
    """Inspect's own name of a project, `inspect-<task>-i<random>`, with the mark before what is random."""
    head, _, tail = name.rpartition("-i")
    return f"{head}-i{mark}{tail}"


def mark_of(project: str) -> str | None:
    """The run's mark in a project's name; None if the project is none of ours."""
    found = _OURS.fullmatch(project)
    return found["run"] if found else None
