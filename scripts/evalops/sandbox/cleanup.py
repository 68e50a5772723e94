"""Removing what jobs left behind: containers, networks and volumes with this toolkit's label, and nothing else."""

from dataclasses import dataclass
from typing import Any

from evalops.sandbox.docker import lines, remove
from evalworker.contract.labels import JOB_LABEL

_LISTS = {
    "container": ("ps", "--all", "--format", "{{.ID}}\t{{.Names}}"),
    "network": ("network", "ls", "--format", "{{.ID}}\t{{.Name}}"),
    "volume": ("volume", "ls", "--format", "{{.Name}}\t{{.Name}}"),
}
"""In the order of removal: a network goes only when its containers have gone."""


@dataclass(frozen=True)
class Leftover:
    """One Docker object with our label."""

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
        with_label = (*words[:-1], f'{words[-1]}\t{{{{.Label "{JOB_LABEL}"}}}}')
        for line in lines(*with_label, "--filter", f"label={JOB_LABEL}"):
            id_, name, value = (*line.split("\t"), "", "")[:3]
            if run_id is None or value.split("/")[0] == run_id:
                found.append(Leftover(kind, id_, name))
    return found


def clean(found: list[Leftover]) -> None:
    """Remove them. Raises DockerError."""
    for kind in _LISTS:
        remove(kind, [item.id for item in found if item.kind == kind])
