"""Removing what jobs left behind: the containers, networks and volumes of their Compose projects, and nothing else.

Called by `ies sandbox cleanup`, for what nobody could remove in time: the machine lost its power, or agent and job were killed together.
A project's name says which job of which run made it (`inspect_internals.name_sandbox_projects`).
"""

import re
from dataclasses import dataclass
from typing import Any

from evalops.sandbox.docker import lines, remove
from evalworker.containers import PROJECT
from evalworker.contract.ids import sandbox_tag

OURS = re.compile(r"inspect-.*-i[0-9a-f]{16}(?P<run>[0-9a-f]{8})[0-9a-z]*")
"""The projects of jobs; those of Inspect outside of a fleet have a short random end instead."""

_LISTS = {
    "container": ("ps", "--all", "--format", "{{.ID}}\t{{.Names}}"),
    "network": ("network", "ls", "--format", "{{.ID}}\t{{.Name}}"),
    "volume": ("volume", "ls", "--format", "{{.Name}}\t{{.Name}}"),
}
"""In the order of removal: a network goes only when its containers have gone."""


@dataclass(frozen=True)
class Leftover:
    """One Docker object of a job's sandbox."""

    kind: str
    id: str
    name: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kind": self.kind, "id": self.id, "name": self.name}


def find(run_id: str | None = None) -> list[Leftover]:
    """All objects of jobs, or those of one run's. Raises DockerError."""
    found = []
    only = None if run_id is None else sandbox_tag(run_id)
    for kind, words in _LISTS.items():
        with_label = (*words[:-1], f'{words[-1]}\t{{{{.Label "{PROJECT}"}}}}')
        for line in lines(*with_label, "--filter", f"label={PROJECT}"):
            id_, name, project = (*line.split("\t"), "", "")[:3]
            ours = OURS.fullmatch(project)
            if ours and only in (None, ours["run"]):
                found.append(Leftover(kind, id_, name))
    return found


def clean(found: list[Leftover]) -> None:
    """Remove them. Raises DockerError."""
    for kind in _LISTS:
        remove(kind, [item.id for item in found if item.kind == kind])
