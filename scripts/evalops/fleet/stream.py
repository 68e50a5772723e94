"""The event stream: lines on the controller's disk at once, numbered segments in storage at most two seconds later.

The segments are the truth, `events.jsonl` is their projection plus what is not stored yet. Messages are deleted from the queue only
after the segment that tells of them is stored. A segment is created, never replaced, so of two controllers only one goes on.
"""

import contextlib
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from evalops.fleet.standing import Noted
from evalworker import redact
from evalworker.contract import layout
from evalworker.contract.events import Event, line, written
from evalworker.contract.wire import now
from evalworker.storage import AlreadyExists, Missing, Storage, Stored

STORE_AFTER_S = 2.0
"""The longest that a line waits before its segment is stored."""

STORE_BYTES = 1_000_000
"""A segment is stored early when it is this large."""


READERS = 12
"""Threads that read segments, fewer than a client has connections."""

FULL_BYTES = 32_000_000
FULL_MESSAGES = 50_000
"""So many bytes, or messages, that wait for a segment are enough: what comes later waits in the queue."""


class Fenced(RuntimeError):
    """Another controller writes this fleet's stream: this one must stop."""


class EventStream:
    """One fleet's stream, written by one controller.

    Attributes:
        path: `events.jsonl`.
        seq: of the last line. stored: of the last line that is in a segment. segment: the last one's number.
        noted: what all lines together tell of workers and results.
    """

    def __init__(
        self, storage: Storage, fleet_id: str, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage = storage
        self._fleet_id = fleet_id
        self.path = path
        self._clock = clock
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._since = 0.0
        self._receipts: list[str] = []
        self._going: tuple[str, list[str]] | None = None
        self._stored: list[str] = []
        self.segment = 0
        self.seq = 0
        self.stored = 0
        self.noted = Noted()
        path.parent.mkdir(parents=True, exist_ok=True)

    def restore(self) -> Iterator[dict[str, Any]]:
        """Rebuild `events.jsonl` from the segments and yield every event; must be exhausted before anything is appended.

        Lines that an earlier controller wrote and had not stored are dropped: their messages come again.
        """
        partial = self.path.with_suffix(".jsonl.new")
        with partial.open("wb") as file:
            for number, body in _segments(self._storage, self._fleet_id):
                file.write(body)
                self.segment = number
                for event in map(json.loads, body.splitlines()):
                    self.seq = event["seq"]
                    self.noted.note(event, datetime.fromisoformat(event["ts"]))
                    yield event
        self.stored = self.seq
        self._install(partial)
        self._file = self.path.open("ab", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def _install(self, partial: Path) -> None:
        """Put the rebuilt file in place.

        One that only has lines too many is cut, so that a `tail -f` goes on, unless an earlier controller still holds it: that one may
        wake up and write, and shall write to the file that nobody looks at any more.
        """
        size = partial.stat().st_size
        with (
            contextlib.suppress(FileNotFoundError),
            self.path.open("r+b") as live,
            contextlib.suppress(BlockingIOError),
        ):
            fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.stat().st_size >= size and _same_start(self.path, partial, size):
                os.truncate(self.path, size)
                partial.unlink()
                return
        partial.replace(self.path)

    def append(self, events: list[Event]) -> None:
        """Write events to the live file at once."""
        if not events:
            return
        moment = now()
        lines = []
        for event in events:
            self.seq += 1
            full = written(redact.json_values(event), seq=self.seq, fleet_id=self._fleet_id, ts=moment)
            self.noted.note(full, moment)
            lines.append(line(full))
        text = "".join(lines)
        with contextlib.suppress(
            OSError
        ):  # a full disk loses the live file's lines, not the stream: segments are the truth
            self._file.write(text.encode("ascii"))
        if not self._pending:
            self._since = self._clock()
        self._pending.append(text)
        self._pending_bytes += len(text)

    def settle(self, receipt: str) -> None:
        """Delete this message once what it led to is stored."""
        if not self._receipts and not self._pending:
            self._since = self._clock()
        self._receipts.append(receipt)

    @property
    def full(self) -> bool:
        """Whether too much waits to be stored: storage has been away for long."""
        return self._pending_bytes >= FULL_BYTES or len(self._receipts) >= FULL_MESSAGES

    @property
    def due(self) -> bool:
        """Whether it is time to store."""
        if not self._pending and not self._receipts and not self._going:
            return False
        return (
            self._going is not None
            or self._pending_bytes >= STORE_BYTES
            or self.full
            or self._clock() - self._since >= STORE_AFTER_S
        )

    def store(self) -> list[str]:
        """Store what is pending as the next segment and return the receipts that may be deleted now.

        A segment that could not be stored is sent again as it was, before anything newer: the call that failed may have been carried out,
        and only the same bytes are known for our own. Raises Fenced when another controller has written that segment, StorageError when it
        cannot be stored (nothing is lost: call again).
        """
        while self._going is not None or self._pending:
            text, settled = self._going = self._going or self._take()
            try:
                self._storage.create(layout.segment(self._fleet_id, self.segment + 1), text.encode("ascii"))
            except AlreadyExists:
                raise Fenced(f"another controller drives the fleet {self._fleet_id}; this one has stopped") from None
            self.segment += 1
            self._going = None
            self._stored += settled
        self.stored = self.seq
        receipts = self._stored + self._receipts
        self._stored, self._receipts = [], []
        return receipts

    def _take(self) -> tuple[str, list[str]]:
        """The next segment, and the receipts of what it tells of."""
        text, receipts = "".join(self._pending), self._receipts
        self._pending, self._pending_bytes, self._receipts = [], 0, []
        return text, receipts

    def close(self) -> None:
        """Close the live file."""
        self._file.close()


def _same_start(first: Path, second: Path, size: int) -> bool:
    """Whether two files begin with the same `size` bytes."""
    with first.open("rb") as one, second.open("rb") as other:
        left = size
        while left > 0:
            count = min(left, 1 << 20)
            if one.read(count) != other.read(count):
                return False
            left -= count
    return True


def segment_keys(storage: Storage, fleet_id: str) -> list[str]:
    """The keys of a fleet's segments, in the order in which they were written."""
    return sorted((info.key for info in storage.list(layout.segments(fleet_id))), key=layout.segment_number)


def _segments(storage: Storage, fleet_id: str) -> Iterator[tuple[int, bytes]]:
    """Number and content of each segment, in order; some are read ahead, for a fleet of half a day has twenty thousand."""
    reading: deque[tuple[int, Future[Stored]]] = deque()
    with ThreadPoolExecutor(READERS, "segments") as pool:
        try:
            for key in segment_keys(storage, fleet_id):
                reading.append((layout.segment_number(key), pool.submit(storage.get, key)))
                if len(reading) > 2 * READERS:
                    number, segment = reading.popleft()
                    yield number, segment.result().body
            for number, segment in reading:
                yield number, segment.result().body
        finally:
            pool.shutdown(cancel_futures=True)


def read_events(storage: Storage, fleet_id: str) -> Iterator[dict[str, Any]]:
    """Every stored event of a fleet, in order: what commands that only look read."""
    for _, body in _segments(storage, fleet_id):
        yield from map(json.loads, body.splitlines())


def read_newer(storage: Storage, fleet_id: str, segment: int) -> Iterator[dict[str, Any]]:
    """The events after a segment, in order: numbers have no gap, so one more read than there are segments tells the end."""
    with contextlib.suppress(Missing):
        while True:
            segment += 1
            yield from map(json.loads, storage.get(layout.segment(fleet_id, segment)).body.splitlines())
