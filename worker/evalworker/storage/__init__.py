"""The store of a fleet: a bucket or a directory behind one interface, chosen by one URL.

Called by everyone who reads or writes below the root; keys come from `evalworker.contract.layout` alone. Both stores have
the same semantics, conditional writes included, and nothing here knows what an object means.
"""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from evalworker import aws
from evalworker.contract.failures import Category
from evalworker.storage.base import (
    AlreadyExists,
    Changed,
    Denied,
    Info,
    Missing,
    Storage,
    StorageError,
    Stored,
)
from evalworker.storage.local import LocalStorage

__all__ = [
    "AlreadyExists",
    "Changed",
    "Denied",
    "Info",
    "LocalStorage",
    "Missing",
    "Storage",
    "StorageError",
    "Stored",
    "open_storage",
]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>//.*)|(?P<s3>[sS]3:.*)")


def open_storage(url: str) -> Storage:
    """The store of a URL: `s3://bucket[/prefix]`, `file:///directory`, or a directory. Raises StorageError (config).

    What is meant as a bucket is never taken for a local path, nor the other way round. No network is used yet.
    """
    found = _SCHEME.fullmatch(url)
    if found is None:
        return LocalStorage(Path(url or "."))
    scheme = "s3" if found["s3"] else found["scheme"].lower()
    if scheme == "s3":
        bucket, _, prefix = (found["rest"] or "").removeprefix("//").partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise _unusable(url, "it names no bucket; expected s3://bucket or s3://bucket/prefix")
        from evalworker.storage.s3 import S3Storage  # a local fleet's processes do without boto3

        return S3Storage(bucket, aws.client("s3"), prefix=prefix)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise _unusable(url, "it names another machine; expected file:///directory")
        return LocalStorage(Path(unquote(parts.path)))
    raise _unusable(url, "expected s3://bucket, file:///directory or a directory")


def _unusable(url: str, why: str) -> StorageError:
    return StorageError(f"cannot use {url!r} as the place for logs: {why}", category=Category.CONFIG)
