"""Which sandbox images to bake in: those named in a file, and those that tasks' Compose files and Dockerfiles say.

Called by the AMI build. Tasks are loaded in a child process, because their code is the user's. Nothing is pulled or built here:
the result are files for the build machine, where `packer/provision/50-images.sh` reads them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from evalops.cloud import payload
from evalops.cloud.payload import CloudError
from evalops.sandbox.images import Image, ImagesError, of_tasks

FOLDER = "sandboxes"
GENERATED = "inspect-fleet.compose.yaml"
MOST_BYTES = 200_000_000
"""The largest build context of a task: larger ones hold data that belongs elsewhere."""

LOAD_S = 900

_REFERENCE = re.compile(r"[a-z0-9][a-zA-Z0-9._/:@-]{0,254}")


def named_images(file: Path) -> list[str]:
    """The image references of a file: one a line, `#` begins a comment; or the document of `ies sandbox images --json`.

    Raises CloudError.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CloudError(f"--images {file}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if text.lstrip().startswith("{"):
        places = [(f"image {number}", name) for number, name in enumerate(_listed(file, text), 1)]
    else:
        places = [(f"line {n}", line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    for place, name in places:
        if name and not _REFERENCE.fullmatch(name):
            raise CloudError(f"--images {file}, {place}: {name!r} is no image reference")
    return [name for _, name in places if name]


def _listed(file: Path, text: str) -> list[str]:
    """The names in the document of `ies sandbox images --json`; what is built has to be given as a task's."""
    try:
        images = [Image(**entry) for entry in json.loads(text)["images"]]
    except (ValueError, KeyError, TypeError):
        raise CloudError(f"--images {file}: it is not what `ies sandbox images --json` prints") from None
    if built := [image for image in images if image.built]:
        names = ", ".join(image.label for image in built)
        tasks = ", ".join(sorted({task for image in built for task in image.tasks}))
        raise CloudError(
            f"--images {file}: what is built cannot be pulled ({names}): give its tasks by --tasks ({tasks})"
        )
    return [str(image.name) for image in images]


def collect(tasks: list[str], images: Path | None) -> dict[str, bytes]:
    """The files for the build machine by path, empty when nothing is to be baked. Raises CloudError."""
    wanted = named_images(images) if images else []
    content: dict[str, bytes] = {}
    found = _load(tasks) if tasks else []
    wanted += [str(image.name) for image in found if not image.built]
    projects = {_project(image): image for image in found if image.built}
    for number, ((folder, file), image) in enumerate(sorted(projects.items())):
        prefix, task = f"{FOLDER}/projects/{number:03d}", ", ".join(image.tasks)
        content[f"{prefix}/files.tar"] = _context(Path(folder), task, None if file else image)
        content[f"{prefix}/compose.txt"] = (file or GENERATED).encode()
        content[f"{prefix}/name.txt"] = task.encode()
    if wanted:
        content[f"{FOLDER}/images.txt"] = ("\n".join(dict.fromkeys(wanted)) + "\n").encode()
    return content


def _project(image: Image) -> tuple[str, str]:
    """(folder that is shipped, Compose file in it): the task's own file, unless it builds what lies elsewhere."""
    context = Path(str(image.context))
    if image.compose is not None and context.is_relative_to(Path(image.compose).parent):
        return str(Path(image.compose).parent), Path(image.compose).name
    return str(context), ""


def summary(content: dict[str, bytes]) -> str:
    """The baked sandboxes in a tag's 256 characters."""
    names = content.get(f"{FOLDER}/images.txt", b"").decode().split()
    names += [data.decode() for name, data in content.items() if name.endswith("/name.txt")]
    text = " ".join(names)
    return text if len(text) <= 250 else text[:247] + "..."


def _context(folder: Path, task: str, image: Image | None) -> bytes:
    """The folder of a sandbox as a tar, with modes (a program must stay one) and without times; with a Compose file for `image`."""
    total = 0
    entries: dict[str, tuple[bytes, int]] = {}
    if image is not None:
        service = {"build": {"context": ".", "dockerfile": image.dockerfile or "Dockerfile"}}
        entries[GENERATED] = (yaml.safe_dump({"services": {"default": service}}).encode(), 0o644)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or "__pycache__" in path.parts or ".git" in path.parts or name in entries:
            continue
        total += path.stat().st_size
        if total > MOST_BYTES:
            raise CloudError(
                f"the sandbox of {task} is built in {folder}, which holds more than {MOST_BYTES // 10**6} MB: give its "
                "Dockerfile a folder of its own"
            )
        entries[name] = (path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644)
    return payload.tar_of(entries)


def _load(tasks: list[str]) -> list[Image]:
    """The images of the tasks' Docker sandboxes, each once."""
    command = [sys.executable, "-P", "-m", "evalops.cloud.sandboxes", *map(_relative, tasks)]
    try:
        child = subprocess.run(command, capture_output=True, timeout=LOAD_S)
    except subprocess.TimeoutExpired:
        raise CloudError(f"--tasks: loading the tasks took more than {LOAD_S // 60} minutes") from None
    if child.returncode != 0:
        last = (child.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise CloudError(f"--tasks: {last}")
    return [Image(**entry) for entry in json.loads(child.stdout.splitlines()[-1])]


def _relative(task: str) -> str:
    """Inspect takes a task's file relative to the current directory alone."""
    file, at, name = task.partition("@")
    return (os.path.relpath(file) if Path(file).is_absolute() else file) + at + name


def main() -> None:
    """The child: print the images that `evalops.sandbox.images` finds as one line of JSON."""
    try:
        found, _ = of_tasks(sys.argv[1:], {})
    except ImagesError as error:
        sys.exit(str(error))
    print(json.dumps([image.as_json() for image in found]))  # noqa: T201


if __name__ == "__main__":
    main()
