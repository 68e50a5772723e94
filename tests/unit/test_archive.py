"""`evalops.logs.archive`: members of zip archives by byte ranges."""

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalops.logs.archive import BadArchive, open_archive


def _zip(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
        archive.comment = comment
    return out.getvalue()


class _Counting:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.reads = raw, 0

    def __call__(self, start: int, length: int) -> bytes:
        self.reads += 1
        return self.raw[start : start + length]


def test_a_small_archive_costs_one_read():
    raw = _zip([("a", b"1"), ("header.json", b"{}")])
    read = _Counting(raw)
    archive = open_archive(len(raw), read)
    assert (archive.complete, archive.read("a"), archive.read("header.json")) == (True, b"1", b"{}")
    assert read.reads == 1


def test_the_header_of_a_large_archive_costs_two_reads_and_the_directory_a_third():
    raw = _zip([(f"samples/{i}_epoch_1.json", b"x" * 100) for i in range(3000)] + [("header.json", b"h" * 5000)])
    read = _Counting(raw)
    archive = open_archive(len(raw), read, 4096)
    assert not archive.complete
    assert archive.read("header.json") == b"h" * 5000
    assert read.reads == 2
    archive.load()
    assert (archive.complete, len(archive.members), read.reads) == (True, 3001, 3)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_members_with_one_name_the_last_counts():
    raw = _zip([("header.json", b"old"), ("x", b""), ("header.json", b"new")])
    archive = open_archive(len(raw), _Counting(raw))
    assert archive.read("header.json") == b"new"
    assert list(archive.members) == ["x", "header.json"]


def test_a_comment_that_looks_like_an_archive_is_a_comment():
    raw = _zip([("a", b"1")], comment=b'{"etag":"x"}')
    archive = open_archive(len(raw), _Counting(raw))
    assert (archive.comment, archive.read("a")) == (b'{"etag":"x"}', b"1")


def test_zip64_records_are_read(monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    raw = _zip([("a", b"1" * 99), ("b", b"2" * 99), ("c", b"3" * 99)], zipfile.ZIP_STORED)
    assert b"PK\x06\x06" in raw
    archive = open_archive(len(raw), _Counting(raw))
    assert [archive.read(name) for name in "abc"] == [b"1" * 99, b"2" * 99, b"3" * 99]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "empty"),
        (b"no archive at all", "no zip archive"),
        (_zip([("a", b"1" * 500)])[:60], "cut off"),
        (_zip([("a", b"1")])[40:], "outside"),
    ],
    ids=["empty", "no archive", "cut off at its end", "cut off at its beginning"],  # the bytes hold the time
)
def test_what_is_no_archive_says_so(raw, why):
    with pytest.raises(BadArchive, match=why):
        open_archive(len(raw), _Counting(raw)).read("a")


def test_a_flipped_byte_is_noticed():
    raw = bytearray(_zip([("a", b"content")], zipfile.ZIP_STORED))
    raw[raw.index(b"content")] ^= 1
    with pytest.raises(BadArchive, match="checksum"):
        open_archive(len(raw), _Counting(bytes(raw))).read("a")


def test_a_member_that_unpacks_to_more_than_it_says_is_refused():
    raw = bytearray(_zip([("a", b"0" * 100_000)]))
    at = raw.rindex(b"PK\x01\x02") + 24
    raw[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(BadArchive):
        open_archive(len(raw), _Counting(bytes(raw))).read("a")


_GOOD = _zip([("header.json", b'{"a": 1}'), ("samples/1.json", b"x" * 300)])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(_GOOD) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(_GOOD)))
def test_damage_never_raises_anything_but_bad_archive(flips, length):
    raw = bytearray(_GOOD)
    for at, value in flips:
        raw[at] = value
    raw = raw[:length]
    try:
        archive = open_archive(len(raw), _Counting(bytes(raw)))
        for name in list(archive.members):
            archive.read(name)
    except BadArchive:
        pass
