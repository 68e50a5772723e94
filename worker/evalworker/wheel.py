"""The worker package as a thing of its own: its fingerprint, and another one unpacked in its place.

The agent compares its own fingerprint with the run's; `evalops.wheel` builds what is unpacked here. A worker whose package is years
old must still be able to do this, so neither the fingerprint nor the wheel's layout ever changes.
"""

import functools
import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from evalworker.contract import layout
from evalworker.storage import Storage

PACKAGE = Path(__file__).parent
"""Where this process's `evalworker` is."""


def files_of(package: Path = PACKAGE) -> list[tuple[str, Path]]:
    """The package's files by their names in a wheel (`evalworker/…`), sorted; compiled ones are left out."""
    found = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    named = ((f"evalworker/{path.relative_to(package).as_posix()}", path) for path in found)
    return sorted((name, path) for name, path in named if not name.endswith((".pyc", ".pyo")))


def digest(package: Path = PACKAGE) -> str:
    """The package's fingerprint: a hash of its files' names and contents."""
    total = hashlib.sha256()
    for name, path in files_of(package):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:32]


@functools.cache
def own() -> str:
    """The fingerprint of this process's package: read once."""
    return digest()


def unpack(storage: Storage, wanted: str, folder: Path) -> Path:
    """The directory with the `evalworker` of this fingerprint and nothing else, unpacked once.

    Raises StorageError when it cannot be had, ValueError when it is another one.
    """
    target = folder / wanted
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel, unpacked = Path(scratch, "worker.whl"), Path(scratch, "unpacked")
        storage.download(layout.wheel(wanted), wheel)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)  # zipfile itself drops what would lead out of the directory
        found = digest(unpacked / "evalworker")
        if found != wanted:
            raise ValueError(f"the worker package {layout.wheel(wanted)} is damaged: its fingerprint is {found}")
        try:
            os.rename(unpacked, target)  # noqa: PTH104 - Path.rename is the same call
        except OSError:  # another worker of this machine was faster
            if not target.is_dir():
                raise
            shutil.rmtree(unpacked, ignore_errors=True)
    return target
