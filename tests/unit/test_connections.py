"""The division of a fleet's model connections: pure rules, and the limit that Inspect's own limiter gets."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalops.commands.fleet import _connections_line
from evalops.fleet.connections import CALM_S, Connections
from evalops.fleet.roster import Roster, Seen
from evalworker import inspect_internals
from evalworker.contract.documents import Control, Limits
from evalworker.contract.messages import Heartbeat
from evalworker.contract.wire import now


def seen(running: int, refused: int = 0, *, online: bool = True) -> Seen:
    return Seen(online=online, running=frozenset(str(n) for n in range(running)), refused=refused)


def test_without_a_total_nothing_is_divided() -> None:
    connections = Connections(None)
    assert not connections.look({"a": seen(3)}, 0)
    assert connections.shares == {}


@given(st.integers(1, 200), st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_the_shares_are_the_whole_and_even_by_jobs(spare: int, running: list[int]) -> None:
    jobs = [max(1, each) for each in running]
    connections = Connections(sum(jobs) + spare)
    connections.look({f"w{n:02d}": seen(each) for n, each in enumerate(running)}, 0)
    assert sum(connections.shares.values()) == sum(jobs) + spare
    each = [share / count for share, count in zip(connections.shares.values(), jobs, strict=True)]
    assert max(each) - min(each) <= 2
    assert min(connections.shares.values()) >= 1


def test_shares_change_as_jobs_and_workers_come_and_go() -> None:
    connections = Connections(12)
    assert connections.look({"a": seen(1), "b": seen(2), "late": seen(0, online=False)}, 0)
    assert connections.shares == {"a": 4, "b": 8}
    assert not connections.look({"a": seen(1), "b": seen(2)}, 1)
    assert connections.look({"a": seen(1), "b": seen(1), "late": seen(0)}, 2)
    assert connections.shares == {"a": 4, "b": 4, "late": 4}
    connections.look({"b": seen(1)}, 3)
    assert connections.shares == {"b": 12}


def test_refused_calls_lower_the_share_of_their_worker_alone_and_calm_brings_it_back() -> None:
    connections = Connections(32)
    shares = []
    for at, refused in [(0, 0), (1, 3), (2, 3), (3, 5), (3 + CALM_S, 5), (3 + 2 * CALM_S, 5), (4 + 2 * CALM_S, 6)]:
        connections.look({"a": seen(1, refused), "b": seen(1)}, at)
        shares.append((connections.shares["a"], connections.shares["b"]))
    assert shares == [(16, 16), (8, 16), (8, 16), (4, 16), (5, 16), (6, 16), (3, 16)]
    for at in range(100, 2000, 40):
        connections.look({"a": seen(1, 6), "b": seen(1)}, at)
    assert connections.shares == {"a": 16, "b": 16}
    for refused in range(7, 55):
        connections.look({"a": seen(1, refused), "b": seen(1)}, 3000)
    assert connections.shares == {"a": 1, "b": 16}


def test_refusals_count_though_another_job_has_ended_and_beats_are_late() -> None:
    """In a beat 5 calls of an ended job go and 3 of another come: what runs has fewer than before."""

    def beat(limited: int, refused: int) -> Heartbeat:
        about = {"fleet_id": "2026-11-29-14-05-33-1a2b3c4d", "instance_id": "a", "ts": now(), "load": 0}
        return Heartbeat(**about, running=["1"], disk_free=1, memory_free=1, rate_limited=limited, refused=refused)

    roster, connections, shares = Roster(), Connections(16), []
    roster.heard("a", 0)
    for limited, refused in [(0, 0), (5, 5), (3, 8), (5, 5), (3, 8)]:
        roster.beat(beat(limited, refused))
        connections.look(roster.workers, 1)
        shares.append(connections.shares["a"])
    assert shares == [16, 8, 4, 4, 4]


def test_the_limit_of_a_models_connections_changes_while_it_runs_and_no_other_does() -> None:
    from inspect_ai.util import concurrency
    from inspect_ai.util._concurrency import get_or_create_semaphore, init_concurrency

    async def main() -> None:
        init_concurrency()
        assert inspect_internals.set_connection_limit(3) == 0
        limiter = await get_or_create_semaphore("scripted/good", 10, "Modelscripted/good", True)
        async with concurrency("mine", 7):
            assert inspect_internals.set_connection_limit(3) == 1
            mine = await get_or_create_semaphore("mine", 7, None, True)
        assert (limiter.concurrency, mine.concurrency) == (3, 7)
        with pytest.raises(ValueError, match="at least 1"):
            inspect_internals.set_connection_limit(0)

    anyio.run(main)


def test_status_shows_the_shares_and_where_calls_are_refused() -> None:
    control = Control(
        fleet_id="2026-11-29-14-05-33-1a2b3c4d",
        round=1,
        state="running",
        deadline=now(),
        beat=now(),
        limits=Limits(fleet_connections=40),
    )
    assert _connections_line(control) == "40 model connections: no worker has any yet"
    told = control.model_copy(update={"connections": {"w1": 10, "w2": 20}, "pressure": {"w1": 7}})
    assert _connections_line(told) == "40 model connections: w1 10 (7 calls refused), w2 20"
