"""Which tasks are divided, and how: pure rules, then the planner with real tasks."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalops import planner
from evalops.shards import LEAST, Wish, divide, how_many
from evalworker.contract.documents import JobSpec, total_samples, wholes

CASES = "metric_cases.py"
FOLDER = Path(__file__).parents[1] / "tasks"


@given(st.lists(st.one_of(st.integers(0, 99), st.text(max_size=3)), unique_by=str, min_size=1), st.integers(1, 9))
def test_each_sample_is_in_one_slice_and_slices_are_even(ids: list[Any], count: int) -> None:
    slices = divide(ids, count, str)
    assert sorted((each for part in slices for each in part), key=repr) == sorted(ids, key=repr)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1 or len(slices) < count
    assert len(slices) == min(count, len(ids))
    assert all([each for each in ids if each in part] == part for part in slices)


def test_ids_that_inspect_cannot_tell_apart_stay_together() -> None:
    assert divide(["1", "2", "01", "3"], 2, lambda each: str(int(each))) == [["1", "01", "3"], ["2"]]


@pytest.mark.parametrize(
    ("wish", "samples", "ids", "total", "count"),
    [
        (Wish(size=10), 100, 95, 100, 10),
        (Wish(size=10), 300, 30, 300, 3),  # three epochs: the size counts samples
        (Wish(count=4), 9, 9, 9, 4),
        (Wish(count=4), 2, 2, 2, 2),
        (Wish(count=1, slots=8), 10_000, 10_000, 10_000, 1),
        (Wish(slots=2), 2_000, 2_000, 2_000, 2),
        (Wish(slots=100), 2_000, 2_000, 2_000, 2_000 // LEAST),  # a shard is worth its start
        (Wish(slots=4), 2_000, 2_000, 8_000, 1),  # other tasks keep the other slots busy
        (Wish(slots=4), 6_000, 6_000, 8_000, 3),
        (Wish(slots=8), 8_000, 2, 8_000, 2),
        (Wish(slots=1), 8_000, 8_000, 8_000, 1),
        (Wish(slots=8), 100, 100, 100, 1),
    ],
)
def test_how_many_shards(wish: Wish, samples: int, ids: int, total: int, count: int) -> None:
    assert how_many(wish, samples, ids, total) == count


def planned(*names: str, wish: Wish | None, **arguments: Any) -> tuple[list[JobSpec], list[str]]:
    said: list[str] = []
    tasks = [f"{CASES}@{name}" for name in names]
    jobs = planner.plan(tasks, ["none/none"], arguments, arguments, FOLDER, warn=said.append, wish=wish)
    return jobs, said


def test_a_sharded_task_is_planned_as_its_shards_and_a_merge_with_the_tasks_own_id() -> None:
    whole, _ = planned("epochs_mean", "groups", wish=None, limit=7)
    jobs, said = planned("epochs_mean", "groups", wish=Wish(count=3), limit=7)
    assert not said
    assert [job.job_id for job in wholes(jobs)] == [job.job_id for job in whole]
    assert len({job.job_id for job in jobs}) == 8
    first, merge = [job for job in jobs if job.name == "epochs_mean"][:3], wholes(jobs)[0]
    assert [job.shard.ids for job in first if job.shard] == [[1, 4, 7], [2, 5], [3, 6]]
    assert [job.samples for job in first] == [9, 6, 6]
    assert merge.merges == [job.job_id for job in first]
    assert (merge.ids, merge.samples) == ([1, 2, 3, 4, 5, 6, 7], 21)
    assert total_samples(jobs) == total_samples(whole) == 28
    again, _ = planned("epochs_mean", "groups", wish=Wish(count=3), limit=7)
    assert again == jobs
    assert JobSpec.model_validate_json(merge.model_dump_json()) == merge


def test_what_cannot_be_divided_stays_whole_and_is_said_when_it_was_asked_for() -> None:
    jobs, said = planned("stops_early", "odd_ids", wish=Wish(size=4))
    assert [job.shard is None for job in jobs] == [True, False, False, False, True]
    assert said == ["stops_early is not run in shards: it decides by the samples that have run which ones still run"]
    assert len(planned("stops_early", wish=None)[0]) == 1
