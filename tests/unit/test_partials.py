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
from inspect_ai import eval_set
from inspect_ai.log import read_eval_log_sample_summaries

from evalworker import holdings
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.partials import PartialKeeper
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


def fetch(store: LocalStorage, log_dir: Path, published_name: str | None, said: "Warnings") -> bool:
    return PartialKeeper(store, FLEET, JOB, log_dir).fetch(SPEC, published_name, said)


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
    (folder / ".buffer" / "log" / "manifest.json").write_text('["manifest 1"]')
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
        ".buffer/log/manifest.json": '["manifest 1"]',
        ".buffer/log/segment.1.zip": "segment 1",
    }


def test_a_manifest_is_read_first_and_goes_last(
    store: LocalStorage, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample leaves the manifest when the log has it, so a worker that dies between two uploads has lost none."""
    order: list[str] = []
    upload, put = store.upload, store.put
    manifest = logs / ".buffer" / "log" / "manifest.json"

    def flushing(path: Path, key: str) -> None:
        order.append(path.name)
        manifest.write_text('{"samples": []}')  # Inspect flushes what it has buffered into the log, and says so
        upload(path, key)

    monkeypatch.setattr(store, "upload", flushing)
    monkeypatch.setattr(store, "put", lambda key, body: (order.append(key.rpartition("/")[2]), put(key, body)))
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    keeper.save()
    assert order == ["segment.1.zip", "log.eval", "manifest.json"]
    assert store.get(PREFIX + ".buffer/log/manifest.json").body == b'["manifest 1"]'
    assert keeper.synced, "the new manifest goes up next time"


def test_a_manifest_that_is_being_written_waits(store: LocalStorage, logs: Path) -> None:
    manifest = logs / ".buffer" / "log" / "manifest.json"
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    keeper.save()
    change(manifest, '["manif')
    assert keeper.save() == 0
    assert store.get(PREFIX + ".buffer/log/manifest.json").body == b'["manifest 1"]'
    change(manifest, '["manifest 2"]')
    assert keeper.save() == 1


def test_it_is_due_when_the_buffer_was_copied(store: LocalStorage, logs: Path) -> None:
    keeper = PartialKeeper(store, FLEET, JOB, logs)
    assert keeper.synced
    keeper.save()
    assert not keeper.synced
    change(logs / ".buffer" / "log" / "manifest.json", '["manifest 2"]')
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
    assert fetch(store, fresh, "published.eval", said)
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
    assert fetch(store, fresh, None, said)
    assert found_in(fresh) == {"2026-1.eval"}
    (text,) = said
    assert f"{PREFIX}2026-2.eval cannot be read" in text
    assert store.exists(PREFIX + "2026-2.eval"), "somebody may want to look at it"


def test_with_nothing_but_a_torn_log_the_published_one_serves(store: LocalStorage, tmp_path: Path) -> None:
    store.put(PREFIX + "2026-2.eval", b"torn")
    store.upload(write_log(tmp_path / "published", [1], ended=True), layout.job_log(FLEET, JOB))
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, fresh, "2026-1.eval", said)
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
    assert fetch(store, fresh, None, said)
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
    assert fetch(store, fresh, "../../2026_t.eval", Warnings())
    assert found_in(fresh) == {"2026_t.eval"}


@pytest.mark.parametrize("published", [None, "gone.eval"])
def test_a_first_attempt_finds_nothing(store: LocalStorage, tmp_path: Path, published: str | None) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert not fetch(store, fresh, published, Warnings())
    assert list(fresh.iterdir()) == []


def test_the_log_of_another_job_is_not_taken(store: LocalStorage, logs: Path, tmp_path: Path) -> None:
    PartialKeeper(store, FLEET, JOB[:-1] + "b", logs).save()
    assert not fetch(store, tmp_path / "fresh", None, Warnings())


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
        if path.name == "segment.1.zip":
            path.unlink()
        upload(path, key)

    monkeypatch.setattr(store, "upload", late)
    assert PartialKeeper(store, FLEET, JOB, logs).save() == 2


# One log, as a rule


def buffer(log: Path, finished: Sequence[int]) -> None:
    """The buffer of a running log: its manifest and a segment."""
    folder = holdings.manifest_of(log).parent
    folder.mkdir(parents=True, exist_ok=True)
    samples = [{"summary": {"id": id_, "epoch": 1, "completed": True}} for id_ in finished]
    (folder / "manifest.json").write_text(json.dumps({"samples": samples}))
    (folder / "segment.1.zip").write_bytes(b"segment")


def age(path: Path, seconds: int) -> Path:
    """A log that was written so long ago."""
    at = path.stat().st_mtime_ns - seconds * 1_000_000_000
    os.utime(path, ns=(at, at))
    return path


def kept_in(store: LocalStorage) -> set[str]:
    return {info.key.removeprefix(PREFIX) for info in store.list(PREFIX)}


@pytest.fixture
def tries(store: LocalStorage, tmp_path: Path) -> tuple[PartialKeeper, Path]:
    """A job whose first try has ended, with a sample that errored, and whose second one has begun: in storage is the first."""
    folder = tmp_path / "tries"
    first = age(write_log(folder / "2026-1.eval", [1, 2], [3]), 60)
    buffer(first, [])
    keeper = PartialKeeper(store, FLEET, JOB, folder)
    keeper.save()
    shutil.rmtree(folder / ".buffer")
    age(write_log(first, [1, 2], [3], ended=True), 30)
    second = write_log(folder / "2026-2.eval", [1, 2], [3])
    buffer(second, [4])
    return keeper, folder


ONLY_THE_SECOND = {"2026-2.eval", ".buffer/2026-2/manifest.json", ".buffer/2026-2/segment.1.zip"}


def test_a_log_goes_when_a_newer_one_with_all_of_its_samples_is_there(
    store: LocalStorage, tries: tuple[PartialKeeper, Path]
) -> None:
    keeper, _ = tries
    assert keeper.save() == 3, "the first try's end is not worth an upload"
    assert kept_in(store) == ONLY_THE_SECOND
    assert keeper.save() == 0


class Killed(BaseException):
    """The worker dies here."""


@pytest.mark.parametrize("answer_lost", [False, True])
@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("failure", [Killed(), StorageError("the store is away")], ids=["killed", "refused"])
def test_whoever_is_killed_when_no_finished_sample_is_lost(
    store: LocalStorage,
    tries: tuple[PartialKeeper, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    failure: BaseException,
    answer_lost: bool,
) -> None:
    keeper, _ = tries
    left = [step]

    def failing(name: str) -> Any:
        done = getattr(store, name)

        def write(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0 or (left[0] == -1 and answer_lost):
                done(*arguments)
            if left[0] < 0:
                raise failure

        return write

    with monkeypatch.context() as patched:
        for name in ("upload", "put", "delete"):
            patched.setattr(store, name, failing(name))
        try:
            keeper.save()
        except (Killed, StorageError) as raised:
            assert raised is failure
    assert left[0] < 0, "the step came"
    fresh, said = tmp_path / "fresh", Warnings()
    assert fetch(store, fresh, None, said)
    found = {key for path in fresh.glob("*.eval") for key in holdings.read(path).finished or ()}
    assert {("1", 1), ("2", 1)} <= found
    assert said == []
    assert len(list(fresh.glob("*.eval"))) == 1, "and one log is enough"
    keeper.save()
    assert kept_in(store) == ONLY_THE_SECOND


def lacks_a_sample(folder: Path) -> None:
    write_log(folder / "2026-2.eval", [1], [3])


def has_it_as_an_error(folder: Path) -> None:
    write_log(folder / "2026-2.eval", [1], [2, 3])


def has_no_record_of_an_error(folder: Path) -> None:
    write_log(folder / "2026-2.eval", [1, 2])


def cannot_be_read(folder: Path) -> None:
    (folder / "2026-2.eval").write_bytes(b"not a log")


def lacks_a_buffered_one(folder: Path) -> None:
    buffer(folder / "2026-1.eval", [9])


def is_of_another_inspect(folder: Path) -> None:
    with zipfile.ZipFile(folder / "2026-2.eval", "w") as archive:
        archive.writestr("_journal/start.json", "{}")
        archive.writestr("samples/1_epoch_1.json", "{}")


@pytest.mark.parametrize(
    "newer",
    [
        lacks_a_sample,
        has_it_as_an_error,
        has_no_record_of_an_error,
        cannot_be_read,
        lacks_a_buffered_one,
        is_of_another_inspect,
    ],
    ids=lambda newer: newer.__name__,
)
def test_a_log_stays_when_the_newer_one(store: LocalStorage, tries: tuple[PartialKeeper, Path], newer: Any) -> None:
    keeper, folder = tries
    newer(folder)
    keeper.save()
    holdings.prune(folder)
    assert {"2026-1.eval", "2026-2.eval"} <= kept_in(store)
    assert (folder / "2026-1.eval").exists()


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_log_that_is_written_anew_while_it_goes_up_may_hold_more(
    store: LocalStorage,
    tries: tuple[PartialKeeper, Path],
    monkeypatch: pytest.MonkeyPatch,
    taken_over: bool,
) -> None:
    keeper, folder = tries
    first, second = folder / "2026-1.eval", folder / "2026-2.eval"
    upload = store.upload

    def flushing(path: Path, key: str) -> None:
        if path == first:
            write_log(first, [1, 2, 7], [3])
        upload(path, key)
        if path == second:  # what goes up is what it holds at least
            write_log(second, [1, 2, 7, 8] if taken_over else [1, 2, 8], [3])

    monkeypatch.setattr(store, "upload", flushing)
    write_log(first, [1, 2], [3])
    second.rename(folder / "later")
    keeper.save()
    (folder / "later").replace(second)
    first.unlink()  # its try has ended, and its job has removed it
    write_log(second, [1, 2, 7] if taken_over else [1, 2], [3])
    keeper.save()
    assert ("2026-1.eval" in kept_in(store)) is not taken_over


def test_a_log_that_another_worker_has_written_to_stays(
    store: LocalStorage, tries: tuple[PartialKeeper, Path], tmp_path: Path
) -> None:
    """Its message was taken from it, and it goes on: what it has finished meanwhile is paid for."""
    _, first = tries
    folder = tmp_path / "second worker"
    keeper = PartialKeeper(store, FLEET, JOB, folder)
    assert keeper.fetch(SPEC, None, Warnings())
    store.upload(write_log(first / "2026-1.eval", [1, 2, 5, 6]), PREFIX + "2026-1.eval")
    write_log(folder / "2026-2.eval", [1, 2], [3])
    keeper.save()
    assert {"2026-1.eval", "2026-2.eval"} <= kept_in(store)


def test_a_buffer_goes_when_its_log_has_ended_with_all_of_it(
    store: LocalStorage, tries: tuple[PartialKeeper, Path]
) -> None:
    keeper, folder = tries
    keeper.save()
    shutil.rmtree(folder / ".buffer")
    keeper.save()
    assert kept_in(store) == ONLY_THE_SECOND, "the log lacks a sample of it"
    write_log(folder / "2026-2.eval", [1, 2, 4], [3], ended=True)
    keeper.save()
    assert kept_in(store) == {"2026-2.eval"}


def test_a_resume_fetches_the_newest_log_and_its_buffer_and_uploads_nothing_again(
    store: LocalStorage, tmp_path: Path
) -> None:
    """Also what an older version of the worker has left: the log of each try."""
    for number in range(1, 6):
        store.upload(write_log(tmp_path / "log", range(1, number), [9]), PREFIX + f"2026-{number}.eval")
        store.put(PREFIX + f".buffer/2026-{number}/manifest.json", b'{"samples": []}')
    fresh = tmp_path / "fresh"
    keeper = PartialKeeper(store, FLEET, JOB, fresh)
    assert keeper.fetch(SPEC, None, Warnings())
    assert found_in(fresh) == {"2026-5.eval", ".buffer/2026-5/manifest.json"}
    assert not keeper.synced
    assert keeper.save() == 0
    assert kept_in(store) == {"2026-5.eval", ".buffer/2026-5/manifest.json"}


def test_inspect_goes_on_from_the_log_with_the_most_samples(store: LocalStorage, tmp_path: Path) -> None:
    """Completed work that lost against another end, and what the next attempt had begun with before."""
    store.upload(write_log(tmp_path / "log", [1, 2, 3, 4], ended=True), PREFIX + "2026-1.eval")
    store.upload(write_log(tmp_path / "log", [1, 2, 5]), PREFIX + "2026-2.eval")
    fresh = tmp_path / "fresh"
    assert fetch(store, fresh, None, Warnings())
    assert [path.name for path in holdings.newest_last(fresh.glob("*.eval"))] == ["2026-2.eval", "2026-1.eval"]


def test_a_later_log_with_less_is_left_in_storage(store: LocalStorage, tmp_path: Path) -> None:
    """Two workers of one attempt have logs with task ids of their own: Inspect would go on from the last log of each."""
    store.upload(write_log(tmp_path / "log", [1, 2, 3], ended=True), PREFIX + "2026-1.eval")
    store.upload(write_log(tmp_path / "log", [1, 2]), PREFIX + "2026-2.eval")
    store.put(PREFIX + ".buffer/2026-2/manifest.json", b'{"samples": []}')
    fresh = tmp_path / "fresh"
    assert fetch(store, fresh, None, Warnings())
    assert found_in(fresh) == {"2026-1.eval"}


@pytest.mark.parametrize("summaries", ["null", "5", '{"a": 1}', "[5]", "[null]"])
def test_a_log_whose_summaries_are_none_is_no_end_of_the_worker(tmp_path: Path, summaries: str) -> None:
    log = tmp_path / "log.eval"
    with zipfile.ZipFile(log, "w") as archive:
        archive.writestr("header.json", "{}")
        archive.writestr("summaries.json", summaries)
    assert holdings.look(log).finished is None


def test_nothing_is_uploaded_while_the_log_is_fetched(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload(write_log(tmp_path / "log", [1]), PREFIX + "2026-1.eval")
    keeper, download = PartialKeeper(store, FLEET, JOB, tmp_path / "fresh"), store.download
    saved: list[int] = []
    monkeypatch.setattr(store, "download", lambda key, path: (download(key, path), saved.append(keeper.save())))
    assert keeper.fetch(SPEC, None, Warnings())
    assert saved == [0]


def test_eval_set_goes_on_from_the_one_log_that_its_tries_leave(store: LocalStorage, tmp_path: Path) -> None:
    """Inspect itself: each try writes all finished samples anew, and what is left after pruning is enough."""
    folder = tmp_path / "logs"
    given: dict[str, Any] = {
        "tasks": f"{CASES}@one_error",
        "model": "none",
        "log_dir": str(folder),
        "continue_on_fail": True,
    }
    given |= {"retry_attempts": 2, "retry_wait": 0.01, "retry_cleanup": False, "display": "none", "ctl_server": False}
    eval_set(**given)
    logs = holdings.newest_last(folder.glob("*.eval"))
    assert len(logs) == 3
    assert holdings.superseded(logs, holdings.look) == logs[:2]
    finished = {one.uuid for one in read_eval_log_sample_summaries(str(logs[0])) if not one.error}
    assert finished
    holdings.prune(folder)
    assert list(folder.glob("*.eval")) == logs[2:]
    PartialKeeper(store, FLEET, JOB, folder).save()
    spec = SPEC.model_copy(update={"name": "one_error", "model": "none/none"})
    fresh = tmp_path / "fresh"
    assert PartialKeeper(store, FLEET, JOB, fresh).fetch(spec, None, Warnings())
    eval_set(**given | {"log_dir": str(fresh), "retry_attempts": 0})
    newest = holdings.newest_last(fresh.glob("*.eval"))[-1]
    assert newest.name != logs[2].name
    assert finished <= {one.uuid for one in read_eval_log_sample_summaries(str(newest))}
