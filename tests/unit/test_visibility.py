"""Messages of running jobs stay ours; a stale receipt is logged, never an end."""

from typing import Any

import pytest

from evalworker.queues import QueueError
from evalworker.visibility import HAND_OVER_S, VisibilityKeeper


class FakeQueue:
    def __init__(self) -> None:
        self.extended: list[tuple[list[str], int]] = []
        self.stale: set[str] = set()
        self.away = False
        self.meanwhile: Any = None

    def extend(self, receipts: list[str], seconds: int) -> set[str]:
        if self.away:
            raise QueueError("cannot be reached")
        self.extended.append((list(receipts), seconds))
        if self.meanwhile is not None:
            self.meanwhile()
        return self.stale & set(receipts)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
def keeper(queue: FakeQueue, clock: Clock, said: list[str]) -> Any:
    made = VisibilityKeeper(queue, 3600, said.append, clock)  # type: ignore[arg-type]
    yield made
    made.stop()


def never() -> None:
    raise AssertionError("nothing is handed over")


def test_all_held_messages_are_extended_and_released_ones_are_not(keeper: VisibilityKeeper, queue: FakeQueue) -> None:
    for receipt in "abc":
        keeper.hold(receipt, never)
    keeper.release("b")
    keeper.release("unknown")
    keeper.extend_all()
    assert queue.extended == [(["a", "c"], 3600)]


def test_without_messages_nothing_is_asked(keeper: VisibilityKeeper, queue: FakeQueue) -> None:
    keeper.extend_all()
    assert queue.extended == []


def test_a_stale_receipt_is_told_once_and_not_extended_again(
    keeper: VisibilityKeeper, queue: FakeQueue, said: list[str]
) -> None:
    held = keeper.hold("a", never)
    keeper.hold("b", never)
    queue.stale = {"a"}
    keeper.extend_all()
    keeper.extend_all()
    assert held.stale
    assert [receipts for receipts, _ in queue.extended] == [["a", "b"], ["b"]]
    assert len(said) == 1
    assert "another worker" in said[0]


def test_a_message_deleted_meanwhile_is_not_called_stale(
    keeper: VisibilityKeeper, queue: FakeQueue, said: list[str]
) -> None:
    keeper.hold("a", never)
    queue.stale = {"a"}
    queue.meanwhile = lambda: keeper.release("a")
    keeper.extend_all()
    assert said == []


def test_an_absent_queue_is_logged_and_asked_again(keeper: VisibilityKeeper, queue: FakeQueue, said: list[str]) -> None:
    keeper.hold("a", never)
    queue.away = True
    keeper.extend_all()
    queue.away = False
    keeper.extend_all()
    assert len(said) == 1
    assert len(queue.extended) == 1


def test_before_twelve_hours_a_job_hands_over_once(keeper: VisibilityKeeper, clock: Clock) -> None:
    handed: list[str] = []
    keeper.hold("old", lambda: handed.append("old"))
    clock.now = HAND_OVER_S
    keeper.hold("young", lambda: handed.append("young"))
    keeper.extend_all()
    assert handed == []
    clock.now += 1
    keeper.extend_all()
    keeper.extend_all()
    assert handed == ["old"]
    assert HAND_OVER_S + 3600 <= 12 * 3600
