"""Which images the sandboxes of given tasks use: from Compose files, Dockerfiles and Inspect's own defaults.

`of_tasks` loads the tasks (the user's code runs); the rest is reading files. The result as JSON is what the AMI build pulls.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evalworker.inspect_internals import SandboxOf, task_sandboxes

GENERIC_IMAGE = "aisiuk/inspect-tool-support"
"""What Inspect starts for a docker sandbox without any configuration."""

COMPOSE_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?[^}]*\}|\$(?P<bare>\w+)")


class ImagesError(ValueError):
    """A task or a file that cannot be read; the text is one sentence."""


@dataclass
class Image:
    """An image: pulled by `name`, or built from `context` (a directory) with `dockerfile`; `service` of `compose` says how."""

    name: str | None
    context: str | None = None
    dockerfile: str | None = None
    compose: str | None = None
    service: str | None = None
    tasks: list[str] = field(default_factory=list)

    @property
    def built(self) -> bool:
        """It is built here, not pulled."""
        return self.context is not None

    @property
    def label(self) -> str:
        """What to call it."""
        return self.name or f"{self.context}/{self.dockerfile or 'Dockerfile'}"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def of_tasks(specs: list[str], task_args: dict[str, Any]) -> tuple[list[Image], list[str]]:
    """The images of tasks, each once, and what there is to say of sandboxes that are no Docker ones.

    Raises ImagesError for a task that cannot be loaded.
    """
    try:
        sandboxes = task_sandboxes(specs, task_args)
    except (Exception, SystemExit) as error:  # whatever the user's code does
        raise ImagesError(
            f"{', '.join(specs)} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    said = sorted(
        {
            f"{one.task} uses the sandbox {one.type}, which has no Docker images"
            for one in sandboxes
            if one.type != "docker"
        }
    )
    return merge(image for one in sandboxes if one.type == "docker" for image in of_sandbox(one)), said


def merge(images: Iterable[Image]) -> list[Image]:
    """Each image once, with all tasks that use it."""
    found: dict[tuple[str | None, ...], Image] = {}
    for image in images:
        key = (image.name, image.context, image.dockerfile)
        known = found.setdefault(key, image)
        known.tasks += [task for task in image.tasks if task not in known.tasks]
    return sorted(found.values(), key=lambda image: (image.built, image.label))


def of_sandbox(one: SandboxOf) -> list[Image]:
    """The images of one sandbox, found as Inspect finds them: its file, or what lies in the task's directory."""
    folder = Path(one.folder)
    if one.config is None:
        for name in (*COMPOSE_NAMES, "Dockerfile"):
            if (folder / name).is_file():
                return of_file(folder / name, one.task)
        return [Image(GENERIC_IMAGE, tasks=[one.task])]
    if isinstance(one.config, str | Path):
        return of_file(folder / one.config, one.task)
    if hasattr(one.config, "model_dump"):
        return of_compose(one.config.model_dump(mode="json", by_alias=True, exclude_none=True), folder, None, one.task)
    raise ImagesError(f"{one.task}: a docker sandbox with the configuration {one.config!r} is not known here")


def of_file(path: Path, task: str) -> list[Image]:
    """The images of a Compose file, or of a Dockerfile (anything whose name ends so)."""
    if not path.is_file():
        raise ImagesError(f"{task}: there is no sandbox file {path}")
    if path.name == "Dockerfile" or path.suffix == ".Dockerfile" or path.name.endswith("Dockerfile"):
        return [Image(None, str(path.parent), path.name, tasks=[task])]
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ImagesError(f"{task}: {path} cannot be read: {' '.join(str(error).split())}") from None
    return of_compose(document if isinstance(document, dict) else {}, path.parent, path, task)


def of_compose(document: Mapping[str, Any], folder: Path, path: Path | None, task: str) -> list[Image]:
    """The images of a Compose document's services."""
    services = document.get("services")
    if not isinstance(services, Mapping):
        raise ImagesError(f"{task}: {path or 'the sandbox'} has no services")
    images = []
    for name, service in services.items():
        service = service if isinstance(service, Mapping) else {}
        image = substitute(str(service["image"]), os.environ) if service.get("image") else None
        compose = str(path) if path else None
        if build := service.get("build"):
            details = build if isinstance(build, Mapping) else {"context": build}
            context = os.path.normpath(folder / substitute(str(details.get("context", ".")), os.environ))
            images.append(Image(image, context, details.get("dockerfile"), compose, str(name), [task]))
        elif image and not service.get("x-local"):
            images.append(Image(image, None, None, compose, str(name), [task]))
    return images


def substitute(text: str, environment: Mapping[str, str]) -> str:
    """Compose's `${NAME:-default}` and `$NAME` filled in."""

    def value(found: re.Match[str]) -> str:
        name = found["name"] or found["bare"]
        return environment.get(name) or found["default"] or ""

    return _VARIABLE.sub(value, text)
