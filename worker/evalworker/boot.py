"""Before the agent: become the process that the run asks for, with the run's own `evalworker` and its environment's Python.

What is installed on a machine (or baked into its image) only has to be able to do this. The process replaces itself, so its id, its
arguments and its supervisor stay. Afterwards everything is consistent: fork server and jobs are started by that Python.
"""

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from evalworker import code, environment, wheel
from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.preload_settings import PLACE
from evalworker.storage import Storage


class BootError(RuntimeError):
    """The run's own process cannot be made; the text is one sentence."""


def settle(
    storage: Storage, fleet_id: str, work: Path, argv: list[str], log: Callable[[str], None], module: str = "evalworker"
) -> None:
    """Return if this process (`python -m MODULE ARGV…`) is what the run asks for, else replace it. Raises BootError, StorageError."""
    manifest = Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
    own = wheel.own()
    if PLACE in os.environ:
        if manifest.worker not in (None, own):
            raise BootError(f"the worker runs evalworker {own} although it started {manifest.worker}: check PYTHONPATH")
        return
    python: Path | None = None
    if manifest.lock is not None or manifest.requirements:
        try:
            root = code.root_of(storage, manifest, work)
            python = environment.prepare(manifest, root, environment.cache_folder(work), log)
        except (code.CodeError, environment.EnvironmentFailed) as error:
            raise BootError(str(error)) from error
    if manifest.worker is None or (manifest.worker == own and python is None):
        return
    try:
        place = wheel.unpack(storage, manifest.worker, environment.cache_folder(work) / "worker")
    except ValueError as error:
        raise BootError(str(error)) from error
    log(f"starting again with evalworker {manifest.worker} (installed: {own}) and {python or sys.executable}")
    command = [str(python or sys.executable), "-P", "-m", module, *argv]
    os.execve(command[0], command, _with_place(dict(os.environ), str(place)))  # noqa: S606 - arguments of our own


def versions() -> dict[str, str]:
    """With what this process runs: Python, Inspect, and the fingerprint of its `evalworker`."""
    found = {"python": platform.python_version(), "evalworker": wheel.own()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["inspect-ai"] = importlib.metadata.version("inspect-ai")
    return found


def _with_place(variables: dict[str, str], place: str) -> dict[str, str]:
    path = [place, *filter(None, [variables.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(path), PLACE: place}
