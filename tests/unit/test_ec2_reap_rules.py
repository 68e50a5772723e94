"""What the reaper decides: pure rules on what it sees."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalops.ec2 import reap_rules, reaper
from evalops.ec2.reap_rules import FleetState, Thing, decide
from evalops.fleet.stream import Fenced
from evalops.settings import Settings
from evalworker.contract import layout
from evalworker.contract.documents import Control, Lane, Machines, Manifest
from evalworker.contract.wire import stamp
from evalworker.storage import Changed, LocalStorage

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
FLEET = "2026-11-29-08-05-33-1a2b3c4d"
OWN = {"Name": "inspect-fleet-default-worker", "inspect-fleet-bucket": "ours"}


def ago(**amount: float) -> datetime:
    return NOW - timedelta(**amount)


OLD = ago(hours=2)


def instance(created: datetime = OLD, state: str = "running", **tags: str) -> Thing:
    shown = {name.replace("_", "-"): value for name, value in tags.items()}
    return Thing("instance", "i-1", created, {"inspect-fleet": "default"} | shown, state)


RUNNING, ENDED = FleetState("running"), FleetState("ended")


@pytest.mark.parametrize(
    ("thing", "fleet", "action", "reason"),
    [
        (instance(fleet_id=FLEET, fleet_deadline=stamp(ago(hours=-1))), RUNNING, "keep", f"works for {FLEET} until"),
        (instance(fleet_id=FLEET), ENDED, "mark", f"belongs to {FLEET}, which has ended; ended on the next pass"),
        (instance(fleet_id=FLEET, fleet_deadline=stamp(ago(minutes=6))), RUNNING, "mark", "is past its deadline"),
        (instance(fleet_id=FLEET, fleet_deadline=stamp(ago(minutes=4))), RUNNING, "keep", f"works for {FLEET}"),
        (instance(fleet_id=FLEET), FleetState(None, missing=True), "mark", f"belongs to {FLEET}, of which nothing"),
        (instance(fleet_id=FLEET), FleetState(None), "keep", f"belongs to {FLEET}, which could not be read"),
        (instance(ago(minutes=9), fleet_id=FLEET), ENDED, "keep", "is only 9 min old"),
        (instance(), ENDED, "keep", "is no worker of a fleet"),
        (instance(fleet_id="../../x"), ENDED, "keep", "has a tag fleet-id that is no fleet's id"),
        (Thing("volume", "vol-1", ago(hours=1), OWN, "available"), RUNNING, "mark", "is a worker's disk"),
        (Thing("volume", "vol-1", ago(hours=1), {}, "available"), RUNNING, "keep", "is no worker's disk"),
        (Thing("volume", "vol-1", ago(hours=1), OWN | {"Name": "data"}, "available"), RUNNING, "keep", "is no worker's disk"),
        (instance(fleet_id=FLEET, inspect_fleet_bucket="other"), FleetState(None, missing=True), "keep", "keeps its records in"),
        (instance(fleet_id=FLEET, inspect_fleet_bucket="ours"), ENDED, "mark", "belongs to"),
        (Thing("volume", "vol-1", ago(minutes=1), OWN, "available"), RUNNING, "keep", "is only 1 min old"),
    ],
)  # fmt: skip
def test_a_first_pass_marks_and_ends_nothing(thing: Thing, fleet: FleetState, action: str, reason: str) -> None:
    (decision,) = decide([thing], {FLEET: fleet}, NOW, OWN)
    assert decision.action == action
    assert decision.reason.startswith(reason)


def marked(minutes: float) -> Thing:
    return instance(fleet_id=FLEET, inspect_fleet_reap=stamp(ago(minutes=minutes)))


def test_a_later_pass_ends_what_was_marked() -> None:
    (decision,) = decide([marked(6)], {FLEET: ENDED}, NOW, OWN)
    assert (decision.action, decision.reason.split(";")[0]) == ("end", f"belongs to {FLEET}, which has ended")


def test_a_mark_must_have_stood_for_a_while() -> None:
    (decision,) = decide([marked(2)], {FLEET: ENDED}, NOW, OWN)
    assert (decision.action, decision.reason.endswith("marked 2 min ago, ended after 5 min")) == ("keep", True)


def test_a_mark_is_taken_back_when_the_fleet_lives() -> None:
    assert [each.action for each in decide([marked(60)], {FLEET: RUNNING}, NOW, OWN)] == ["unmark"]
    again = instance(fleet_id=FLEET, inspect_fleet_reap="")
    assert [each.action for each in decide([again], {FLEET: ENDED}, NOW, OWN)] == ["mark"]


def test_what_is_gone_already_is_left_out() -> None:
    gone = [instance(state=state, fleet_id=FLEET) for state in ("terminated", "shutting-down")]
    assert decide(gone, {FLEET: ENDED}, NOW, OWN) == []


def test_a_pass_ends_only_so_many() -> None:
    found = decide([marked(6)] * (reap_rules.MOST + 3), {FLEET: ENDED}, NOW, OWN)
    assert [each.action for each in found] == ["end"] * reap_rules.MOST + ["keep"] * 3
    assert found[-1].reason.endswith(f"but a pass ends {reap_rules.MOST} things")


def test_uploads_go_by_age() -> None:
    old, young = (Thing("upload", name, ago(hours=hours)) for name, hours in ((f"{FLEET}/a", 25), ("partial/b", 23)))
    assert [(each.action, each.reason) for each in reap_rules.uploads([old, young], NOW)] == [
        ("end", "broke off 25 h ago"),
        ("keep", "began 23 h ago"),
    ]


def test_uploads_of_others_in_the_same_bucket_are_not_touched_and_a_pass_ends_only_so_many() -> None:
    def begun(name: str) -> Thing:
        return Thing("upload", name, ago(hours=25))

    assert reap_rules.uploads([begun("backup/2026.tar"), begun("data.bin")], NOW) == []
    many = reap_rules.uploads([begun(f"{FLEET}/{number}") for number in range(reap_rules.MOST + 1)], NOW)
    assert [each.action for each in many] == ["end"] * reap_rules.MOST + ["keep"]


@pytest.mark.parametrize(("backend", "action"), [("local", "keep"), ("ec2", "end")])
def test_only_a_fleet_of_machines_is_dead_without_any(backend: Any, action: str, tmp_path: Path) -> None:
    storage, estate = LocalStorage(tmp_path), SimpleNamespace(name="e", bucket="ours")
    machines = Machines(estate="e", markets=["spot"], images={}, instance_types={}, workers=1)
    about: dict[str, Any] = {"jobs": [], "arguments": {}, "models": [], "submit_dir": "."}
    manifest = Manifest(
        fleet_id=FLEET, created=OLD, backend=backend, machines=machines if backend == "ec2" else None, **about
    )
    control = Control(fleet_id=FLEET, round=1, state="running", deadline=ago(hours=-1), beat=ago(hours=1))
    storage.put(layout.manifest(FLEET), manifest.to_bytes())
    storage.put(layout.control(FLEET), control.to_bytes())
    one: Any = reaper.Reaper(Settings(root=".", bucket=None, estate="e", owner="me"), estate, storage)  # type: ignore[arg-type]
    lane = Lane(name="lane-01", jobs="j", events="e", dead="d", fleet_id=FLEET, until=ago(hours=-1))
    assert one._lane(lane, NOW, set()).action == action


@pytest.mark.parametrize("error", [Fenced("another controller"), Changed("by somebody else")])
def test_a_fleet_that_somebody_else_ends_does_not_cut_the_pass_short(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster(*_: Any) -> None:
        raise error

    monkeypatch.setattr(reaper.takeover, "close_abandoned", faster)
    estate: Any = None
    one = reaper.Reaper(Settings(root=".", bucket=None, estate="e", owner="me"), estate, LocalStorage(tmp_path))
    lane = Lane(name="lane-01", jobs="j", events="e", dead="d", fleet_id=FLEET)
    (done,) = one._close(lane, reap_rules.Decision(Thing("lane", "lane-01", OLD), "end", "is past its deadline"))
    assert (done.action, done.reason, one.failed) == ("keep", "is being ended by somebody else", [])
