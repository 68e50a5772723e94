"""The controller's memory does not grow with what it hears; its speed is measured by tests/bench."""

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import crowd

JOBS = 8


def kept(folder: Path, samples: int, times: int = 1) -> tuple[int, int]:
    """Bytes that a controller still holds when its jobs have ended, and messages that it has heard; each comes `times` times."""
    jobs = crowd.specs(JOBS, samples)
    bodies = (body for body in crowd.messages(jobs, 2) for _ in range(times))
    controller = crowd.controller(folder, jobs, bodies)
    gc.collect()
    tracemalloc.start()
    try:
        verdict = controller.run()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert verdict.ending == "complete"
    assert controller.fleet.ledger.samples.completed == JOBS * samples
    queue: crowd.QueueInProcess = controller.fleet.events  # type: ignore[assignment]
    assert queue.deleted >= JOBS * samples * times
    return size, queue.received


@pytest.fixture(autouse=True, scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept once for all is no growth: imports, and the strings in the cache of pydantic, which holds 16,000."""
    kept(tmp_path_factory.mktemp("warm"), 1000)
    yield


def test_a_sample_of_a_completed_job_leaves_a_few_bytes(tmp_path: Path) -> None:
    """Eight of each execution, by which a message that comes twice is known; 400 and more before they were sealed."""
    few, heard = kept(tmp_path / "few", 250)
    many, heard_more = kept(tmp_path / "many", 1000)
    assert heard_more > 3.9 * heard
    assert (many - few) / (heard_more - heard) < 16


def test_messages_that_come_again_leave_nothing(tmp_path: Path) -> None:
    """Less than a pointer each: what a table keeps that was full once (20 KB, of deletions under way) is 3 bytes each here."""
    once, heard = kept(tmp_path / "once", 250)
    often, heard_more = kept(tmp_path / "often", 250, times=4)
    assert heard_more > 3.5 * heard
    assert (often - once) / (heard_more - heard) < 8
