"""The applied estate: one emulator and one `terraform apply` serve all e2e tests of a session."""

import os
import shutil
from collections.abc import Iterator

import aws_emulator
import pytest
from terraform_bench import Estate, copied


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
