"""`evalops.logs.publish`: what a pass that meets trouble leaves for the next one, and the lock while a pass is long."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import logmaker
import pytest

from evalops.logs import publish
from evalops.logs.choose import Chosen
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.reading import Directory
from evalops.logs.summarise import Result, Work
from evalworker.contract import layout
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage, StorageError

RUN, OTHER = "2026-11-29-14-05-33-1a2b3c4d", "2026-11-28-14-05-33-1a2b3c4d"
LATER = logmaker.T0 + timedelta(days=1)


class Ill(LocalStorage):
    """A store that refuses to copy or upload what belongs to one run, or spoils the copy."""

    def __init__(self, root: Path, run_id: str, *, spoils: bool = False) -> None:
        super().__init__(root)
        self.run_id, self.spoils = run_id, spoils

    def copy(self, source: str, target: str) -> None:
        if self.run_id not in source:
            super().copy(source, target)
        elif self.spoils:
            self.put(target, self.get(source).body[:-1] + b"!")
        else:
            raise StorageError("503 SlowDown")

    def upload(self, path: Path, key: str) -> str:
        if self.run_id in key and not self.spoils:
            raise StorageError("503 SlowDown")
        return super().upload(path, key)


def pass_over(storage: LocalStorage) -> publish.Outcome:
    moment = now() + timedelta(hours=1)  # the logs were written long ago
    return publish.publish_all(storage, Models(), Evaluations(), clock=lambda: moment)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs that have ended, of one task with two models."""
    for run_id, model in ((RUN, "openai/gpt-4o"), (OTHER, "openai/gpt-4o-mini")):
        logmaker.make(tmp_path / layout.working(run_id), model=model)
    return tmp_path


def test_what_only_the_store_refused_is_tried_again(root: Path) -> None:
    first = pass_over(Ill(root, RUN))
    assert any("503 SlowDown" in line for line in first.todo)
    second = pass_over(LocalStorage(root))
    assert second.todo == [] and f"{RUN}: promoted inspect_evals/gsm8k openai/gpt-4o to stage" in second.done
    third = pass_over(LocalStorage(root))
    assert (third.done, third.todo) == ([], [])


def test_a_log_that_comes_while_its_run_is_published_is_the_next_passs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summarise = publish.summarise

    def meanwhile(work: Work, directory: Directory, chosen: Sequence[Chosen]) -> list[Result]:
        logmaker.make(root / layout.working(RUN), number=2, model="openai/gpt-4o-mini")
        monkeypatch.setattr(publish, "summarise", summarise)
        return summarise(work, directory, chosen)

    monkeypatch.setattr(publish, "summarise", meanwhile)
    promoted = f"{RUN}: promoted inspect_evals/gsm8k openai/gpt-4o"
    first = pass_over(LocalStorage(root))
    assert f"{promoted} to stage" in first.done and f"{promoted}-mini to stage" not in first.done
    second = publish.publish_all(
        LocalStorage(root), Models(), Evaluations(), replace=True, clock=lambda: now() + timedelta(hours=1)
    )
    assert f"{promoted}-mini to stage" in second.done
    third = pass_over(LocalStorage(root))
    assert (third.done, third.todo) == ([], [])


def test_a_copy_that_is_spoilt_leaves_the_other_runs_alone_and_is_made_again(root: Path) -> None:
    first = pass_over(Ill(root, RUN, spoils=True))
    assert [line for line in first.todo if RUN in line and "not the same" in line]
    assert f"{OTHER}: promoted inspect_evals/gsm8k openai/gpt-4o-mini to stage" in first.done
    assert f"{RUN}: promoted inspect_evals/gsm8k openai/gpt-4o to stage" in pass_over(LocalStorage(root)).done


def test_the_lock_of_a_long_pass_is_renewed_and_one_that_was_lost_ends_it(root: Path) -> None:
    storage, moment = LocalStorage(root), [LATER]

    def until() -> str:
        return publish.Lock.from_json(storage.get(layout.PUBLISH_LOCK).body).until.isoformat()

    with publish.lock(storage, lambda: moment[0]) as renew:
        first = until()
        renew()
        assert until() == first
        moment[0] += publish.LOCKED_FOR * 0.6
        renew()
        assert until() > first
        moment[0] += publish.LOCKED_FOR * 0.6
        with pytest.raises(publish.Busy), publish.lock(storage, lambda: moment[0]):
            pass
        storage.put(layout.PUBLISH_LOCK, publish.Lock(owner="another", until=moment[0]).to_bytes())
        outcome = publish.publish_all(storage, Models(), Evaluations(), clock=lambda: moment[0], renew=renew)
        assert (outcome.done, outcome.todo) == ([], [])
    assert storage.exists(layout.PUBLISH_LOCK), "it is another's"
