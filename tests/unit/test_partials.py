"""Unfinished logs go up when they change and come back whole; nothing else of a log directory does."""

import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval as inspect_eval
from inspect_ai.log import read_eval_log_sample_summaries

from evalworker import holdings
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.partials import PartialKeeper, fetch
from evalworker.storage import LocalStorage, StorageError

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
JOB = "00000000000000aa"
PREFIX = layout.partial(FLEET, JOB)
SPEC = JobSpec(job_id=JOB, task="t.py@t", name="t", model="scripted/good", samples=9)
CASES = Path(__file__).parents[1] / "tasks" / "metric_cases.py"


def write_log(
    path: Path, finished: Sequence[int], errored: Sequence[int] = (), *, ended: bool = False, task: str = "t"
) -> Path:
    """A log as Inspect lays it out: its header, its summaries, and a sample of each."""
    header = {"eval": {"task": task, "model": SPEC.model, "dataset": {"samples": 9}}}
    summaries = [{"id": id_, "epoch": 1, "completed": True} for id_ in finished]
    summaries += [{"id": id_, "epoch": 1, "completed": True, "error": "boom"} for id_ in errored]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for summary in summaries:
            archive.writestr(f"samples/{summary['id']}_epoch_1.json", json.dumps(summary))
        archive.writestr("summaries.json" if ended else "_journal/summaries/1.json", json.dumps(summaries))
        archive.writestr("header.json" if ended else "_journal/start.json", json.dumps(header))
    return path


class Warnings(list[str]):
    """What a person was told."""

    __call__ = list.append


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


def found_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_was_kept_comes_back_whole(store: LocalStorage, logs: Path, tmp_path: Path) -> None:
    write_log(logs / "log.eval", [1])
    PartialKeeper(store, FLEET, JOB, logs).save()
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, FLEET, SPEC, fresh, "published.eval", said)
    assert found_in(fresh) == {"log.eval", ".buffer/log/manifest.json", ".buffer/log/segment.1.zip"}
    for name in found_in(fresh):
        assert (fresh / name).read_bytes() == (logs / name).read_bytes()
    assert said == []


def cut(path: Path) -> bytes:
    """A log whose end is not there, as of an upload that was mixed from two versions."""
    return path.read_bytes()[:-20]


def shifted(path: Path) -> bytes:
    """A log whose directory is another version's: what it points to is elsewhere."""
    with zipfile.ZipFile(path) as archive:
        start = archive.infolist()[-1].header_offset
    body = path.read_bytes()
    return body[:start] + bytes(reversed(body[start : start + 8])) + body[start + 8 :]


@pytest.mark.parametrize("spoil", [cut, shifted, lambda _: b"", lambda _: b"not a log"])
def test_a_torn_log_is_left_out_and_named(store: LocalStorage, tmp_path: Path, spoil: Any) -> None:
    """Inspect refuses a directory with a log that it cannot read, and the job would fail in every round."""
    store.upload(write_log(tmp_path / "good", [1]), PREFIX + "2026-1.eval")
    store.put(PREFIX + "2026-2.eval", spoil(write_log(tmp_path / "newer", [1, 2])))
    store.put(PREFIX + ".buffer/2026-2/manifest.json", b"{}")
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, FLEET, SPEC, fresh, None, said)
    assert found_in(fresh) == {"2026-1.eval"}
    (text,) = said
    assert f"{PREFIX}2026-2.eval cannot be read" in text
    assert store.exists(PREFIX + "2026-2.eval"), "somebody may want to look at it"


def test_with_nothing_but_a_torn_log_the_published_one_serves(store: LocalStorage, tmp_path: Path) -> None:
    store.put(PREFIX + "2026-2.eval", b"torn")
    store.upload(write_log(tmp_path / "published", [1], ended=True), layout.job_log(FLEET, JOB))
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, FLEET, SPEC, fresh, "2026-1.eval", said)
    assert (found_in(fresh), len(said)) == ({"2026-1.eval"}, 1)


def test_what_is_no_part_of_the_jobs_log_is_left_out_and_named(store: LocalStorage, tmp_path: Path) -> None:
    write_log(tmp_path / "log", [1])
    store.upload(tmp_path / "log", PREFIX + "2026-1.eval")
    store.upload(tmp_path / "log", PREFIX + "elsewhere/2026-2.eval")
    store.put(PREFIX + "notes.json", b"{}")
    store.upload(write_log(tmp_path / "other", [1], task="another"), PREFIX + "2026-3.eval")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("holiday.jpg", "")
    store.upload(tmp_path / "archive", PREFIX + "2026-4.eval")
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, FLEET, SPEC, fresh, None, said)
    assert found_in(fresh) == {"2026-1.eval"}
    for name in ("elsewhere/2026-2.eval", "notes.json", "2026-3.eval", "2026-4.eval"):
        assert PREFIX + name in " ".join(said)


def test_what_inspect_writes_is_read_as_inspect_reads_it(tmp_path: Path) -> None:
    """Fails when Inspect writes its logs in another way."""
    tasks = [f"{CASES}@{name}" for name in ("epochs_mean", "error_in_one_epoch", "odd_ids")]
    given = {"model": "none", "continue_on_fail": True, "display": "none", "ctl_server": False}
    for log in inspect_eval(tasks, log_dir=str(tmp_path), **given):
        holding = holdings.read(Path(log.location.removeprefix("file://")))
        summaries = read_eval_log_sample_summaries(log.location)
        assert (holding.task, holding.model) == (log.eval.task, log.eval.model)
        assert holding.finished == {(str(one.id), one.epoch) for one in summaries if one.completed and not one.error}


def test_without_a_partial_log_the_published_one_of_an_earlier_round_serves(
    store: LocalStorage, tmp_path: Path
) -> None:
    store.upload(write_log(tmp_path / "published", [1], ended=True), layout.job_log(FLEET, JOB))
    fresh = tmp_path / "fresh"
    assert fetch(store, FLEET, SPEC, fresh, "../../2026_t.eval", Warnings())
    assert found_in(fresh) == {"2026_t.eval"}


@pytest.mark.parametrize("published", [None, "gone.eval"])
def test_a_first_attempt_finds_nothing(store: LocalStorage, tmp_path: Path, published: str | None) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert not fetch(store, FLEET, SPEC, fresh, published, Warnings())
    assert list(fresh.iterdir()) == []


def test_the_log_of_another_job_is_not_taken(store: LocalStorage, logs: Path, tmp_path: Path) -> None:
    PartialKeeper(store, FLEET, JOB[:-1] + "b", logs).save()
    assert not fetch(store, FLEET, SPEC, tmp_path / "fresh", None, Warnings())


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
