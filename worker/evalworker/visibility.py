"""Keeps the messages of running jobs invisible to other workers, in a thread that nothing else can hold up.

A receipt that SQS calls stale belongs to someone else by now: that is logged and the attempt carries on, because consumers are
idempotent. SQS keeps a message invisible for twelve hours in all; a job that comes near is told to hand over.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from evalworker.queues import Queue, QueueError

HAND_OVER_S = 11 * 3600.0
"""How long one receive may last (SQS's limit is 12 hours): after it a job hands over as on a spot notice."""


@dataclass
class Held:
    """A message that is ours."""

    receipt: str
    since: float
    hand_over: Callable[[], None]
    stale: bool = False


class VisibilityKeeper:
    """Extends all held messages three times per visibility timeout."""

    def __init__(
        self, queue: Queue, visibility_s: int, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self.visibility_s = visibility_s
        self._log = log
        self._clock = clock
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="visibility")
        self._thread.start()

    def hold(self, receipt: str, hand_over: Callable[[], None]) -> Held:
        """Keep a message from now on; `hand_over` is called once when it has been ours for too long."""
        held = Held(receipt, self._clock(), hand_over)
        with self._lock:
            self._held[receipt] = held
        return held

    def release(self, receipt: str) -> None:
        """Stop keeping it (it is about to be deleted or given back)."""
        with self._lock:
            self._held.pop(receipt, None)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self.visibility_s / 3):
            self.extend_all()

    def extend_all(self) -> None:
        """One round; an unreachable queue is logged and tried again in the next."""
        with self._lock:
            held = [one for one in self._held.values() if not one.stale]
        if not held:
            return
        try:
            stale = self._queue.extend([one.receipt for one in held], self.visibility_s)
        except QueueError as error:
            self._log(f"keeping messages: {error}")
            return
        for one in held:
            if one.receipt in stale:
                one.stale = True
                if one.receipt not in self._held:
                    continue  # deleted or given back in the meantime
                self._log("a running job's message went to another worker; the job carries on here too")
            elif self._clock() - one.since > HAND_OVER_S:
                one.since = float("inf")
                one.hand_over()
