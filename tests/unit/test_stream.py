"""Lines go to the live file at once and to numbered segments soon; whoever takes over finds every stored line, once."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalops.fleet.stream import READERS, STORE_AFTER_S, STORE_BYTES, EventStream, Fenced, read_events
from evalworker.contract import layout
from evalworker.storage import LocalStorage, StorageError, Stored

FLEET = "2026-11-29-14-05-33-1a2b3c4d"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def opened(store: LocalStorage, path: Path, clock: Clock | None = None) -> EventStream:
    stream = EventStream(store, FLEET, path, clock or Clock())
    for _ in stream.restore():
        pass
    return stream


def warning(text: str) -> dict[str, str]:
    return {"type": "warning", "text": text}


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_a_line_is_in_the_live_file_at_once_and_stored_later(store: LocalStorage, tmp_path: Path) -> None:
    clock = Clock()
    stream = opened(store, tmp_path / "events.jsonl", clock)
    assert not stream.due
    stream.append([warning("a"), warning("b")])
    assert texts(stream.path) == ["a", "b"]
    assert not stream.due
    assert list(store.list(layout.segments(FLEET))) == []
    clock.now += STORE_AFTER_S
    assert stream.due
    stream.store()
    assert store.get(layout.segment(FLEET, 1)).body == stream.path.read_bytes()
    assert not stream.due


def test_receipts_may_be_deleted_only_when_their_segment_is_stored(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(store, tmp_path / "events.jsonl")
    stream.append([warning("a")])
    stream.settle("r1")

    def away(key: str, body: bytes) -> str:
        raise StorageError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "create", away)
        with pytest.raises(StorageError):
            stream.store()
    stream.append([warning("b")])
    stream.settle("r2")
    assert stream.store() == ["r1", "r2"]
    assert [event["text"] for event in read_events(store, FLEET)] == ["a", "b"]
    assert stream.store() == []


def test_a_message_that_led_to_nothing_is_deleted_too(store: LocalStorage, tmp_path: Path) -> None:
    clock = Clock()
    stream = opened(store, tmp_path / "events.jsonl", clock)
    stream.settle("heartbeat")
    assert not stream.due
    clock.now += STORE_AFTER_S
    assert stream.due
    assert stream.store() == ["heartbeat"]
    assert stream.segment == 0


def test_much_is_stored_early(store: LocalStorage, tmp_path: Path) -> None:
    stream = opened(store, tmp_path / "events.jsonl")
    stream.append([warning("x" * 1000)] * (STORE_BYTES // 1000))
    assert stream.due


def test_of_two_controllers_only_one_goes_on(store: LocalStorage, tmp_path: Path) -> None:
    first, second = opened(store, tmp_path / "one.jsonl"), opened(store, tmp_path / "two.jsonl")
    first.append([warning("first")])
    second.append([warning("second")])
    second.settle("r")
    first.store()
    with pytest.raises(Fenced):
        second.store()
    assert [event["text"] for event in read_events(store, FLEET)] == ["first"]


def test_a_segment_whose_answer_was_lost_is_our_own(store: LocalStorage, tmp_path: Path) -> None:
    """What failed may have been carried out: only the same bytes, sent again, are told from another controller's."""
    create, lost = store.create, [True]

    class Bucket(LocalStorage):
        def create(self, key: str, body: bytes) -> str:
            if self.exists(key) and self.get(key).body == body:
                return "ours"
            etag = create(key, body)
            if lost and lost.pop():
                raise StorageError("the answer was lost")
            return etag

    stream = opened(Bucket(store.root), tmp_path / "events.jsonl")
    stream.append([warning("a")])
    stream.settle("r1")
    with pytest.raises(StorageError):
        stream.store()
    assert stream.due
    stream.append([warning("b")])
    stream.settle("r2")
    assert stream.store() == ["r1", "r2"]
    assert [event["text"] for event in read_events(store, FLEET)] == ["a", "b"]
    assert (stream.segment, stream.due, stream.store()) == (2, False, [])


def test_lines_that_were_not_stored_are_cut_and_a_tail_goes_on(store: LocalStorage, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = opened(store, path)
    first.append([warning("stored")])
    first.store()
    first.append([warning("lost")])
    first.close()
    inode = path.stat().st_ino
    second = opened(store, path)
    assert (second.seq, second.segment, path.stat().st_ino) == (1, 1, inode)
    second.append([warning("again")])
    second.store()
    assert texts(path) == ["stored", "again"]
    assert [event["seq"] for event in read_events(store, FLEET)] == [1, 2]


def test_on_another_machine_the_live_file_is_rebuilt(store: LocalStorage, tmp_path: Path) -> None:
    first = opened(store, tmp_path / "here" / "events.jsonl")
    for text in "abc":
        first.append([warning(text)])
        first.store()
    second = opened(store, tmp_path / "there" / "events.jsonl")
    assert second.path.read_bytes() == first.path.read_bytes()
    assert (second.seq, second.segment) == (3, 3)


def test_a_live_file_with_another_content_is_replaced(store: LocalStorage, tmp_path: Path) -> None:
    first = opened(store, tmp_path / "one.jsonl")
    first.append([warning("true")])
    first.store()
    other = tmp_path / "two.jsonl"
    other.write_text(
        '{"something":"else, and longer than what is stored, which is about a hundred and twenty bytes long"}\n' * 3
    )
    assert texts(opened(store, other).path) == ["true"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["append", "store", "restart"]), max_size=25))
def test_nothing_stored_is_lost_and_numbers_have_no_gap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    store = LocalStorage(folder / "root")
    stream = opened(store, folder / "events.jsonl")
    stored: list[str] = []
    pending: list[str] = []
    for number, step in enumerate(steps):
        if step == "append":
            stream.append([warning(str(number))])
            pending.append(str(number))
        elif step == "store":
            stream.store()
            stored, pending = stored + pending, []
        else:
            stream.close()
            stream = opened(store, folder / "events.jsonl")
            pending = []
        assert texts(stream.path) == stored + pending
    stream.store()
    events = list(read_events(store, FLEET))
    assert [event["text"] for event in events] == stored + pending
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    stream.close()


def test_many_segments_are_read_ahead_and_come_in_order(store: LocalStorage, tmp_path: Path) -> None:
    stream = opened(store, tmp_path / "events.jsonl")
    for number in range(5 * READERS):
        stream.append([warning(str(number))])
        stream.store()
    told = iter(read_events(store, FLEET))
    assert [next(told)["text"] for _ in range(3)] == ["0", "1", "2"]
    told.close()  # type: ignore[attr-defined]
    assert [event["text"] for event in read_events(store, FLEET)] == [str(number) for number in range(5 * READERS)]


def test_a_segment_that_cannot_be_read_is_an_error_after_those_before_it(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(store, tmp_path / "events.jsonl")
    for number in range(4):
        stream.append([warning(str(number))])
        stream.store()
    get = store.get

    def refuse(key: str) -> Stored:
        if key == layout.segment(FLEET, 3):
            raise StorageError("the store is away")
        return get(key)

    monkeypatch.setattr(store, "get", refuse)
    told = read_events(store, FLEET)
    assert [next(told)["text"], next(told)["text"]] == ["0", "1"]
    with pytest.raises(StorageError):
        next(told)
