"""A directory as the store: files appear whole, are created by one writer alone, and are compared before they are replaced.

Keys under `logs/` are files under `<root>/logs/`, all others under `<root>/logs/fleet/`, so that a checkout holds one folder
of ours. Several processes may use one directory; nothing is forced to the disk, so a power cut may lose the last seconds.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from evalworker.storage.base import (
    AlreadyExists,
    Changed,
    Denied,
    Info,
    Missing,
    StorageError,
    Stored,
    check_key,
    check_prefix,
)

_LOGS = "logs/"
_FLEET = "logs/fleet/"
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.part")
"""Files that are being written, or were when their writer was killed."""


class LocalStorage:
    """The store below a directory, which is made at the first write."""

    def __init__(self, root: Path) -> None:
        """Args: root: the directory; relative ones are taken from the current directory now, not later."""
        self.root = root.expanduser().absolute()

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def url(self, key: str) -> str:
        """The file's path."""
        return str(self._path(key))

    def get(self, key: str) -> Stored:
        """See Storage."""
        with self._errors("read", key), self._path(key).open("rb") as file:
            return Stored(file.read(), _etag(os.fstat(file.fileno())))

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """See Storage."""
        with self._errors("read", key):
            if etag is not None and _etag(self._path(key).stat()) == etag:
                return None
        return self.get(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See Storage."""
        with self._errors("read", key), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> Info | None:
        """See Storage."""
        path = self._path(key)
        with self._errors("read", key):
            return _info(key, path.stat()) if path.is_file() else None

    def exists(self, key: str) -> bool:
        """See Storage."""
        return self.head(key) is not None

    def put(self, key: str, body: bytes) -> str:
        """See Storage."""
        with self._errors("write", key), self._written(key, body) as (part, etag), _locked(part.parent):
            part.replace(self._path(key))
            return etag

    def create(self, key: str, body: bytes) -> str:
        """See Storage. A hard link is what makes it atomic: it fails where the name is taken."""
        with self._errors("create", key), self._written(key, body) as (part, etag):
            try:
                os.link(part, self._path(key))
            except FileExistsError:
                raise AlreadyExists(f"{self.url(key)} exists already") from None
            return etag

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """See Storage. All who replace or delete in a directory hold its lock while they compare and rename."""
        path = self._path(key)
        with self._errors("replace", key), self._written(key, body) as (part, new), _locked(part.parent):
            if not path.is_file() or _etag(path.stat()) != etag:
                raise Changed(f"{path} was changed by somebody else")
            part.replace(path)
            return new

    def upload(self, path: Path, key: str) -> None:
        """See Storage."""
        with self._errors("write", key), self._part(key) as part:
            shutil.copyfile(path, part)
            _stamp(part)
            with _locked(part.parent):
                part.replace(self._path(key))

    def download(self, key: str, path: Path) -> None:
        """See Storage."""
        part = path.with_name(_part_name())
        with self._errors("read", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(self._path(key), part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def copy(self, source: str, target: str) -> None:
        """See Storage."""
        path = self._path(source)
        if not path.is_file():
            raise Missing(f"there is no {path}")
        if source != target:
            self.upload(path, target)

    def delete(self, key: str) -> None:
        """See Storage. Empty directories stay: another writer may be about to use them."""
        path = self._path(key)
        with self._errors("delete", key):
            if path.parent.is_dir():
                with _locked(path.parent):
                    path.unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Info]:
        """See Storage."""
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        with self._errors("list", prefix or "."):
            yield from self._walk(f"{folder}/" if folder else "", prefix)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See Storage."""
        check_prefix(prefix)
        with self._errors("list", prefix or "."):
            for name, path in sorted(self._children(prefix)):
                if path.is_dir() and next(self._walk(f"{prefix}{name}/", prefix), None):
                    yield name

    def probe(self) -> None:
        """See Storage."""
        key = f"probe-{secrets.token_hex(8)}"
        self.create(key, b"probe")
        try:
            if self.get(key).body != b"probe":
                raise StorageError(f"{self.root} does not give back what was written to it")
        finally:
            self.delete(key)

    def _walk(self, folder: str, prefix: str) -> Iterator[Info]:
        # By name, folders with their slash: the order of S3, without holding more than one path of folders.
        children = ((f"{name}/" if path.is_dir() else name, path) for name, path in self._children(folder))
        for name, path in sorted(children):
            key = folder + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                try:
                    yield _info(key, path.stat())
                except FileNotFoundError:  # deleted while we listed
                    continue

    def _children(self, folder: str) -> Iterator[tuple[str, Path]]:
        directories = [self._folder(folder)] + ([self.root] if folder == "" else [])
        for directory in directories:
            top = directory == self.root
            try:
                entries = list(directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                continue
            for path in entries:
                hidden = path.name != "logs" if top else folder == _LOGS and path.name == "fleet"
                if not hidden and not _UNFINISHED.fullmatch(path.name):
                    yield path.name, path

    def _folder(self, folder: str) -> Path:
        return self.root / (folder if folder.startswith(_LOGS) else _FLEET + folder)

    def _path(self, key: str) -> Path:
        check_key(key)
        if key in ("logs", "logs/fleet") or key.startswith(_FLEET):
            raise StorageError(f"{key!r} is no key of an object: {_FLEET} holds what is not under {_LOGS}")
        return self._folder(key)

    @contextmanager
    def _part(self, key: str) -> Iterator[Path]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(_part_name())
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _written(self, key: str, body: bytes) -> Iterator[tuple[Path, str]]:
        with self._part(key) as part:
            part.write_bytes(body)
            yield part, _stamp(part)

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        where = self.root / key
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:  # a directory is no object
            raise Missing(f"there is no {error.filename or where}") from error
        except PermissionError as error:
            raise Denied(
                f"cannot {doing} {error.filename or where}: permission denied; check who owns the directory"
            ) from error
        except OSError as error:
            raise StorageError.of(error, f"cannot {doing} {where}") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _part_name() -> str:
    return f".{secrets.token_hex(8)}.part"


def _stamp(path: Path) -> str:
    """Give a file the exact time: the kernel's own is a few milliseconds coarse, too coarse to tell two writes apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
    return _etag(path.stat())


def _etag(stat: os.stat_result) -> str:
    return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}-{stat.st_ino:x}"'


def _info(key: str, stat: os.stat_result) -> Info:
    return Info(key, stat.st_size, _etag(stat), datetime.fromtimestamp(stat.st_mtime, UTC))
