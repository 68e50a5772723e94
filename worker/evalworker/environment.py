"""The Python environment of a run: what its `uv.lock` and its pinned requirements say, installed by uv once per machine.

Called before the agent starts, which then runs with that environment's Python. Nothing is resolved here: versions were decided when the
run was submitted.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from evalworker.contract.documents import Manifest
from evalworker.contract.jsonio import canonical

BAKED_LOCK, LEFT_OUT = "inspect-fleet.uv.lock", "inspect-fleet.left-out"
"""In an environment that an image brings: the lock that it was installed from, and the names in it that no worker needs."""

INSTALL_S = 1800
"""The longest that one call of uv may take, in seconds."""


class EnvironmentFailed(RuntimeError):
    """The environment cannot be made; the text is one sentence with uv's reason."""


def cache_folder(work: Path) -> Path:
    """Where this machine keeps what several workers can use; a worker's own directory if there is no home to write to."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    wanted = Path(os.environ.get("INSPECT_FLEET_CACHE") or Path(home, "inspect-fleet"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted if os.access(wanted, os.W_OK) else work / "cache"
    except OSError:
        return work / "cache"


def key_of(manifest: Manifest, root: Path) -> str:
    """The environment's name in the cache: a hash of everything that decides what is in it."""
    locked = [_hash(root / manifest.lock / name) for name in ("uv.lock", "pyproject.toml")] if manifest.lock else []
    behind = None if manifest.code else sys.prefix
    parts = [locked, manifest.requirements, platform.python_version(), sys.base_prefix, platform.machine(), behind]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:32]


def prepare(manifest: Manifest, root: Path, cache: Path, log: Callable[[str], None]) -> Path | None:
    """The environment's Python, installed if it is not there yet; None when the run is content with the worker's own.

    Raises EnvironmentFailed.
    """
    if (manifest.lock is None and not manifest.requirements) or _is_baked(manifest, root):
        return None
    folder = cache / "environments" / key_of(manifest, root)
    python, complete = folder / "bin" / "python", folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            log(f"installing the environment of the run: {len(manifest.requirements)} packages and its lock")
            _install(manifest, root, folder, python)
            complete.touch()
            log("the environment of the run is installed")
    return python


def _is_baked(manifest: Manifest, root: Path) -> bool:
    """Whether the image's own environment was made from the run's lock and has all that the run names: nothing is to be installed.

    Versions need not be looked at: whatever a lock pins, requirements beside it have as it pins it.
    """
    own = Path(sys.prefix, BAKED_LOCK)
    if manifest.lock is None or not own.is_file() or _hash(own) != _hash(root / manifest.lock / "uv.lock"):
        return False
    there = {_name(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    there |= set(Path(sys.prefix, LEFT_OUT).read_text().split())
    return {_name(requirement) for requirement in manifest.requirements} <= there


def _name(requirement: str) -> str:
    """A package's name as it is compared; a line that pins none is taken whole, and is no installed package."""
    found = re.match(r"[A-Za-z0-9._-]+(?===)", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else requirement).lower()


def _install(manifest: Manifest, root: Path, folder: Path, python: Path) -> None:
    _uv("venv", "--python", sys.executable, str(folder), cwd=folder.parent)
    if manifest.lock is not None:
        words = ("sync", "--frozen", "--no-install-workspace", "--compile-bytecode")
        _uv(*words, cwd=root / manifest.lock, UV_PROJECT_ENVIRONMENT=str(folder))
    if manifest.requirements:
        pins = folder / "requirements.txt"
        pins.write_text("\n".join(manifest.requirements) + "\n")
        _uv("pip", "install", "--python", str(python), "--compile-bytecode", "-r", str(pins), cwd=folder)
    if manifest.code is None:
        # Code that is used in place was written for what is installed here: that stays visible, behind the run's own packages.
        own = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        (target,) = folder.glob("lib/python3*/site-packages")
        lines = [f"import site; site.addsitedir({entry!r})" for entry in own]
        (target / "inspect_fleet_in_place.pth").write_text("\n".join(lines) + "\n")


def find_uv() -> str | None:
    """uv's program: the one beside this Python, on PATH, or where its own installer puts it."""
    beside, home = str(Path(sys.executable).parent), str(Path.home() / ".local" / "bin")
    return shutil.which("uv", path=beside) or shutil.which("uv") or shutil.which("uv", path=home)


def _uv(*words: str, cwd: Path, **environment: str) -> None:
    binary = find_uv()
    if binary is None:
        raise EnvironmentFailed("the environment of the run cannot be installed: this machine has no uv")
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            [binary, *words, "--quiet"],
            cwd=cwd,
            env=kept | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"the environment of the run was not installed within {INSTALL_S} s") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[-1000:] or f"uv ended with {done.returncode}"
        raise EnvironmentFailed(f"the environment of the run cannot be installed (uv {words[0]}): {reason}")


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file: two workers of one machine install an environment once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
