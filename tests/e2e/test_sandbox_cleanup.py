"""`ies sandbox cleanup` against a real Docker engine: only what belongs to a job's Compose project goes."""

import json
import secrets
import subprocess
import sys

import pytest
from click.testing import CliRunner

from evalops.commands.sandbox import sandbox
from evalworker.containers import PROJECT
from evalworker.contract.ids import sandbox_tag

RUN = "2026-11-29-14-05-33-1a2b3c4d"


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=60).stdout


def _project(run: str) -> str:
    """The name that a job of this run gives to a sandbox's Compose project, by the function that the job calls."""
    code = (
        "import sys; from pathlib import Path; from evalworker import inspect_internals as i\n"
        "i.name_sandbox_projects(sys.argv[1], Path('/dev/null'))\n"
        "from inspect_ai.util._sandbox.docker import docker\n"
        "print(docker.task_project_name('a task'))"
    )
    tag = sandbox_tag(run, secrets.token_hex(8))
    return subprocess.run([sys.executable, "-c", code, tag], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def engine():
    """A running Docker engine."""
    try:
        _docker("info", "--format", "{{.ServerVersion}}")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"no Docker engine answers: {error}")


def test_only_the_sandboxes_of_the_run_go(engine):
    name = f"inspect-fleet-test-{secrets.token_hex(4)}"
    label, another = (f"{PROJECT}={_project(run)}" for run in (RUN, RUN.replace("29", "28")))
    _docker("network", "create", "--label", label, f"{name}-ours")
    _docker("volume", "create", "--label", label, f"{name}-ours")
    _docker("volume", "create", "--label", another, f"{name}-theirs")
    try:
        said = CliRunner().invoke(sandbox, ["cleanup", "--run-id", RUN, "--json"], catch_exceptions=False)
        removed = {(item["kind"], item["name"]) for item in json.loads(said.stdout)["removed"]}
        assert removed == {("network", f"{name}-ours"), ("volume", f"{name}-ours")}
        assert f"{name}-ours" not in _docker("volume", "ls") + _docker("network", "ls")
        assert f"{name}-theirs" in _docker("volume", "ls")
    finally:
        _docker("volume", "rm", "--force", f"{name}-theirs", f"{name}-ours")
        subprocess.run(["docker", "network", "rm", f"{name}-ours"], capture_output=True)
