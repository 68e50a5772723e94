"""Threads between the events queue and the controller: several receive, several delete, so that one loop keeps up with a large fleet.

Used by the inbox alone. Nothing here knows what a message is. While little comes one thread asks the queue and the others wait; they
help as soon as answers come well filled. What has been received and not been taken is bounded, so a slow controller stops asking, and so
is what is to be deleted, so that messages which wait for that do not pile up, or come again.
"""

import queue
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from evalworker.aws import ServiceError
from evalworker.queues import Received

RECEIVE_WAIT_S = 1
"""One long poll. The end of a fleet waits for those that are under way."""

RECEIVE_MOST = 10
"""Messages that one call brings or deletes: SQS's limit."""

FULL = 5
"""An answer with so many messages: there may be more. SQS need not fill an answer."""

RECEIVERS = 6
DELETERS = 6
"""Threads; together fewer than a client has connections. A call takes 10 ms within a region, 100 ms from elsewhere: six bring 6,000 and
600 messages a second."""

AHEAD = 100
"""Answers that may wait for the controller."""

BEHIND = 3000
"""Calls that may wait to delete messages. With more, nothing is taken until they get on."""

BREATH_S = 0.1
"""For them, before one looks again."""

AT_ONCE = 500
"""Messages that the controller takes in one turn of its loop: it has other duties."""


class Source(Protocol):
    """What is needed of a queue."""

    def receive(self, max_messages: int = 1, wait_s: int = 20) -> list[Received]:
        """Messages. Raises ServiceError."""

    def delete(self, receipts: list[str]) -> set[str]:
        """Delete; returns stale receipts. Raises ServiceError."""


class Pump:
    """The events queue's threads; made idle, they start with the first `take`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._came: queue.Queue[list[Received] | Exception] = queue.Queue(AHEAD)
        self._rush = threading.Event()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._in_hand: list[Received] = []
        self._pool = ThreadPoolExecutor(DELETERS, "delete")
        self._deleting: dict[Future[set[str]], list[str]] = {}

    # Receiving

    def take(self, wait_s: float = 2 * RECEIVE_WAIT_S) -> tuple[list[Received], bool]:
        """What has come, and whether that is all there was; waits for the first answer. Raises what asking the queue has raised.

        Nothing, and that is not all, while too much is still to be deleted.
        """
        if not self._threads:
            self._start()
        if len(self._deleting) > BEHIND and sum(not call.done() for call in self._deleting) > BEHIND:
            self._over.wait(BREATH_S)
            return [], False
        found: list[Received] = []
        heard_all = False  # no answer at all says nothing
        while len(found) < AT_ONCE:
            try:
                came = self._came.get_nowait() if found else self._came.get(timeout=wait_s)
            except queue.Empty:
                return found, heard_all
            if isinstance(came, Exception):
                if not found:
                    raise came
                return found, False  # what else is wrong will be said again
            found += came
            heard_all = len(came) < FULL
            if not came:
                return found, heard_all
        return found, False

    def _start(self) -> None:
        for number in range(RECEIVERS):
            thread = threading.Thread(target=self._receive, args=(number == 0,), name=f"receive-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _receive(self, always: bool) -> None:
        """Ask the queue until the end; all but one thread only while there is a rush."""
        while not self._over.is_set():
            if not always and not self._rush.wait(RECEIVE_WAIT_S):
                continue
            try:
                came = self._source.receive(RECEIVE_MOST, RECEIVE_WAIT_S)
            except Exception as error:  # also one of our own making: the controller shall not wait in silence
                self._rush.clear()
                if always:
                    self._hand_over(error)
                self._over.wait(random.uniform(0.5, 1.5))  # noqa: S311
                continue
            if len(came) >= FULL:
                self._rush.set()
            elif not came:
                self._rush.clear()
            if came or always:
                self._hand_over(came)

    def _hand_over(self, what: list[Received] | Exception) -> None:
        while not self._over.is_set():
            try:
                self._came.put(what, timeout=RECEIVE_WAIT_S)
                return
            except queue.Full:
                continue
        if not isinstance(what, Exception):
            self._in_hand += what

    # Deleting

    def delete(self, receipts: list[str]) -> None:
        """Delete messages, soon. Raises ServiceError for what could not be deleted since the last call; that is tried again."""
        failed = self._collect()
        wanted = receipts + failed
        for start in range(0, len(wanted), RECEIVE_MOST):
            batch = wanted[start : start + RECEIVE_MOST]
            self._deleting[self._pool.submit(self._source.delete, batch)] = batch
        if failed:
            raise self._error

    def flush(self) -> None:
        """Wait until all is deleted. Raises ServiceError when something could not be: call again."""
        for future in list(self._deleting):
            future.exception()
        self.delete([])

    def _collect(self) -> list[str]:
        """The receipts of deletions that failed."""
        failed: list[str] = []
        for future in [future for future in self._deleting if future.done()]:
            batch = self._deleting.pop(future)
            error = future.exception()
            if isinstance(error, ServiceError):
                self._error = error
                failed += batch
            elif error is not None:
                raise error
        return failed

    # The end

    def stop(self, *, wait: bool) -> list[Received]:
        """Ask no more, and return what nobody has taken: it comes again unless it is deleted.

        With `wait` no thread is left that could take away what is somebody else's next; without, threads end after their last call.
        """
        self._over.set()
        self._rush.set()
        if wait:
            for thread in self._threads:
                thread.join()
        self._pool.shutdown(wait=wait)
        left = self._in_hand
        while True:
            try:
                came = self._came.get_nowait()
            except queue.Empty:
                return left
            if not isinstance(came, Exception):
                left += came
