"""What can be said of the configuration without AWS: its form, its own tests, its variables, and checkov's opinion."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terraform_bench import ROOT, copied, provider_environment

from evalops.infra.estate import Estate
from evalworker.environment import find_uv

CONFIGURATION = ROOT / "terraform"
CHECKOV = "checkov==3.3.30"
MOST_SKIPS = 14


def sources() -> list[Path]:
    return sorted(CONFIGURATION.glob("*.tf")) + sorted(CONFIGURATION.glob("modules/*/*.tf"))


def terraform(directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(directory)} | provider_environment()
    program = shutil.which("terraform")
    assert program, "these tests need terraform >= 1.11 on PATH"
    return subprocess.run(
        [program, f"-chdir={directory}", *argv], env=environ, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied(tmp_path_factory.mktemp("static") / "terraform", emulated=False)
    done = terraform(directory, "init", "-backend=false", "-input=false", "-lockfile=readonly", "-no-color")
    assert done.returncode == 0, done.stderr
    return directory


def test_fmt() -> None:
    done = terraform(CONFIGURATION, "fmt", "-check", "-recursive")
    assert (done.returncode, done.stdout) == (0, "")


def test_validate(initialised: Path) -> None:
    done = terraform(initialised, "validate", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_promise_in_every_shape(initialised: Path) -> None:
    done = terraform(initialised, "test", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"Success! (\d+) passed, 0 failed", done.stdout)[1])  # type: ignore[index]
    assert passed == len(re.findall(r"^run ", (CONFIGURATION / "tests" / "estate.tftest.hcl").read_text(), re.M))


def test_variables_are_few_and_described() -> None:
    text = (CONFIGURATION / "variables.tf").read_text()
    blocks = re.findall(r'^variable "(\w+)" \{(.*?)^\}', text, re.M | re.S)
    assert 0 < len(blocks) <= 30
    for name, body in blocks:
        assert re.search(r"^  type ", body, re.M), name
        assert re.search(r"^  default ", body, re.M), name
        said = re.search(r'^  description = "(.*)"$', body, re.M)
        assert said and re.search(r"\b(free|USD|paid|costs?|cost)\b", said[1], re.I), (
            f"{name} does not say what it costs"
        )


def test_example_names_variables_that_exist() -> None:
    known = set(re.findall(r'^variable "(\w+)"', (CONFIGURATION / "variables.tf").read_text(), re.M))
    named = set(re.findall(r"^# (\w+) +=", (CONFIGURATION / "terraform.tfvars.example").read_text(), re.M))
    assert named and named <= known


def test_lock_file_holds_hashes_for_all_platforms() -> None:
    text = (CONFIGURATION / ".terraform.lock.hcl").read_text()
    assert text.count('"zh:') >= 14 and '"h1:' in text
    assert ">= 5.100.0, < 7.0.0" in text


def test_scripts_read_the_configuration_that_terraform_writes() -> None:
    written = set(re.findall(r'^output "(\w+)"', (CONFIGURATION / "outputs.tf").read_text(), re.M))
    assert written == {field.alias or name for name, field in Estate.model_fields.items()}


def test_checkov(tmp_path: Path) -> None:
    inline = [
        (path.name, check, reason.strip())
        for path in sources()
        for check, reason in re.findall(r"#checkov:skip=(\w+):?(.*)", path.read_text())
    ]
    assert 0 < len(inline) <= MOST_SKIPS
    assert [entry for entry in inline if len(entry[2]) < 40] == [], "each skip says why"
    assert not [*ROOT.glob(".checkov*"), *CONFIGURATION.rglob(".checkov*")]
    done = subprocess.run(
        [checkov(), "-d", str(CONFIGURATION), "--framework", "terraform", "--skip-download", "--quiet", "-o", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    summary = found["summary"]
    assert [(item["check_id"], item["resource"]) for item in found["results"]["failed_checks"]] == []
    assert (summary["failed"], summary["parsing_errors"]) == (0, 0)
    assert summary["passed"] > 150 and summary["resource_count"] > 50


def checkov() -> str:
    """checkov in an environment of its own: its pins would fight with the project's."""
    home = ROOT / "tests" / ".cache" / "checkov"
    program = home / "bin" / "checkov"
    if not program.exists():
        subprocess.run(
            [find_uv() or "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], check=True
        )
        subprocess.run(
            [find_uv() or "uv", "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), CHECKOV],
            check=True,
        )
    return str(program)
