"""Posts a worker's messages to the events queue: at once when idle, in batches when many wait, from a spool on disk when SQS is away.

One thread owns the queue. `post` never blocks and never raises; what matters is waited for with `Posted.wait`. A message leaves the
spool only when SQS has taken it, so a worker that is killed and started again in its directory sends what its forerunner could not;
duplicates are the controller's to drop.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from evalworker import redact
from evalworker.queues import BATCH, Queue, SendFailed

GAP_S = 0.04
"""Least time between two sends: a lone sample goes at once, a burst goes in batches (a call costs 2 to 3 ms of CPU on each side)."""

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits between tries while SQS cannot be reached."""


CLOSING_PAUSE_S = 0.5
"""The same while the worker is about to end."""


class Posted:
    """A message on its way."""

    def __init__(self, body: str) -> None:
        self.body = body
        self._sent = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Whether SQS has taken the message, after at most `timeout_s`."""
        return self._sent.wait(timeout_s)

    def mark_sent(self) -> None:
        """Called by the poster."""
        self._sent.set()


class Poster:
    """The thread, the waiting messages, and the spool behind them."""

    def __init__(
        self, queue: Queue, spool: Path, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._spool_path = spool
        self._log = log
        self._clock = clock
        self._waiting: collections.deque[Posted] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._urgent = 0
        self._trouble = 0
        self.lost_spool = False
        self._spool = self._open_spool()
        self._thread = threading.Thread(target=self._run, daemon=True, name="poster")
        self._thread.start()

    def post(self, body: str, *, urgent: bool = False) -> Posted:
        """Queue a message (JSON, already fitted to the size limit). `urgent`: somebody waits for it, send without a gap.

        Texts were redacted before they were cut; what is left in any other field goes here.
        """
        posted = Posted(body := redact.text(body))
        with self._changed:
            self._keep(body)
            self._waiting.append(posted)
            self._urgent += urgent
            self._changed.notify()
        return posted

    def close(self, timeout_s: float) -> bool:
        """Send what waits, for at most `timeout_s`; whether all is sent. What isn't stays in the spool."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._waiting

    def _open_spool(self) -> int | None:
        try:
            # A forerunner that was killed while it wrote has left half a line: it is no message, and must not grow into one.
            left = self._spool_path.read_bytes() if self._spool_path.exists() else b""
            whole = left[: left.rfind(b"\n") + 1]
            self._waiting.extend(Posted(body) for body in whole.decode("ascii", "replace").splitlines() if body)
            spool = os.open(self._spool_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.ftruncate(spool, len(whole))
            return spool
        except OSError as error:
            self._without_spool(error)
            return None

    def _keep(self, body: str) -> None:
        if self._spool is None:
            return
        try:
            os.write(self._spool, body.encode("ascii") + b"\n")
        except OSError as error:  # a full disk must not stop the stream
            self._without_spool(error)
            self._spool = None

    def _without_spool(self, error: OSError) -> None:
        self.lost_spool = True
        self._log(
            f"the spool {self._spool_path.name} cannot be written ({error.strerror}): unsent messages are held in memory only"
        )

    def _forget(self) -> None:
        """All is sent: empty the spool."""
        if self._spool is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._spool, 0)

    def _run(self) -> None:
        sent_at = -GAP_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                gap = sent_at + GAP_S - self._clock()
                if gap > 0 and len(self._waiting) < BATCH and not self._urgent and not self._closing:
                    self._changed.wait_for(lambda: self._urgent or self._closing or len(self._waiting) >= BATCH, gap)
                batch = [self._waiting[index] for index in range(min(BATCH, len(self._waiting)))]
            sent_at = self._clock()
            self._send(batch)

    def _send(self, batch: list[Posted]) -> None:
        """Send one batch; whatever could not be sent stays in front of the queue and is tried again after a pause."""
        unsent: list[str] = []
        try:
            self._queue.send([posted.body for posted in batch])
        except SendFailed as error:
            unsent = error.unsent
            self._log(f"posting: {error}")
        except Exception as error:  # whatever it is: without this thread nothing more is heard of the worker
            unsent = [posted.body for posted in batch]
            self._log(f"posting: {error}")
        with self._changed:
            failed = []
            for posted in batch:
                self._waiting.popleft()
                if posted.body in unsent:
                    unsent.remove(posted.body)
                    failed.append(posted)
                else:
                    posted.mark_sent()
            self._waiting.extendleft(reversed(failed))
            if not self._waiting:
                self._urgent = 0
                self._forget()
            self._trouble = self._trouble + 1 if failed else 0
            if failed:
                self._pause(PAUSES_S[min(self._trouble, len(PAUSES_S)) - 1])

    def _pause(self, seconds: float) -> None:
        """Wait before the next try, however many messages come meanwhile; while closing, not long."""
        if not self._closing:
            self._changed.wait_for(lambda: self._closing, seconds)
        else:
            self._changed.wait(CLOSING_PAUSE_S)
