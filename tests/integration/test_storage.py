"""The promises of `evalworker.storage`, asked of a directory and of S3 on two emulators alike."""

import errno
import functools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, IncompleteReadError
from botocore.response import StreamingBody
from botocore.stub import Stubber
from emulators import REGION, Emulator

from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.failures import Category
from evalworker.storage import (
    AlreadyExists,
    Changed,
    Denied,
    LocalStorage,
    Missing,
    Storage,
    StorageError,
    open_storage,
)
from evalworker.storage.s3 import S3Storage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
ESCAPES = ["../x", "a/../../x", "/etc/x", "a//b", "./a", "a/.", "", "a\0b", "logs/../../x", ".."]


def s3_client(emulator: Emulator) -> Any:
    """boto3's, because its transfers are used."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.Session(region_name=REGION, **keys).client("s3", endpoint_url=emulator.endpoint)


shared_client = functools.cache(s3_client)


def make_bucket(emulator: Emulator, client: Any = None, **options: Any) -> S3Storage:
    """A store in a new bucket; give a client of its own to one whose events are hooked."""
    client = client or shared_client(emulator)
    name = f"b-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    return S3Storage(name, client, page_size=7, sleep=lambda _: None, **options)


@pytest.fixture(params=["local", "ministack", "moto", "ministack-prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "root")
    name, _, prefix = request.param.partition("-")
    return make_bucket(request.getfixturevalue(name), prefix=prefix)


@pytest.fixture
def bucket(emulator: Emulator) -> S3Storage:
    return make_bucket(emulator, s3_client(emulator))


def one_winner(write: Callable[[int], str], lost: type[StorageError]) -> tuple[int, str]:
    """Eight threads write at once; returns who won with what tag, after seeing that all others lost."""
    ready = threading.Barrier(8)

    def attempt(index: int) -> str | None:
        ready.wait()
        try:
            return write(index)
        except lost:
            return None

    with ThreadPoolExecutor(8) as pool:
        tags = list(pool.map(attempt, range(8)))
    winners = [(index, tag) for index, tag in enumerate(tags) if tag is not None]
    assert len(winners) == 1
    return winners[0]


def test_put_get_and_head_agree(store: Storage) -> None:
    etag = store.put("a/b.json", b"\x00body")
    stored = store.get("a/b.json")
    info = store.head("a/b.json")
    assert stored.body == b"\x00body"
    assert info is not None
    assert (info.key, info.size, info.etag, stored.etag) == ("a/b.json", 5, etag, etag)
    assert info.modified.tzinfo is not None
    assert store.exists("a/b.json")


def test_an_empty_object_is_an_object(store: Storage) -> None:
    store.put("a", b"")
    assert store.get("a").body == b""
    assert store.exists("a")
    assert store.read_range("a", 0, 10) == b""


def test_missing_is_its_own_answer(store: Storage, tmp_path: Path) -> None:
    assert store.head("none") is None
    assert not store.exists("none")
    store.delete("none")
    for call in (
        lambda: store.get("none"),
        lambda: store.get_if_changed("none", '"x"'),
        lambda: store.read_range("none", 0, 1),
        lambda: store.copy("none", "other"),
        lambda: store.copy("none", "none"),
        lambda: store.download("none", tmp_path / "x"),
    ):
        with pytest.raises(Missing, match=r"there is no .*none"):
            call()
    assert not (tmp_path / "x").exists()


def test_a_folder_is_no_object(store: Storage) -> None:
    store.put("a/b", b"x")
    assert store.head("a") is None
    with pytest.raises(Missing):
        store.get("a")


def test_conditional_get(store: Storage) -> None:
    first = store.put("a", b"1")
    assert store.get_if_changed("a", first) is None
    second = store.put("a", b"2")
    assert second != first
    changed = store.get_if_changed("a", first)
    assert changed is not None
    assert (changed.body, changed.etag) == (b"2", second)
    assert store.get_if_changed("a", None) == changed


def test_create_only_once(store: Storage) -> None:
    etag = store.create("a/x", b"first")
    with pytest.raises(AlreadyExists, match="a/x exists already"):
        store.create("a/x", b"second")
    with pytest.raises(AlreadyExists):
        store.create("a/x", b"first")  # the same words from somebody else have lost too
    assert (store.get("a/x").body, store.get("a/x").etag) == (b"first", etag)


def test_of_many_creators_one_wins(store: Storage) -> None:
    for round_ in range(5):
        winner, etag = one_winner(
            lambda index, key=f"r/{round_}": store.create(key, f"{index}".encode()), AlreadyExists
        )
        stored = store.get(f"r/{round_}")
        assert (stored.body, stored.etag) == (f"{winner}".encode(), etag)


def test_replace_only_what_was_read(store: Storage) -> None:
    old = store.put("a", b"1")
    new = store.replace("a", b"2", old)
    assert store.get("a").etag == new
    with pytest.raises(Changed, match="changed by somebody else"):
        store.replace("a", b"3", old)
    store.delete("a")
    with pytest.raises(Changed):
        store.replace("a", b"4", new)
    assert not store.exists("a")


def test_of_many_replacers_one_wins(store: Storage) -> None:
    etag = store.put("a", b"start")
    for _ in range(5):
        winner, etag = one_winner(lambda index, tag=etag: store.replace("a", f"{index}".encode(), tag), Changed)
        assert store.get("a").body == f"{winner}".encode()
        etag = store.put("a", os.urandom(8))


def test_a_counter_under_contention_loses_no_step(store: Storage) -> None:
    store.put("n", b"0")

    def step(_: int) -> None:
        while True:
            stored = store.get("n")
            try:
                store.replace("n", str(int(stored.body) + 1).encode(), stored.etag)
            except Changed:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(step, range(20)))
    assert store.get("n").body == b"20"


def test_ranges(store: Storage) -> None:
    store.put("a", b"0123456789")
    assert store.read_range("a", 2, 3) == b"234"
    assert store.read_range("a", 8, 100) == b"89"
    assert store.read_range("a", 10, 5) == b""
    assert store.read_range("a", 3, 0) == b""


def test_listing_in_pages_and_in_order(store: Storage) -> None:
    keys = [f"p/{index:03d}" for index in range(20)] + [
        "p-x",
        "p.x",
        "p/a/b",
        "p/a.b",
        "p/a-b",
        "q",
        "logs/working/r/l.eval",
    ]
    for key in keys:
        store.put(key, key.encode())
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("p/")] == sorted(key for key in keys if key.startswith("p/"))
    assert [info.key for info in store.list("p/01")] == [f"p/01{digit}" for digit in range(10)]
    assert [info.key for info in store.list("logs/wor")] == ["logs/working/r/l.eval"]
    assert list(store.list("none/")) == []
    for info in store.list("p/a"):
        head = store.head(info.key)
        assert head is not None
        assert (head.size, head.etag) == (info.size, info.etag)


def test_folders_in_one_listing(store: Storage) -> None:
    for key in ["w/a/1", "w/a/2", "w/b/c/1", "w/file", "x/1", *(f"w/many{index}/f" for index in range(9))]:
        store.put(key, b"")
    store.put("w/gone/1", b"")
    store.delete("w/gone/1")
    assert list(store.list_dirs("w/")) == ["a", "b", *(f"many{index}" for index in range(9))]
    assert list(store.list_dirs("")) == ["w", "x"]
    assert list(store.list_dirs("none/")) == []


def test_files_go_up_and_come_down(store: Storage, tmp_path: Path) -> None:
    source, target = tmp_path / "a.bin", tmp_path / "new" / "folder" / "b.bin"
    source.write_bytes(os.urandom(9 * 1024 * 1024))  # more than one part
    store.upload(source, "big/a.bin")
    store.download("big/a.bin", target)
    assert target.read_bytes() == source.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["b.bin"]
    store.copy("big/a.bin", "logs/working/r/a.bin")
    store.copy("big/a.bin", "logs/working/r/a.bin")
    store.copy("big/a.bin", "big/a.bin")
    assert store.get("logs/working/r/a.bin").body == source.read_bytes()


def test_a_file_that_is_replaced_while_it_goes_up_arrives_as_one_version(bucket: S3Storage, tmp_path: Path) -> None:
    """Inspect replaces an unfinished log at every flush; parts of two versions would be a log that nobody can read."""
    path, newer = tmp_path / "log.eval", tmp_path / "newer"
    before = os.urandom(9 * 1024 * 1024)  # more than one part
    path.write_bytes(before)
    newer.write_bytes(os.urandom(10 * 1024 * 1024))
    bucket._client.meta.events.register_first(
        "before-call.s3.CreateMultipartUpload", lambda **_: newer.replace(path) and None
    )
    bucket.upload(path, "log.eval")
    assert not newer.exists()
    assert bucket.get("log.eval").body == before


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
def test_a_refused_part_is_sent_again_from_its_beginning(bucket: S3Storage, tmp_path: Path, operation: str) -> None:
    path, left = tmp_path / "log.eval", [503, 503]
    path.write_bytes(os.urandom(1024 if operation == "PutObject" else 9 * 1024 * 1024))

    def refuse(request: Any, **_: Any) -> AWSResponse | None:
        if not left:
            return None
        request.body.read()
        raw = SimpleNamespace(stream=lambda: iter([b"<Error><Code>SlowDown</Code></Error>"]))
        return AWSResponse(request.url, left.pop(), {}, raw)

    bucket._client.meta.events.register_first(f"before-send.s3.{operation}", refuse)
    bucket.upload(path, "log.eval")
    assert left == []
    assert bucket.get("log.eval").body == path.read_bytes()


@pytest.mark.parametrize("key", ESCAPES)
def test_no_key_leads_out_of_the_root(store: Storage, tmp_path: Path, key: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: store.get(key),
        lambda: store.put(key, b"x"),
        lambda: store.create(key, b"x"),
        lambda: store.replace(key, b"x", '"x"'),
        lambda: store.delete(key),
        lambda: store.head(key),
        lambda: store.copy("a", key),
        lambda: store.upload(tmp_path, key),
        lambda: store.url(key),
    ]
    if key:
        calls += [lambda: list(store.list(key)), lambda: list(store.list_dirs(f"{key}/"))]
    store.put("a", b"x")
    for call in calls:
        with pytest.raises(StorageError, match="is no key"):
            call()
    assert [info.key for info in store.list("")] == ["a"]


def test_a_probe_leaves_nothing(store: Storage) -> None:
    store.probe()
    assert list(store.list("")) == []


# The directory alone


def test_where_files_lie_on_a_local_root(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.put(layout.control(RUN), b"{}")
    store.put(layout.working(RUN) + "x.eval", b"log")
    assert (tmp_path / "logs/fleet" / RUN / "control.json").read_bytes() == b"{}"
    assert (tmp_path / "logs/working" / RUN / "x.eval").read_bytes() == b"log"
    assert store.url(layout.control(RUN)) == str(tmp_path / "logs/fleet" / RUN / "control.json")
    with pytest.raises(StorageError):
        store.put(f"logs/fleet/{RUN}/control.json", b"two names of one file")


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_storage(".")
    monkeypatch.chdir("/")
    store.put("a", b"x")
    assert (tmp_path / "logs/fleet/a").exists()


def test_unfinished_files_are_never_listed(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.put("w/.buffer/1", b"x")
    (tmp_path / "logs/fleet/w/.0123456789abcdef.part").write_bytes(b"of a killed writer")
    assert [info.key for info in store.list("")] == ["w/.buffer/1"]


def test_tags_do_not_depend_on_the_kernels_coarse_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tick is some milliseconds: files of one size in a reused inode would be taken for the same content."""
    store = LocalStorage(tmp_path)
    assert len({store.put("a", b"%03d" % index) for index in range(300)}) == 300
    exact = 1_700_000_000_123_456_789
    monkeypatch.setattr(time, "time_ns", lambda: exact)
    store.put("a", b"x")
    assert (tmp_path / "logs/fleet/a").stat().st_mtime_ns == exact


def test_a_full_disk_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = LocalStorage(tmp_path)
    store.put("a", b"x")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(StorageError, match="free some space") as caught:
        store.copy("a", "b")
    assert caught.value.category is Category.DISK_FULL
    assert [path.name for path in (tmp_path / "logs/fleet").iterdir()] == ["a"]


# S3 alone: answers that an emulator does not give


@pytest.fixture
def stubbed(ministack: Emulator) -> Any:
    client = s3_client(ministack)
    with Stubber(client) as stub:
        yield S3Storage("bucket-x", client, sleep=lambda _: None), stub
        stub.assert_no_pending_responses()


def test_denied_is_not_missing(stubbed: Any) -> None:
    store, stub = stubbed
    stub.add_client_error("get_object", "AccessDenied", "Access Denied", 403)
    with pytest.raises(
        Denied, match=r"cannot read s3://bucket-x/a: access denied .*s3:ListBucket is not allowed"
    ) as caught:
        store.get("a")
    assert caught.value.category is Category.STORAGE
    stub.add_client_error("head_object", "403", "Forbidden", 403)
    with pytest.raises(Denied):
        store.exists("a")
    stub.add_client_error("get_object", "NoSuchKey", "", 404)
    with pytest.raises(Missing):
        store.get("a")
    stub.add_client_error("put_object", "NoSuchBucket", "", 404)
    with pytest.raises(StorageError, match="there is no bucket bucket-x") as other:
        store.put("a", b"")
    assert not isinstance(other.value, Missing)


def test_a_wrong_clock_and_expired_credentials_are_told_apart(stubbed: Any) -> None:
    store, stub = stubbed
    stub.add_client_error("put_object", "RequestTimeTooSkewed", "The difference is too large", 403)
    with pytest.raises(StorageError, match="clock is wrong") as clock:
        store.put("a", b"")
    assert clock.value.category is Category.CLOCK
    assert not isinstance(clock.value, Denied)
    stub.add_client_error("put_object", "ExpiredToken", "The provided token has expired", 400)
    with pytest.raises(StorageError, match="have expired; renew") as expired:
        store.put("a", b"")
    assert expired.value.credentials


@pytest.mark.parametrize("status", [409, 500])
def test_a_conflict_is_sent_again(stubbed: Any, status: int) -> None:
    store, stub = stubbed
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"old"'}):
        expected = {"Bucket": "bucket-x", "Key": "a", "Body": b"1", **condition}
        stub.add_client_error("put_object", "ConditionalRequestConflict", "", status, expected_params=expected)
        stub.add_response("put_object", {"ETag": '"new"'}, expected)
        tag = store.create("a", b"1") if "IfNoneMatch" in condition else store.replace("a", b"1", '"old"')
        assert tag == '"new"'


def test_a_lost_race_after_a_conflict_is_lost_whatever_is_there(stubbed: Any) -> None:
    store, stub = stubbed
    stub.add_client_error("put_object", "ConditionalRequestConflict", "", 409)
    stub.add_client_error("put_object", "PreconditionFailed", "", 412)
    with pytest.raises(AlreadyExists):
        store.create("a", b"1")


def test_conflicts_for_ever_end(stubbed: Any) -> None:
    store, stub = stubbed
    for _ in range(5):
        stub.add_client_error("put_object", "ConditionalRequestConflict", "", 409)
    with pytest.raises(StorageError, match="ConditionalRequestConflict"):
        store.create("a", b"1")


def test_the_consoles_folders_are_no_objects(bucket: S3Storage) -> None:
    bucket._client.put_object(Bucket=bucket.bucket, Key="w/", Body=b"")
    bucket.put("w/a", b"x")
    assert [info.key for info in bucket.list("")] == ["w/a"]


class CutOff:
    """The next PUT is carried out, but its answer never arrives."""

    def __init__(self, store: S3Storage, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.left = 1
        self.meanwhile = meanwhile
        store._client.meta.events.register("needs-retry.s3.PutObject", self.answer)

    def answer(self, response: Any, endpoint: Any, **_: Any) -> None:
        if self.left and response is not None and response[0].status_code == 200:
            self.left -= 1
            self.meanwhile()
            raise ConnectionClosedError(endpoint_url=endpoint.host)


def test_a_writer_that_was_cut_off_has_won(bucket: S3Storage) -> None:
    cut = CutOff(bucket)
    etag = bucket.create("a", b"mine")
    assert cut.left == 0
    assert bucket.get("a").etag == etag
    cut.left = 1
    new = bucket.replace("a", b"mine again", etag)
    assert cut.left == 0
    assert (bucket.get("a").body, bucket.get("a").etag) == (b"mine again", new)


def test_a_writer_that_was_cut_off_and_then_overtaken_has_lost(emulator: Emulator) -> None:
    bucket = make_bucket(emulator, s3_client(emulator))
    other = S3Storage(bucket.bucket, shared_client(emulator))
    CutOff(bucket, lambda: other.put("a", b"theirs"))
    with pytest.raises(AlreadyExists):
        bucket.create("a", b"mine")
    assert bucket.get("a").body == b"theirs"


def test_botocores_own_retry_of_a_won_put_has_won(bucket: S3Storage) -> None:
    """The answer is a 500 although the object was written: botocore itself sends again and meets its own object."""
    left = [1]

    def spoil(response_dict: dict[str, Any], **_: Any) -> None:
        if left and response_dict["status_code"] == 200:
            left.pop()
            response_dict["status_code"] = 500
            response_dict["body"] = b"<Error><Code>InternalError</Code></Error>"

    bucket._client.meta.events.register("before-parse.s3.PutObject", spoil)

    etag = bucket.create("a", b"mine")
    assert left == []
    assert bucket.get("a").etag == etag


def test_a_body_that_breaks_off_is_read_again(bucket: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("a", b"whole")
    whole, left = StreamingBody.read, [1, 1]

    def read(self: StreamingBody, amt: int | None = None) -> bytes:
        if left:
            left.pop()
            raise IncompleteReadError(actual_bytes=1, expected_bytes=5)
        body: bytes = whole(self, amt)
        return body

    monkeypatch.setattr(StreamingBody, "read", read)
    assert bucket.get("a").body == b"whole"
    assert left == []


# The URL


def test_the_standard_variables_name_the_endpoint(aws_environment: Emulator) -> None:
    name = f"b-{uuid.uuid4().hex}"
    aws.client("s3").create_bucket(Bucket=name)
    store = open_storage(f"s3://{name}/a/prefix/")
    store.probe()
    store.put("k", b"x")
    assert store.url("k") == f"s3://{name}/a/prefix/k"
    assert [info.key for info in open_storage(f"s3://{name}").list("")] == ["a/prefix/k"]


@pytest.mark.parametrize(
    "url", ["s3://", "s3:bucket", "s3:/bucket/x", "S3:x", "s3:///x", "s3://Bad_Bucket", "gs://b", "file://host/x"]
)
def test_a_url_that_names_no_store_is_never_a_path(url: str) -> None:
    with pytest.raises(StorageError, match="cannot use") as caught:
        open_storage(url)
    assert caught.value.category is Category.CONFIG


def test_directories(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri()):
        store = open_storage(url)
        assert isinstance(store, LocalStorage)
        assert store.root == tmp_path / "a b"
