"""Checking a zip archive's members while its bytes stream by, without holding or reading any of them twice.

Used while a log is packed for publication. Inspect does not check its members' checksums, so a flipped bit shows only when somebody
opens that sample.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import zstandard

from evalops.logs.archive import LOCAL_HEADER, BadArchive, Member

SLICE_BYTES = 64 * 1024
"""Unpacked at once: bounds memory, however well the content packs."""

_FIXED = LOCAL_HEADER.size


class MemberCheck:
    """Fed with an archive's bytes in order; `finish` tells whether all members were whole.

    The first damage is kept and raised by `finish`, so that the caller may first ask whether the file was rewritten meanwhile.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._due = sorted(members, key=lambda member: member.offset, reverse=True)
        self._at = 0
        self._pending = b""
        self._current: Member | None = None
        self._left = 0
        self._unpack: Any = None
        self._crc = 0
        self._damage: str | None = None

    def feed(self, piece: bytes) -> None:
        """The next bytes of the archive."""
        view = memoryview(self._pending + piece if self._pending else piece)
        self._pending = b""
        while len(view) and self._damage is None:
            used = self._step(view)
            if used is None:
                self._pending = bytes(view)
                return
            view, self._at = view[used:], self._at + used

    def finish(self) -> None:
        """Raises BadArchive when a member was damaged or is missing."""
        if self._damage is None and (self._due or self._current is not None):
            self._damage = f"{(self._current or self._due[-1]).name} is cut off"
        if self._damage is not None:
            raise BadArchive(self._damage)

    def _step(self, view: memoryview) -> int | None:
        """Use up some bytes; None when more are needed to go on."""
        if self._current is not None:
            return self._content(view)
        if not self._due:
            return len(view)
        gap = self._due[-1].offset - self._at
        if gap < 0:
            self._damage = f"{self._due[-1].name} overlaps another member"
            return len(view)
        return min(gap, len(view)) if gap else self._header(view)

    def _header(self, view: memoryview) -> int | None:
        if len(view) < _FIXED:
            return None
        fields = LOCAL_HEADER.unpack_from(view)
        length = _FIXED + int(fields[9]) + int(fields[10])
        if fields[0] != b"PK\x03\x04":
            self._damage = f"{self._due[-1].name} is not where the directory says"
            return len(view)
        if len(view) < length:
            return None
        self._current = self._due.pop()
        self._left, self._crc = self._current.packed, 0
        self._unpack = _unpacker(self._current)
        if self._unpack is None:
            self._damage = f"{self._current.name} is packed by an unknown method ({self._current.method})"
        elif not self._left:
            self._end()
        return length

    def _content(self, view: memoryview) -> int:
        assert self._current is not None
        raw = bytes(view[: min(self._left, SLICE_BYTES)])
        try:
            self._crc = zlib.crc32(self._unpack(raw), self._crc)
        except (zlib.error, zstandard.ZstdError) as error:
            self._damage = f"{self._current.name} is damaged ({error})"
            return len(view)
        self._left -= len(raw)
        if not self._left:
            self._end()
        return len(raw)

    def _end(self) -> None:
        assert self._current is not None
        if self._crc != self._current.crc:
            self._damage = f"{self._current.name} is damaged (its checksum differs)"
        self._current = None


def _unpacker(member: Member) -> Any:
    """A function from packed to unpacked bytes; None for an unknown method."""
    if member.method == 93:
        return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress
    if member.method == 8:
        return zlib.decompressobj(-15).decompress
    return bytes if member.method == 0 else None
