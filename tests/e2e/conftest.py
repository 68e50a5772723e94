"""The applied estate: one emulator and one `terraform apply` serve all e2e tests of a session."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aws_emulator
import boto3
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "unit")]  # iam_calls, test_infra_guard
CLI = "import sys; from evalops.commands.infra import infra, secrets; {'infra': infra, 'secrets': secrets}[sys.argv.pop(1)]()"


def provider_environment() -> dict[str, str]:
    """TF_CLI_CONFIG_FILE for machines with a provider mirror; nothing where the registry is used."""
    found = subprocess.run([HERE / "terraform-mirror.sh"], capture_output=True, text=True, check=True).stdout.strip()
    environ = {"TF_PLUGIN_CACHE_DIR": "", "CHECKPOINT_DISABLE": "1"}
    return environ | ({"TF_CLI_CONFIG_FILE": found} if found else {})


def copied(target: Path, *, emulated: bool) -> Path:
    """A copy of terraform/ without what an operator's own runs left there; with what the emulator needs, if asked."""
    shutil.copytree(
        ROOT / "terraform", target, ignore=shutil.ignore_patterns(".terraform", "*.tfstate*", "*.tfvars", "backend.tf")
    )
    if emulated:
        shutil.copy(HERE / "data" / "emulator_override.tf", target)
    return target


@dataclass
class Estate:
    """A directory of Terraform, the emulator that it talks to, and `ies infra` run as a user would."""

    directory: Path
    emulator: aws_emulator.Emulator
    who: str = "operator"
    said: dict[str, str] = field(default_factory=dict)

    def environment(self, who: str = "") -> dict[str, str]:
        return self.emulator.environment(who or self.who) | provider_environment() | {"PYTHONPATH": ""}

    def ies(
        self, *argv: str, who: str = "", cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`ies ARGV…`, with --dir where the command takes it."""
        takes_dir = argv[0] == "infra" and argv[1] != "doctor"
        options = ["--dir", str(self.directory)] if takes_dir else []
        return subprocess.run(
            [sys.executable, "-c", CLI, *argv, *options],
            env=self.environment(who) | environ,
            cwd=cwd or self.directory.parent,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=900,
        )

    def terraform(self, *argv: str, who: str = "") -> subprocess.CompletedProcess[str]:
        """Bare terraform in the same directory."""
        return subprocess.run(
            ["terraform", f"-chdir={self.directory}", *argv],
            env=self.environment(who),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=900,
        )

    def variables(self, **values: Any) -> None:
        """What terraform.tfvars says from now on."""
        (self.directory / "terraform.tfvars.json").write_text(json.dumps(values))

    def client(self, service: str, who: str = "test") -> Any:
        """boto3's client for the emulator."""
        return boto3.client(
            service,
            endpoint_url=self.emulator.url,
            region_name="us-east-1",
            aws_access_key_id=who,
            aws_secret_access_key="emulator",
        )


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[aws_emulator.Emulator]:
    """A fresh moto server."""
    running = aws_emulator.start(tmp_path_factory.mktemp("emulator"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def unapplied(tmp_path_factory: pytest.TempPathFactory, emulator: aws_emulator.Emulator) -> Estate:
    """The configuration, initialised."""
    if shutil.which("terraform") is None:
        pytest.fail("these tests need terraform >= 1.11 on PATH")
    estate = Estate(copied(tmp_path_factory.mktemp("estate") / "terraform", emulated=True), emulator)
    done = estate.ies("infra", "init")
    assert done.returncode == 0, done.stderr
    return estate


@pytest.fixture(scope="session")
def applied(unapplied: Estate) -> Estate:
    """The estate with two lanes, made by `ies infra apply`."""
    unapplied.variables(lanes=2)
    done = unapplied.ies("infra", "apply", "--yes")
    unapplied.said["apply"] = done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return unapplied


@pytest.fixture(autouse=True)
def _no_own_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
