"""Unfinished logs go up when they change and come back whole; nothing else of a log directory does."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalworker.contract import layout
from evalworker.partials import PartialKeeper, fetch
from evalworker.storage import LocalStorage, StorageError

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
JOB = "00000000000000aa"
PREFIX = layout.partial(FLEET, JOB)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    (folder / ".buffer" / "log").mkdir(parents=True)
    (folder / "log.eval").write_text("log 1")
    (folder / ".buffer" / "log" / "manifest.json").write_text("manifest 1")
    (folder / ".buffer" / "log" / "segment.1.zip").write_text("segment 1")
    (folder / "eval-set.json").write_text("Inspect makes it anew")
    (folder / ".lock").write_text("")
    return folder


def change(path: Path, text: str) -> None:
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


def test_the_log_and_its_buffer_go_up_once(store: LocalStorage, logs: Path) -> None:
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    assert keeper.save() == 3
    assert keeper.save() == 0
    change(logs / "log.eval", "log 2")
    assert keeper.save() == 1
    kept = {info.key.removeprefix(PREFIX): store.get(info.key).body.decode() for info in store.list(PREFIX)}
    assert kept == {
        "log.eval": "log 2",
        ".buffer/log/manifest.json": "manifest 1",
        ".buffer/log/segment.1.zip": "segment 1",
    }


def test_the_log_goes_last(store: LocalStorage, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it never promises more than is there when the worker dies between two uploads."""
    order: list[str] = []
    upload = store.upload
    monkeypatch.setattr(store, "upload", lambda path, key: (order.append(path.name), upload(path, key)))
    PartialKeeper(store, FLEET, JOB, logs).save()
    assert order[-1] == "log.eval"


def test_it_is_due_when_the_buffer_was_copied(store: LocalStorage, logs: Path) -> None:
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    assert keeper.synced
    keeper.save()
    assert not keeper.synced
    change(logs / ".buffer" / "log" / "manifest.json", "manifest 2")
    assert keeper.synced


def test_a_failed_upload_is_tried_again(store: LocalStorage, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = PartialKeeper(store, FLEET, JOB, logs)

    def away(path: Path, key: str) -> None:
        raise StorageError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "upload", away)
        with pytest.raises(StorageError):
            keeper.save()
    assert keeper.save() == 3


def test_what_was_kept_comes_back_whole(store: LocalStorage, logs: Path, tmp_path: Path) -> None:
    PartialKeeper(store, FLEET, JOB, logs).save()
    fresh = tmp_path / "fresh"
    assert fetch(store, FLEET, JOB, fresh, "published.eval")
    found = {path.relative_to(fresh).as_posix(): path.read_text() for path in fresh.rglob("*") if path.is_file()}
    assert found == {
        "log.eval": "log 1",
        ".buffer/log/manifest.json": "manifest 1",
        ".buffer/log/segment.1.zip": "segment 1",
    }


def test_without_a_partial_log_the_published_one_of_an_earlier_round_serves(
    store: LocalStorage, tmp_path: Path
) -> None:
    store.put(layout.job_log(FLEET, JOB), b"published")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert fetch(store, FLEET, JOB, fresh, "../../2026_t.eval")
    assert [(path.name, path.read_bytes()) for path in fresh.iterdir()] == [("2026_t.eval", b"published")]


@pytest.mark.parametrize("published", [None, "gone.eval"])
def test_a_first_attempt_finds_nothing(store: LocalStorage, tmp_path: Path, published: str | None) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert not fetch(store, FLEET, JOB, fresh, published)
    assert list(fresh.iterdir()) == []


def test_the_partial_log_of_another_job_is_not_taken(store: LocalStorage, logs: Path, tmp_path: Path) -> None:
    PartialKeeper(store, FLEET, JOB[:-1] + "b", logs).save()
    assert not fetch(store, FLEET, JOB, tmp_path / "fresh", None)


def test_a_directory_that_goes_away_meanwhile_is_no_error(
    store: LocalStorage, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's end removes its directory while the worker's thread for partial logs looks at it."""
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    scandir = os.scandir

    def vanishing(folder: Any) -> Any:
        if not isinstance(folder, int) and Path(folder).name == ".buffer":  # rmtree itself lists by descriptor
            shutil.rmtree(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert not keeper.synced
    assert keeper.save() == 1
    shutil.rmtree(logs)
    assert not keeper.synced
    assert keeper.save() == 0


def test_a_file_that_goes_away_before_its_upload_is_passed_over(
    store: LocalStorage, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = store.upload

    def late(path: Path, key: str) -> None:
        if path.name == "manifest.json":
            path.unlink()
        upload(path, key)

    monkeypatch.setattr(store, "upload", late)
    assert PartialKeeper(store, FLEET, JOB, logs).save() == 2
