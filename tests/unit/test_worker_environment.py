"""Whether a run needs an environment of its own on a machine whose image has brought one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from evalworker import environment
from evalworker.contract.documents import Manifest
from evalworker.contract.wire import now

FLEET = "2026-11-29-14-05-33-1a2b3c4d"


class Wanted(Exception):
    """An environment would be installed now."""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The image's environment, made from the lock `locked`; installing is an exception."""

    def install(*_: Any) -> None:
        raise Wanted

    made = tmp_path / "venv"
    made.mkdir()
    (made / environment.BAKED_LOCK).write_text("locked")
    (made / environment.LEFT_OUT).write_text("debugpy ministack\n")
    monkeypatch.setattr(sys, "prefix", str(made))
    monkeypatch.setattr(environment, "_install", install)
    return made


def prepare(tmp_path: Path, lock: str | None, requirements: tuple[str, ...] = ()) -> Path | None:
    code = tmp_path / "code"
    code.mkdir(exist_ok=True)
    if lock is not None:
        (code / "uv.lock").write_text(lock)
    manifest = Manifest(
        fleet_id=FLEET,
        created=now(),
        backend="ec2",
        jobs=[],
        arguments={},
        models=[],
        submit_dir=".",
        lock=None if lock is None else ".",
        requirements=list(requirements),
    )
    return environment.prepare(manifest, code, tmp_path / "cache", print)


def test_a_run_with_the_image_s_own_lock_takes_what_is_there(image: Path, tmp_path: Path) -> None:
    assert prepare(tmp_path, "locked") is None
    assert prepare(tmp_path, None) is None
    needed = ("boto3==1.0", "Inspect_AI==0.3", "pyyaml==6 ; python_full_version < '3.12'", "debugpy==1.8")
    assert prepare(tmp_path, "locked", needed) is None


@pytest.mark.parametrize(
    ("lock", "requirements"),
    [
        ("other", ()),
        ("locked", ("not-installed==1.17.0",)),
        ("locked", ("boto3 @ https://example.org/boto3.whl",)),
        (None, ("not-installed==1.17.0",)),
    ],
)
def test_anything_else_is_installed(
    image: Path, tmp_path: Path, lock: str | None, requirements: tuple[str, ...]
) -> None:
    with pytest.raises(Wanted):
        prepare(tmp_path, lock, requirements)


def test_an_environment_of_no_image_says_nothing_of_a_lock(image: Path, tmp_path: Path) -> None:
    (image / environment.BAKED_LOCK).unlink()
    with pytest.raises(Wanted):
        prepare(tmp_path, "locked")
