"""The worker package as a wheel: the same bytes for the same files, and exactly the package that was asked for."""

import importlib.metadata
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from evalops import locks
from evalops import wheel as building
from evalworker import wheel
from evalworker.contract import layout
from evalworker.preload_settings import PLACE, restore
from evalworker.storage import LocalStorage, Missing


def test_the_fingerprint_depends_on_the_files_alone(tmp_path: Path) -> None:
    copy = tmp_path / "evalworker"
    shutil.copytree(wheel.PACKAGE, copy)
    assert wheel.digest(copy) == wheel.digest()
    (copy / "__pycache__").mkdir(exist_ok=True)
    (copy / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert wheel.digest(copy) == wheel.digest()
    (copy / "job.py").write_text("changed")
    assert wheel.digest(copy) != wheel.digest()


def test_the_wheel_is_the_package_with_its_metadata(tmp_path: Path) -> None:
    assert building.build() == building.build()
    storage = LocalStorage(tmp_path / "store")
    digest = building.ship(storage)
    assert building.ship(storage) == digest
    place = wheel.unpack(storage, digest, tmp_path / "cache")
    assert wheel.digest(place / "evalworker") == digest
    assert {path.name.partition("-")[0] for path in place.iterdir()} == {"evalworker", "inspect_fleet"}
    (found,) = importlib.metadata.distributions(name="inspect-fleet", path=[str(place)])
    assert found.version == importlib.metadata.version("inspect-fleet")
    assert {re.split("[<>=]", line)[0] for line in found.requires or []} == set(locks.WORKER_PACKAGES)
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("inspect_ai", "evalworker.scripted")


def test_it_is_fetched_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    digest = building.ship(storage)
    place = wheel.unpack(storage, digest, tmp_path / "cache")
    storage.delete(layout.wheel(digest))
    assert wheel.unpack(storage, digest, tmp_path / "cache") == place
    with pytest.raises(Missing):
        wheel.unpack(storage, digest, tmp_path / "other")


def test_another_package_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("evalworker/__init__.py", "")
        archive.writestr("../escape.py", "")
    storage.upload(tmp_path / "other.whl", layout.wheel("0" * 32))
    with pytest.raises(ValueError, match="is damaged"):
        wheel.unpack(storage, "0" * 32, tmp_path / "cache")
    assert not list(tmp_path.rglob("0" * 32))
    assert not list(tmp_path.glob("escape.py"))


def test_jobs_see_the_users_own_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, "/cache/worker/x")
    monkeypatch.setenv("PYTHONPATH", "/cache/worker/x:/home/me/code")
    restore()
    assert os.environ["PYTHONPATH"] == "/home/me/code"
    assert PLACE not in os.environ
    monkeypatch.setenv(PLACE, "/cache/worker/x")
    monkeypatch.setenv("PYTHONPATH", "/cache/worker/x")
    restore()
    assert "PYTHONPATH" not in os.environ
