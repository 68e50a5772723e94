"""Guards on whole fleets: each stops its fleet with exit 3 and a summary that says why, and loses nothing that was paid for."""

import json
import time
from pathlib import Path

import fleets
import pytest

from evalops.ui import EXIT_FAILURES, EXIT_STOPPED, EXIT_USAGE
from evalworker.contract.documents import Control

PRICES = """
scripted/good: {input: 1000, output: 2000, input_cache_write: 0, input_cache_read: 0}
"""
ARITHMETIC = "examples/arithmetic.py"
CHOICES = "examples/choices.py"
GOOD = ("--model", "scripted/good")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = fleets.prepare(tmp_path / "run")
    (made / "prices.yaml").write_text(PRICES)
    return made


def stopped(fleet: fleets.Fleet, because: str) -> None:
    """What every guard leaves behind."""
    fleets.check(fleet)
    assert fleet.code == EXIT_STOPPED, fleet.err
    assert fleet.summary["outcome"] == "stopped"
    assert because in fleet.summary["reason"]
    assert fleet.summary["reason"] in fleet.err


def test_the_deadline_stops_a_fleet(folder: Path) -> None:
    fleet = fleets.run(folder, "tasks/slow.py", *GOOD, "-T", "seconds=600", "--deadline", "15s")
    stopped(fleet, "the deadline")
    assert fleet.summary["cancelled"] == 1


def test_a_job_over_its_timeout_is_tried_again_from_what_it_had(folder: Path) -> None:
    arguments = ("-T", "n=5", "-M", "hang=Question 3.", "--job-timeout", "12s")
    fleet = fleets.run(folder, ARITHMETIC, *GOOD, *arguments)
    fleets.check(fleet)
    end = fleet.done("arithmetic")
    assert (fleet.code, end["failure_category"], end["attempts"]) == (EXIT_FAILURES, "timeout", 3)
    assert "--job-timeout" in end["error_summary"]
    assert end["samples"]["completed"] == 4
    first, second, last = fleet.of("job_attempt")
    assert [event["failure_category"] for event in (first, second, last)] == ["timeout"] * 3
    assert (first["kept"], second["kept"], last["kept"], last["redone"]) == (0, 4, 4, 0)


def test_a_budget_stops_a_fleet_and_belongs_to_all_rounds_of_the_run(folder: Path) -> None:
    in_flight = 3
    arguments = ("-T", "n=12", "-M", "latency=6", "--concurrency-per-worker", str(in_flight), *GOOD)
    priced = ("--model-cost-config", "prices.yaml")
    fleet = fleets.run(folder, ARITHMETIC, *arguments, *priced, "--budget", "0.03")
    stopped(fleet, "the budget is spent: $0.0")
    assert [(event["kind"], event["percent"]) for event in fleet.of("budget")] == [
        ("usd", 50),
        ("usd", 80),
        ("usd", 100),
    ]
    costs = [event["cost_usd"] for event in fleet.of("result")]
    spent = fleet.summary["cost_usd"]["tokens"]
    assert spent == pytest.approx(sum(costs))
    assert 0.03 <= spent <= 0.03 + in_flight * max(costs)
    tokens = sum(event["model_usage"]["scripted/good"]["total_tokens"] for event in fleet.of("result"))

    for more, sentence in (
        ((), "the budget is spent"),
        (("--budget", "9", "--token-budget", str(tokens)), "the token budget is spent"),
    ):
        refused = fleets.run(folder, "--run-id", fleet.fleet_id, *GOOD, *more)
        assert refused.code == EXIT_USAGE
        assert sentence in refused.err
        assert "resume it with a larger one" in refused.err

    whole = fleets.run(folder, "--run-id", fleet.fleet_id, *GOOD, "--budget", "9")
    fleets.check(whole)
    assert whole.code == 0, whole.err
    assert whole.summary["cost_usd"]["tokens"] == pytest.approx(sum(event["cost_usd"] for event in whole.of("result")))
    assert whole.of("job_attempt")[-1]["kept"] == len(costs)


def test_a_budget_needs_every_price(folder: Path) -> None:
    priced = ("--model-cost-config", "prices.yaml", "--budget", "1")
    model = fleets.run(folder, ARITHMETIC, "--model", "scripted/good,scripted/mixed", *priced)
    role = fleets.run(folder, ARITHMETIC, *GOOD, "--model-role", "grader=scripted/wrong", *priced)
    for refused, name in ((model, "scripted/mixed"), (role, "scripted/wrong")):
        assert refused.code == EXIT_USAGE
        assert f"--budget needs the price of {name}: add it to a file for --model-cost-config" in refused.err
        assert refused.events == []


def test_without_a_controller_that_counts_no_job_is_taken(folder: Path) -> None:
    models = "scripted/good,scripted/wrong,scripted/mixed"
    arguments = ("-T", "n=4", "-M", "latency=2", "--max-workers", "1", "--slots", "1", "--token-budget", "1000000")
    # one sample after the other: the first job runs on for seconds after its first result, and no second one is taken meanwhile
    with fleets.started(folder, ARITHMETIC, "--model", models, *arguments, "--max-samples", "1") as (process, watcher):
        watcher.wait(lambda events: any(event["type"] == "result" for event in events))
        (agent,) = watcher.agents().values()
        process.kill()
        process.wait()
        (path,) = folder.glob("logs/fleet/*/control.json")
        control = Control.from_json(path.read_bytes())
        assert (control.budgeted, control.limits.controller_silent_s) == (True, 600.0)
        limits = control.limits.model_copy(update={"controller_silent_s": 0.5, "idle_s": 4.0})
        shorter = path.with_suffix(".new")
        shorter.write_bytes(control.model_copy(update={"limits": limits}).to_bytes())
        shorter.replace(path)
        _gone(agent)
        assert len(list(path.parent.glob("*.done-1.json"))) == 1
        attached = fleets.call(folder, "ct", "fleet", "attach", path.parent.name, "--max-workers", "1")
    fleet = fleets.ended(folder, attached.returncode, attached.stdout, attached.stderr)
    fleets.check(fleet)
    assert (fleet.code, fleet.summary["outcome"], fleet.summary["completed"]) == (0, "complete", 3), fleet.err


def _gone(pid: int) -> None:
    end = time.monotonic() + fleets.PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the worker does not leave"
        time.sleep(0.1)


def test_nothing_runs_before_the_canaries_have_passed_and_their_samples_are_kept(folder: Path) -> None:
    models = ("--model", "scripted/good,scripted/wrong")
    fleet = fleets.run(folder, ARITHMETIC, CHOICES, *models, "--canary", "-T", "n=4", "--max-workers", "1")
    fleets.check(fleet)
    assert (fleet.code, fleet.summary["completed"]) == (0, 4), fleet.err
    canaries = fleet.of("job_attempt", canary=True)
    assert len(canaries) == 4
    passed = max(event["seq"] for event in canaries)
    early = [event["job_id"] for event in fleet.of("result") if event["seq"] < passed]
    assert sorted(early) == sorted(event["job_id"] for event in canaries)
    again = [(event["kept"], event["redone"]) for event in fleet.of("job_attempt") if "canary" not in event]
    assert again == [(1, 0)] * 4


def test_a_failed_canary_stops_the_fleet(folder: Path) -> None:
    words = ("--canary", "-M", "error=Question 1.", "-T", "n=9", "--max-workers", "1")
    fleet = fleets.run(folder, ARITHMETIC, CHOICES, *GOOD, *words)
    stopped(fleet, "the canary of arithmetic with scripted/good failed (task_error): its first sample errored: ")
    assert (fleet.summary["completed"], fleet.summary["failed"], fleet.summary["cancelled"]) == (0, 1, 1)
    ran = [event for event in fleet.of("result") if not (event["error"] or "").startswith("Cancelled")]
    assert [event["sample_id"] for event in ran if event["task"] == "arithmetic"] == [1]
    assert len([event for event in ran if event["task"] == "choices"]) <= 1


def test_first_jobs_that_all_fail_alike_stop_the_fleet(folder: Path) -> None:
    models = "scripted/good,scripted/wrong,scripted/mixed,scripted/refuse,scripted/comply"
    fleet = fleets.run(folder, ARITHMETIC, "--model", models, "-T", "n=1", "-M", "crash=1", "--max-workers", "1")
    stopped(fleet, "the first 3 jobs all failed with crash")
    assert fleet.summary["failed"] >= 3


def test_a_silent_fleet_says_what_it_waits_for_and_stops(folder: Path) -> None:
    faults = ("-M", "hang=Question 1.", "-M", "rate_limit=Question 2.", "-M", "retry_pause=1", "--stall-after", "30s")
    fleet = fleets.run(folder, ARITHMETIC, *GOOD, "-T", "n=3", *faults, "--hung-after", "5s")
    stopped(fleet, "nothing happened for 6")
    silences = [event for event in fleet.of("stalled") if "job_id" not in event]
    assert silences
    assert "arithmetic with scripted/good: 2 samples in flight, the oldest" in silences[-1]["waiting_for"]
    hung = {event["sample_id"]: event for event in fleet.of("stalled") if "job_id" in event}
    assert hung.keys() == {1}  # a call that is tried again and again is pressure, not silence
    assert (hung[1]["task"], hung[1]["waiting_for"], hung[1]["ended"]) == (
        "arithmetic",
        "a call of scripted/good",
        False,
    )
    assert "rate-limited call" in fleet.err


def test_a_hung_sample_that_is_ended_is_tried_again_by_inspects_own_rules(folder: Path) -> None:
    faults = ("-M", "hang=once:Question 2.", "-M", f"state_dir={folder / 'state'}", "--retry-wait", "1")
    fleet = fleets.run(folder, ARITHMETIC, *GOOD, "-T", "n=3", *faults, "--hung-after", "5s", "--on-hung", "error")
    fleets.check(fleet)
    assert (fleet.code, fleet.summary["samples"]["completed"]) == (0, 3), fleet.err
    assert fleet.of("stalled", sample_id=2)[-1]["ended"] is True
    (retried,) = fleet.of("sample_retry")
    assert (retried["sample_id"], "interrupted by operator" in retried["error"]) == (2, True)


def test_status_shows_the_pressure_and_what_is_waited_for(folder: Path) -> None:
    faults = ("-M", "rate_limit=1", "-M", "retry_pause=1")
    with fleets.started(folder, ARITHMETIC, *GOOD, "-T", "n=2", *faults) as (process, watcher):
        watcher.wait(lambda events: any(event["type"] == "worker_online" for event in events))
        shown: dict[str, object] = {}
        end = time.monotonic() + fleets.PATIENCE_S
        while not shown.get("rate_limited"):
            assert time.monotonic() < end, shown
            assert process.poll() is None
            time.sleep(1)
            answer = fleets.call(folder, "ct", "fleet", "status", watcher.work.parent.name, "--json")
            shown = json.loads(answer.stdout)
        fleets.send(process)
        process.communicate(timeout=fleets.PATIENCE_S)
    assert process.returncode == 130
    assert "2 samples in flight" in str(shown["waiting_for"])
