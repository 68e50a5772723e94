"""The download that stands beside a dashboard file: `<log>.eval.zip`, which holds the `.eval` unchanged.

Streamed in pieces through a temporary file, so that a log of any size costs little memory; on the way each of its members is
checked, because nobody wants to publish a download that cannot be read. The archive's comment says of which content it was made: a
second run sees from its last bytes that it is up to date.
"""

import json
import tempfile
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from evalops.logs.archive import BadArchive, Member, open_archive
from evalops.logs.integrity import MemberCheck
from evalworker.contract.jsonio import dump_bytes
from evalworker.storage import Info, Missing, Storage

PIECE_BYTES = 8 * 1024 * 1024
_TAIL_BYTES = 1024  # comment, directory of one member, end records


class SourceChanged(Exception):
    """The log was rewritten while it was packed."""


def up_to_date(storage: Storage, packed: Info | None, log: Info) -> bool:
    """Whether a zip was made of exactly this log; one small read."""
    if packed is None:
        return False
    try:
        archive = open_archive(
            packed.size, lambda start, length: storage.read_range(packed.key, start, length), _TAIL_BYTES
        )
        made_of = json.loads(archive.comment or b"{}")
    except (BadArchive, ValueError, Missing):
        return False
    return isinstance(made_of, dict) and made_of.get("etag") == log.etag and made_of.get("size") == log.size


def pack(
    storage: Storage, log: Info, target: str, moment: datetime | None, read: Callable[[int], None] = lambda n: None
) -> None:
    """Write the zip of a log. The member is stored, not compressed: the log is already.

    Args:
        moment: the member's time; fixed by the log, so that the same log gives the same bytes.
        read: told the size of each piece (a progress bar).

    Raises SourceChanged when the log was rewritten meanwhile, BadArchive when a member is damaged, StorageError.
    """
    check = MemberCheck(_members(storage, log))
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-") as folder:
        path = Path(folder) / "log.zip"
        name = log.key.rsplit("/", 1)[-1]
        stamp = (moment or datetime(1980, 1, 1, tzinfo=UTC)).astimezone(UTC)
        member = zipfile.ZipInfo(name, stamp.timetuple()[:6] if stamp.year >= 1980 else (1980, 1, 1, 0, 0, 0))
        member.external_attr = 0o644 << 16
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            with archive.open(member, "w", force_zip64=log.size >= zipfile.ZIP64_LIMIT) as out:
                for start in range(0, log.size, PIECE_BYTES):
                    piece = storage.read_range(log.key, start, min(PIECE_BYTES, log.size - start))
                    out.write(piece)
                    check.feed(piece)
                    read(len(piece))
            archive.comment = dump_bytes({"etag": log.etag, "size": log.size})
        now = storage.head(log.key)
        if now is None or now.etag != log.etag or member.file_size != log.size:
            raise SourceChanged(f"{storage.url(log.key)} was rewritten while it was packed")
        check.finish()
        storage.upload(path, target)


def _members(storage: Storage, log: Info) -> list[Member]:
    archive = open_archive(log.size, lambda start, length: storage.read_range(log.key, start, length))
    archive.load()
    return list(archive.members.values())
