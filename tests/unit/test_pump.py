"""The threads between the events queue and the controller: nothing lost, nothing left, errors heard, quiet when nothing comes."""

import threading
import time
from collections.abc import Iterator

import pytest

from evalops.fleet import pump as module
from evalops.fleet.pump import AHEAD, RECEIVE_MOST, RECEIVERS, Pump
from evalworker.queues import QueueError, Received


class Source:
    """A queue in memory that many threads may use, and that can be made to fail."""

    def __init__(self, count: int = 0) -> None:
        self.lock = threading.Condition()
        self.waiting = [Received(str(number), f"r{number}", 1) for number in range(count)]
        self.deleted: list[str] = []
        self.batches: list[int] = []
        self.asked: set[str] = set()
        self.receive_failures = 0
        self.delete_failures = 0

    def receive(self, max_messages: int = 1, wait_s: int = 20) -> list[Received]:
        with self.lock:
            self.asked.add(threading.current_thread().name)
            if self.receive_failures:
                self.receive_failures -= 1
                raise QueueError("the queue is away")
            self.lock.wait_for(lambda: bool(self.waiting), wait_s)
            found, self.waiting = self.waiting[:max_messages], self.waiting[max_messages:]
            return found

    def delete(self, receipts: list[str]) -> set[str]:
        with self.lock:
            if self.delete_failures:
                self.delete_failures -= 1
                raise QueueError("the queue is away")
            self.deleted += receipts
            self.batches.append(len(receipts))
        return set()

    def put(self, count: int) -> None:
        with self.lock:
            self.waiting += [Received("late", f"late{number}", 1) for number in range(count)]
            self.lock.notify_all()


@pytest.fixture
def pumps() -> Iterator[list[Pump]]:
    made: list[Pump] = []
    yield made
    for pump in made:
        pump.stop(wait=True)


def taken(pump: Pump, count: int) -> list[str]:
    """Take until so many have come."""
    found: list[str] = []
    while len(found) < count:
        found += [received.receipt for received in pump.take()[0]]
    return found


def test_every_message_is_taken_once_and_deleted_in_full_batches(pumps: list[Pump]) -> None:
    source = Source(2000)
    pumps.append(pump := Pump(source))
    found = taken(pump, 2000)
    assert sorted(found) == sorted(f"r{number}" for number in range(2000))
    pump.delete(found)
    pump.flush()
    assert sorted(source.deleted) == sorted(found)
    assert set(source.batches) == {RECEIVE_MOST}
    assert len(source.asked) > 1, "one thread did all the work"


def test_nothing_is_taken_while_too_much_is_to_be_deleted(pumps: list[Pump], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND", 3)
    source = Source(100)
    pumps.append(pump := Pump(source))
    found = taken(pump, 100)
    source.put(1)
    with source.lock:  # no call of the queue gets on
        pump.delete(found)
        assert pump.take() == ([], False)
    pump.flush()
    assert taken(pump, 1) == ["late0"]
    assert len(source.deleted) == 100


def test_while_nothing_comes_one_thread_asks(pumps: list[Pump]) -> None:
    source = Source()
    pumps.append(pump := Pump(source))
    assert pump.take() == ([], True)
    source.put(1)
    assert taken(pump, 1) == ["late0"]
    assert source.asked == {"receive-0"}


def test_an_error_is_heard_and_what_comes_after_it_too(pumps: list[Pump]) -> None:
    source = Source(3)
    source.receive_failures = 1
    pumps.append(pump := Pump(source))
    with pytest.raises(QueueError, match="away"):
        pump.take()
    assert taken(pump, 3) == ["r0", "r1", "r2"]


def test_no_answer_is_not_taken_for_silence(pumps: list[Pump]) -> None:
    """A queue that does not answer says nothing about workers."""
    source = Source()
    pumps.append(pump := Pump(source))
    source.lock.acquire()
    try:
        assert pump.take(0.01) == ([], False)
    finally:
        source.lock.release()


def test_a_bug_in_a_thread_is_no_silence(pumps: list[Pump], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()

    def broken(*_: object) -> list[Received]:
        raise TypeError("a bug")

    monkeypatch.setattr(source, "receive", broken)
    pumps.append(pump := Pump(source))
    with pytest.raises(TypeError):
        pump.take()


def test_deletions_that_failed_are_said_and_tried_again(pumps: list[Pump]) -> None:
    source = Source()
    source.delete_failures = 2
    pumps.append(pump := Pump(source))
    pump.delete([f"r{number}" for number in range(30)])
    with pytest.raises(QueueError):
        pump.flush()
    pump.flush()
    assert sorted(source.deleted) == sorted(f"r{number}" for number in range(30))


def test_a_slow_controller_is_not_buried_and_gets_back_what_it_did_not_take() -> None:
    source = Source(3 * AHEAD * RECEIVE_MOST)
    pump = Pump(source)
    taken = len(pump.take()[0])
    end = time.monotonic() + 30
    while not pump._came.full() and time.monotonic() < end:
        time.sleep(0.01)
    left = len(pump.stop(wait=True))
    assert AHEAD * RECEIVE_MOST <= left <= (AHEAD + RECEIVERS) * RECEIVE_MOST
    assert taken + left + len(source.waiting) == 3 * AHEAD * RECEIVE_MOST
