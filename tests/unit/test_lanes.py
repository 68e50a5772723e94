"""A lane has one owner at a time, until the owner's deadline, whoever asks and however fast."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from evalops.fleet import lanes
from evalops.fleet.stream import Fenced
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now
from evalworker.storage import Changed, LocalStorage

FLEETS = [f"2026-11-29-14-05-{n:02d}-1a2b3c4d" for n in range(20)]
LATER = now() + timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def estate(store: LocalStorage, count: int) -> None:
    for number in range(count):
        name = f"lane-{number:02d}"
        store.put(layout.lane(name), Lane(name=name, jobs="j", events="e", dead="d").to_bytes())


def test_each_lane_is_taken_once_and_then_none_is_left(store: LocalStorage) -> None:
    estate(store, 2)
    taken = [lanes.take(store, fleet, "me", LATER).name for fleet in FLEETS[:2]]
    assert taken == ["lane-00", "lane-01"]
    with pytest.raises(lanes.NoLane) as none:
        lanes.take(store, FLEETS[2], "me", LATER)
    assert FLEETS[0] in str(none.value)
    assert "of me until" in str(none.value)


def test_many_at_once_share_what_there_is(store: LocalStorage) -> None:
    estate(store, 5)

    def take(fleet: str) -> str | None:
        try:
            return lanes.take(store, fleet, "me", LATER).name
        except lanes.NoLane:
            return None

    with ThreadPoolExecutor(8) as threads:
        taken = [name for name in threads.map(take, FLEETS) if name is not None]
    assert len(taken) == len(set(taken))
    owners = [lane.fleet_id for lane, _ in lanes.lanes(store) if lane.fleet_id is not None]
    assert len(owners) == len(set(owners)) == len(taken) > 0


def test_an_estate_without_lanes_says_so(store: LocalStorage) -> None:
    with pytest.raises(lanes.NoLane, match="the estate has none"):
        lanes.take(store, FLEETS[0], "me", LATER)


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:9"])
def test_who_has_ended_a_round_does_not_give_away_the_lane_of_the_next(
    store: LocalStorage, endpoint: str | None
) -> None:
    """The next round of a run may have taken the lane anew while the controller of the last one still cleaned up."""
    lane = Lane(name="lane-00", jobs="j", events="e", dead="d", endpoint=endpoint)
    first = lanes.register(store, lane, FLEETS[0], "me", LATER)
    assert lanes.held(store, first)
    second = lanes.register(store, lane, FLEETS[0], "me", LATER + timedelta(minutes=1))
    assert not lanes.held(store, first)
    lanes.release(store, first)
    assert lanes.find(store, FLEETS[0]) == second
    lanes.release(store, second)
    assert lanes.find(store, FLEETS[0]) is None
    assert not lanes.held(store, second)


def test_a_released_lane_is_free_again(store: LocalStorage) -> None:
    estate(store, 1)
    lane = lanes.take(store, FLEETS[0], "me", LATER)
    assert lanes.find(store, FLEETS[0]) == lane
    lanes.release(store, lane)
    assert lanes.find(store, FLEETS[0]) is None
    assert lanes.take(store, FLEETS[1], "you", LATER).owner == "you"


def test_a_lane_that_has_another_owner_by_now_is_not_released(store: LocalStorage) -> None:
    estate(store, 1)
    mine = lanes.take(store, FLEETS[0], "me", LATER)
    lanes.release(store, mine)
    lanes.take(store, FLEETS[1], "you", LATER)
    lanes.release(store, mine)
    assert lanes.find(store, FLEETS[1]) is not None


def test_a_fleet_past_its_deadline_is_ended_before_its_lane_is_taken(store: LocalStorage) -> None:
    estate(store, 1)
    old = lanes.take(store, FLEETS[0], "me", now() - timedelta(seconds=1))
    closed: list[str | None] = []

    def close(lane: Lane) -> None:
        closed.append(lane.fleet_id)
        lanes.release(store, lane)

    assert lanes.take(store, FLEETS[1], "you", LATER, close).fleet_id == FLEETS[1]
    assert closed == [FLEETS[0]]
    assert lanes.expired(old)


@pytest.mark.parametrize("error", [Fenced("another controller"), Changed("by somebody else")])
def test_who_is_not_the_first_to_end_a_fleet_takes_another_lane(store: LocalStorage, error: Exception) -> None:
    estate(store, 2)
    lanes.take(store, FLEETS[0], "me", now() - timedelta(seconds=1))

    def close(lane: Lane) -> None:
        raise error

    assert lanes.take(store, FLEETS[1], "you", LATER, close).name == "lane-01"
    with pytest.raises(lanes.NoLane, match=f"lane-00: somebody else is ending {FLEETS[0]}"):
        lanes.take(store, FLEETS[2], "you", LATER, close)


def test_a_lane_of_this_machine_is_never_taken_and_goes_with_its_fleet(store: LocalStorage) -> None:
    own = Lane(name="embedded-x", jobs="j", events="e", dead="d", endpoint="http://127.0.0.1:1")
    registered = lanes.register(store, own, FLEETS[0], "me", LATER)
    with pytest.raises(lanes.NoLane):
        lanes.take(store, FLEETS[1], "you", LATER)
    assert lanes.find(store, FLEETS[0]) == registered
    lanes.release(store, registered)
    assert list(lanes.lanes(store)) == []


def test_a_record_that_cannot_be_read_is_named_and_passed_over(
    store: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    estate(store, 2)
    store.put(layout.lane("lane-00"), b"{broken")
    assert lanes.take(store, FLEETS[0], "me", LATER).name == "lane-01"
    assert "lane-00.json cannot be read" in capsys.readouterr().err
