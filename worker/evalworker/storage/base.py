"""What both stores promise: the interface, what it returns, and its errors.

The stores are in `local` and `s3`; callers import all of it from `evalworker.storage`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from evalworker.aws import ServiceError
from evalworker.contract.failures import Category

_NO_PARTS = frozenset({"", ".", ".."})


class StorageError(ServiceError):
    """The store did not do what was asked; the text is one sentence and `category` what the failure table needs."""

    default_category = Category.STORAGE


class Missing(StorageError):
    """There is no such object (404)."""


class Denied(StorageError):
    """Access was refused (403): without s3:ListBucket that is also the answer for a missing object."""


class AlreadyExists(StorageError):
    """`create` lost: somebody else's object is there."""


class Changed(StorageError):
    """`replace` lost: the object is no longer the one that was read."""


@dataclass(frozen=True)
class Stored:
    """An object's whole content and the tag of exactly that content."""

    body: bytes
    etag: str


@dataclass(frozen=True)
class Info:
    """What a listing says of an object: size in bytes, time of the last write in UTC."""

    key: str
    size: int
    etag: str
    modified: datetime


class Storage(Protocol):
    """A store. All methods raise StorageError, or one of its kinds where said; all are usable from several threads."""

    def url(self, key: str) -> str:
        """What a person or Inspect would open: a path, or an s3:// URL."""

    def get(self, key: str) -> Stored:
        """The object; raises Missing."""

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """The object unless its tag is still `etag`; raises Missing."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes from offset `start`; b"" past the end. Raises Missing."""

    def head(self, key: str) -> Info | None:
        """The object's size, tag and time; None when it is missing."""

    def exists(self, key: str) -> bool:
        """Whether the object is there."""

    def put(self, key: str, body: bytes) -> str:
        """Write whatever was there before; returns the tag."""

    def create(self, key: str, body: bytes) -> str:
        """Write an object that does not exist: of all who try, one wins, the others get AlreadyExists.

        A writer who was cut off may have won without knowing: what it finds is compared with its own body, so bodies of
        different writers should differ.
        """

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """Write over exactly the content that has `etag`; raises Changed (also when the object is gone)."""

    def upload(self, path: Path, key: str) -> None:
        """A local file of any size to an object: one version of it, even if the file is replaced meanwhile."""

    def download(self, key: str, path: Path) -> None:
        """An object of any size to a local file, which appears whole or not at all; raises Missing."""

    def copy(self, source: str, target: str) -> None:
        """An object to another key of this store; again is the same as once. Raises Missing."""

    def delete(self, key: str) -> None:
        """Remove the object if it is there."""

    def list(self, prefix: str) -> Iterator[Info]:
        """All objects whose key begins with the prefix, in the order of their keys."""

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """The names directly below a prefix that ends with "/" (or is "") under which there are objects."""

    def probe(self) -> None:
        """Write, read and remove a small object; raises the sentence that says why the store cannot be used."""


def check_key(key: str) -> str:
    """The key itself if it names one object below the root and cannot lead out of it; raises StorageError."""
    if not key or "\0" in key or any(part in _NO_PARTS for part in key.split("/")):
        raise StorageError(
            f"{key!r} is no key of an object: expected a relative path without . and ..", category=Category.STORAGE
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself if it is the beginning of a key; raises StorageError."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
