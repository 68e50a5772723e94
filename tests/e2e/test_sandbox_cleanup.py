"""`ies sandbox cleanup` against a real Docker engine: only what a job's Compose projects have made goes."""

import json
import secrets
import subprocess

import pytest
from click.testing import CliRunner

from evalops.commands.sandbox import sandbox
from evalworker.contract.labels import PROJECT_LABEL, project_mark

RUN = "2026-11-29-14-05-33-1a2b3c4d"


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def engine():
    """A running Docker engine."""
    try:
        _docker("info", "--format", "{{.ServerVersion}}")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"no Docker engine answers: {error}")


def test_only_what_a_job_has_made_goes(engine):
    name = f"inspect-fleet-test-{secrets.token_hex(4)}"
    label = f"{PROJECT_LABEL}=inspect-t-i{project_mark(RUN, secrets.token_hex(8))}x1y2z3"
    _docker("network", "create", "--label", label, f"{name}-ours")
    _docker("volume", "create", "--label", label, f"{name}-ours")
    _docker("volume", "create", f"{name}-theirs")
    try:
        said = CliRunner().invoke(sandbox, ["cleanup", "--run-id", RUN, "--json"], catch_exceptions=False)
        removed = {(item["kind"], item["name"]) for item in json.loads(said.stdout)["removed"]}
        assert removed == {("network", f"{name}-ours"), ("volume", f"{name}-ours")}
        assert f"{name}-ours" not in _docker("volume", "ls") + _docker("network", "ls")
        assert f"{name}-theirs" in _docker("volume", "ls")
    finally:
        _docker("volume", "rm", "--force", f"{name}-theirs", f"{name}-ours")
        subprocess.run(["docker", "network", "rm", f"{name}-ours"], capture_output=True)
