"""What is refused before a fleet starts or goes on, each with one sentence."""

import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalops import code
from evalops.commands.fleet import _list_row
from evalops.fleet import lanes, look, ownership, preflight, request, running, submit, takeover
from evalops.fleet.ending import STOPPED
from evalops.fleet.ledger import Ledger
from evalops.fleet.workers import default_slots
from evalops.settings import Settings
from evalops.ui import EXIT_STOPPED, Failure
from evalworker import redact
from evalworker.contract import layout
from evalworker.contract.documents import Control, Guards, JobSpec, Lane, Limits, Machines, Manifest
from evalworker.contract.wire import now
from evalworker.queues import QueueError
from evalworker.storage import Changed, Denied, LocalStorage, StorageError

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
SETTINGS = Settings(root="/somewhere", bucket=None, estate="default", owner="me")


def spec(number: int, name: str = "t", model: str = "scripted/good") -> JobSpec:
    return JobSpec(job_id=f"{number:016x}", task=f"{name}.py@{name}", name=name, model=model, samples=1)


def manifest(*jobs: JobSpec) -> Manifest:
    return Manifest(
        fleet_id=FLEET,
        created=now(),
        backend="local",
        jobs=list(jobs),
        arguments={},
        models=["scripted/good"],
        submit_dir=".",
    )


def control(**changes: Any) -> Control:
    fields: dict[str, Any] = {"state": "running", "deadline": now() + timedelta(hours=1), "beat": now()} | changes
    return Control(fleet_id=FLEET, round=1, **fields)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def sentence(call: Callable[[], Any]) -> str:
    """What a call that must be refused says; the exit code is 2."""
    with pytest.raises(Failure) as refused:
        call()
    assert refused.value.exit_code == 2
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(minutes=90)),
        ("2d", timedelta(days=2)),
        ("10m", timedelta(minutes=10)),
    ],
)
def test_durations(text: str, found: timedelta) -> None:
    assert request.deadline_of(text) == found


@pytest.mark.parametrize("text", ["", "h", "12", "1w", "-1h", "0m", "nand", "infh", "1e300d", "9999999d", "1h30m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|over before|too long"):
        request.deadline_of(text)


def test_a_run_is_resumed_with_its_own_jobs() -> None:
    preflight.check_same(manifest(spec(1), spec(2)), [spec(2), spec(1)])
    assert "also holds t with scripted/good" in sentence(
        lambda: preflight.check_same(manifest(spec(1), spec(2)), [spec(2)])
    )
    said = sentence(lambda: preflight.check_same(manifest(spec(1)), [spec(1), spec(3, "other")]))
    assert "does not hold other with scripted/good" in said
    assert "other arguments" not in said
    assert "other arguments" in sentence(lambda: preflight.check_same(manifest(spec(1)), [spec(3)]))


def owned(store: LocalStorage, endpoint: str | None = None, **changes: Any) -> None:
    lane = Lane(name="l", jobs="j", events="e", dead="d", endpoint=endpoint)
    lanes.register(store, lane, FLEET, changes.pop("owner", "me"), changes.pop("until", now() + timedelta(hours=1)))
    store.put(layout.manifest(FLEET), manifest(spec(1), spec(2)).to_bytes())
    store.put(layout.control(FLEET), control(**changes).to_bytes())


def test_the_same_jobs_are_not_paid_for_twice(store: LocalStorage) -> None:
    owned(store)
    said = sentence(lambda: preflight.check_not_running(store, [spec(2), spec(1)], SETTINGS))
    assert f"ct fleet status {FLEET}" in said
    assert "--new-fleet" in said


DEAD_PORT = "http://127.0.0.1:9"


def before_the_reboot(host: str | None = None) -> str:
    """A controller's name, of this machine: its process is no more."""
    return f"{host or socket.gethostname()}:{2**22 + 1}"


def test_a_fleet_that_a_reboot_has_ended_hinders_nobody(store: LocalStorage) -> None:
    owned(store, DEAD_PORT, controller=before_the_reboot())
    preflight.check_not_running(store, [spec(1), spec(2)], SETTINGS)
    sight = look.look(store, FLEET)
    assert "its queues have gone" in (sight.waiting_for or "")
    assert f"`ct run eval --run-id {FLEET}` goes on" in (sight.waiting_for or "")
    said = sentence(lambda: takeover.attach(SETTINGS, store, request.Request(), manifest(spec(1), spec(2))))
    assert "has lost its queues" in said and f"--run-id {FLEET} runs again what did not complete" in said


def test_of_a_fleet_on_another_machine_nothing_is_known(store: LocalStorage) -> None:
    long_ago = now() - timedelta(hours=1)
    owned(store, DEAD_PORT, controller=before_the_reboot("elsewhere"), beat=long_ago)
    assert "is running the same jobs" in sentence(
        lambda: preflight.check_not_running(store, [spec(1), spec(2)], SETTINGS)
    )
    assert "ct fleet attach" in (look.look(store, FLEET).waiting_for or "")


def ended(store: LocalStorage, **changes: Any) -> Manifest:
    """A run whose first round has ended with nothing completed."""
    stored = manifest(spec(1), spec(2))
    store.put(layout.manifest(FLEET), stored.to_bytes())
    store.put(layout.control(FLEET), control(state="ended", **changes).to_bytes())
    return stored


def test_of_two_resumes_the_one_that_goes_on_has_its_own_manifest(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = ended(store)
    begun: list[Manifest] = []
    monkeypatch.setattr(submit, "_begin", lambda *words: begun.append(words[3]))

    def resume(code: str) -> None:
        submit.resume(SETTINGS, store, request.Request(), stored, {"submit_dir": code})

    ours = store.replace

    def other_first(key: str, body: bytes, etag: str) -> str:
        """Somebody resumes the run right before we claim it."""
        monkeypatch.setattr(store, "replace", ours)
        resume("theirs")
        return store.replace(key, body, etag)

    monkeypatch.setattr(store, "replace", other_first)
    with pytest.raises(Changed):
        resume("ours")
    found = Manifest.from_json(store.get(layout.manifest(FLEET)).body)
    assert ([one.submit_dir for one in begun], found.submit_dir) == (["theirs"], "theirs")
    assert Control.from_json(store.get(layout.control(FLEET)).body).round == 2


def test_a_resume_waits_for_the_controller_that_still_ends_the_last_round(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    living = subprocess.Popen(["sleep", "60"])
    lane = Lane(name="lane-00", jobs="j", events="e", dead="d")
    taken = lanes.register(store, lane, FLEET, "me", now() + timedelta(hours=1))
    stored = ended(store, controller=f"{socket.gethostname()}:{living.pid}")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        assert not begun
        waits.append(seconds)
        if len(waits) == 3:
            lanes.release(store, taken)

    begun: list[Any] = []
    monkeypatch.setattr(submit.time, "sleep", sleep)
    monkeypatch.setattr(submit, "_begin", lambda *words: begun.append(words))
    submit.resume(SETTINGS, store, request.Request(), stored, {})
    living.kill()
    living.wait()
    assert (len(waits), len(begun)) == (3, 1)


@pytest.mark.parametrize(
    "changes",
    [{"state": "ended"}, {"owner": "you"}, {"until": now() - timedelta(seconds=1)}],
)
def test_fleets_that_do_not_matter(store: LocalStorage, changes: dict[str, Any]) -> None:
    owned(store, **changes)
    preflight.check_not_running(store, [spec(1), spec(2)], SETTINGS)


def test_other_jobs_may_run_beside(store: LocalStorage) -> None:
    owned(store)
    preflight.check_not_running(store, [spec(1)], SETTINGS)


def test_a_fleet_with_a_living_controller_is_not_driven_twice() -> None:
    here = control(controller=ownership.controller_name())
    assert ownership.controller_name() in sentence(lambda: ownership.refuse_if_driven(FLEET, here))
    elsewhere = control(controller="another-machine:1")
    assert "another-machine:1" in sentence(lambda: ownership.refuse_if_driven(FLEET, elsewhere))


def test_a_fleet_whose_controller_has_gone_may_be_driven() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ownership.refuse_if_driven(FLEET, control(controller=f"{socket.gethostname()}:{child.pid}"))
    silent = now() - timedelta(seconds=ownership.CONTROLLER_ALIVE_S + 1)
    ownership.refuse_if_driven(FLEET, control(controller="another-machine:1", beat=silent))


def test_a_missing_a_refused_and_a_strange_manifest_are_three_sentences(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no run" in sentence(lambda: preflight.read_manifest(store, SETTINGS, FLEET))
    store.put(layout.manifest(FLEET), b'{"schema":2}')
    assert "cannot be read by this version" in sentence(lambda: preflight.read_manifest(store, SETTINGS, FLEET))

    def denied(key: str) -> None:
        raise Denied("access to it was refused")

    monkeypatch.setattr(store, "get", denied)
    assert "cannot be read: access to it was refused" in sentence(
        lambda: preflight.read_manifest(store, SETTINGS, FLEET)
    )


def test_the_state_of_the_tree_that_is_submitted(tmp_path: Path) -> None:
    assert code.state(tmp_path) is None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, env=environment)

    git("init")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-m", "a")
    state = code.state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "b").write_text("b")
    assert (code.state(tmp_path) or {})["dirty"] is True


@pytest.mark.parametrize(("cpus", "workers", "slots"), [(8, 2, 4), (2, 2, 1), (1, 4, 1), (None, 1, 1)])
def test_local_workers_share_the_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int | None, workers: int, slots: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert default_slots(workers) == slots


def test_what_a_resume_adds_to_the_manifest_holds_no_secret(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(redact, "_process", redact.Redactor({"HF_TOKEN": "hf_0123456789abcdef"}))
    old = manifest(spec(1))
    store.put(layout.manifest(FLEET), old.to_bytes())
    store.put(layout.control(FLEET), control(state="ended").to_bytes())
    shipped = {"requirements": ["mine @ https://example.org/mine.whl?token=hf_0123456789abcdef"]}
    said = sentence(lambda: submit.resume(SETTINGS, store, request.Request(), old, shipped))
    assert "HF_TOKEN" in said
    assert store.get(layout.manifest(FLEET)).body == old.to_bytes()


@pytest.mark.parametrize(
    ("error", "seen"),
    [(QueueError("the queue is away"), Failure), (KeyboardInterrupt(), KeyboardInterrupt), (ValueError(), ValueError)],
)
def test_a_fleet_that_could_not_be_started_leaves_no_workers(
    error: BaseException, seen: type[BaseException], store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def refuse() -> None:
        raise error

    fleet = SimpleNamespace(
        stream=SimpleNamespace(restore=lambda: iter(()), append=lambda events: None, store=list),
    )
    fake = SimpleNamespace(
        staff=SimpleNamespace(start=lambda: done.append("workers")),
        dispatch=SimpleNamespace(send_open_jobs=refuse),
        close=lambda reason: done.append("closed"),
    )
    monkeypatch.setattr(submit, "_embedded_lane", lambda *_: None)
    monkeypatch.setattr(submit, "fleet_of", lambda *_: fleet)
    monkeypatch.setattr(submit, "fleet_start", lambda *_: {})
    monkeypatch.setattr(submit, "Controller", lambda _: fake)
    run = manifest(spec(1))
    with pytest.raises(seen):
        submit._begin(SETTINGS, store, request.Request(), run, control(), "etag", Ledger(run.jobs))
    assert done == ["workers", "closed"]


@pytest.mark.parametrize("left", ["nothing", "an end without a release"])
def test_a_lane_past_its_deadline_is_freed_whatever_its_fleet_has_left(store: LocalStorage, left: str) -> None:
    if left != "nothing":
        store.put(layout.manifest(FLEET), manifest(spec(1)).to_bytes())
        store.put(layout.control(FLEET), control(state="ended").to_bytes())
    lane = Lane(
        name="lane-01", jobs="j", events="e", dead="d", fleet_id=FLEET, owner="me", until=now() - timedelta(hours=1)
    )
    store.put(layout.lane("lane-01"), lane.to_bytes())
    takeover.close_abandoned(SETTINGS, store, lane)
    (freed, _), *_ = lanes.lanes(store)
    assert freed.fleet_id is None
    assert not list(store.list(layout.segments(FLEET))), "a fleet that had ended got a second summary"


def test_a_fleet_past_its_deadline_is_left_to_its_controller_for_a_while(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is handing over, which takes minutes."""
    taken: list[str] = []
    monkeypatch.setattr(takeover, "_take_over", lambda *_: SimpleNamespace(close=taken.append))
    store.put(layout.manifest(FLEET), manifest(spec(1)).to_bytes())
    lane = Lane(name="lane-01", jobs="j", events="e", dead="d", fleet_id=FLEET, until=now() - timedelta(seconds=90))
    store.put(layout.control(FLEET), control(beat=now(), controller="elsewhere:1").to_bytes())
    takeover.close_abandoned(SETTINGS, store, lane)
    assert taken == []
    takeover.close_abandoned(SETTINGS, store, lane.model_copy(update={"until": now() - takeover.HANDING_OVER}))
    assert taken == [takeover.PAST_DEADLINE]
    store.put(layout.control(FLEET), control(beat=now(), controller="").to_bytes())
    takeover.close_abandoned(SETTINGS, store, lane)
    assert len(taken) == 2


@pytest.mark.parametrize("error", [StorageError("the store is away"), KeyboardInterrupt(), ValueError("a bug")])
def test_a_fleet_that_fails_before_it_begins_gives_its_lane_back(
    error: BaseException, store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(layout.lane("lane-01"), Lane(name="lane-01", jobs="j", events="e", dead="d").to_bytes())
    begun = control()
    etag = store.create(layout.control(FLEET), begun.to_bytes())

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(submit, "fleet_of", refuse)
    run = manifest(spec(1))
    with pytest.raises(type(error)):
        submit._begin(SETTINGS, store, request.Request(queues="estate"), run, begun, etag, Ledger(run.jobs))
    assert [lane.fleet_id for lane, _ in lanes.lanes(store)] == [None]
    assert Control.from_json(store.get(layout.control(FLEET)).body).state == "ended"


def waiting(store: LocalStorage, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[], None]) -> Callable[[], Any]:
    """The start of a fleet that waits for the one lane, which another has; `sleep` is what happens meanwhile."""
    lane = Lane(name="lane-01", jobs="j", events="e", dead="d", fleet_id="other", until=now() + timedelta(hours=1))
    store.put(layout.lane("lane-01"), lane.to_bytes())
    run, begun = manifest(spec(1)), control(controller=ownership.controller_name())
    store.put(layout.manifest(FLEET), run.to_bytes())
    etag = store.create(layout.control(FLEET), begun.to_bytes())
    monkeypatch.setattr(submit.time, "sleep", lambda _seconds: sleep())
    wish = request.Request(queues="estate", wait=True)
    return lambda: submit._begin(SETTINGS, store, wish, run, begun, etag, Ledger(run.jobs))


@pytest.mark.parametrize("error", [StorageError("the store is away"), KeyboardInterrupt()])
def test_a_fleet_that_is_given_up_while_it_waits_for_a_lane_has_ended(
    error: BaseException, store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise error

    with pytest.raises(type(error)):
        waiting(store, monkeypatch, away)()
    assert Control.from_json(store.get(layout.control(FLEET)).body).state == "ended"
    assert [lane.fleet_id for lane, _ in lanes.lanes(store)] == ["other"]


@pytest.mark.parametrize(("who", "state"), [("me", "ended"), ("another", "stopping")])
def test_a_fleet_that_is_stopped_while_it_waits_for_a_lane_ends(
    who: str, state: str, store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another controller has it by now."""
    name = ownership.controller_name() if who == "me" else "elsewhere:1"

    def stop() -> None:
        store.put(layout.control(FLEET), control(state="stopping", controller=name).to_bytes())

    with pytest.raises(Failure, match="was stopped while it waited for a lane") as stopped:
        waiting(store, monkeypatch, stop)()
    assert stopped.value.exit_code == EXIT_STOPPED
    assert Control.from_json(store.get(layout.control(FLEET)).body).state == state


def test_a_fleet_without_a_lane_can_be_stopped(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller was killed while it waited for one."""
    monkeypatch.chdir(tmp_path)
    run = manifest(spec(1), spec(2))
    store.put(layout.manifest(FLEET), run.to_bytes())
    store.put(layout.control(FLEET), control().to_bytes())
    assert "owns no lane" in sentence(lambda: takeover.attach(SETTINGS, store, request.Request(quiet=True), run))
    begun = control(state="stopping", limits=Limits(workers=5))
    store.put(layout.control(FLEET), begun.to_bytes())
    controller = takeover.attach(SETTINGS, store, request.Request(quiet=True), run)
    assert controller.fleet.plan.workers == 5, "as at its start"
    assert controller.run() == STOPPED
    sight = look.look(store, FLEET)
    assert (sight.state, sight.control.outcome) == ("ended", "stopped")
    assert sight.summary is not None
    assert (sight.summary["cancelled"], sight.summary["samples"]["total"]) == (2, 2)


def resumed(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch, asked: request.Request, shipped: dict[str, Any], **before: Any
) -> Control:
    """What stands in control.json when a fleet is driven on that had lost its controller, by `--run-id`."""
    fields: dict[str, Any] = {"owner": "me", "controller": ""} | before
    owned(store, **fields)
    monkeypatch.setattr(submit.lanes, "answers", lambda lane: True)
    monkeypatch.setattr(submit, "attach", lambda *_: "driven on")
    old = Manifest.from_json(store.get(layout.manifest(FLEET)).body)
    assert submit.resume(SETTINGS, store, asked, old, shipped) == "driven on"
    assert Manifest.from_json(store.get(layout.manifest(FLEET)).body) == old
    return Control.from_json(store.get(layout.control(FLEET)).body)


def test_a_fleet_that_runs_on_takes_the_guards_and_limits_of_a_resume(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request.Request(
        workers=3,
        concurrency=2,
        job_timeout_s=3.0,
        deadline=timedelta(minutes=30),
        guards=Guards(token_budget=5),
        typed=frozenset({"deadline"}),
    )
    limits = request.LOCAL_LIMITS.model_copy(update={"visibility_s": 99})
    found = resumed(store, monkeypatch, asked, {"secrets": [], "versions": {"python": "4"}}, limits=limits)
    assert (found.round, found.state, found.budgeted, found.guards) == (1, "running", True, Guards(token_budget=5))
    assert (found.limits.workers, found.limits.concurrency_per_worker, found.limits.job_timeout_s) == (3, 2, 3.0)
    assert found.limits.control_s < limits.control_s
    assert found.limits.visibility_s == 99, "its queues were made with that"
    assert found.deadline <= now() + timedelta(minutes=30)


def test_the_deadline_of_a_fleet_that_runs_on_comes_sooner_or_stays(
    store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = now() + timedelta(hours=1)
    untold = request.Request(deadline=timedelta(hours=12))
    assert resumed(store, monkeypatch, untold, {}, deadline=deadline).deadline == deadline
    later = replace(untold, typed=frozenset({"deadline"}))
    said = sentence(lambda: resumed(store, monkeypatch, later, {}, deadline=deadline))
    assert f"still runs, until {deadline:%Y-%m-%d %H:%M} UTC at the latest: --deadline can make that sooner" in said


@pytest.mark.parametrize(
    ("asked", "shipped", "what"),
    [
        ({}, {"arguments": {"retry_attempts": 3}}, "options of Inspect's"),
        ({}, {"code": "c" * 32, "code_root": "/mended", "requirements": ["x==1"]}, "code or packages"),
        ({"typed": frozenset({"secrets"})}, {"secrets": ["MINE"]}, "secrets"),
        ({"slots": 2, "guards": Guards(canary=True)}, {}, "--slots or --canary"),
        ({"connections": 9}, {}, "--fleet-connections"),
    ],
)
def test_what_a_fleet_that_runs_on_cannot_take_is_refused(
    asked: dict[str, Any], shipped: dict[str, Any], what: str, store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = sentence(lambda: resumed(store, monkeypatch, request.Request(**asked), shipped))
    assert f"still runs, and takes no other {what}: attach to it as it is, or stop it first" in said
    assert f"ct fleet stop {FLEET}" in said
    assert Control.from_json(store.get(layout.control(FLEET)).body).limits == Limits()


def test_more_workers_are_no_other_machines() -> None:
    had = Machines(
        estate="e", markets=["spot"], images={"x86_64": "ami-1"}, instance_types={"x86_64": ["m"]}, workers=2
    )
    run = manifest(spec(1)).model_copy(update={"backend": "ec2", "machines": had})
    asked = request.Request(workers=9)
    assert running.told(asked, run, control(), {"machines": had.model_copy(update={"workers": 9})}).round == 1
    said = sentence(lambda: running.told(asked, run, control(), {"machines": had.model_copy(update={"images": {}})}))
    assert "takes no other machines" in said


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"controller": ""}, "unattended"),
        ({"controller": "", "state": "stopping"}, "unattended"),
        ({"state": "stopping"}, "stopping"),
        ({"deadline": now() - timedelta(minutes=1)}, "past its deadline"),
        ({"deadline": now() - timedelta(minutes=1), "state": "stopping"}, "stopping"),
        ({"controller": "", "state": "ended"}, "ended"),
    ],
)
def test_list_and_status_say_what_became_of_a_fleet(changes: dict[str, Any], state: str) -> None:
    found = control(**{"controller": "elsewhere:1"} | changes)
    assert look.Sight(manifest(), found, Ledger([])).state == state
    assert _list_row(FLEET, manifest(), found)["state"] == state


@pytest.mark.parametrize("waits", ["EC2 capacity for 2 of 2 workers", None])
def test_what_a_fleet_without_workers_waits_for_is_shown(waits: str | None) -> None:
    run = manifest(spec(1))
    sight = look.Sight(run, control(waiting_for=waits, controller="elsewhere:1"), Ledger(run.jobs))
    assert sight.waiting_for == (waits or "a worker to come online")
