"""Removing what jobs left behind: containers, networks and volumes of Compose projects named after a job, and nothing else.

A project goes when its run is over. `kept` is the rule of what stays; what is known of runs comes from `evalops.sandbox.owners`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalops.sandbox.docker import lines, remove
from evalworker.contract.labels import PROJECT_LABEL, mark_of, run_mark

_LISTS = {
    "container": ("ps", "--all", "--format", "{{.ID}}\t{{.Names}}\t{{.State}}"),
    "network": ("network", "ls", "--format", "{{.ID}}\t{{.Name}}"),
    "volume": ("volume", "ls", "--format", "{{.Name}}\t{{.Name}}"),
}
"""In the order of removal: a network goes only when its containers have gone."""

_LIVING = frozenset({"running", "paused", "restarting"})

UNKNOWN = "a container of it runs, and its run cannot be found from here"


@dataclass(frozen=True)
class Leftover:
    """One Docker object of a job. `mark` is its run's; `lives`: it is a container that has not ended."""

    kind: str
    id: str
    name: str
    project: str
    mark: str
    lives: bool

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kind": self.kind, "id": self.id, "name": self.name, "project": self.project}


def find(run_id: str | None = None) -> list[Leftover]:
    """All objects of jobs, or those of one run's. Raises DockerError."""
    found = []
    for kind, words in _LISTS.items():
        with_label = (*words[:-1], f'{{{{.Label "{PROJECT_LABEL}"}}}}\t{words[-1]}')
        for line in lines(*with_label, "--filter", f"label={PROJECT_LABEL}"):
            project, id_, name, state = (*line.split("\t"), "", "", "")[:4]
            mark = mark_of(project)
            if mark is not None and (run_id is None or mark == run_mark(run_id)):
                found.append(Leftover(kind, id_, name, project, mark, state in _LIVING))
    return found


def kept(found: list[Leftover], fates: Mapping[str, str | None]) -> dict[str, str]:
    """The projects that stay, each with why: its run lives, or nobody can tell and a container of it runs.

    `fates`: of each mark, why its run lives, None if it is over; without those of runs that are not known (`owners.fates`).
    """
    running = {item.project for item in found if item.lives}
    why = {item.project: fates.get(item.mark, UNKNOWN if item.project in running else None) for item in found}
    return {project: reason for project, reason in why.items() if reason is not None}


def clean(found: list[Leftover]) -> None:
    """Remove them. Raises DockerError."""
    for kind in _LISTS:
        remove(kind, [item.id for item in found if item.kind == kind])
