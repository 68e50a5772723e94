"""What a log on this worker's disk holds, read without Inspect: for the agent, which never imports it.

Called by `evalworker.partials`, which must know whether a log is whole, whose it is, and which samples of it are finished, and by a job
whose tries leave one log each. Only the zip file's directory, the header and the summaries are read, never a sample.
"""

import contextlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from evalworker import zipmembers

HEADERS = ("header.json", "_journal/start.json")
"""A log's header: once it has ended, and while it runs."""

_SUMMARIES = "summaries.json"
_JOURNAL = "_journal/summaries/"
_SAMPLES = "samples/"

LOG = ".eval"
BUFFER = ".buffer"
MANIFEST = "manifest.json"

Finished = frozenset[tuple[str, int]]
"""Samples, as id and epoch, that have ended without an error."""


class BadLog(ValueError):
    """A file that is no whole log; the text says why."""


@dataclass(frozen=True)
class Holding:
    """What a log holds: `records` names the samples that it has anything of.

    `finished` is None where its summaries are not what is known of Inspect's: then nothing can be said of it. `dataset` tells datasets
    apart: samples of another one are not gone on with.
    """

    task: str | None = None
    model: str | None = None
    dataset: str = ""
    records: frozenset[str] = frozenset()
    finished: Finished | None = None

    def with_buffer(self, finished: Finished | None) -> "Holding":
        """The same with the finished samples of its buffer, as Inspect puts them together."""
        both = None if self.finished is None or finished is None else self.finished | finished
        return replace(self, finished=both)

    def within(self, other: "Holding") -> bool:
        """Whether `other` has all that this one has: then nothing is lost with it. No where that cannot be said."""
        if self.finished is None or other.finished is None:
            return False
        return self.finished <= other.finished and self.records <= other.records


UNKNOWN = Holding()
"""Of a log that cannot be read just now."""


def read(path: Path) -> Holding:
    """Read one log. Raises BadLog, whatever is wrong with the file."""
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            members = zipmembers.members(archive, "")
            for info in members.values():
                zipmembers.data_offset(raw, info)
            header = next((members[name] for name in HEADERS if name in members), None)
            if header is None:
                raise BadLog("it is no log of Inspect's")
            said = json.loads(zipmembers.content(raw, header))
            records = frozenset(name for name in members if name.startswith(_SAMPLES))
            return replace(_of_header(said), records=records, finished=_finished(raw, members))
    except BadLog:
        raise
    except Exception as error:  # a damaged directory makes `zipfile` raise almost anything, and believe any size
        raise BadLog(f"{error}" or type(error).__name__) from error


def _of_header(header: Any) -> Holding:
    spec = header.get("eval") if isinstance(header, dict) else None
    if not isinstance(spec, dict):
        return UNKNOWN
    dataset = spec.get("dataset")
    known = {name: dataset.get(name) for name in ("samples", "sample_ids")} if isinstance(dataset, dict) else {}
    return Holding(spec.get("task"), spec.get("model"), json.dumps(known))


def _finished(raw: IO[bytes], members: dict[str, zipfile.ZipInfo]) -> Finished | None:
    if _SUMMARIES in members:
        names = [_SUMMARIES]
    else:
        names = sorted((name for name in members if name.startswith(_JOURNAL)), key=lambda name: (len(name), name))
    if not names and any(name.startswith(_SAMPLES) for name in members):
        return None
    return _of_summaries([entry for name in names for entry in json.loads(zipmembers.content(raw, members[name]))])


def buffered(manifest: bytes) -> Finished | None:
    """The finished samples of a `.buffer/` folder, whose manifest this is; None where it is not what is known of Inspect's."""
    try:
        return _of_summaries([sample["summary"] for sample in json.loads(manifest)["samples"]])
    except (ValueError, KeyError, TypeError):
        return None


def _of_summaries(summaries: Any) -> Finished | None:
    """Of several summaries of a sample the last one counts, as for Inspect."""
    ended: dict[tuple[str, int], bool] = {}
    try:
        for summary in summaries:
            key = str(summary["id"]), summary["epoch"]
            ended[key] = summary.get("error") is None and summary.get("completed") is not False
    except (KeyError, TypeError, AttributeError):
        return None
    return frozenset(key for key, well in ended.items() if well)


def manifest_of(log: Path) -> Path:
    """Where the list of a log's buffered samples is."""
    return log.parent / BUFFER / log.stem / MANIFEST


def newest_last(logs: Iterable[Path]) -> list[Path]:
    """In the order in which they were written last, as Inspect orders them; one that has gone is left out."""
    written = []
    for log in logs:
        with contextlib.suppress(FileNotFoundError):
            written.append((log.stat().st_mtime_ns, log))
    return [log for _, log in sorted(written)]


def superseded(logs: list[Path], look: Callable[[Path], Holding]) -> list[Path]:
    """Of logs in that order, those whose samples are all in the last one, which alone is gone on with.

    Args: look: gives what a log holds, without its buffer.
    """
    if len(logs) < 2:
        return []
    newest = look(logs[-1])
    found = []
    for log in logs[:-1]:
        try:
            finished = buffered(manifest_of(log).read_bytes())
        except OSError:
            finished = frozenset()
        if look(log).with_buffer(finished).within(newest):
            found.append(log)
    return found


def look(log: Path) -> Holding:
    """What a log holds, UNKNOWN where it cannot be read."""
    try:
        return read(log)
    except BadLog:
        return UNKNOWN


def prune(log_dir: Path) -> None:
    """Remove a job's logs that a newer one supersedes, and their buffers: each try of `eval_set` writes all samples again.

    For the job's own process, at a moment at which Inspect reads none of them.
    """
    for log in superseded(newest_last(log_dir.glob(f"*{LOG}")), look):
        with contextlib.suppress(OSError):
            shutil.rmtree(manifest_of(log).parent, ignore_errors=True)
            log.unlink()
