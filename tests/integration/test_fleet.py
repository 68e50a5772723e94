"""Whole fleets on this machine, as a user starts them: what they leave behind, and that they agree with plain Inspect."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fleets import Fleet, check, environment, prepare, run
from inspect_ai.log import EvalLog, read_eval_log, read_eval_log_sample_summaries

from evalworker.contract.ids import sample_key
from ports import free_port

PUBLIC = [f"inspect_evals/agent_threat_bench_{name}" for name in ("memory_poison", "autonomy_hijack", "data_exfil")]
MODELS = ["--model", "scripted/refuse", "--model", "scripted/comply"]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def everyday(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Two tasks with two models: what `make eval` runs, and the task of the recipes."""
    folder = prepare(tmp_path_factory.mktemp("everyday"))
    return run(
        folder, "examples/arithmetic.py", "examples/linux_agent.py", *MODELS, "--limit", "10", "--max-workers", "2"
    )


@pytest.fixture(scope="module")
def public(public_tasks: None, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Public tasks with their own data."""
    return run(prepare(tmp_path_factory.mktemp("public")), *PUBLIC, *MODELS, "--max-workers", "1")


def inspect_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One of Inspect's own commands, in the fleet's directory."""
    command = [str(Path(sys.executable).with_name("inspect")), *words]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300, check=True
    )


# A run that goes well


def test_a_run_ends_well_and_keeps_all_rules(everyday: Fleet) -> None:
    check(everyday)
    assert everyday.code == 0, everyday.err
    assert everyday.summary["outcome"] == "complete"
    assert (everyday.summary["completed"], everyday.summary["samples"]["completed"]) == (4, 32)


def test_it_starts_with_what_will_run(everyday: Fleet) -> None:
    start = everyday.events[0]
    assert (start["expected"], start["total_samples"], start["backend"]) == (4, 32, "local")
    assert (start["tasks"], start["models"]) == (["arithmetic", "linux_agent"], ["scripted/refuse", "scripted/comply"])
    assert len(everyday.of("worker_online")) == start["workers"] == 2


def test_results_come_while_their_job_runs(everyday: Fleet) -> None:
    for end in everyday.of("job_done"):
        results = everyday.of("result", job_id=end["job_id"])
        assert len(results) == end["samples"]["total"]
        assert all(event["seq"] < end["seq"] and event["ts"] <= end["ts"] for event in results)


def test_fields_are_those_of_the_documents(everyday: Fleet) -> None:
    """The fields that people's scripts read, in the order in which they are documented."""
    first = {
        "fleet_start": "fleet_id expected workers total_samples tasks models backend resumed",
        "worker_online": "fleet_id instance_id bootstrap_s instance_type lifecycle slots",
        "result": "fleet_id job_id task model scores error duration_s instance_id status sample_id epoch uuid attempt"
        " model_usage cost_usd limit",
        "job_done": "fleet_id job_id status instance_id duration_s failure_category error_summary attempts samples log",
        "fleet_summary": "fleet_id outcome expected completed failed cancelled samples cost_usd elapsed_s",
    }
    for type_, names in first.items():
        event = everyday.of(type_)[0]
        assert list(event)[:3] == ["ts", "seq", "type"]
        assert " ".join(name for name in event if name in names.split()) == names
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["ts"])


def test_one_log_per_task_and_model_that_inspect_reads(everyday: Fleet) -> None:
    (first, *_) = everyday.working
    dumped = json.loads(inspect_command(everyday.folder, "log", "dump", str(first)).stdout)
    assert (dumped["status"], len(dumped["samples"])) == ("success", dumped["results"]["total_samples"])
    pairs = set()
    for path in everyday.working:
        log = read_eval_log(str(path), header_only=True)
        assert log.status == "success"
        pairs.add((log.eval.task, log.eval.model))
    ends = everyday.of("job_done")
    assert pairs == {(event["task"], event["model"]) for event in ends}
    assert len(everyday.working) == len(ends)
    for event in ends:
        published = everyday.storage_file(event["log"]).read_bytes()
        assert published == (everyday.working[0].parent / event["log_name"]).read_bytes()


@contextmanager
def viewer(folder: Path, logs: Path) -> Iterator[str]:
    """`inspect view` on loopback."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("inspect")), "view", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--log-dir", str(logs)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "inspect view does not answer"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_inspect_view_lists_the_logs(everyday: Fleet) -> None:
    with (
        viewer(everyday.folder, everyday.working[0].parent) as address,
        urllib.request.urlopen(f"{address}/api/logs", timeout=PATIENCE_S) as answer,
    ):
        listed = json.load(answer)
    files = listed["files"] if "files" in listed else listed["logs"]
    assert {Path(entry["name"]).name for entry in files} == {path.name for path in everyday.working}


def test_what_a_person_sees(everyday: Fleet) -> None:
    live = everyday.live.relative_to(everyday.folder)
    assert f"tail -f {live}" in everyday.err
    assert f"ct fleet stop {everyday.fleet_id}" in everyday.err
    assert re.search(r"^\[4/4\] 4 done, 32/32 samples", everyday.err, re.M)
    last = dict(text.split(maxsplit=1) for text in everyday.err.splitlines() if text.startswith(("logs ", "events ")))
    assert last == {"logs": str(everyday.working[0].parent), "events": str(live)}
    head, *rows = everyday.out.splitlines()
    assert " ".join(head.split()) == "task model status scores completed errored total time tokens cost"
    assert [(row.split()[0], row.split()[1], row.split()[2]) for row in rows] == [
        (task, model, "completed")
        for model in ("scripted/refuse", "scripted/comply")
        for task in ("arithmetic", "linux_agent")
    ]


def test_workers_leave_their_logs_and_nothing_else(everyday: Fleet) -> None:
    """The workers' own directories, the lane and the partial logs go with the fleet."""
    assert len(list((everyday.path / "workers").glob("*.log"))) == 2
    assert not (everyday.path / "work").exists()
    assert not list((everyday.folder / "logs" / "fleet").glob("lanes/*"))
    assert not list((everyday.folder / "logs" / "fleet").glob("partial/**/*.*"))
    assert {path.name for path in everyday.folder.iterdir()} == {"examples", "tasks", "logs"}


# The recipes of the documentation, word for word

# ruff: noqa: E501
RECIPES = {
    "failures": """jq -c 'select(.type=="job_done" and .status!="completed")' \\
  logs/fleet/<fleet_id>/events.jsonl""",
    "scores": """jq -c 'select(.type=="result") | {task, status, scores, duration_s}' \\
  logs/fleet/<fleet_id>/events.jsonl""",
    "pass rate": """jq -s '[.[] | select(.type=="result")] | {n: length, passed: ([.[] | select(.scores.linux_scorer.value.main_task_success=="C")] | length)}' \\
  logs/fleet/<fleet_id>/events.jsonl""",
}


def recipe(fleet: Fleet, name: str) -> str:
    """What a recipe prints when it is pasted into a shell with the fleet's id in it."""
    text = RECIPES[name].replace("<fleet_id>", fleet.fleet_id)
    return subprocess.run(text, shell=True, cwd=fleet.folder, capture_output=True, text=True, check=True).stdout


def test_the_recipe_for_scores(everyday: Fleet) -> None:
    rows = [json.loads(text) for text in recipe(everyday, "scores").splitlines()]
    assert len(rows) == 32
    agents = [row for row in rows if row["task"] == "linux_agent"]
    assert {row["scores"]["linux_scorer"]["value"]["main_task_success"] for row in agents} == {"C", "I"}
    assert all(row["status"] == "completed" and row["duration_s"] >= 0 for row in rows)


def test_the_recipe_for_the_pass_rate(everyday: Fleet) -> None:
    assert json.loads(recipe(everyday, "pass rate")) == {"n": 32, "passed": 6}


def test_the_recipe_for_failures_shows_none(everyday: Fleet) -> None:
    assert recipe(everyday, "failures") == ""


# Public tasks, compared with plain Inspect


@pytest.fixture(scope="module")
def plain(public: Fleet) -> dict[tuple[str, str], EvalLog]:
    """The same arguments given to `inspect eval-set`."""
    words = [
        "eval-set",
        *PUBLIC,
        "--model",
        "scripted/refuse,scripted/comply",
        "--log-dir",
        "plain",
        "--display",
        "none",
    ]
    inspect_command(public.folder, *words)
    return by_pair(sorted((public.folder / "plain").glob("*.eval")))


def by_pair(paths: list[Path]) -> dict[tuple[str, str], EvalLog]:
    logs = [read_eval_log(str(path), header_only=True) for path in paths]
    assert len(logs) == len(PUBLIC) * 2
    return {(log.eval.task, log.eval.model): log for log in logs}


def metrics(log: EvalLog) -> Any:
    assert log.results is not None
    return [
        (score.name, score.scorer, score.reducer, {name: metric.value for name, metric in score.metrics.items()})
        for score in log.results.scores
    ]


def values(log: EvalLog) -> dict[tuple[str, int], Any]:
    return {
        sample_key(one.id, one.epoch): {name: score.value for name, score in (one.scores or {}).items()}
        for one in read_eval_log_sample_summaries(log.location)
    }


def test_public_tasks_run(public: Fleet) -> None:
    check(public)
    assert public.code == 0, public.err


def test_scores_are_those_of_plain_inspect(public: Fleet, plain: dict[tuple[str, str], EvalLog]) -> None:
    ours = by_pair(public.working)
    assert ours.keys() == plain.keys()
    for pair, log in ours.items():
        assert log.status == plain[pair].status == "success"
        assert metrics(log) == metrics(plain[pair])
        assert values(log) == values(plain[pair])
        assert log.eval.dataset.sample_ids == plain[pair].eval.dataset.sample_ids


def test_streamed_scores_are_those_of_the_logs(public: Fleet) -> None:
    for log in by_pair(public.working).values():
        (end,) = (
            event
            for event in public.of("job_done")
            if event["log_name"] == os.path.basename(log.location)  # noqa: PTH119
        )
        streamed = {
            key: {name: score["value"] for name, score in event["scores"].items()}
            for key, event in public.results(end["job_id"]).items()
        }
        assert streamed == values(log)
