"""Which workers a fleet has: what is lost, what never came, whether more would help."""

from typing import Any

from evalops.fleet.roster import LOST_AFTER_S, Roster
from evalworker.contract.messages import Heartbeat, WorkerOnline
from evalworker.contract.wire import now

FLEET = "2026-11-29-08-05-33-1a2b3c4d"


def online(roster: Roster, name: str, at: float = 0.0, slots: int = 1) -> bool:
    roster.heard(name, at)
    return roster.online(
        WorkerOnline(
            fleet_id=FLEET, instance_id=name, ts=now(), bootstrap_s=1, instance_type="m", lifecycle="spot", slots=slots
        )
    )


def beat(roster: Roster, name: str, at: float = 0.0, running: tuple[str, ...] = (), **more: Any) -> None:
    roster.heard(name, at)
    roster.beat(
        Heartbeat(
            fleet_id=FLEET,
            instance_id=name,
            ts=now(),
            running=list(running),
            load=0,
            disk_free=1,
            memory_free=1,
            **more,
        )
    )


def test_a_worker_of_which_nothing_is_heard_is_silent() -> None:
    roster = Roster()
    online(roster, "a")
    online(roster, "b")
    beat(roster, "b", 80)
    assert roster.silent(LOST_AFTER_S) == []
    assert roster.silent(LOST_AFTER_S + 1) == ["a"]


def test_a_worker_drains_from_its_word_to_its_goodbye() -> None:
    """In whatever order its last messages come."""
    roster = Roster()
    for name in ("a", "b"):
        online(roster, name)
    beat(roster, "b", 1, leaving="spot")
    beat(roster, "b", 2)
    assert roster.draining == {"b": "spot"}
    roster.left("b")
    beat(roster, "b", 3, leaving="spot")
    assert roster.draining == {}


def test_while_nobody_listens_nobody_is_silent() -> None:
    roster = Roster()
    online(roster, "a")
    roster.deaf(100)
    assert roster.silent(100 + LOST_AFTER_S) == []
    assert roster.silent(101 + LOST_AFTER_S) == ["a"]


def test_a_machine_that_never_came_online_is_not_silent_but_a_failed_boot() -> None:
    roster = Roster()
    roster.heard("a", 0)
    assert roster.silent(1000) == []
    assert roster.lost("a", "EC2 says Server.InternalError") == "failed boot"
    assert (roster.failed("a"), roster.failed("a"), roster.failed_boots) == (True, False, 1)


def test_what_a_lost_machine_means() -> None:
    roster = Roster()
    for name in "abc":
        online(roster, name)
    assert (roster.left("b"), roster.left("b")) == (True, False)
    assert roster.lost("a", "EC2 says Server.SpotInstanceTermination") == "lost"
    assert roster.lost("a", "again") == "done"
    assert not roster.left("a")
    assert roster.lost("b", "EC2 says Server.SpotInstanceTermination") == "done"
    assert roster.lost("c", "ended") == "done"
    assert not roster.any_online


def test_a_late_message_brings_nobody_back() -> None:
    roster = Roster()
    roster.left("a")
    beat(roster, "a", 5, ("job",))
    assert online(roster, "a", 6)
    assert not online(roster, "a", 7)
    assert roster.workers == {}


def test_how_long_an_attempt_has_run() -> None:
    roster = Roster()
    online(roster, "a", 10)
    beat(roster, "a", 20, running=("j",))
    beat(roster, "a", 50, running=("j",))
    assert (roster.busy_s("j", 80), roster.busy_s("other", 80)) == (60, 0)
    roster.ended("j")
    beat(roster, "a", 90, running=("j",))
    assert roster.busy_s("j", 95) == 5


def test_the_stream_of_an_earlier_controller_tells_who_is_online() -> None:
    roster = Roster()
    for event in (
        {"type": "worker_online", "instance_id": "old", "slots": 1},
        {"type": "fleet_start"},
        {"type": "worker_online", "instance_id": "a", "slots": 2},
        {"type": "worker_online", "instance_id": "b", "slots": 2},
        {"type": "worker_lost", "instance_id": "b"},
        {"type": "result"},
    ):
        roster.replay(event, 50)
    assert list(roster.workers) == ["a"]
    assert roster.silent(50 + LOST_AFTER_S + 1) == ["a"]
    assert not online(roster, "a", 60)


def test_more_workers_come_while_all_are_busy_and_jobs_wait() -> None:
    roster = Roster()
    assert roster.more(alive=0, most=5, waiting=9) == 0
    online(roster, "a", slots=2)
    beat(roster, "a", running=("1",))
    assert roster.more(alive=1, most=5, waiting=9) == 0
    beat(roster, "a", running=("1", "2"))
    assert roster.more(alive=1, most=5, waiting=9) == 4
    assert roster.more(alive=1, most=5, waiting=2) == 2
    assert roster.more(alive=2, most=5, waiting=9) == 0
    beat(roster, "a", running=("1", "2"), rate_limited=3)
    assert roster.more(alive=1, most=5, waiting=9) == 0
