"""Messages leave at once and in order, survive an absent queue and a killed worker, and never hold up whoever posts."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalworker import poster as module
from evalworker.poster import Poster
from evalworker.queues import BATCH, QueueError, SendFailed

PATIENCE_S = 30.0


class FakeQueue:
    """Takes batches when it is let; remembers each call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Semaphore(0)
        self.answer: Callable[[list[str]], None] = lambda bodies: None

    def send(self, bodies: list[str], delay_s: int = 0) -> None:
        self.calls.append(bodies)
        self.called.release()
        self.gate.wait(PATIENCE_S)
        self.answer(bodies)

    @property
    def sent(self) -> list[str]:
        return [body for bodies in self.calls for body in bodies]


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
def made(queue: FakeQueue, tmp_path: Path) -> Iterator[Callable[[], Poster]]:
    posters: list[Poster] = []

    def make() -> Poster:
        posters.append(Poster(queue, tmp_path / "spool.jsonl", lambda _: None))  # type: ignore[arg-type]
        return posters[-1]

    yield make
    queue.gate.set()
    queue.answer = lambda bodies: None
    for poster in posters:
        poster.close(PATIENCE_S)


def test_one_message_goes_at_once_and_leaves_the_spool(
    queue: FakeQueue, made: Callable[[], Poster], tmp_path: Path
) -> None:
    poster = made()
    assert poster.post('{"n":1}').wait(PATIENCE_S)
    assert queue.calls == [['{"n":1}']]
    assert poster.close(PATIENCE_S)
    assert (tmp_path / "spool.jsonl").read_bytes() == b""


def test_what_waits_goes_in_batches_and_in_order(queue: FakeQueue, made: Callable[[], Poster]) -> None:
    queue.gate.clear()
    poster = made()
    posted = [poster.post(str(0))]
    assert queue.called.acquire(timeout=PATIENCE_S)
    posted += [poster.post(str(n)) for n in range(1, 26)]
    assert not any(one.wait(0) for one in posted)
    queue.gate.set()
    assert all(one.wait(PATIENCE_S) for one in posted)
    assert queue.sent == [str(n) for n in range(26)]
    assert max(len(call) for call in queue.calls) == BATCH
    assert len(queue.calls) <= 5


def test_messages_that_were_not_taken_stay_in_front(
    queue: FakeQueue, made: Callable[[], Poster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0,))
    failing = [True]

    def refuse_some(bodies: list[str]) -> None:
        if failing and len(bodies) > 1:
            failing.clear()
            raise SendFailed("some were not taken", unsent=[bodies[1], bodies[2]])

    queue.gate.clear()
    poster = made()
    poster.post("first")
    assert queue.called.acquire(timeout=PATIENCE_S)
    queue.answer = refuse_some
    posted = [poster.post(body) for body in ("a", "b", "c", "d")]
    queue.gate.set()
    assert all(one.wait(PATIENCE_S) for one in posted)
    assert queue.calls[1] == ["a", "b", "c", "d"]
    assert queue.sent[5:] == ["b", "c"]


def test_an_absent_queue_is_not_asked_again_by_each_new_message(
    queue: FakeQueue, made: Callable[[], Poster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (PATIENCE_S,))

    def absent(bodies: list[str]) -> None:
        raise QueueError("cannot be reached")

    queue.answer = absent
    poster = made()
    poster.post("0")
    assert queue.called.acquire(timeout=PATIENCE_S)
    posted = [poster.post(str(n)) for n in range(1, 200)]
    assert not posted[-1].wait(0.3)
    assert len(queue.calls) == 1
    queue.answer = lambda bodies: None
    assert poster.close(PATIENCE_S)  # closing tries at once
    assert queue.sent[1:] == [str(n) for n in range(200)]


def test_what_cannot_be_sent_before_the_end_stays_in_the_spool_for_the_next_one(
    queue: FakeQueue, made: Callable[[], Poster], tmp_path: Path
) -> None:
    def absent(bodies: list[str]) -> None:
        raise QueueError("cannot be reached")

    queue.answer = absent
    poster = made()
    posted = [poster.post(str(n)) for n in range(3)]
    assert not poster.close(0.2)
    assert not any(one.wait(0) for one in posted)
    assert (tmp_path / "spool.jsonl").read_text() == "0\n1\n2\n"
    queue.calls.clear()
    other = FakeQueue()
    second = Poster(other, tmp_path / "spool.jsonl", lambda _: None)  # type: ignore[arg-type]
    assert second.close(PATIENCE_S)
    assert other.sent == ["0", "1", "2"]
    assert (tmp_path / "spool.jsonl").read_bytes() == b""


def test_half_a_line_of_a_killed_forerunner_is_no_message(queue: FakeQueue, tmp_path: Path) -> None:
    spool = tmp_path / "spool.jsonl"
    spool.write_bytes(b'{"n":1}\n{"n":2}\n{"n":3,"half')
    queue.gate.clear()
    poster = Poster(queue, spool, lambda _: None)  # type: ignore[arg-type]
    poster.post('{"n":4}')
    assert spool.read_bytes() == b'{"n":1}\n{"n":2}\n{"n":4}\n'
    queue.gate.set()
    assert poster.close(PATIENCE_S)
    assert queue.sent == ['{"n":1}', '{"n":2}', '{"n":4}']


def test_without_a_spool_messages_still_go(queue: FakeQueue, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "spool.jsonl").mkdir()
    poster = Poster(queue, tmp_path / "spool.jsonl", said.append)  # type: ignore[arg-type]
    assert poster.lost_spool
    assert poster.post("1").wait(PATIENCE_S)
    assert poster.close(PATIENCE_S)
    assert len(said) == 1
    assert "held in memory only" in said[0]


def test_a_full_disk_does_not_stop_the_stream(queue: FakeQueue) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    said: list[str] = []
    poster = Poster(queue, Path("/dev/full/none"), said.append)  # type: ignore[arg-type]
    poster._spool = os.open("/dev/full", os.O_WRONLY)
    assert poster.post("1").wait(PATIENCE_S)
    assert poster.lost_spool
    assert poster.close(PATIENCE_S)


def test_an_urgent_message_does_not_wait_for_the_gap(
    queue: FakeQueue, made: Callable[[], Poster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GAP_S", 3600.0)
    poster = made()
    poster.post("sample")
    assert queue.called.acquire(timeout=PATIENCE_S)
    late = poster.post("another sample")
    assert not late.wait(0.2)
    assert poster.post("the job's end", urgent=True).wait(PATIENCE_S)
    assert late.wait(0)
