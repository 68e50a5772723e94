"""`evalops.logs.local_run`: who may run a run here, and what its control document says meanwhile."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evalops.fleet import lanes
from evalops.logs import local_run, places
from evalops.logs.survey import survey
from evalworker.contract import layout
from evalworker.contract.documents import Control, Guards, JobSpec, Lane, Manifest
from evalworker.contract.wire import now
from evalworker.storage import Changed, LocalStorage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
JOB = JobSpec(job_id="0" * 16, task="t.py@t", name="t", model="scripted/good", samples=4)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def write(store: LocalStorage, **changes: Any) -> None:
    """A run's manifest, and a control document whose controller has been silent for five minutes."""
    plan = {"created": now(), "backend": "ec2", "jobs": [JOB], "arguments": {}, "models": [JOB.model]}
    store.put(layout.manifest(RUN), Manifest(fleet_id=RUN, submit_dir=".", **plan).to_bytes())
    silent = {"beat": now() - timedelta(minutes=5), "deadline": now() + timedelta(hours=11)}
    fields = {"round": 1, "state": "running", "controller": "elsewhere:1"} | silent | changes
    store.put(layout.control(RUN), Control(fleet_id=RUN, **fields).to_bytes())


def own_lane(store: LocalStorage, endpoint: str | None = None) -> None:
    lanes.register(store, Lane(name="l", jobs="j", events="e", dead="d", endpoint=endpoint), RUN, "me", now())


def busy(store: LocalStorage) -> str | None:
    return local_run.living_owner(store, RUN, local_run.last_seen(store, RUN))


@pytest.mark.parametrize(
    ("control", "why"),
    [
        ({}, "its controller's last sign of life was 5 min ago"),
        ({"controller": "", "beat": now()}, "its controller left it"),
        ({"state": "stopping"}, "last sign of life"),
        ({"deadline": now() - timedelta(hours=1)}, "its deadline passed 1 h ago"),
    ],
)
def test_a_fleet_that_runs_on_without_its_controller_is_left_alone(
    store: LocalStorage, control: dict[str, Any], why: str
) -> None:
    write(store, **control)
    own_lane(store)
    said = busy(store)
    assert said is not None
    assert why in said
    assert f"`ct fleet attach {RUN}`" in said
    top = survey(places.of_run(RUN, store), lambda model: None).headline
    assert top.startswith("Nobody drives this fleet: ")
    assert why in top
    assert "ies run local" not in top


def test_a_run_that_has_no_lane_or_has_ended_is_free(store: LocalStorage) -> None:
    assert busy(store) is None
    write(store)
    assert busy(store) is None
    own_lane(store)
    write(store, state="ended")
    assert busy(store) is None
    assert f"`ies run local --run-id {RUN}`" in survey(places.of_run(RUN, store), lambda model: None).headline


def test_a_fleet_of_this_machine_runs_on_while_its_queues_do(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store)
    own_lane(store, "http://127.0.0.1:9")
    assert busy(store) is None
    monkeypatch.setattr(lanes, "answers", lambda lane: lane.name == "l")
    assert "runs on" in (busy(store) or "")


def test_a_run_is_taken_over_as_it_was_seen_or_not_at_all(store: LocalStorage) -> None:
    write(store, guards=Guards(budget_usd=5))
    seen = local_run.last_seen(store, RUN)
    with local_run.alive(store, RUN, seen):
        control = Control.from_json(store.get(layout.control(RUN)).body)
        assert (control.round, control.state, control.guards.budget_usd) == (2, "running", 5)
        with pytest.raises(Changed, match="somebody else took the run"), local_run.alive(store, RUN, seen):
            pytest.fail("two run it")
        with pytest.raises(Changed), local_run.alive(store, RUN, None):
            pytest.fail("two run it")
    assert Control.from_json(store.get(layout.control(RUN)).body).state == "ended"
