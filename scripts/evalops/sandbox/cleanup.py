"""Removing what jobs left behind: containers, networks and volumes of Compose projects named after a job, and nothing else."""

from dataclasses import dataclass
from typing import Any

from evalops.sandbox.docker import lines, remove
from evalworker.contract.labels import PROJECT_LABEL, mark_of, run_mark

_LISTS = {
    "container": ("ps", "--all", "--format", "{{.ID}}\t{{.Names}}"),
    "network": ("network", "ls", "--format", "{{.ID}}\t{{.Name}}"),
    "volume": ("volume", "ls", "--format", "{{.Name}}\t{{.Name}}"),
}
"""In the order of removal: a network goes only when its containers have gone."""


@dataclass(frozen=True)
class Leftover:
    """One Docker object of a job."""

    kind: str
    id: str
    name: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kind": self.kind, "id": self.id, "name": self.name}


def find(run_id: str | None = None) -> list[Leftover]:
    """All objects of jobs, or those of one run's. Raises DockerError."""
    found = []
    for kind, words in _LISTS.items():
        with_label = (*words[:-1], f'{words[-1]}\t{{{{.Label "{PROJECT_LABEL}"}}}}')
        for line in lines(*with_label, "--filter", f"label={PROJECT_LABEL}"):
            id_, name, project = (*line.split("\t"), "", "")[:3]
            mark = mark_of(project)
            if mark is not None and (run_id is None or mark == run_mark(run_id)):
                found.append(Leftover(kind, id_, name))
    return found


def clean(found: list[Leftover]) -> None:
    """Remove them. Raises DockerError."""
    for kind in _LISTS:
        remove(kind, [item.id for item in found if item.kind == kind])
