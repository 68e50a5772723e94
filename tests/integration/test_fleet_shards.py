"""Fleets whose tasks run in shards: what people see, a gap that is filled, and an interruption that leaves no trace."""

import json
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fleets import Fleet, call, check, ended, environment, prepare, run, send, started
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries

from evalworker import inspect_internals
from evalworker.merge import Whole, merge

FAILING = ("error_in_one_epoch", "errors_counted")

METADATA = """
evaluations:
  slow:
    title: Slow
    description: for tests
    path: tasks
    group: Mathematics
    contributors: [somebody]
    tasks:
      - {name: slow, dataset_samples: 12}
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    folder = prepare(tmp_path_factory.mktemp("sharded"))
    tasks = ["examples/choices.py", *(f"tasks/metric_cases.py@{name}" for name in FAILING)]
    return run(folder, *tasks, "--model", "scripted/mixed", "--shards", "2", "--retry-attempts", "1")


def test_a_sharded_fleet_says_what_any_fleet_says(sharded: Fleet) -> None:
    check(sharded)
    assert sharded.code == 1, sharded.err
    assert (sharded.summary["expected"], sharded.summary["samples"]["total"]) == (9, 46)
    assert len(sharded.working) == 3
    [shard, other, merged] = sharded.of("job_done", task="choices")
    assert (shard["shard"], other["shard"], merged["merged"]) in (("1/2", "2/2", 2), ("2/2", "1/2", 2))
    rows = [line for line in sharded.out.splitlines() if line.startswith(("choices ", *FAILING))]
    assert len(rows) == 3, sharded.out
    told = list(sharded.of("result", task="choices"))
    assert {(event["sample_id"], event["epoch"]) for event in told} == {(n, e) for n in range(1, 6) for e in (1, 2)}


def test_what_the_tasks_took_is_kept_for_the_next_fleet(sharded: Fleet) -> None:
    [path] = (sharded.folder / "logs" / "fleet" / "timings").glob("choices*.json")
    timing = json.loads(path.read_text())
    assert (timing["task"], timing["model"]) == ("examples/choices.py@choices", "scripted/mixed")
    spent = [end["duration_s"] for end in sharded.of("job_done", task="choices") if "shard" in end]
    assert (timing["samples"], timing["seconds_per_sample"]) == (10, pytest.approx(sum(spent) / 10, abs=1e-3))


def test_results_are_those_of_a_plain_run(sharded: Fleet) -> None:
    folder = sharded.folder / "plain"
    command = ["inspect", "eval", "examples/choices.py", *(f"tasks/metric_cases.py@{name}" for name in FAILING)]
    given = ["--model", "scripted/mixed", "--continue-on-fail", "--log-dir", str(folder), "--display", "none"]
    subprocess.run(
        [str(Path(sys.executable).with_name("inspect")), *command[1:], *given],
        cwd=sharded.folder, env=environment(sharded.folder), check=False, timeout=300, capture_output=True,
    )  # fmt: skip
    plain = {log.eval.task: log for log in map(read_eval_log, map(str, folder.glob("*.eval")))}
    ours = {log.eval.task: log for log in map(read_eval_log, map(str, sharded.working))}
    assert plain.keys() == ours.keys() == {"choices", *FAILING}
    for name, log in plain.items():
        for part in ("results", "reductions"):
            mine, theirs = (json.loads(inspect_internals.log_json(getattr(each, part))) for each in (ours[name], log))
            assert mine == theirs, (name, part)
        assert ours[name].status == log.status
    assert sharded.done("choices")["metrics"]["choice/accuracy/mean"] == plain["choices"].results.scores[0].metrics[
        "accuracy"
    ].value  # fmt: skip


def test_a_failed_merge_is_tried_again_with_its_errored_samples_alone(sharded: Fleet) -> None:
    """Of `error_in_one_epoch` each shard has failed, of `errors_counted` none has: it takes both for too many errors."""
    before = {
        name: {(e["sample_id"], e["epoch"]): e["uuid"] for e in sharded.of("result", task=name)} for name in FAILING
    }
    assert [end["status"] for end in sharded.of("job_done", task="errors_counted")] == [
        "completed",
        "completed",
        "failed",
    ]
    assert sharded.done("errors_counted")["error_summary"].startswith(
        "TooManyErrors: 2 of 9 samples errored, for example"
    )
    again = run(sharded.folder, "--run-id", sharded.fleet_id)
    check(again)
    assert again.code == 1
    assert again.summary["round"] == 2
    assert [end["round"] for end in again.of("job_done", task="choices")] == [1, 1, 1]
    for name, errored in {"error_in_one_epoch": {(2, 2), (7, 2)}, "errors_counted": {(1, 1), (2, 1)}}.items():
        after = read_eval_log_sample_summaries(str(next(p for p in again.working if name.replace("_", "-") in p.name)))
        assert {(s.id, s.epoch) for s in after if before[name][s.id, s.epoch] != s.uuid} == errored
        said = [(e["sample_id"], e["epoch"]) for e in again.of("result", task=name)]
        assert len(said) == len(before[name]) + 2, "what was kept is not said again"
    assert len(again.working) == 3


def test_the_run_is_complete_to_a_local_retry_which_fills_a_gap(sharded: Fleet) -> None:
    [path] = [path for path in sharded.working if "choices" in path.name]
    before = path.read_bytes()
    called = ("ies", "run", "local", "examples/choices.py", "--model", "scripted/mixed", "--run-id", sharded.fleet_id)
    done = call(sharded.folder, *called)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before

    shards = [sharded.storage_file(e["log"]) for e in sharded.of("job_done", task="choices") if "shard" in e]
    task = f"{sharded.folder}/examples/choices.py@choices"
    live = inspect_internals.live_task({"tasks": [task], "model": "scripted/mixed"})
    path.unlink()
    gap = merge(shards[:1], path.parent, Whole([1, 2, 3, 4, 5], 2, {"sample_id": None}), live)
    assert gap.missing
    done = call(sharded.folder, *called)
    assert done.returncode == 0, done.stderr
    healed = [read_eval_log(str(each)) for each in path.parent.glob("*.eval")]
    [log] = [log for log in healed if log.eval.task == "choices" and log.status == "success"]
    kept = {(s.id, s.epoch): s.uuid for s in gap.summaries}
    assert log.samples is not None
    assert len(log.samples) == 10
    assert {(s.id, s.epoch): s.uuid for s in log.samples if (s.id, s.epoch) in kept} == kept


def dashboard(fleet: Fleet) -> Any:
    """The dashboard file of the one task of a run, without times and ids."""
    (fleet.folder / "tasks.yaml").write_text(METADATA)
    done = call(fleet.folder, "ies", "summarize", "--run-id", fleet.fleet_id, "--task-metadata", "tasks.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (fleet.folder / "logs" / "working" / fleet.fleet_id).glob("*.dashboard.json")
    found = json.loads(path.read_text())
    for name in ("eval_id", "run_id", "task_id", "eval_set_id", "created"):
        found["eval"].pop(name, None)
    for name in ("started_at", "completed_at"):
        found["stats"].pop(name)
    found.pop("location")
    return found


def test_a_sharded_run_that_was_interrupted_gives_the_dashboard_of_one_that_was_not(tmp_path: Path) -> None:
    given = ["tasks/slow.py", "-T", "n=12", "-T", "seconds=0.5", "--model", "scripted/mixed", "--max-samples", "1"]
    given += ["--max-workers", "1"]
    folder = prepare(tmp_path / "interrupted")
    with started(folder, *given, "--shards", "3") as (process, watcher):
        watcher.wait(lambda events: sum(event["type"] == "result" for event in events) >= 3)
        send(process, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    stopped = ended(folder, process.returncode, out, err)
    check(stopped)
    assert stopped.code == 130, err
    assert not stopped.working
    refused = call(folder, "ies", "run", "local", "--run-id", stopped.fleet_id)
    assert refused.returncode == 2, refused.stderr
    assert f"`ct run eval --run-id {stopped.fleet_id}` goes on from them" in refused.stderr
    [kept] = stopped.of("job_done", task="slow", merged=3)
    assert kept["samples"]["completed"] == stopped.summary["samples"]["completed"] >= 3
    resumed = run(folder, "--run-id", stopped.fleet_id)
    check(resumed)
    assert resumed.code == 0, resumed.err
    assert len(resumed.working) == 1
    undisturbed = run(prepare(tmp_path / "undisturbed"), *given)
    assert undisturbed.code == 0, undisturbed.err
    assert dashboard(resumed) == dashboard(undisturbed)


# Model connections of the whole fleet


def test_connections_are_divided_over_the_running_jobs(tmp_path: Path) -> None:
    folder = prepare(tmp_path)
    given = ["tasks/slow.py", "-T", "n=24", "-T", "seconds=0", "--model", "scripted/good", "-M", "latency=1.5"]
    with started(folder, *given, "--shards", "2", "--slots", "1", "--fleet-connections", "6") as (process, watcher):
        watcher.wait(lambda events: sum(event["type"] == "result" for event in events) >= 2)
        [path] = folder.glob("logs/fleet/*/control.json")
        shares = json.loads(path.read_text())["connections"]
        out, err = process.communicate(timeout=300)
    fleet = ended(folder, process.returncode, out, err)
    check(fleet)
    assert fleet.code == 0, err
    assert sorted(shares.values()) == [3, 3], shares
    for end in fleet.of("job_done"):
        if "shard" in end:
            log = read_eval_log(str(fleet.storage_file(end["log"])))
            calls = [e for s in log.samples or [] for e in s.events if e.event == "model"]
            spans = [(e.completed - timedelta(seconds=e.output.time), e.completed) for e in calls]
            assert most_at_once(spans) <= 3


def most_at_once(spans: list[tuple[Any, Any]]) -> int:
    """How many of these spans overlap at the most."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def test_too_few_connections_are_refused(tmp_path: Path) -> None:
    given = ["examples/arithmetic.py", "--model", "scripted/good", "--max-workers", "3", "--slots", "2"]
    refused = run(prepare(tmp_path), *given, "--fleet-connections", "4")
    assert refused.code == 2
    assert "--fleet-connections 4 is less than the 6 jobs that may run at once" in refused.err
