"""The applied estate: one emulator and one `terraform apply` serve all e2e tests of a session."""

import os
from collections.abc import Iterator

import aws_emulator
import pytest
import terraform_bench
from terraform_bench import Estate


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[aws_emulator.Emulator]:
    """A fresh moto server."""
    running = aws_emulator.start(tmp_path_factory.mktemp("emulator"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def unapplied(tmp_path_factory: pytest.TempPathFactory, emulator: aws_emulator.Emulator) -> Estate:
    """The configuration, initialised."""
    return terraform_bench.initialised(tmp_path_factory.mktemp("estate") / "terraform", emulator)


@pytest.fixture(scope="session")
def applied(unapplied: Estate) -> Estate:
    """The estate with two lanes, made by `ies infra apply`."""
    terraform_bench.apply(unapplied, lanes=2)
    return unapplied


@pytest.fixture(autouse=True)
def _no_own_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
