"""What a run's Python environment is made of: the project's `uv.lock`, `--package`, and what the worker itself needs, all pinned.

Called when a run is submitted; workers install what is decided here and resolve nothing. Nothing is pinned for a run that is
content with the worker's own environment.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from evalops.code import Tree, git, shown
from evalops.ui import fail, note
from evalworker.environment import find_uv

WORKER_PACKAGES = ("boto3", "inspect-ai", "pydantic", "zstandard")
"""What `evalworker` imports; the versions it can do with stand in our own metadata."""

MAIN_PACKAGES = (
    "inspect-ai",
    "inspect-evals",
    "inspect-fleet",
    "openai",
    "anthropic",
    "google-genai",
    "mistralai",
    "groq",
    "azure-ai-inference",
    "huggingface-hub",
    "datasets",
    "boto3",
    "pydantic",
)
"""Packages whose versions are told by name, because results may depend on them."""


def lock_of(tree: Tree) -> Path | None:
    """The directory of the `uv.lock` that holds for the submit directory: its project's, or its workspace's further up."""
    project = tree.project
    if project is None:
        return None
    for folder in (project, *project.parents):
        if (folder / "uv.lock").is_file():
            return folder
        if folder == tree.root:
            break
    return None


def locked_versions(lock: Path) -> dict[str, str]:
    """Package versions of a directory's `uv.lock`."""
    try:
        found = tomllib.loads((lock / "uv.lock").read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{lock / 'uv.lock'} cannot be read: {error}")
    return {package["name"]: package["version"] for package in found.get("package", []) if "version" in package}


def installed(package: str) -> str | None:
    """The version of a package here, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def worker_requirements() -> list[str]:
    """What `evalworker` needs, as our own metadata says it."""
    wanted = importlib.metadata.requires("inspect-fleet") or []
    return [line for line in wanted if re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0].lower() in WORKER_PACKAGES]


def pin(packages: list[str], lock: Path | None) -> list[str]:
    """Pinned requirements of an environment that has `packages`, what the worker needs and, without a lock, the main packages.

    Under a lock everything that it pins stays as it pins it. Ends with uv's reason when there is no such environment.
    """
    wanted = [*packages, *worker_requirements()]
    if lock is None:
        wanted += [
            f"{name}=={version}" for name in MAIN_PACKAGES if name != "inspect-fleet" and (version := installed(name))
        ]
        constraints = ""
    else:
        locked = locked_versions(lock)
        here = installed("inspect-ai")
        theirs = locked.get("inspect-ai")
        if theirs is None:
            wanted.append(f"inspect-ai=={here}")
        elif theirs != here:
            note(f"workers run Inspect {theirs}, as {lock / 'uv.lock'} has it; this command runs {here}")
        export = ("export", "--frozen", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-workspace")
        constraints = _without_paths(_uv(*export, folder=lock, doing=f"{lock / 'uv.lock'} cannot be read"))
    return _compile(wanted, constraints)


def _compile(wanted: list[str], constraints: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wanted.in").write_text("\n".join(wanted) + "\n")
        Path(folder, "constraints.txt").write_text(constraints)
        version = ".".join(platform.python_version_tuple()[:2])
        words = ("pip", "compile", "wanted.in", "-c", "constraints.txt", "--universal", "--python-version", version)
        answer = _uv(
            *words,
            "--no-header",
            "--no-annotate",
            folder=Path(folder),
            doing="no environment for this run can be made (--package, uv.lock)",
        )
    return [line.strip() for line in answer.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _without_paths(requirements: str) -> str:
    """Only what can be a constraint: names with versions, no directories and no URLs."""
    lines = (line for line in requirements.splitlines() if re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*==", line))
    return "\n".join(lines) + "\n"


def _uv(*words: str, folder: Path, doing: str) -> str:
    """What uv prints; ends with one sentence when it refuses."""
    if (uv := find_uv()) is None:
        fail(f"{doing}: uv is not installed (https://docs.astral.sh/uv)")
    try:
        answer = subprocess.run([uv, *words, "--quiet"], cwd=folder, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        fail(f"{doing}: uv took longer than ten minutes")
    if answer.returncode != 0:
        fail(f"{doing}: {' '.join(answer.stderr.split())[:1000] or 'uv gave no reason'}")
    return answer.stdout


def check_clean(tree: Tree) -> None:
    """Refuse a tree that nobody could bring back: uncommitted changes, or dependencies that no lock pins."""
    if not tree.git:
        fail(f"--require-clean: {tree.refusal or f'{tree.root} is in no git repository'}")
    words = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal")
    changed = git(
        tree.root, *words, "--", ".", ":(exclude)logs", f":(exclude){os.path.normpath(tree.submit_dir + '/logs')}"
    )
    if changed is None:
        fail(f"--require-clean: git cannot tell the state of {tree.root}")
    if changed:
        names = [shown(os.fsdecode(line[3:])) for line in changed.split(b"\0") if line]
        fail(f"--require-clean: uncommitted changes in {', '.join(names[:5])}: commit or stash them")
    if git(tree.root, "rev-parse", "--verify", "HEAD") is None:
        fail(f"--require-clean: {tree.root} has no commit yet")
    project = tree.project
    if project is None or not (project / "pyproject.toml").is_file():
        return
    lock = lock_of(tree)
    if lock is None:
        fail(f"--require-clean: {tree.relative(project / 'pyproject.toml')} has no uv.lock beside it: run `uv lock`")
    _uv(
        "lock",
        "--check",
        folder=lock,
        doing=f"--require-clean: {tree.relative(lock / 'uv.lock')} is not up to date, run `uv lock`",
    )
