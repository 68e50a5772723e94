"""A directory of Terraform and the emulator that it talks to, with `ies infra` and terraform run as a user would."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aws_emulator
import boto3

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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


def initialised(target: Path, emulator: aws_emulator.Emulator) -> Estate:
    """The configuration in a directory of its own, with the provider in place."""
    assert shutil.which("terraform") is not None, "this needs terraform >= 1.11 on PATH"
    estate = Estate(copied(target, emulated=True), emulator)
    done = estate.ies("infra", "init")
    assert done.returncode == 0, done.stderr
    return estate


def apply(estate: Estate, **variables: Any) -> None:
    """`ies infra apply`; what it said is kept."""
    estate.variables(**variables)
    done = estate.ies("infra", "apply", "--yes")
    estate.said["apply"] = done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
