"""Reading logs where they lie: at most a few ranged requests each, many at once, remembered by ETag.

Called by status, summarize and the report. One bad log is a row that says why, never an exception; a log that is replaced while it
is read is tried once more and then said to be being written.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalops.logs.archive import Archive, BadArchive, Member, open_archive
from evalops.logs.cache import FactsCache
from evalops.logs.facts import Facts, of_header, unreadable
from evalworker.storage import Info, Missing, Storage, StorageError

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog

HEADER, START, SUMMARIES = "header.json", "_journal/start.json", "summaries.json"
_JOURNAL = re.compile(r"_journal/summaries/(\d+)\.json")
_SAMPLE = re.compile(r"samples/.*_epoch_\d+\.json", re.DOTALL)
_TIMED_JSON = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}[:-]\d{2}[:-]\d{2}.*\.json")

_ASIDE = (".shards", ".buffer", ".checkpoints")
"""Folders beside logs that hold parts of them (`<name>.shards`, `.buffer/<name>`, `<name>.checkpoints`)."""

REQUESTS_PER_LOG = 4
"""Reads that a status row may cost; what would need more is shown as not known."""

BYTES_PER_LOG = 150_000
"""Bytes that a status row may cost beyond the header itself."""

THREADS = 16
"""Logs read at once: as many as the S3 client keeps connections for."""


@dataclass(frozen=True)
class Listed:
    """A log in a listing, its facts, and when the log or what is written beside it (`.buffer/`) was last written."""

    info: Info
    facts: Facts

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return self.info.key.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Directory:
    """What a log directory holds: logs, and all other objects by key."""

    logs: list[Info]
    others: dict[str, Info]


def list_directory(storage: Storage, prefix: str) -> Directory:
    """One listing of a log directory. Shards, buffers and checkpoints beside a log are no logs of the run."""
    logs, others = [], {}
    for info in storage.list(prefix):
        inner = info.key[len(prefix) :]
        folders = inner.split("/")[:-1]
        name = inner.rsplit("/", 1)[-1]
        aside = any(folder.endswith(_ASIDE) for folder in folders)
        is_log = name.endswith(".eval") or (_TIMED_JSON.fullmatch(name) and not name.endswith(".dashboard.json"))
        if is_log and not aside:
            logs.append(info)
        else:
            others[info.key] = info
    return Directory(logs, others)


def read_all(
    storage: Storage, infos: Sequence[Info], cache: FactsCache | None = None, done: Callable[[], None] = lambda: None
) -> list[Listed]:
    """The facts of many logs, in the order given; what the cache knows of the same content is not read again."""
    known = {info.key: cache.get(info) if cache else None for info in infos}
    fresh = [info for info in infos if known[info.key] is None]
    if fresh:
        import inspect_ai.log  # noqa: F401 - once, before the threads need it
    with ThreadPoolExecutor(THREADS) as pool:
        for info, found in zip(fresh, pool.map(lambda info: _read_and_tell(storage, info, done), fresh), strict=True):
            known[info.key] = found
    listed = [Listed(info, facts) for info in infos if (facts := known[info.key]) is not None]
    if cache:
        cache.put((one.info, one.facts) for one in listed)
    return listed


def _read_and_tell(storage: Storage, info: Info, done: Callable[[], None]) -> Facts:
    facts = read_facts(storage, info)
    done()
    return facts


def read_facts(storage: Storage, info: Info) -> Facts:
    """The facts of one log; never raises for what the log is."""
    if info.key.endswith(".json"):
        return unreadable("it is in the JSON format; convert it with `inspect log convert --to eval`")
    try:
        return _facts(_Reader(storage, info))
    except (BadArchive, ValueError, KeyError, StorageError):
        pass  # perhaps it was just being replaced
    try:
        now = storage.head(info.key)
        if now is None:
            return unreadable("it was removed while it was read", replaced=True)
        reader = _Reader(storage, now)
        return _facts(reader)
    except Missing:
        return unreadable("it was removed while it was read", replaced=True)
    except StorageError as error:
        return unreadable(str(error), replaced=True)
    except (BadArchive, ValueError, KeyError) as error:
        return _why(error, changed=now is not None and now.etag != info.etag)


def read_header(storage: Storage, info: Info) -> "EvalLog":
    """The whole header of one log as Inspect's model; raises BadArchive, ValueError (pydantic's) or StorageError."""
    return _Reader(storage, info).header()


def read_summaries(storage: Storage, info: Info, limit: int) -> list[dict[str, Any]]:
    """The sample summaries of one log as plain values, [] when they pack to more than `limit` bytes.

    Raises BadArchive, ValueError or StorageError.
    """
    archive = _Reader(storage, info).archive
    archive.load()
    names = _summary_members(archive)
    if sum(archive.members[name].packed for name in names) > limit:
        return []
    return _latest(item for name in names for item in json.loads(archive.read(name)))


class _Reader:
    """One log's archive, counting what it costs."""

    def __init__(self, storage: Storage, info: Info) -> None:
        self.requests = self.bytes = 0
        self._storage, self._key = storage, info.key
        self.archive = open_archive(info.size, self._read)

    def _read(self, start: int, length: int) -> bytes:
        self.requests += 1
        self.bytes += length
        return self._storage.read_range(self._key, start, length)

    def header(self) -> "EvalLog":
        """`header.json`, or the start of a log that has none (Inspect's own reading of such a log)."""
        from inspect_ai.log import EvalLog

        if HEADER not in self.archive.members:
            self.archive.load()
        if HEADER in self.archive.members:
            return EvalLog.model_validate(json.loads(self.archive.read(HEADER)))
        if START not in self.archive.members:
            raise BadArchive("it is a zip archive but no log (neither header nor start)")
        return EvalLog.model_validate({"status": "started"} | json.loads(self.archive.read(START)))

    def affordable(self, members: Iterable[Member]) -> bool:
        """Whether these can be read within the budget; what the tail already holds is free."""
        tail_start = self.archive.size - len(self.archive.tail)
        outside = [member for member in members if member.offset < tail_start]
        cost = sum(member.packed + 400 for member in outside)
        return self.requests + len(outside) <= REQUESTS_PER_LOG and self.bytes + cost <= BYTES_PER_LOG


def _facts(reader: _Reader) -> Facts:
    log = reader.header()
    archive = reader.archive
    logged = sum(1 for name in archive.members if _SAMPLE.fullmatch(name)) if archive.complete else None
    errored = None
    if log.results is None:
        if not archive.complete:
            archive.load()
            logged = sum(1 for name in archive.members if _SAMPLE.fullmatch(name))
        names = _summary_members(archive)
        if reader.affordable(archive.members[name] for name in names):
            summaries = _latest(item for name in names for item in json.loads(archive.read(name)))
            errored = sum(1 for item in summaries if item.get("error"))
            logged = len(summaries)
    return of_header(log, logged=logged, errored=errored)


def _summary_members(archive: Archive) -> list[str]:
    if SUMMARIES in archive.members:
        return [SUMMARIES]
    numbered = [(int(found[1]), name) for name in archive.members if (found := _JOURNAL.fullmatch(name))]
    return [name for _, name in sorted(numbered)]


def _latest(items: Iterable[Any]) -> list[dict[str, Any]]:
    """The last summary of each (sample, epoch): a sample that was run again is listed twice."""
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for item in items:
        if isinstance(item, dict):
            rows[str(item.get("id")), item.get("epoch")] = item
    return list(rows.values())


def _why(error: Exception, *, changed: bool) -> Facts:
    if changed:
        return unreadable("it is being written; look again in a moment", replaced=True)
    if isinstance(error, BadArchive):
        return unreadable(str(error))
    if isinstance(error, json.JSONDecodeError):
        return unreadable("its header is not JSON")
    detail = " ".join(str(error).split())
    return unreadable(f"today's Inspect cannot read its header ({detail[:200]})")
