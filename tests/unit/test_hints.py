"""`evalops.hints` and who prints them: the commands work as printed, in the shell in which they are printed."""

import shlex
from types import SimpleNamespace
from typing import Any

import click
import pytest

from evalops import hints
from evalops.cli import ct, ies
from evalops.commands import follow
from evalops.fleet.guards import Verdict
from evalops.settings import Settings
from evalworker.contract.wire import now

RUN = "2026-11-29-14-05-33-1a2b3c4d"
ESTATE = Settings(root="s3://estate", bucket="estate", estate="default", owner="me")


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)


def test_the_root_is_named_where_the_environment_does_not_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hints.at_root("ct fleet stop R", "b") == "S3_BUCKET_NAME=b ct fleet stop R"
    assert hints.at_root("ct fleet stop R", None) == "ct fleet stop R"
    monkeypatch.setenv("S3_BUCKET_NAME", "b")
    assert hints.at_root("ct fleet stop R", "b") == "ct fleet stop R"


def parsed(words: list[str]) -> dict[str, Any]:
    """A command line as its command reads it."""
    command: click.Command = {"ct": ct, "ies": ies}[words.pop(0)]
    context = click.Context(command)
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, parent=context, info_name=name)
    return command.make_context(command.name, words, parent=context.parent).params


@pytest.mark.parametrize("backend", ["local", "ec2", "batch"])
def test_a_run_is_resumed_where_it_began(backend: str) -> None:
    found = parsed(shlex.split(hints.resume(RUN, backend)))
    assert found["run_id"] == RUN
    assert bool(found.get("ec2")) == (backend == "ec2")


def test_what_a_fleet_on_ec2_prints_names_its_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    done = SimpleNamespace(failure_category="task_error", error_summary="a bug of the task")
    failed = SimpleNamespace(name="t", spec=SimpleNamespace(model="m/m"), done=done, status="failed")
    fleet: Any = SimpleNamespace(
        fleet_id=RUN,
        manifest=SimpleNamespace(backend="ec2", code="c0de"),
        control=SimpleNamespace(deadline=now(), budgeted=False),
        ledger=SimpleNamespace(jobs={"j": failed}, open_jobs=[], samples=SimpleNamespace(total=1)),
        pool=SimpleNamespace(stays=True),
        storage=SimpleNamespace(url=lambda key: f"s3://estate/{key}", list=lambda prefix: iter(())),
        stream=SimpleNamespace(path="/e/events.jsonl"),
    )
    follow._banner(fleet, ESTATE)
    follow._left(fleet, Verdict("left", "interrupted"), ESTATE)
    follow._closing(fleet, Verdict("failures"), None)
    said = capsys.readouterr().err
    assert said.count("ct fleet ") == said.count("S3_BUCKET_NAME=estate ct fleet ") == 5
    assert f"resume  ct run eval --ec2 --run-id {RUN}\nmended  {hints.SHIP_ANEW}" in said
