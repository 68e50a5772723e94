"""The run's code on a worker: fetched and unpacked once, or used in place on the machine of whoever submitted it.

Called by the agent before it starts. An archive is trusted only as far as its hash, and nothing in it is written outside of its
directory.
"""

import gzip
import hashlib
import os
import tarfile
import tempfile
from pathlib import Path

from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.storage import Storage


class CodeError(RuntimeError):
    """The run's code cannot be used here; the text is one sentence."""


def root_of(storage: Storage, manifest: Manifest, work: Path) -> Path:
    """The root of the run's code on this machine. Raises CodeError, StorageError."""
    if manifest.code is not None:
        return _unpacked(storage, manifest.code, work / "code")
    root = Path(manifest.code_root or ".")
    if not root.is_dir():
        raise CodeError(f"the run's code was used in place at {root}, and this machine has no such directory")
    return root


def import_path(manifest: Manifest, root: Path) -> list[str]:
    """Where jobs run and from where they import the run's code, before anything that is installed: the first is the job's directory."""
    return [str((root / folder).resolve()) for folder in (manifest.submit_dir, *manifest.python_path)]


def _unpacked(storage: Storage, digest: str, folder: Path) -> Path:
    target, complete = folder / digest, folder / f"{digest}.complete"
    if complete.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = Path(scratch, "code.tar.gz")
        storage.download(layout.code(digest), archive)
        _check(archive, digest)
        extract(archive, target)
    complete.touch()
    return target


def _check(archive: Path, digest: str) -> None:
    total = hashlib.sha256()
    try:
        with gzip.open(archive) as file:
            while piece := file.read(1 << 20):
                total.update(piece)
    except (OSError, EOFError) as error:
        raise CodeError(f"the code {layout.code(digest)} is damaged: {error}") from error
    if total.hexdigest()[: len(digest)] != digest:
        raise CodeError(f"the code {layout.code(digest)} is damaged: its hash is another one")


def extract(archive: Path, target: Path) -> None:
    """Unpack a tar.gz of user code; raises CodeError for a member that would be written elsewhere or is no file."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(target, filter="data")
            else:  # Python before 3.11.4, such as Debian 12's
                for member in tar:
                    tar.extract(_harmless(member, target.resolve()), target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CodeError(f"the run's code cannot be unpacked: {error}") from error


def _harmless(member: tarfile.TarInfo, target: Path) -> tarfile.TarInfo:
    """The member as it may be unpacked below `target`, a real path; what tarfile's own filter does. Raises TarError.

    Asked for one member after the other, so that a link which has been unpacked is seen.
    """
    member.name = member.name.lstrip("/")
    goes = [target / member.name]
    if member.issym() or member.islnk():
        if Path(member.linkname).is_absolute():
            raise tarfile.TarError(f"{member.name!r} is a link to an absolute path")
        goes.append((goes[0].parent if member.issym() else target) / member.linkname)
    if not all(place.resolve().is_relative_to(target) for place in goes):
        raise tarfile.TarError(f"{member.name!r} would be outside of the directory")
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise tarfile.TarError(f"{member.name!r} is a special file")
    member.mode = (member.mode & 0o755) | (0o700 if member.isdir() else 0o600)
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return member
