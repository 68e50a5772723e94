"""What headers said, remembered on this machine by the log's ETag, so that a second look reads only what changed.

A file for each log directory under `$XDG_CACHE_HOME/inspect-fleet/headers`. It is a convenience: one that is missing, damaged or
of another version is as good as empty, and one that cannot be written is left out.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from evalops.logs.facts import Facts
from evalworker.storage import Info

VERSION = 2
"""Raised when `Facts` changes: older files are read anew."""


def cache_home() -> Path:
    """The directory for what this toolkit remembers."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inspect-fleet"


class FactsCache:
    """The remembered facts of one log directory, by its URL. Not for several threads."""

    def __init__(self, url: str, home: Path | None = None) -> None:
        digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        self._path = (home or cache_home()) / "headers" / f"{digest}.json"
        self._raw: dict[str, list[object]] | None = None

    def get(self, info: Info) -> Facts | None:
        """The facts of exactly this content, None when they are not known."""
        entry = self._load().get(info.key)
        if not entry or entry[0] != info.etag or entry[1] != info.size:
            return None
        try:
            return Facts.model_validate(entry[2])
        except ValidationError:
            return None

    def put(self, seen: Iterable[tuple[Info, Facts]]) -> None:
        """Remember the directory as it is now; a log that was being replaced is not remembered."""
        entries = {
            info.key: [info.etag, info.size, facts.model_dump(mode="json", exclude_defaults=True)]
            for info, facts in seen
            if not facts.replaced
        }
        if entries == self._raw:
            return
        self._raw = entries
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="ascii") as file:
                json.dump({"version": VERSION, "entries": entries}, file)
            Path(file.name).replace(self._path)
        except (OSError, ValueError):
            return

    def _load(self) -> dict[str, list[object]]:
        if self._raw is None:
            try:
                document = json.loads(self._path.read_text("ascii"))
                self._raw = document["entries"] if document["version"] == VERSION else {}
            except (OSError, ValueError, KeyError, TypeError):
                self._raw = {}
        return self._raw
