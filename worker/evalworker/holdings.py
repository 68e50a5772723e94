"""What a log on this worker's disk holds, read without Inspect: for the agent, which never imports it.

Called by `evalworker.partials`, which must know whether a log is whole, whose it is, and which samples of it are finished. Only the zip
file's directory, the header and the summaries are read, never a sample.
"""

import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from evalworker import zipmembers

HEADERS = ("header.json", "_journal/start.json")
"""A log's header: once it has ended, and while it runs."""

_SUMMARIES = "summaries.json"
_JOURNAL = "_journal/summaries/"

Finished = frozenset[tuple[str, int]]
"""Samples, as id and epoch, that have ended without an error."""


class BadLog(ValueError):
    """A file that is no whole log; the text says why."""


@dataclass(frozen=True)
class Holding:
    """What a log holds. `finished` is None where its summaries are not what is known of Inspect's: then nothing can be said of it.

    `dataset` tells datasets apart: samples of another one are not gone on with.
    """

    task: str | None
    model: str | None
    dataset: str
    finished: Finished | None


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
            return _holding(said, _finished(raw, members))
    except BadLog:
        raise
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, OSError) as error:
        raise BadLog(f"{error}") from error  # a damaged directory makes `zipfile` raise any of these


def _holding(header: Any, finished: Finished | None) -> Holding:
    spec = header.get("eval") if isinstance(header, dict) else None
    if not isinstance(spec, dict):
        return Holding(None, None, "", None)
    dataset = spec.get("dataset")
    known = {name: dataset.get(name) for name in ("samples", "sample_ids")} if isinstance(dataset, dict) else {}
    return Holding(spec.get("task"), spec.get("model"), json.dumps(known), finished)


def _finished(raw: IO[bytes], members: dict[str, zipfile.ZipInfo]) -> Finished | None:
    if _SUMMARIES in members:
        names = [_SUMMARIES]
    else:
        names = sorted((name for name in members if name.startswith(_JOURNAL)), key=lambda name: (len(name), name))
    if not names and any(name.startswith("samples/") for name in members):
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
