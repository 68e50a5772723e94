"""Members of a zip archive by byte ranges: how a log on S3 is read without fetching it.

Called by `evalops.logs.reading` with a function that reads a range. It never extracts to a path, checks each member's CRC (Inspect
does not), and takes the last of members that share a name, as Inspect does.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import zstandard

TAIL_BYTES = 64 * 1024
"""What the first request fetches: the end record, the central directory of about 800 samples, and often the header itself."""

MAX_MEMBER_BYTES = 256 * 1024 * 1024
"""The largest member that is unpacked: a header of more is no header."""

_STORED, _DEFLATE, _ZSTD = 0, 8, 93
_EOCD = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_EXTRA_GUESS = 64  # a local header's extra field may be longer than the directory's; so much is read in advance

ReadRange = Callable[[int, int], bytes]
"""(start, length) → at most that many bytes."""


class BadArchive(ValueError):
    """The bytes are no readable zip archive; the text is one clause for a person."""


@dataclass(frozen=True)
class Member:
    """An entry of the central directory. `offset` is that of its local header; sizes in bytes."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    offset: int


@dataclass
class Archive:
    """An open archive: its end (already read) and its directory.

    `complete` says whether `members` is the whole directory; when the directory is larger than the tail only its end is known,
    which is where Inspect writes the header.
    """

    size: int
    read_range: ReadRange
    tail: bytes
    directory_start: int
    directory_size: int
    count: int
    comment: bytes = b""
    members: dict[str, Member] = field(default_factory=dict)
    complete: bool = False

    def load(self) -> None:
        """Read the whole directory: one request when the tail does not hold it."""
        if self.complete:
            return
        raw = self._bytes(self.directory_start, self.directory_size)
        self.members, seen = _parse_directory(raw)
        if seen != self.count and self.count != 0xFFFF:
            raise BadArchive(f"its directory lists {seen} of {self.count} members")
        self.complete = True

    def read(self, name: str) -> bytes:
        """A member's content. Raises KeyError when there is none, BadArchive when it is damaged."""
        return self.unpack(self.members[name], None)

    def unpack(self, member: Member, window: tuple[int, bytes] | None) -> bytes:
        """A member's content, from `window` (offset, bytes) where that holds it, else by a request."""
        wanted = LOCAL_HEADER.size + len(member.name.encode()) + _LOCAL_EXTRA_GUESS + member.packed
        raw = _cut(window, member.offset, wanted) or self._bytes(member.offset, wanted)
        if len(raw) < LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
            raise BadArchive(f"{member.name} is not where the directory says")
        name_length, extra_length = LOCAL_HEADER.unpack_from(raw)[9:11]
        start = LOCAL_HEADER.size + name_length + extra_length
        if len(raw) < start + member.packed:
            raw = self._bytes(member.offset, start + member.packed)
        packed = raw[start : start + member.packed]
        if len(packed) < member.packed:
            raise BadArchive(f"{member.name} is cut off")
        return _unpacked(member, packed)

    def _bytes(self, start: int, length: int) -> bytes:
        length = min(length, self.size - start)
        held = _cut((self.size - len(self.tail), self.tail), start, length)
        return held if held is not None else self.read_range(start, length)


def open_archive(size: int, read_range: ReadRange, tail_bytes: int = TAIL_BYTES) -> Archive:
    """Read the end of an archive of `size` bytes; one request, two for an archive of more than 4 GB. Raises BadArchive."""
    if size == 0:
        raise BadArchive("the file is empty")
    tail = read_range(max(0, size - tail_bytes), tail_bytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _EOCD.size > len(tail):
        raise BadArchive("it is no zip archive, or it was cut off (no end record)")
    _, _, _, _, count, directory_size, start, comment_length = _EOCD.unpack_from(tail, at)
    comment = tail[at + _EOCD.size :][:comment_length]
    if 0xFFFFFFFF in (directory_size, start) or count == 0xFFFF:
        count, directory_size, start = _zip64(size, tail, at, read_range) or (count, directory_size, start)
    if start + directory_size > size:
        raise BadArchive("it was cut off or overwritten (its directory lies outside it)")
    archive = Archive(size, read_range, tail, start, directory_size, count, comment)
    tail_start = size - len(tail)
    if start >= tail_start:
        archive.load()
    else:
        archive.members = _last_entries(tail[: start + directory_size - tail_start])
    return archive


def _zip64(size: int, tail: bytes, at: int, read_range: ReadRange) -> tuple[int, int, int] | None:
    if at < 20 or tail[at - 20 : at - 16] != b"PK\x06\x07":
        return None  # the values are real ones: 65,535 members, say
    (offset,) = struct.unpack_from("<Q", tail, at - 12)
    if offset + 56 > size:
        raise BadArchive("its zip64 end record lies outside it")
    raw = _cut((size - len(tail), tail), offset, 56) or read_range(offset, 56)
    if raw[:4] != b"PK\x06\x06":
        raise BadArchive("its zip64 end record is damaged")
    count, directory_size, start = struct.unpack_from("<3Q", raw, 32)
    return count, directory_size, start


def _parse_directory(raw: bytes) -> tuple[dict[str, Member], int]:
    members: dict[str, Member] = {}
    position = seen = 0
    while position + _ENTRY.size <= len(raw) and raw[position : position + 4] == b"PK\x01\x02":
        member, position = _entry(raw, position)
        members.pop(member.name, None)  # so that the order is that of the last ones
        members[member.name] = member
        seen += 1
    return members, seen


def _last_entries(raw: bytes) -> dict[str, Member]:
    """The entries at the end of a directory whose beginning is not known: each candidate must lead exactly to the end."""
    start = raw.find(b"PK\x01\x02")
    while start >= 0:
        try:
            members, _ = _parse_directory(raw[start:])
            if members and _ends_with(raw, start):
                return members
        except (BadArchive, struct.error):
            pass
        start = raw.find(b"PK\x01\x02", start + 1)
    return {}


def _ends_with(raw: bytes, position: int) -> bool:
    while position < len(raw):
        if raw[position : position + 4] != b"PK\x01\x02" or position + _ENTRY.size > len(raw):
            return False
        fields = _ENTRY.unpack_from(raw, position)
        position += _ENTRY.size + fields[10] + fields[11] + fields[12]
    return position == len(raw)


def _entry(raw: bytes, position: int) -> tuple[Member, int]:
    fields = _ENTRY.unpack_from(raw, position)
    method, (crc, packed, size, name_length, extra_length, comment_length), offset = fields[4], fields[7:13], fields[16]
    start = position + _ENTRY.size
    name = raw[start : start + name_length].decode("utf-8", "replace")
    extra = raw[start + name_length : start + name_length + extra_length]
    if 0xFFFFFFFF in (packed, size, offset):
        size, packed, offset = _wide(extra, size, packed, offset)
    return Member(name, method, crc, packed, size, offset), start + name_length + extra_length + comment_length


def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The 64-bit values that an entry's extra field holds, in the order that the format prescribes."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            try:
                return tuple(next(values) if value == 0xFFFFFFFF else value for value in (size, packed, offset))  # type: ignore[return-value]
            except (StopIteration, RuntimeError):
                break
        position += 4 + length
    raise BadArchive("a zip64 entry is damaged")


def _cut(window: tuple[int, bytes] | None, start: int, length: int) -> bytes | None:
    if window is None or start < window[0] or start + length > window[0] + len(window[1]):
        return None
    return window[1][start - window[0] :][:length]


def _unpacked(member: Member, packed: bytes) -> bytes:
    if member.size > MAX_MEMBER_BYTES:
        raise BadArchive(f"{member.name} unpacks to {member.size} bytes")
    try:
        if member.method == _ZSTD:
            content = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read(member.size + 1)
        elif member.method == _DEFLATE:
            content = zlib.decompressobj(-15).decompress(packed, member.size + 1)
        elif member.method == _STORED:
            content = packed
        else:
            raise BadArchive(f"{member.name} is packed by an unknown method ({member.method})")
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadArchive(f"{member.name} is damaged ({error})") from None
    if len(content) != member.size or zlib.crc32(content) != member.crc:
        raise BadArchive(f"{member.name} is damaged (its checksum differs)")
    return content
