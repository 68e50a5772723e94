"""Retries and resumes redo only what is missing; a killed job, fork server or agent costs no result."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fleets import Event, Fleet, check, ended, fork_server, job_processes, prepare, run, send, started
from inspect_ai.log import read_eval_log

from evalworker.contract.ids import sample_key


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A sample that fails once, without retries, in two epochs, beside a task that completes."""
    folder = prepare(tmp_path_factory.mktemp("heals"))
    words = ["tasks/errors.py@error_once", "examples/choices.py", "-T", f"state_dir={folder}", "-T", "n=2"]
    words += ["--epochs", "2", "--retry-attempts", "0", "--max-workers", "1"]
    return run(folder, *words, "--model", "scripted/good")


@pytest.fixture(scope="module")
def healed(failed: Fleet) -> Fleet:
    """The same run again, by its id alone, as a program would start it."""
    return run(failed.folder, "--run-id", failed.fleet_id, "--json")


def test_without_retries_the_sample_fails_at_once(failed: Fleet) -> None:
    check(failed)
    assert failed.code == 1
    end = failed.done("error_once")
    assert (end["status"], end["failure_category"]) == ("failed", "task_error")
    assert end["samples"] == {"total": 8, "completed": 7, "errored": 1}
    assert failed.of("sample_retry") == []
    assert len(failed.of("result", job_id=end["job_id"])) == 8
    assert failed.done("choices")["status"] == "completed"
    assert f"resume  ct run eval --run-id {failed.fleet_id}" in failed.err


def test_the_same_run_again_redoes_only_what_is_missing(failed: Fleet, healed: Fleet) -> None:
    check(healed)
    assert healed.code == 0, healed.err
    assert healed.fleet_id == failed.fleet_id
    assert healed.events[: len(failed.events)] == failed.events
    new = healed.events[len(failed.events) :]
    assert (new[0]["type"], new[0]["resumed"], new[0]["round"]) == ("fleet_start", True, 2)
    job = failed.done("error_once")["job_id"]
    (redone,) = (event for event in new if event["type"] == "result")
    (errored,) = failed.of("result", job_id=job, status="errored")
    assert (redone["job_id"], redone["sample_id"], redone["status"]) == (job, 3, "completed")
    assert (redone["epoch"], redone["replaces"]) == (errored["epoch"], errored["uuid"])
    assert [event["job_id"] for event in new if event["type"] == "job_done"] == [job]
    assert healed.summary["samples"] == {"total": 12, "completed": 12, "errored": 0}
    (kept,) = (event for event in new if event["type"] == "job_attempt")
    assert kept["kept"] == 7


def test_one_final_result_per_sample_and_epoch(healed: Fleet) -> None:
    final = healed.results(healed.done("error_once")["job_id"])
    assert set(final) == {sample_key(id_, epoch) for id_ in (1, 2, 3, 4) for epoch in (1, 2)}
    assert {event["status"] for event in final.values()} == {"completed"}


def test_the_healed_log_takes_the_place_of_the_failed_one(failed: Fleet, healed: Fleet) -> None:
    logs = [read_eval_log(str(path), header_only=True) for path in healed.working]
    assert sorted((log.eval.task, log.status) for log in logs) == [("choices", "success"), ("error_once", "success")]


def test_json_prints_a_launch_record_and_a_done_record(healed: Fleet) -> None:
    """For programs: two lines on stdout, nothing else; `--detach` is the same without waiting."""
    launch, done = map(json.loads, healed.out.splitlines())
    assert (launch["type"], launch["fleet_id"], done["type"]) == ("launch", healed.fleet_id, "done")
    assert Path(launch["events"]).samefile(healed.live)
    assert (done["success"], done["outcome"], len(done["jobs"])) == (True, "complete", 2)
    assert all(Path(job["log"]).is_file() for job in done["jobs"])


def test_a_run_that_has_completed_is_left_alone(healed: Fleet) -> None:
    again = run(healed.folder, "--run-id", healed.fleet_id)
    assert again.code == 0
    assert f"every job of {healed.fleet_id} has completed: nothing to run" in again.err
    assert again.events == healed.events


def test_a_run_is_not_resumed_with_other_tasks(healed: Fleet) -> None:
    changed = run(healed.folder, "--run-id", healed.fleet_id, "--retry-attempts", "3")
    assert (changed.code, "--retry-attempts" in changed.err) == (2, True), changed.err
    other = run(healed.folder, "examples/arithmetic.py", "--model", "scripted/good", "--run-id", healed.fleet_id)
    assert other.code == 2
    assert error_line(other.err).startswith(
        f"Error: the run {healed.fleet_id} does not hold arithmetic with scripted/good"
    )


def error_line(text: str) -> str:
    """The line that says what was wrong."""
    (line,) = (line for line in text.splitlines() if line.startswith("Error"))
    return line


# Ctrl-C


def test_ctrl_c_keeps_what_there_is_and_the_run_goes_on_later(tmp_path: Path) -> None:
    folder = prepare(tmp_path)
    words = ["tasks/slow.py", "-T", "n=8", "-T", "seconds=1", "--model", "scripted/good", "--max-samples", "1"]
    with started(folder, *words, "--max-workers", "1") as (process, watcher):
        watcher.wait(lambda events: sum(event["type"] == "result" for event in events) >= 2)
        send(process, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    stopped = ended(folder, process.returncode, out, err)
    check(stopped)
    assert stopped.code == 130, err
    assert (stopped.summary["outcome"], stopped.summary["cancelled"]) == ("cancelled", 1)
    told = {sample_key(event["sample_id"], event["epoch"]): event["uuid"] for event in stopped.of("result")}
    assert 2 <= len(told) < 8

    again = run(folder, "--run-id", stopped.fleet_id, "--max-workers", "1")
    check(again)
    assert again.code == 0, again.err
    final = again.results(again.done("slow")["job_id"])
    assert len(final) == 8
    assert {key: event["uuid"] for key, event in final.items() if key in told} == told, "finished samples ran again"


# Kills


def has_result(task: str, attempt: int = 1) -> Any:
    """Waits for a sample of a task's attempt."""

    def found(events: list[Event]) -> Any:
        return [e for e in events if e["type"] == "result" and e["task"] == task and e["attempt"] == attempt]

    return found


def agent_of(events: list[Event], task: str) -> str:
    """The worker that runs a task's job now."""
    return str([event for event in events if event["type"] == "result" and event["task"] == task][-1]["instance_id"])


def test_killed_jobs_servers_and_agents_heal(tmp_path: Path) -> None:
    """One fleet, three accidents: a job process, then a fork server, then an agent is killed with SIGKILL."""
    folder = prepare(tmp_path)
    for name in ("first", "second"):
        text = (folder / "tasks" / "slow.py").read_text()
        (folder / "tasks" / f"{name}.py").write_text(text.replace("def slow(", f"def {name}("))
    words = ["tasks/first.py", "tasks/second.py", "examples/arithmetic.py", "-T", "n=12", "-T", "seconds=1"]
    words += ["--model", "scripted/good", "--max-samples", "1", "--log-shared", "1"]
    with started(folder, *words, "--max-workers", "2", "--slots", "1") as (process, watcher):
        watcher.wait(has_result("first"))
        watcher.wait(has_result("second"))
        agents = watcher.agents()
        (job,) = job_processes(agents[agent_of(watcher.events(), "first")]).values()
        os.kill(job, signal.SIGKILL)
        watcher.wait(has_result("first", 2))
        server = fork_server(watcher.agents()[agent_of(watcher.events(), "first")])
        os.kill(server, signal.SIGKILL)
        watcher.wait(has_result("first", 3))
        lost = agent_of(watcher.events(), "second")
        os.kill(watcher.agents()[lost], signal.SIGKILL)
        out, err = process.communicate(timeout=400)
    fleet = ended(folder, process.returncode, out, err)
    check(fleet)
    assert fleet.code == 0, err + out
    assert fleet.summary["samples"] == {"total": 36, "completed": 36, "errored": 0}
    assert {event["instance_id"] for event in fleet.of("worker_lost")} == {lost}
    first = fleet.done("first")
    assert first["attempts"] == 3
    crashes = fleet.of("job_attempt", job_id=first["job_id"], failure_category="crash")
    assert [event["attempt"] for event in crashes] == [1, 2]
    assert "killed by SIGKILL" in crashes[0]["error_summary"]
    assert "fork server" in crashes[1]["error_summary"]
    for event in fleet.of("job_done"):
        assert len(fleet.results(event["job_id"])) == 12


def test_a_running_fleet_is_not_started_twice(tmp_path: Path) -> None:
    """The same jobs of the same owner: the running fleet is named instead."""
    folder = prepare(tmp_path)
    words = ["tasks/slow.py", "-T", "n=1", "-T", "seconds=600", "--model", "scripted/good", "--max-workers", "1"]
    with started(folder, *words) as (process, watcher):
        watcher.wait(lambda events: events)
        second = run(folder, *words)
        assert second.code == 2
        assert "is running the same jobs" in error_line(second.err)
        send(process, signal.SIGINT)
        send(process, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    fleet = ended(folder, process.returncode, out, err)
    check(fleet)
    assert fleet.code == 130
