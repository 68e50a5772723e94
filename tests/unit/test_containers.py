"""Which Docker commands the removal of a job's sandboxes runs, with a stand-in for the command (tests/chaos has the real one)."""

import json
import os
from pathlib import Path

import pytest

from evalworker import containers
from evalworker.contract.labels import mark_of, project_mark, run_mark

FAKE = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
what = json.loads(os.environ["HAVE"])
words = " ".join(sys.argv[1:])
for listing, found in what.items():
    if words.startswith(listing):
        if found == "fail":
            sys.exit("the engine is away")
        print(found)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the commands; a stand-in is first on PATH."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "docker"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("HAVE", "{}")
    return tmp_path / "calls"


def seen(calls: Path) -> list[list[str]]:
    return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def test_an_attempt_without_sandboxes_calls_nothing(calls: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    assert containers.clean_up(tmp_path, lines.append)
    containers.inherit(tmp_path)
    assert containers.clean_up_after(tmp_path, lines.append)
    assert seen(calls) == [] and lines == []


def test_exactly_the_recorded_projects_are_removed(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / containers.RECORD).write_text("inspect-t-iabc\ninspect-t-iabc\n")
    monkeypatch.setenv("HAVE", json.dumps({"ps": "c1 c2", "network ls": "n1", "image ls": "i1 i1"}))
    lines: list[str] = []
    containers.clean_up(tmp_path, lines.append)
    only = ["--filter", "label=com.docker.compose.project=inspect-t-iabc"]
    assert seen(calls) == [
        ["ps", "--all", "--quiet", *only],
        ["rm", "--force", "--volumes", "c1", "c2"],
        ["network", "ls", "--quiet", *only],
        ["network", "rm", "n1"],
        ["volume", "ls", "--quiet", *only],
        ["image", "ls", "--quiet", "inspect-t-iabc-*"],
        ["image", "rm", "--force", "i1"],
    ]
    assert lines == ["removed what the sandbox inspect-t-iabc had left: 2 containers, 1 network"]


def test_a_sandbox_that_inspect_has_removed_is_not_mentioned(calls: Path, tmp_path: Path) -> None:
    (tmp_path / containers.RECORD).write_text("inspect-t-iabc\n")
    lines: list[str] = []
    containers.clean_up(tmp_path, lines.append)
    assert len(seen(calls)) == 4 and lines == []


def test_an_engine_that_is_away_is_logged(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / containers.RECORD).write_text("inspect-t-iabc\n")
    monkeypatch.setenv("HAVE", json.dumps({"ps": "fail", "version": "fail"}))
    lines: list[str] = []
    assert not containers.clean_up(tmp_path, lines.append)
    assert lines == ["docker ps: the engine is away"]
    assert not containers.engine_answers()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert not containers.clean_up(tmp_path, lines.append)  # no docker at all
    assert "No such file" in lines[-1]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A worker's directory with two attempts, one of which has had a sandbox."""
    for attempt in ("a-1", "b-1"):
        (tmp_path / "work" / attempt).mkdir(parents=True)
    (tmp_path / "work" / "a-1" / containers.RECORD).write_text("inspect-t-iabc\n")
    return tmp_path / "work"


def test_what_a_killed_agent_left_is_removed_once(calls: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "UNSETTLED_S", 0.0)
    containers.inherit(work)
    assert not containers.nothing_noted(work)
    assert containers.clean_up_after(work, lambda _: None)
    assert len(seen(calls)) == 4
    assert containers.clean_up_after(work, lambda _: None)
    assert len(seen(calls)) == 4


def test_what_is_left_while_the_engine_is_away_is_removed_when_it_is_back(
    calls: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "UNSETTLED_S", 0.0)
    monkeypatch.setenv("HAVE", json.dumps({"ps": "fail"}))
    containers.set_aside(work / "a-1")
    for _ in range(2):
        assert not containers.clean_up_after(work, lambda _: None)
    monkeypatch.setenv("HAVE", json.dumps({"ps": "c1"}))
    lines: list[str] = []
    assert containers.clean_up_after(work, lines.append)
    assert ["rm", "--force", "--volumes", "c1"] in seen(calls)
    assert lines == ["removed what the sandbox inspect-t-iabc had left: 1 container"]


def test_what_a_killed_job_may_still_be_making_is_looked_for_again(
    calls: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers.set_aside(work / "a-1")
    assert not containers.clean_up_after(work, lambda _: None)
    monkeypatch.setenv("HAVE", json.dumps({"ps": "c1"}))  # made by a command that was under way
    containers.clean_up_after(work, lambda _: None)
    assert ["rm", "--force", "--volumes", "c1"] in seen(calls)
    monkeypatch.setattr(containers, "UNSETTLED_S", 0.0)
    assert containers.clean_up_after(work, lambda _: None)


def test_two_records_of_one_attempt_are_both_kept(calls: Path, work: Path) -> None:
    containers.inherit(work)
    (work / "a-1" / containers.RECORD).write_text("inspect-t-idef\n")  # by a job that has outlived its agent
    containers.inherit(work)
    containers.clean_up_after(work, lambda _: None)
    asked = " ".join(word for words in seen(calls) for word in words)
    assert "inspect-t-iabc" in asked
    assert "inspect-t-idef" in asked


def test_projects_are_named_after_the_job_and_recorded_before_use(tmp_path: Path) -> None:
    # in a process of its own, as in a job: the change lasts
    import subprocess
    import sys

    code = (
        "from pathlib import Path; from evalworker import inspect_internals as i\n"
        f"i.name_sandbox_projects('0123456789abcdef', Path({str(tmp_path / containers.RECORD)!r}))\n"
        "from inspect_ai.util._sandbox.docker import docker, util\n"
        "names = [docker.task_project_name('A task: x'), docker.task_project_name('b-ic')]\n"
        "assert all(util.is_inspect_project(name) for name in names), names\n"
        "print(*names)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name[:-6] for name in said] == ["inspect-a-task-x-i0123456789abcdef", "inspect-b-ic-i0123456789abcdef"]
    assert containers.recorded(tmp_path / containers.RECORD) == said


def test_a_projects_name_tells_of_its_run_and_others_are_none_of_ours() -> None:
    run, other = "2026-11-29-14-05-33-1a2b3c4d", "2026-11-29-14-05-34-1a2b3c4d"
    mark = project_mark(run, "0123456789abcdef")
    assert mark.endswith("0123456789abcdef")
    assert mark_of(f"inspect-a-task-i{mark}x1y2z3") == run_mark(run) != run_mark(other)
    for foreign in ("inspect-a-task-ix1y2z3", "web", "", f"mine-i{mark}x1y2z3", f"inspect-t-i{mark}"):
        assert mark_of(foreign) is None
