"""What `ct run eval` makes of how its controller ended, and how it starts itself in the background."""

import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from evalops.commands import detach, fleet, follow, run
from evalops.fleet.guards import Verdict
from evalops.fleet.request import Request, limits_of
from evalops.fleet.stream import Fenced
from evalops.settings import Settings
from evalops.ui import EXIT_LEFT_RUNNING, Failure
from evalworker.contract.documents import Control, Guards, JobSpec, Machines, Manifest, Shard
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage, StorageError

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
SURROUNDINGS = Settings(root="/somewhere", bucket=None, estate="default", owner="me")


@pytest.mark.parametrize("error", [StorageError("storage is away"), Fenced("another controller drives the fleet")])
def test_a_fleet_whose_controller_had_to_give_up_is_left_running(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not 2: that would say that nothing had been started."""

    def give_up() -> None:
        raise error

    monkeypatch.setattr(follow, "_banner", lambda *_: None)
    controller: Any = SimpleNamespace(fleet=SimpleNamespace(fleet_id=FLEET), run=give_up)
    with pytest.raises(Failure) as failed:
        follow.follow(controller, SURROUNDINGS, json_output=False)
    assert failed.value.exit_code == EXIT_LEFT_RUNNING
    assert str(error) in failed.value.message


@pytest.mark.parametrize(("ending", "code"), [("failures", 1), ("stopped", 3), ("cancelled", 143)])
def test_storage_that_is_away_at_the_end_does_not_change_the_exit_code(
    ending: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(tmp_path)

    def away(prefix: str) -> None:
        raise StorageError("the credentials have expired")

    monkeypatch.setattr(storage, "list", away)
    for name in ("_banner", "results_table"):
        monkeypatch.setattr(follow, name, lambda *_: None)
    ended = SimpleNamespace(
        fleet_id=FLEET,
        manifest=SimpleNamespace(backend="local", code=None),
        storage=storage,
        ledger=SimpleNamespace(jobs={}),
        stream=SimpleNamespace(path=tmp_path / "e"),
    )
    controller: Any = SimpleNamespace(
        fleet=ended, run=lambda: Verdict(ending), ending=SimpleNamespace(signal_number=signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as over:
        follow.follow(controller, SURROUNDINGS, json_output=False)
    assert over.value.code == code
    assert f"--run-id {FLEET}" in capsys.readouterr().err


def test_detached_is_the_same_command_with_json_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place: what comes after `--` are tasks."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)
            (tmp_path / "logs" / "fleet" / FLEET).mkdir()
            self.stdout = io.BytesIO(f'{{"type": "launch", "fleet_id": "{FLEET}"}}\n'.encode())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detach.subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "argv", ["/bin/ct", "run", "eval", "--detach", "--", "a.py"])
    detach.detach()
    assert started[0][-6:] == ["ct", "run", "eval", "--json", "--", "a.py"]


def test_what_starts_nothing_in_the_background_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An estimate has no launch record; it used to end in a traceback."""

    class Process:
        returncode = 3

        def __init__(self, *_: Any, stderr: Any, **__: Any) -> None:
            stderr.write(b"a remark\n")
            self.stdout = io.BytesIO(b'{"jobs": 2}\n{"more": 1}\n')

        def communicate(self) -> tuple[bytes, None]:
            return self.stdout.read(), None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detach.subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "argv", ["/bin/ct", "run", "eval", "--detach", "--estimate", "a.py"])
    with pytest.raises(SystemExit) as ended:
        detach.detach()
    assert ended.value.code == 3
    said = capsys.readouterr()
    assert said.out == '{"jobs": 2}\n{"more": 1}\n'
    assert said.err == "a remark\n"


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_before_the_launch_record_reaches_what_goes_on_in_the_background(
    launched: bool,
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command signals its caller, as a user would who waits for the record, and ends only when the signal comes back."""
    record = json.dumps({"type": "launch", "fleet_id": FLEET}) if launched else ""
    program = f"""
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
for _ in range(50):
    os.kill(os.getppid(), {int(number)})
    if signal.sigtimedwait([{int(number)}], 0.1):
        break
else:
    sys.exit(99)
print({record!r}, end="\\n" if {launched} else "", flush=True)
sys.stderr.write("stopping\\n")
sys.exit({code})
"""
    start = subprocess.Popen
    monkeypatch.setattr(
        detach.subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", program], **how)
    )
    monkeypatch.setattr(sys, "argv", ["/bin/ct", "run", "eval", "--detach", "a.py"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs" / "fleet" / FLEET).mkdir(parents=True)

    def hear(number: int, _frame: object) -> None:
        pass

    before = signal.signal(number, hear)
    try:
        with pytest.raises(SystemExit) as ended:
            detach.detach()
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)
    assert ended.value.code == code
    said = capfd.readouterr()
    assert said.err == "stopping\n"
    assert said.out.count("launch") == launched
    assert (tmp_path / "logs" / "fleet" / FLEET / "controller.log").exists() == launched
    assert not list((tmp_path / "logs" / "fleet").glob("detached-*"))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Verdict("left", "the credentials have expired"), "has not been stopped: the credentials have expired"),
        (Fenced("another controller drives the fleet"), "another controller drives the fleet"),
    ],
)
def test_a_fleet_that_could_not_be_stopped_is_said_to_run_on(
    end: Verdict | Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Verdict:
        if isinstance(end, Exception):
            raise end
        return end

    stopping = SimpleNamespace(state="stopping", controller="")
    monkeypatch.setattr(fleet, "_ask_to_stop", lambda *_: stopping)
    monkeypatch.setattr(fleet, "settings", lambda: SURROUNDINGS)
    monkeypatch.setattr(fleet, "open_storage", lambda root: None)
    monkeypatch.setattr(fleet.preflight, "read_manifest", lambda *_: None)
    monkeypatch.setattr(fleet.takeover, "attach", lambda *_: SimpleNamespace(run=run))
    with pytest.raises(Failure) as failed:
        fleet.fleet.main(["stop", FLEET], standalone_mode=False)
    assert failed.value.exit_code == EXIT_LEFT_RUNNING
    assert said in failed.value.message


@pytest.mark.parametrize("words", [["--limit", "2"], ["--package", "tabulate"], ["--require-clean"], ["--ship-code"]])
@pytest.mark.parametrize("backend", [[], ["--ec2"]])
def test_a_resume_without_tasks_refuses_what_it_would_ignore(words: list[str], backend: list[str]) -> None:
    done = CliRunner().invoke(run.run_eval, ["--run-id", FLEET, *backend, *words])
    assert done.exit_code == 2
    assert f"to change {words[0]}, repeat the whole command with --run-id" in done.stderr


def typed(*words: str) -> click.Context:
    """The command line of `ct run eval` as the command reads it."""
    return run.run_eval.make_context("eval", list(words))


def resumed_as(before: Request, *words: str) -> Request:
    """What `--run-id` with these words asks for, of a run on this machine that was begun as `before` and written down."""
    ctx = typed("--run-id", FLEET, *words)
    limits = limits_of(before, "local")
    control = Control(
        fleet_id=FLEET, round=1, state="ended", deadline=now(), beat=now(), limits=limits, guards=before.guards
    )
    had = run._as_before(run._typed(ctx), Control.from_json(control.to_bytes()))
    return run._request(ctx.params | had, frozenset())


OWN = Request(
    workers=3,
    concurrency=1,
    slots=2,
    connections=7,
    deadline=timedelta(hours=2),
    job_timeout_s=90.0,
    hung_after_s=60.0,
    on_hung="error",
    guards=Guards(budget_usd=2.0, token_budget=5, canary=True, max_failed_share=1.0, stall_after_s=600.0),
)


def test_a_resume_is_bounded_as_the_run_was() -> None:
    assert resumed_as(OWN) == OWN
    assert resumed_as(Request()) == Request()


def test_what_is_typed_counts_before_what_the_run_had() -> None:
    """Also where it is what a new run would have."""
    bounds = ("--max-workers", "2", "--concurrency-per-worker", "10", "--slots", "1", "--fleet-connections", "9")
    times = ("--deadline", "12h", "--job-timeout", "3s", "--hung-after", "30m", "--on-hung", "wait")
    stops = ("--budget", "9", "--token-budget", "8", "--no-canary", "--max-failed-share", "0.5", "--stall-after", "30m")
    new = Request(
        workers=2,
        slots=1,
        connections=9,
        job_timeout_s=3.0,
        guards=Guards(budget_usd=9.0, token_budget=8),
    )
    assert resumed_as(OWN, *bounds, *times, *stops) == new


def test_a_record_of_before_there_were_such_fields_says_nothing_of_them() -> None:
    old = Control(fleet_id=FLEET, round=1, state="ended", deadline=now(), beat=now()).to_dict()
    del old["guards"]
    for name in ("workers", "deadline_s"):
        del old["limits"][name]
    had = run._as_before(frozenset(), Control.from_json(json.dumps(old)))
    assert run._request(typed("--run-id", FLEET).params | had, frozenset()) == Request()


def test_too_few_model_connections_are_refused() -> None:
    shards = [
        JobSpec(
            job_id=f"{n:016x}",
            task="t",
            name="t",
            model="m/m",
            samples=1,
            shard=Shard(index=n, of=4, ids=[n]),
        )
        for n in range(4)
    ]
    merge = JobSpec(job_id="f" * 16, task="t", name="t", model="m/m", samples=4, merges=[one.job_id for one in shards])
    manifest = Manifest(
        fleet_id=FLEET,
        created=now(),
        backend="local",
        jobs=[*shards, merge],
        arguments={},
        models=["m"],
        submit_dir=".",
    )
    kept = Request(workers=8, slots=2, connections=3)
    with pytest.raises(Failure, match="--fleet-connections 3 is less than the 4 jobs that may run at once"):
        run._check_connections({"ec2": False}, kept, manifest)
    assert run._check_connections({"ec2": False}, replace(kept, connections=4), manifest) == 4
    with pytest.raises(Failure, match="is less than the 16 jobs"):
        run._check_connections({"ec2": False}, kept, None)


def test_a_shell_that_is_set_to_a_model_says_nothing_of_the_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobSpec(job_id="1" * 16, task="t", name="t", model="scripted/good", samples=1)
    resumed = Manifest(
        fleet_id=FLEET, created=now(), backend="local", jobs=[job], arguments={}, models=[], submit_dir="."
    )
    monkeypatch.setenv("INSPECT_EVAL_MODEL", "scripted/wrong")
    run.check_models(typed("--run-id", FLEET), resumed)
    run.check_models(typed("--run-id", FLEET, "--model", "scripted/good"), resumed)
    with pytest.raises(Failure, match="has other models: leave --model away"):
        run.check_models(typed("--run-id", FLEET, "--model", "scripted/wrong"), resumed)


BEFORE = Machines(
    estate="e",
    markets=["spot"],
    images={"x86_64": "ami-1"},
    instance_types={"x86_64": ["m7i.large", "m6i.large"]},
    workers=7,
)


def wanted(before: Machines | None, workers: int | None = None, **given: Any) -> Any:
    options = {"market": None, "on_demand_base": None, "instance_types": (), "ami": None} | given
    jobs: Any = [SimpleNamespace(merges=[])] * 9
    return run._wanted(options, Request(workers=workers), jobs, before)


def test_a_run_goes_on_with_its_own_machines() -> None:
    found = wanted(BEFORE)
    assert (found.markets, found.on_demand_base, found.workers) == (["spot"], 0, 7)
    assert (found.instance_types, found.images) == (("m7i.large", "m6i.large"), {"x86_64": "ami-1"})
    on_demand = BEFORE.model_copy(update={"markets": ["spot", "on-demand"], "on_demand_base": 2})
    assert (wanted(on_demand).markets, wanted(on_demand).on_demand_base) == (["spot", "on-demand"], 2)


def test_what_is_given_counts_before_what_a_run_had() -> None:
    found = wanted(BEFORE, 3, market="spot", on_demand_base=1, instance_types=("c7i.large",), ami="ami-2")
    assert (found.markets, found.on_demand_base, found.workers) == (["spot", "on-demand"], 1, 3)
    assert (found.instance_types, found.image, found.images) == (("c7i.large",), "ami-2", {})
    base = BEFORE.model_copy(update={"markets": ["spot", "on-demand"], "on_demand_base": 2})
    assert wanted(base, market="spot-only").on_demand_base == 0
    with pytest.raises(Failure, match="the run has --spot-only, which --on-demand-base contradicts"):
        wanted(BEFORE, on_demand_base=1)


def test_a_new_run_takes_what_the_estate_has() -> None:
    found = wanted(None)
    assert (found.markets, found.on_demand_base, found.workers) == (["spot", "on-demand"], 0, 2)
    assert (found.instance_types, found.image, found.images) == ((), None, {})


@pytest.mark.parametrize("command", ["detach", "attach"])
def test_a_directory_that_cannot_hold_the_live_events_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Before a lane is taken: the root may be a bucket, and the current directory somebody else's."""
    (tmp_path / "logs").write_text("no directory")
    monkeypatch.chdir(tmp_path)
    manifest = Manifest(
        fleet_id="2026-11-29-14-05-33-1a2b3c4d", created=now(), backend="local", jobs=[], arguments={}, models=[],
        submit_dir=".",
    )  # fmt: skip
    monkeypatch.setattr(fleet.preflight, "open_root", lambda _: LocalStorage(tmp_path / "root"))
    monkeypatch.setattr(fleet.preflight, "read_manifest", lambda *_: manifest)
    with pytest.raises(Failure, match=r"logs/fleet cannot be written .*: start from a directory of yours"):
        if command == "detach":
            detach.detach()
        else:
            fleet.attach.callback(manifest.fleet_id, None, False)  # type: ignore[misc]
