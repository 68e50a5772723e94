"""Members of a zip file as they lie there: copied without being unpacked, or read only as far as they are needed.

For the merge of logs, whose members are large and compressed already, and for what the agent reads of one. It knows nothing of logs;
`zipfile` reads the directories, and its own bookkeeping is told of each member that is copied past it.
"""

import codecs
import copy
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import zstandard

CHUNK = 1024 * 1024
"""Bytes that are copied at once."""

FIRST_READ = 64 * 1024
"""Characters of a member that are unpacked before its fields are looked for; four times as many each time that was too little."""

_LOCAL_HEADER = 30
_SIGNATURE = b"PK\x03\x04"
_DATA_DESCRIPTOR = 0x08
_ZSTANDARD = 93


class BadMember(ValueError):
    """A member that is not what its directory says; the text names it."""


def members(archive: zipfile.ZipFile, prefix: str) -> dict[str, zipfile.ZipInfo]:
    """The members whose names begin with `prefix`. A name may be there more than once: the last one counts, as for any reader."""
    return {info.filename: info for info in archive.infolist() if info.filename.startswith(prefix)}


def copy_member(source: IO[bytes], info: zipfile.ZipInfo, target: zipfile.ZipFile) -> None:
    """Append a member to `target` with its packed bytes as they are. Raises BadMember."""
    kept = copy.copy(info)
    kept.flag_bits &= ~_DATA_DESCRIPTOR  # sizes and checksum are known here, so they stand in front
    kept.extra = b""
    out: Any = target
    assert out.fp is not None
    source.seek(data_offset(source, info))
    out.fp.seek(out.start_dir)
    kept.header_offset = out.fp.tell()
    out.fp.write(kept.FileHeader())
    out.fp.flush()
    at, left = source.tell(), info.compress_size
    while left:
        copied = os.sendfile(out.fp.fileno(), source.fileno(), at, left)
        if not copied:
            raise BadMember(f"{info.filename}: the file ends within it")
        at, left = at + copied, left - copied
    out.fp.seek(0, os.SEEK_END)
    out.start_dir = out.fp.tell()
    out.filelist.append(kept)
    out.NameToInfo[kept.filename] = kept
    out._didModify = True


def data_offset(source: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where a member's packed bytes begin: its local header has lengths of its own. Raises BadMember where there is none."""
    source.seek(info.header_offset)
    header = source.read(_LOCAL_HEADER)
    if len(header) != _LOCAL_HEADER or not header.startswith(_SIGNATURE):
        raise BadMember(f"{info.filename}: there is no member where the directory says")
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + name + extra


def content(source: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """A member, unpacked: with Inspect's compression too, which `zipfile` knows only where Inspect is imported. Raises BadMember."""
    source.seek(data_offset(source, info))
    packed = source.read(info.compress_size)
    try:
        if info.compress_type == _ZSTANDARD:
            body = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(packed)
        else:
            body = zlib.decompress(packed, -15) if info.compress_type == zipfile.ZIP_DEFLATED else packed
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadMember(f"{info.filename} cannot be unpacked: {error}") from error
    if zlib.crc32(body) != info.CRC:
        raise BadMember(f"{info.filename} is damaged: its checksum differs")
    return body


def head_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo, wanted: set[str]) -> dict[str, Any]:
    """The wanted fields of a member that is one JSON object; what comes after the last of them is never unpacked.

    A field that is not there is left out. Raises BadMember for what is no JSON object.
    """
    found: dict[str, Any] = {}
    with archive.open(info) as stream:
        try:
            for name, value in _fields(stream):
                if name in wanted:
                    found[name] = value
                    if len(found) == len(wanted):
                        break
        except (ValueError, EOFError) as error:
            raise BadMember(f"{info.filename} cannot be read: {error}") from error
    return found


def _fields(stream: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """The fields of a JSON object, one after the other, unpacking no more than the last one needed."""
    text = _Text(stream)
    at = text.skip(0, "{")
    while True:
        at = text.skip(at)
        if text.at(at) == "}":
            return
        if text.at(at) == ",":
            at = text.skip(at + 1)
        name, at = text.value(at)
        value, at = text.value(text.skip(at, ":"))
        yield name, value
        text.forget(at)
        at = 0


class _Text:
    """A growing piece of a JSON text."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._scan = json.JSONDecoder().raw_decode
        self._text = ""
        self._over = False
        self._grow()

    def _grow(self) -> None:
        if self._over:
            raise EOFError("it ends too early")
        wanted = max(FIRST_READ, 3 * len(self._text))
        pieces = [self._text]
        while wanted > 0 and not self._over:
            data = self._stream.read(min(wanted, CHUNK))
            self._over = not data
            pieces.append(self._decoder.decode(data, final=self._over))
            wanted -= len(data)
        self._text = "".join(pieces)

    def at(self, place: int) -> str:
        """The character there."""
        while place >= len(self._text):
            self._grow()
        return self._text[place]

    def skip(self, place: int, sign: str = "") -> int:
        """The next place that is no blank; with `sign`, the place after that sign, which must come next."""
        while self.at(place) in " \t\r\n":
            place += 1
        if not sign:
            return place
        if self._text[place] != sign:
            raise ValueError(f"{sign} expected")
        return self.skip(place + 1)

    def value(self, place: int) -> tuple[Any, int]:
        """The JSON value that begins there, and the place after it."""
        while True:
            try:
                value, end = self._scan(self._text, place)
                if end < len(self._text) or self._over:  # a number might go on
                    return value, end
            except ValueError:
                if self._over:
                    raise
            self._grow()

    def forget(self, place: int) -> None:
        """Drop what lies before."""
        self._text = self._text[place:]
