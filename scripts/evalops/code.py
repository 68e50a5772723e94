"""The user's code on its way to workers: which files git sees, what must never be shipped, and one archive of the rest.

Called when a run is submitted. `Tree` is the submit directory's place in its repository, `choose` decides what is packed, `pack` writes
it; the archive depends on names, modes and content alone and is stored under its hash, once. `logs/` is never packed.
"""

import gzip
import hashlib
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from evalops.ui import EXIT_USAGE, Failure, bytes_text, fail, note, progress
from evalworker import redact
from evalworker.contract import layout
from evalworker.storage import Storage

MAX_FILE = 50_000_000
MAX_TOTAL = 250_000_000
"""Bytes. Code is meant; data sets belong into the bucket or on a hub."""

SHOW_PROGRESS = 5_000_000
"""Bytes from which packing shows how far it is."""

WITHOUT_GIT = frozenset(
    {".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Directories that are left out where there is no git to ask."""

_KEY_NAMES = re.compile(
    r"id_(rsa|dsa|ecdsa|ecdsa_sk|ed25519|ed25519_sk)|.*\.(p12|pfx|ppk|jks|keystore)|\.netrc|\.pgpass", re.I
)
_ENV_NAMES = re.compile(r"\.env(?!\.(template|example|sample|dist)$)(\..*)?", re.I)
_KEY_HEADER = re.compile(
    rb'^[ \t]*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|"private_key"\s*:\s*"-----BEGIN ', re.MULTILINE
)


@dataclass(frozen=True)
class Tree:
    """Where a run is submitted.

    Attributes:
        root: the top of the git repository, or the submit directory itself where there is none.
        submit_dir: the submit directory, relative to the root.
        git: whether git says what belongs to the tree.
        refusal: why git, which looks after this directory, will not say so; such a tree can be run in place, never packed.
    """

    root: Path
    submit_dir: str
    git: bool
    refusal: str = ""

    @property
    def project(self) -> Path | None:
        """The nearest directory with a pyproject.toml or setup file, from the submit directory up to the root."""
        here = (self.root / self.submit_dir).resolve()
        for folder in (here, *here.parents):
            if any((folder / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg")):
                return folder
            if folder == self.root:
                return None
        return None

    def relative(self, path: Path) -> str:
        """A path below the root, relative to it."""
        return os.path.relpath(path, self.root)


@dataclass
class Chosen:
    """What `choose` found: files to pack (relative, sorted), and what it refuses or leaves out, each with its reason."""

    files: list[str] = field(default_factory=list)
    total: int = 0
    refused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def tree_of(folder: Path) -> Tree:
    """The tree that a directory belongs to. Only where no `.git` is, here or above, does a tree have no git."""
    folder = folder.resolve()
    try:
        root = Path(os.fsdecode(_ask(folder, "rev-parse", "--show-toplevel").rstrip(b"\n"))).resolve()
    except GitRefused as error:
        looked_after = any((place / ".git").exists() for place in (folder, *folder.parents))
        return Tree(folder, ".", git=False, refusal=str(error) if looked_after else "")
    return Tree(root, os.path.relpath(folder, root), git=True)


def python_path(tree: Tree, sys_path: list[str]) -> list[str]:
    """Directories of the tree, relative, from which the submitter's own interpreter imports modules.

    The project's `src` and the project itself, and what editable installs have put on `sys.path`.
    """
    found: list[str] = []
    if (project := tree.project) is not None:
        found += [tree.relative(folder) for folder in (project / "src", project) if folder.is_dir()]
    for entry in sys_path:
        folder = Path(entry or ".").resolve()
        inside = folder.is_relative_to(tree.root) and folder.is_dir() and "site-packages" not in folder.parts
        if inside and not WITHOUT_GIT & set(folder.relative_to(tree.root).parts):
            found.append(tree.relative(folder))
    return [entry for entry in dict.fromkeys(found) if entry != tree.submit_dir]


def choose(tree: Tree) -> Chosen:
    """Which files of a tree are packed. Ends with git's own sentence when it will not say which files it ignores."""
    if tree.refusal:
        fail(f"which files under {tree.root} git ignores cannot be known, so none is shipped: {tree.refusal}")
    chosen = Chosen()
    names = _seen_by_git(tree.root, chosen) if tree.git else _below(tree.root)
    logs = {"logs", os.path.normpath(f"{tree.submit_dir}/logs")}
    for name in sorted(set(names)):
        if any(name == folder or name.startswith(folder + os.sep) for folder in logs):
            continue
        _consider(tree, name, chosen)
    if chosen.total > MAX_TOTAL:
        largest = sorted(chosen.files, key=lambda name: -os.lstat(tree.root / name).st_size)[:3]
        named = ", ".join(f"{shown(name)} ({bytes_text(os.lstat(tree.root / name).st_size)})" for name in largest)
        chosen.refused.append(
            f"{bytes_text(chosen.total)} in all, more than {bytes_text(MAX_TOTAL)}; the largest: {named}"
        )
    return chosen


def _consider(tree: Tree, name: str, chosen: Chosen) -> None:
    """Put one file where it belongs."""
    try:
        _judge(tree, name, chosen)
    except FileNotFoundError:  # deleted, and git has not been told
        return
    except OSError as error:
        chosen.refused.append(f"{shown(name)}: cannot be read ({error.strerror})")


def _judge(tree: Tree, name: str, chosen: Chosen) -> None:
    path = tree.root / name
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        if not _stays_inside(tree.root, path):
            chosen.refused.append(f"{shown(name)}: a symbolic link that leads out of the tree")
            return
    elif not stat.S_ISREG(found.st_mode):
        return
    elif _ENV_NAMES.fullmatch(path.name):
        if not tree.git:
            chosen.left_out.append(name)
            return
        chosen.refused.append(f"{shown(name)}: holds settings and keys of one machine")
        return
    elif found.st_size > MAX_FILE:
        chosen.refused.append(f"{shown(name)}: {bytes_text(found.st_size)}, more than {bytes_text(MAX_FILE)}")
        return
    elif (reason := _secret_in(path)) is not None:
        chosen.refused.append(f"{shown(name)}: {reason}")
        return
    chosen.files.append(name)
    chosen.total += 0 if stat.S_ISLNK(found.st_mode) else found.st_size


def _secret_in(path: Path) -> str | None:
    """Why a file is taken for a secret, None if it is not."""
    if _KEY_NAMES.fullmatch(path.name):
        return "a private key or password file"
    body = path.read_bytes()
    if _KEY_HEADER.search(body[:65536]):
        return "holds a private key"
    name = redact.find(body.decode("utf-8", "replace"))
    return None if name is None else f"holds the value of {name}"


def _stays_inside(root: Path, link: Path) -> bool:
    target = os.path.normpath(link.parent / link.readlink())
    return Path(target).is_relative_to(root) and Path(os.path.realpath(link)).is_relative_to(root)


def _seen_by_git(root: Path, chosen: Chosen) -> Iterator[str]:
    """Tracked files, and untracked ones that are not ignored, those of submodules and of nested repositories too."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        fail(f"git cannot list the files of {root}: run `git status` there")
    for raw in listed.split(b"\0"):
        name = os.fsdecode(raw).rstrip("/")
        folder = root / name
        if not name:
            continue
        if folder.is_symlink() or not folder.is_dir():
            yield name
        elif (folder / ".git").exists():
            for inner in _seen_by_git(folder, chosen):
                yield f"{name}/{inner}"
        else:
            chosen.left_out.append(name)  # a submodule that has not been checked out


def _below(root: Path) -> Iterator[str]:
    """All files below a directory that no git looks after."""
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = sorted(set(folders) - WITHOUT_GIT - set(links))
        for name in (*files, *links):
            if not name.endswith(".pyc"):
                yield os.path.relpath(Path(folder, name), root)


def shown(name: str) -> str:
    """A file's name as it may stand in a sentence, whatever bytes it has."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# Packing


def pack(tree: Tree, files: list[str], archive: IO[bytes], step: Callable[[int], None] = lambda _: None) -> str:
    """Write a tar.gz of the files and return the hash of its uncompressed bytes, which names, modes and content decide.

    Args:
        files: relative to the root, sorted.
        step: told of each file's size when it is packed.
    """
    with gzip.GzipFile(filename="", mode="wb", fileobj=archive, compresslevel=6, mtime=0) as packed:
        return _tar(tree, files, cast("IO[bytes]", packed), step)


def digest(tree: Tree) -> str | None:
    """The hash that the tree's code has now, None when it could not be shipped as it is."""
    try:
        chosen = choose(tree)
        if chosen.refused:
            return None
        with Path(os.devnull).open("wb") as nowhere:
            return _tar(tree, chosen.files, nowhere)
    except (Failure, OSError):
        return None


def _tar(tree: Tree, files: list[str], archive: IO[bytes], step: Callable[[int], None] = lambda _: None) -> str:
    """Write a tar of the files and return its hash. A change of what is written here changes the hash of all code."""
    digest = hashlib.sha256()
    with tarfile.open(
        fileobj=cast("IO[bytes]", _Tee(archive, digest.update)), mode="w|", format=tarfile.PAX_FORMAT
    ) as tar:
        for name in files:
            path = tree.root / name
            entry = tarfile.TarInfo(name.replace(os.sep, "/"))
            if path.is_symlink():
                entry.type = tarfile.SYMTYPE
                # An absolute link is made relative: the tree stands elsewhere on a worker.
                entry.linkname = os.path.relpath(os.path.normpath(path.parent / path.readlink()), path.parent)
                entry.mode = 0o777
                tar.addfile(entry)
                continue
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                entry.size = found.st_size
                entry.mode = 0o755 if found.st_mode & 0o100 else 0o644
                tar.addfile(entry, file)
            step(entry.size)
    return digest.hexdigest()[:32]


class _Tee:
    """A file that also tells a hash what is written."""

    def __init__(self, file: IO[bytes], also: Callable[[bytes], None]) -> None:
        self._file = file
        self._also = also

    def write(self, data: bytes) -> int:
        self._also(data)
        return self._file.write(data)


def ship(tree: Tree, storage: Storage) -> str:
    """Store the tree's code, unless it is there already, and return its hash. Ends with the list of what is refused."""
    chosen = choose(tree)
    if chosen.refused:
        many = len(chosen.refused)
        listed = "\n".join(f"  {line}" for line in chosen.refused[:50]) + ("\n  …" if many > 50 else "")
        do = "let git ignore" if tree.git else "move away"
        fail(f"the code under {tree.root} cannot be shipped: {do} (or remove) what follows\n{listed}", EXIT_USAGE)
    if not chosen.files:
        fail(f"there is no code to ship under {tree.root}")
    if chosen.left_out:
        note(f"left out of the code: {', '.join(map(shown, chosen.left_out[:10]))}")
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as archive, progress("packing the code") as bar:
        task = bar.tasks[0].id
        bar.update(task, total=max(1, chosen.total), visible=chosen.total >= SHOW_PROGRESS)
        try:
            digest = pack(tree, chosen.files, archive, lambda size: bar.advance(task, size))
        except OSError as error:
            fail(f"the code under {tree.root} changed while it was packed, or cannot be read: {error}")
        key = layout.code(digest)
        if not storage.exists(key):
            bar.update(task, description="uploading the code")
            archive.flush()
            storage.upload(Path(archive.name), key)
    return digest


class GitRefused(Exception):
    """git does not answer: its own sentence, or why it could not be asked."""


def git(folder: Path, *words: str) -> bytes | None:
    """What git answers in a directory, None when it refuses or is not there."""
    try:
        return _ask(folder, *words)
    except GitRefused:
        return None


def _ask(folder: Path, *words: str) -> bytes:
    """What git answers in a directory. Raises GitRefused."""
    try:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise GitRefused("git did not answer within two minutes") from None
    except OSError as error:
        raise GitRefused(f"git cannot be run: {error.strerror}") from None
    if answer.returncode != 0:
        sentence = " ".join(answer.stderr.decode("utf-8", "replace").split())
        raise GitRefused(sentence or f"git ended with {answer.returncode} and gave no reason")
    return answer.stdout


def state(folder: Path) -> dict[str, Any] | None:
    """Commit and cleanness of the tree that is submitted, None outside of git."""
    commit = git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    dirty = bool(git(folder, "status", "--porcelain", "--untracked-files=normal"))
    return {"commit": commit.decode().strip(), "dirty": dirty}
