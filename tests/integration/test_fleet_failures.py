"""What goes wrong in user code or around it: one clear line, the right category and exit code, and the good part is kept."""

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fleets import Fleet, check, prepare, run
from inspect_ai.log import read_eval_log_sample_summaries

from evalops.cli import ct, ies
from evalworker.contract import layout
from evalworker.contract.ids import sample_key

HOSTILE = [
    "tasks/errors.py@all_error",
    "tasks/errors.py@one_error",
    "tasks/errors.py@error_once",
    "tasks/errors.py@misleading_error",
    "tasks/noisy.py",
    "tasks/exits_in_solver.py",
    "tasks/daemon.py",
    "tasks/closes_fds.py@closes_standard_fds",
    "tasks/closes_fds.py@closes_all_fds",
    "tasks/hostile_ids.py",
    "tasks/odd_scores.py",
    "tasks/hook_breaker.py",
    "examples/arithmetic.py",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Everything that user code does wrong, beside a task that does nothing wrong, in one fleet."""
    folder = prepare(tmp_path_factory.mktemp("hostile"))
    arguments = ["-T", f"state_dir={folder}", "-T", f"pid_file={folder}/daemon.pid", "-T", "n=3"]
    arguments += ["--retry-attempts", "2", "--max-workers", "1", "--slots", "1"]
    return run(folder, *HOSTILE, *arguments, "--model", "scripted/good")


# User code that misbehaves while it runs


def test_the_good_part_is_kept_and_all_rules_hold(hostile: Fleet) -> None:
    check(hostile)
    assert hostile.code == 1
    assert hostile.summary["outcome"] == "failures"
    assert hostile.done("arithmetic")["samples"] == {"total": 3, "completed": 3, "errored": 0}


def test_one_log_is_kept_for_a_resume_however_often_a_job_was_tried(hostile: Fleet) -> None:
    job_id = hostile.done("one_error")["job_id"]
    kept = hostile.folder / "logs" / "fleet" / layout.partial(hostile.fleet_id, job_id)
    assert len(list(kept.glob("*.eval"))) == 1


COMPLETED = "arithmetic error_once noisy daemon closes_standard_fds hostile_ids lone_surrogate long_explanation"
FAILED = {
    "all_error": r"every sample errored, for example ValueError\('this sample always fails'\)",
    "one_error": r"1 of 4 samples errored, for example ValueError\('this sample always fails'\)",
    "misleading_error": r"every sample errored, for example ValueError\(.*",
    "exits_in_solver": r"the task's code called sys\.exit\(3\)",
    "closes_all_fds": r"OSError: \[Errno 9\] Bad file descriptor",
}


@pytest.mark.parametrize("task", [*COMPLETED.split(), "nan_score", "odd_value", "hook_breaker"])
def test_completed(hostile: Fleet, task: str) -> None:
    end = hostile.done(task)
    assert (end["status"], end["failure_category"], end["attempts"]) == ("completed", None, 1), end
    assert end["samples"]["completed"] == end["samples"]["total"] > 0


@pytest.mark.parametrize(("task", "summary"), FAILED.items())
def test_failed_with_one_clear_line(hostile: Fleet, task: str, summary: str) -> None:
    """The task's own error is never tried again: Inspect has done so."""
    end = hostile.done(task)
    assert (end["status"], end["failure_category"], end["attempts"]) == ("failed", "task_error", 1), end
    assert re.fullmatch(summary, end["error_summary"])
    assert f"\n{task} with scripted/good failed (task_error): {end['error_summary']}\n" in hostile.err


def test_an_errored_sample_keeps_the_others(hostile: Fleet) -> None:
    end = hostile.done("one_error")
    assert end["samples"] == {"total": 4, "completed": 3, "errored": 1}
    final = hostile.results(end["job_id"])
    assert {json.loads(key): event["status"] for (key, _), event in final.items()} == {
        1: "completed",
        2: "completed",
        3: "errored",
        4: "completed",
    }


def test_each_try_of_a_sample_is_told_and_only_the_last_is_a_result(hostile: Fleet) -> None:
    """`--retry-attempts 2`: the first try and two more."""
    job = hostile.done("one_error")["job_id"]
    retries = hostile.of("sample_retry", job_id=job)
    assert [(event["sample_id"], event["status"]) for event in retries] == [(3, "errored")] * 2
    (result,) = hostile.of("result", job_id=job, sample_id=3)
    assert len({event["uuid"] for event in [*retries, result]}) == 3
    assert "this sample always fails" in result["error"]


def test_a_sample_that_fails_once_heals_in_place(hostile: Fleet) -> None:
    job = hostile.done("error_once")["job_id"]
    (retry,) = hostile.of("sample_retry", job_id=job)
    (result,) = hostile.of("result", job_id=job, sample_id=3)
    assert (retry["sample_id"], result["status"], result["error"]) == (3, "completed", None)
    assert len(hostile.of("result", job_id=job)) == 4


def test_what_a_task_prints_goes_to_the_workers_log_and_is_bounded(hostile: Fleet) -> None:
    logs = [path.read_text("utf-8", "replace") for path in (hostile.path / "workers").glob("*.log")]
    assert any("noise noise" in log and "more bytes of output were left out" in log for log in logs)
    assert sum(map(len, logs)) < 2_000_000
    assert "noise" not in hostile.out + hostile.err


def test_a_daemon_is_dead_afterwards(hostile: Fleet) -> None:
    pid = int((hostile.folder / "daemon.pid").read_text())
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return
    assert state in "ZX"


def test_ids_keep_their_type_and_their_text(hostile: Fleet) -> None:
    end = hostile.done("hostile_ids")
    streamed = [event["sample_id"] for event in hostile.of("result", job_id=end["job_id"])]
    logged = read_eval_log_sample_summaries(str(hostile.storage_file(end["log"])))
    assert sorted(map(repr, streamed)) == sorted(repr(summary.id) for summary in logged)
    assert {"001", 1, "../../x", "a:b", "line\nfeed"} <= set(streamed)


def test_scores_that_are_no_json_become_null(hostile: Fleet) -> None:
    job = hostile.done("nan_score")["job_id"]
    values = {
        event["sample_id"]: event["scores"]["give_unmeasured"]["value"] for event in hostile.of("result", job_id=job)
    }
    assert values == {1: None, 2: None, 3: {"a": None, "b": None}}


def test_scores_of_any_type_are_themselves(hostile: Fleet) -> None:
    job = hostile.done("odd_value")["job_id"]
    values = {
        event["sample_id"]: event["scores"]["give_unmeasured"]["value"] for event in hostile.of("result", job_id=job)
    }
    text = values.pop(6)
    assert values == {1: True, 2: 0, 3: "C", 4: [1, 2.5, "x"], 5: {"a": None, "b": False}}
    assert values[1] is True
    assert text.startswith("t" * 5000) and len(text) < 32 * 1024
    assert [event["sample_id"] for event in hostile.of("result", job_id=job) if event.get("truncated")] == [6]


def test_a_long_explanation_is_cut_and_marked(hostile: Fleet) -> None:
    for event in hostile.of("result", job_id=hostile.done("long_explanation")["job_id"]):
        assert event["truncated"] is True
        assert 0 < len(event["scores"]["give"]["explanation"]) <= 8192
    assert all(len(text) < 32 * 1024 for text in hostile.live.read_text("ascii").splitlines())


def test_half_a_surrogate_pair_is_written_out(hostile: Fleet) -> None:
    (event,) = hostile.of("result", job_id=hostile.done("lone_surrogate")["job_id"])
    assert event["scores"]["includes"]["answer"] == "yes \\ud83d"


def test_a_broken_hook_loses_nothing_and_is_reported(hostile: Fleet) -> None:
    end = hostile.done("hook_breaker")
    assert len(hostile.results(end["job_id"])) == 3
    (warning,) = hostile.of("warning", job_id=end["job_id"])
    assert warning["text"] == "hook_breaker: 3 samples were reported only after the job"


def test_the_recipe_for_failures(hostile: Fleet) -> None:
    text = f"""jq -c 'select(.type=="job_done" and .status!="completed")' \\
  logs/fleet/{hostile.fleet_id}/events.jsonl"""
    shown = subprocess.run(text, shell=True, cwd=hostile.folder, capture_output=True, text=True, check=True).stdout
    assert {json.loads(row)["task"] for row in shown.splitlines()} == set(FAILED)


# A provider that refuses the key


def test_wrong_credentials_stop_the_fleet(tmp_path: Path) -> None:
    """At the first refused call: each further one would be refused too."""
    folder = prepare(tmp_path)
    words = ["examples/arithmetic.py", "tasks/slow.py", "examples/choices.py", "-T", "n=4", "-M", "auth=1"]
    fleet = run(folder, *words, "--model", "scripted/good", "--max-workers", "1", "--slots", "1")
    check(fleet)
    assert fleet.code == 3
    first = fleet.done("arithmetic")
    assert (first["status"], first["failure_category"], first["attempts"]) == ("failed", "auth", 1)
    assert "401" in first["error_summary"]
    assert fleet.summary["outcome"] == "stopped"
    assert fleet.summary["reason"].startswith("a model provider refused the credentials")
    assert fleet.summary["cancelled"] >= 1
    assert "Error code: 401" in fleet.err


# Memory


@contextmanager
def memory_cgroup(megabytes: int) -> Iterator[str]:
    """A control group with a limit; gives the file that a process enters it by."""
    name = f"inspect-fleet-test-{uuid.uuid4().hex[:8]}"
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / name
    try:
        group.mkdir()
        (group / limit).write_text(str(megabytes << 20))
        if root is v2:
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        yield str(group / "cgroup.procs")
    finally:
        left = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        assert not left, f"left in the control group: {left}"
        group.rmdir()


def test_a_job_that_the_kernel_ends_for_want_of_memory(tmp_path: Path) -> None:
    """The job dies, its worker and the others' jobs live; it is tried three times and then called `oom`."""
    folder = prepare(tmp_path)
    with memory_cgroup(1400) as entrance:
        wrapper = ("sh", "-c", f'echo $$ > {entrance} && exec "$@"', "sh")
        words = ["tasks/memory_hog.py", "examples/arithmetic.py", "-T", "megabytes=4000", "-T", "n=3"]
        fleet = run(folder, *words, "--model", "scripted/good", "--max-workers", "1", "--slots", "1", wrapper=wrapper)
        check(fleet)
    assert fleet.code == 1
    end = fleet.done("memory_hog")
    assert (end["status"], end["failure_category"], end["attempts"]) == ("failed", "oom", 3), end
    assert end["error_summary"] == "the kernel ended the job because memory ran out"
    assert [event["failure_category"] for event in fleet.of("job_attempt")] == ["oom", "oom"]
    assert fleet.done("arithmetic")["status"] == "completed"
    assert not fleet.of("worker_lost")


# What is refused before anything starts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the tasks."""
    monkeypatch.chdir(prepare(tmp_path / "here"))
    for name in [name for name in os.environ if name.startswith(("INSPECT_", "OPENAI_", "S3_BUCKET"))]:
        monkeypatch.delenv(name)
    return Path.cwd()


def refused(here: Path, *words: str) -> Result:
    """A command that must end with one sentence and exit code 2, and leave nothing behind."""
    result = CliRunner().invoke(ct, ["run", "eval", *words], prog_name="ct")
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert not list(here.glob("logs/fleet/*"))
    return result


REFUSALS = {
    "a module that is missing": (
        ["tasks/missing_module.py", "--model", "scripted/good"],
        r"Error: tasks/missing_module\.py \(line \d+\) cannot be imported: ModuleNotFoundError: .*a_module_that_nobody_has.*",
    ),
    "a file that raises": (
        ["tasks/raises_at_import.py", "--model", "scripted/good"],
        r"Error: tasks/raises_at_import\.py \(line \d+\) cannot be loaded: RuntimeError: this file always raises",
    ),
    "a file that ends the process": (
        ["tasks/exits_at_import.py", "--model", "scripted/good"],
        r"Error: tasks/exits_at_import\.py.* cannot be loaded: it calls sys\.exit\(3\)",
    ),
    "a file that is not there": (
        ["nowhere.py", "--model", "scripted/good"],
        r"Error: nowhere\.py: there is no such file in .*",
    ),
    "a task that nobody has": (
        ["nobody/has_this", "--model", "scripted/good"],
        r"Error: Task named 'nobody/has_this' not found.*",
    ),
    "a good task beside one that cannot be loaded": (
        ["examples/arithmetic.py", "tasks/missing_module.py", "--model", "scripted/good"],
        r"Error: tasks/missing_module\.py .*",
    ),
    "an unknown provider": (["examples/arithmetic.py", "--model", "nobody/model"], r"Error: unknown model: .*nobody.*"),
    "an unknown model": (
        ["examples/arithmetic.py", "--model", "scripted/nobody"],
        r"Error: .*scripted/nobody.*scripted/good.*",
    ),
    "a missing key": (["examples/arithmetic.py", "--model", "openai/gpt-4o"], r"Error: .*(openai|OPENAI_API_KEY).*"),
    "an empty dataset": (
        ["tasks/empty.py", "--model", "scripted/good"],
        r"Error: tasks/empty\.py .*dataset is empty.*",
    ),
    "an unknown option": (
        ["examples/arithmetic.py", "--model", "scripted/good", "--no-such-option"],
        r"Error: No such option:? '?--no-such-option.*",
    ),
    "a bad value": (
        ["examples/arithmetic.py", "--model", "scripted/good", "--max-samples", "many"],
        r"Error: Invalid value for '--max-samples'.*",
    ),
    "a bad run id": (["--run-id", "yesterday"], r"Error: Invalid value for '--run-id': 'yesterday' is not a run id.*"),
    "a run that is not there": (
        ["--run-id", "2026-11-29-14-05-33-1a2b3c4d"],
        r"Error: there is no run 2026-11-29-14-05-33-1a2b3c4d .*",
    ),
    "the same task twice": (
        ["examples/arithmetic.py", "./examples/arithmetic.py", "--model", "scripted/good"],
        r"Error: the task .*arithmetic.* was given 2 times.*",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_one_line(case: str, here: Path) -> None:
    words, sentence = REFUSALS[case]
    result = refused(here, *words)
    said = [text for text in result.output.splitlines() if text.startswith("Error")]
    assert len(said) == 1, result.output
    assert re.fullmatch(sentence, said[0]), said[0]


def test_a_sandbox_without_docker_is_refused_before_anything_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "no docker").mkdir()
    monkeypatch.setenv("PATH", str(here / "no docker"))
    words = ("examples/arithmetic.py", "--model", "scripted/good", "--sandbox", "docker")
    sentence = (
        "Error: the samples of arithmetic run in Docker sandboxes, but there is no `docker` on this machine: install Docker "
        "Engine and its Compose plugin; `ies sandbox check` says what this machine needs"
    )
    assert sentence in refused(here, *words).output.splitlines()
    alone = CliRunner().invoke(ies, ["run", "local", *words], prog_name="ies")
    assert (alone.exit_code, alone.output.splitlines()[-1]) == (2, sentence)
    assert not (here / "logs" / "working").exists()
    known = CliRunner().invoke(ct, ["run", "eval", *words, "--estimate"], prog_name="ct")
    assert known.exit_code == 0, known.output


def test_an_unwritable_root_is_found_before_anything_runs(here: Path) -> None:
    """A file stands where the fleets' directory would be: root too cannot write below it."""
    (here / "logs").mkdir()
    (here / "logs" / "fleet").write_text("a file")
    result = CliRunner().invoke(
        ct, ["run", "eval", "examples/arithmetic.py", "--model", "scripted/good"], prog_name="ct"
    )
    assert result.exit_code == 2, result.output
    (said,) = (text for text in result.output.splitlines() if text.startswith("Error"))
    assert re.fullmatch(rf"Error: the root {here} cannot be used: .*", said)
    assert (here / "logs" / "fleet").read_text() == "a file"


def test_a_full_disk_is_found_before_anything_runs(here: Path) -> None:
    """A file system of a few pages, where this machine lets the test mount one."""
    small = here / "logs"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        (small / "filler").write_bytes(b"x" * shutil.disk_usage(small).free)
        result = CliRunner().invoke(
            ct, ["run", "eval", "examples/arithmetic.py", "--model", "scripted/good"], prog_name="ct"
        )
        assert result.exit_code == 2, result.output
        assert re.search(r"^Error: the root .* cannot be used: .*", result.output, re.M)
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_exit_code_of_a_refusal_reaches_the_shell(tmp_path: Path) -> None:
    fleet = run(prepare(tmp_path), "tasks/empty.py", "--model", "scripted/good")
    assert fleet.code == 2
    assert fleet.out == ""
    assert fleet.err.splitlines()[-1].startswith("Error: tasks/empty.py")
    assert fleet.events == []


def test_results_of_a_failed_run_are_told_from_their_logs(hostile: Fleet) -> None:
    """The stream's final results and the logs name the same executions also where a job failed."""
    for end in hostile.of("job_done", status="failed"):
        if end["log"]:
            for summary in read_eval_log_sample_summaries(str(hostile.storage_file(end["log"]))):
                final = hostile.results(end["job_id"])[sample_key(summary.id, summary.epoch)]
                assert (final["uuid"], final["status"]) == (
                    summary.uuid,
                    "completed" if summary.error is None else "errored",
                )
