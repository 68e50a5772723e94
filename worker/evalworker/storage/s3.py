"""A bucket as the store, with S3's conditional writes and what they demand of a client.

A conditional PUT answers 412 when it is lost and 409 when it is to be sent again; a PUT that was sent twice may have lost to
itself, so what is there is read back. Transfers of any size go through boto3's managed ones.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError

from evalworker.aws import explain
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

TRIES = 5
"""Times a conditional write is sent and a body read; botocore's own retries of each call come on top."""

FIRST_PAUSE_S = 0.1
"""Before the second try; doubled at each, with jitter of half."""

_TRANSFER = TransferConfig(max_concurrency=4, preferred_transfer_client="classic")
_TRANSFER.max_in_memory_upload_chunks = 4  # of 8 MB: what an upload holds beyond those that are being sent
_ERRORS = (ClientError, BotoCoreError, Boto3Error, OSError)
_GONE = frozenset({"NoSuchKey", "404", "NotFound"})


class S3Storage:
    """The store in a bucket, below an optional prefix."""

    def __init__(
        self,
        bucket: str,
        client: Any,
        *,
        prefix: str = "",
        page_size: int = 1000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Args: client: boto3's S3 client. page_size: objects a listing asks for at once. sleep: held by tests."""
        self.bucket = bucket
        self._client = client
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._page_size = page_size
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"S3Storage('s3://{self.bucket}/{self._prefix}')"

    def url(self, key: str) -> str:
        """The object's s3:// URL."""
        return f"s3://{self.bucket}/{self._prefix}{check_key(key)}"

    def get(self, key: str) -> Stored:
        """See Storage."""
        found = self._read("read", key)
        assert found is not None
        return found

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """See Storage."""
        return self._read("read", key, **({"IfNoneMatch": etag} if etag else {}))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See Storage."""
        if length <= 0:
            return b""
        found = self._read("read", key, Range=f"bytes={start}-{start + length - 1}")
        return found.body if found else b""

    def head(self, key: str) -> Info | None:
        """See Storage."""
        try:
            with self._errors("read", key):
                answer = self._client.head_object(**self._at(key))
        except Missing:
            return None
        return Info(key, answer["ContentLength"], answer["ETag"], answer["LastModified"])

    def exists(self, key: str) -> bool:
        """See Storage."""
        return self.head(key) is not None

    def put(self, key: str, body: bytes) -> str:
        """See Storage."""
        with self._errors("write", key):
            return str(self._client.put_object(**self._at(key), Body=body)["ETag"])

    def create(self, key: str, body: bytes) -> str:
        """See Storage."""
        return self._conditional(key, body, AlreadyExists(f"{self.url(key)} exists already"), IfNoneMatch="*")

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """See Storage."""
        return self._conditional(key, body, Changed(f"{self.url(key)} was changed by somebody else"), IfMatch=etag)

    def upload(self, path: Path, key: str) -> None:
        """See Storage. Given a name, boto3 would open it anew for each part, and mix two versions of a file that is replaced."""
        target = self._key(key)
        with self._errors("write", key), path.open("rb") as file:
            self._client.upload_fileobj(file, self.bucket, target, Config=_TRANSFER)

    def download(self, key: str, path: Path) -> None:
        """See Storage. boto3 writes to a temporary file beside `path` and renames it."""
        with self._errors("read", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(self.bucket, self._key(key), str(path), Config=_TRANSFER)

    def copy(self, source: str, target: str) -> None:
        """See Storage."""
        if source == target:  # S3 refuses that
            if not self.exists(source):
                raise Missing(f"there is no {self.url(source)}")
            return
        origin = {"Bucket": self.bucket, "Key": self._key(source)}
        with self._errors("copy", source):
            self._client.copy(origin, self.bucket, self._key(target), Config=_TRANSFER)

    def delete(self, key: str) -> None:
        """See Storage."""
        with self._errors("delete", key):
            self._client.delete_object(**self._at(key))

    def list(self, prefix: str) -> Iterator[Info]:
        """See Storage."""
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                key = item["Key"][len(self._prefix) :]
                if not key.endswith("/"):  # the console's folders are no objects of ours
                    yield Info(key, item["Size"], item["ETag"], item["LastModified"])

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See Storage."""
        start = len(self._prefix) + len(prefix)
        for page in self._pages(prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", []):
                yield item["Prefix"][start:].rstrip("/")

    def probe(self) -> None:
        """See Storage."""
        key = f"probe-{secrets.token_hex(8)}"
        self.create(key, b"probe")
        try:
            self.get(key)
        finally:
            self.delete(key)

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(key)}

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket,
            Prefix=self._prefix + check_prefix(prefix),
            PaginationConfig={"PageSize": self._page_size},
            **options,
        )
        with self._errors("list", prefix):
            yield from pages

    def _read(self, doing: str, key: str, **options: str) -> Stored | None:
        """The object's content, None where a condition or range says that there is none to read."""
        for left in reversed(range(TRIES)):
            try:
                with self._errors(doing, key):
                    answer = self._client.get_object(**self._at(key), **options)
                    return Stored(answer["Body"].read(), answer["ETag"])
            except StorageError as error:
                fault = error.fault
                if fault is not None and (fault.status in (304, 416) or fault.code in ("304", "InvalidRange")):
                    return None
                if not left or not error.retryable or (fault is not None and fault.status):  # botocore retried answers
                    raise
            self._pause(TRIES - 1 - left)
        raise AssertionError("unreachable")

    def _conditional(self, key: str, body: bytes, lost: StorageError, **condition: str) -> str:
        """A conditional PUT that ends with the new tag, `lost`, or an error that says why."""
        uncertain = False  # whether an earlier sending of ours may have got through
        for turn in range(TRIES):
            last = turn == TRIES - 1
            try:
                return str(self._client.put_object(**self._at(key), Body=body, **condition)["ETag"])
            except (ClientError, BotoCoreError) as error:
                fault = explain(error)
                uncertain = uncertain or fault.resent
                if fault.status == 412 or (fault.status == 404 and "IfMatch" in condition and fault.code in _GONE):
                    own = self._own(key, body) if uncertain else None
                    if own is None:
                        raise lost from error
                    return own
                if last or not (fault.status == 409 or fault.retryable):
                    raise self._error(error, "write", key) from error
                uncertain = uncertain or fault.status != 409
            self._pause(turn)
        raise AssertionError("unreachable")

    def _own(self, key: str, body: bytes) -> str | None:
        """The tag of what is there if it is our body, byte for byte."""
        try:
            found = self.get(key)
        except Missing:
            return None
        return found.etag if found.body == body else None

    def _pause(self, turn: int) -> None:
        self._sleep(FIRST_PAUSE_S * 2**turn * random.uniform(0.5, 1.5))  # noqa: S311

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except _ERRORS as error:
            raise self._error(error, doing, key) from error

    def _error(self, error: BaseException, doing: str, key: str) -> StorageError:
        fault = explain(error)
        where = f"s3://{self.bucket}/{self._prefix}{key}"
        if fault.code == "NoSuchBucket":
            return StorageError(f"there is no bucket {self.bucket}: check S3_BUCKET_NAME", fault)
        if fault.code in _GONE:
            return Missing(f"there is no {where}", fault)
        if fault.status == 403 and not fault.credentials and fault.category is None:
            also = ", or the object is missing and s3:ListBucket is not allowed" if doing == "read" else ""
            return Denied(f"cannot {doing} {where}: {fault.text}{also}", fault)
        return StorageError(f"cannot {doing} {where}: {fault.text}", fault)
