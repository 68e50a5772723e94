"""Which tasks are divided, and how: pure rules, then the planner with real tasks."""

from pathlib import Path
from typing import Any

import logmaker
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalops import planner
from evalops.commands.run import _at_once
from evalops.fleet import guards, view
from evalops.fleet.ledger import Ledger
from evalops.fleet.merges import Merges, at_once
from evalops.logs import local_run, places, rows, survey
from evalops.logs.events import Progress
from evalops.shards import LEAST, Wish, divide, how_many, shard_jobs
from evalworker.contract import layout
from evalworker.contract.documents import JobDone, JobSpec, Manifest, Shard, total_samples, wholes, with_ids
from evalworker.contract.failures import Category
from evalworker.contract.ids import SampleId
from evalworker.contract.messages import AttemptDone, SampleCounts, SampleDone
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage

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
    assert (merge.ids, merge.order, merge.samples) == ([], [], 21)
    assert with_ids(merge, jobs).ids == [1, 2, 3, 4, 5, 6, 7]
    assert total_samples(jobs) == total_samples(whole) == 28
    again, _ = planned("epochs_mean", "groups", wish=Wish(count=3), limit=7)
    assert again == jobs
    assert JobSpec.model_validate_json(merge.model_dump_json()) == merge


@given(st.lists(st.integers(0, 30) | st.text("ab1", max_size=2), min_size=2, unique_by=repr), st.integers(2, 5))
def test_the_manifest_holds_each_id_once_and_a_merge_finds_all_in_order(ids: list[SampleId], count: int) -> None:
    job = JobSpec(job_id="f" * 16, task="t.py@t", name="t", model="m/m", samples=len(ids))
    slices = divide(ids, count, str)
    jobs = shard_jobs(job, ids, slices, lambda name: f"{int(name.split('/')[0]):016x}")
    assert sorted(
        repr(each) for spec in jobs for each in [*spec.ids, *(spec.shard.ids if spec.shard else [])]
    ) == sorted(map(repr, ids))
    stored = [JobSpec.model_validate_json(spec.model_dump_json()) for spec in jobs]
    assert list(map(repr, with_ids(stored[-1], stored).ids)) == list(map(repr, ids))
    assert [with_ids(spec, stored) for spec in stored[:-1]] == stored[:-1]


def test_a_merge_of_an_older_manifest_has_its_ids() -> None:
    older = {
        "job_id": "f" * 16,
        "task": "t",
        "name": "t",
        "model": "m/m",
        "samples": 2,
        "merges": ["0" * 16],
        "ids": [2, "1"],
    }
    assert with_ids(JobSpec.model_validate(older), []).ids == [2, "1"]


def test_what_cannot_be_divided_stays_whole_and_is_said_when_it_was_asked_for() -> None:
    jobs, said = planned("stops_early", "odd_ids", wish=Wish(size=4))
    assert [job.shard is None for job in jobs] == [True, False, False, False, True]
    assert said == ["stops_early is not run in shards: it decides by the samples that have run which ones still run"]
    assert len(planned("stops_early", wish=None)[0]) == 1


# What becomes of them in a fleet


def ledger_of(count: int = 2, round_: int = 1) -> tuple[Ledger, list[JobSpec]]:
    common: dict[str, Any] = {"task": "t.py@t", "name": "t", "model": "m/m"}
    shards = [
        JobSpec(job_id=f"{n:016x}", samples=2, shard=Shard(index=n, of=count, ids=[n, n + count]), **common)
        for n in range(count)
    ]
    whole = JobSpec(
        job_id="f" * 16,
        samples=2 * count,
        merges=[each.job_id for each in shards],
        ids=list(range(2 * count)),
        **common,
    )
    return Ledger([*shards, whole], round_), [*shards, whole]


def end(
    spec: JobSpec, status: str = "completed", *, errored: int = 0, log: bool = True, round_: int = 1
) -> AttemptDone:
    return AttemptDone(
        fleet_id="2026-11-29-14-05-33-1a2b3c4d", instance_id="w", ts=now(), round=round_, job_id=spec.job_id, attempt=1, status=status,
        ended=True, duration_s=1.0, samples=SampleCounts(total=spec.samples, completed=spec.samples - errored, errored=errored),
        failure_category=None if status == "completed" else Category.TASK_ERROR, error_summary="why", log="x.eval" if log else None,
    )  # fmt: skip


def conclude(ledger: Ledger, done: AttemptDone) -> dict[str, Any]:
    ledger.attempt(done)
    return ledger.conclude(done)[-1]


def test_a_merge_is_released_once_when_its_last_shard_has_ended() -> None:
    ledger, (first, second, whole) = ledger_of()
    merges = Merges(ledger)
    assert (merges.held(), merges.release()) == ({whole.job_id}, [])
    assert conclude(ledger, end(first))["shard"] == "1/2"
    assert merges.release() == []
    conclude(ledger, end(second, "failed", errored=1))
    assert [job.spec for job in merges.release()] == [whole]
    assert (merges.held(), merges.release()) == (set(), [])
    assert Merges(ledger).release() == []  # a controller that takes over finds it sent


def test_a_controller_releases_a_merge_whose_last_shard_ends_with_the_first_message_that_it_hears() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first))
    merges = Merges(ledger)
    conclude(ledger, end(second))
    assert [job.spec for job in merges.release()] == [whole]


def test_samples_count_once_and_the_merge_speaks_for_the_whole() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first))
    conclude(ledger, end(second, errored=1))
    said = conclude(ledger, end(whole, errored=1))
    assert (said["merged"], ledger.samples.total, ledger.samples.errored) == (2, 4, 1)
    assert [job.spec for job in ledger.wholes] == [whole]
    assert [job.name for job in ledger.jobs.values()] == ["t (shard 1/2)", "t (shard 2/2)", "t"]


def test_a_failed_shard_is_settled_by_a_merge_that_completed() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first, "failed", errored=2))
    conclude(ledger, end(second))
    assert ledger.count("completed") == 1
    conclude(ledger, end(whole, errored=2))
    assert ledger.count("completed") == 3
    assert ledger.new_round(2) == []


def test_a_settled_shard_is_no_canary_that_failed() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first, "failed", errored=2))
    assert guards.canary(ledger.jobs.values()) is not None
    conclude(ledger, end(second))
    conclude(ledger, end(whole, errored=2))
    assert guards.canary(ledger.jobs.values()) is None


def test_workers_come_for_what_can_run_and_not_for_merges_that_wait() -> None:
    ledger, (first, second, whole) = ledger_of()
    assert (at_once(ledger), _at_once([first, second, whole])) == (2, 2)
    conclude(ledger, end(first))
    conclude(ledger, end(second))
    assert at_once(ledger) == 1


def test_a_merge_that_failed_opens_the_shards_with_errors_again() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first, errored=1))
    conclude(ledger, end(second))
    conclude(ledger, end(whole, "failed", errored=1))
    assert [job.spec for job in ledger.new_round(2)] == [first, whole]
    assert Merges(ledger).held() == {whole.job_id}


def sample(spec: JobSpec, id_: int, uuid: str, *, errored: bool = False, round_: int = 1) -> SampleDone:
    return SampleDone(
        fleet_id="2026-11-29-14-05-33-1a2b3c4d", instance_id="w", ts=now(), round=round_, job_id=spec.job_id, attempt=round_, task="t",
        model="m/m", sample_id=id_, epoch=1, uuid=uuid, status="errored" if errored else "completed", scores={},
        error="x" if errored else None, model_usage={"m/m": {"total_tokens": 7}},
    )  # fmt: skip


def test_a_shard_that_is_opened_again_knows_what_it_has_said() -> None:
    ledger, (first, second, whole) = ledger_of()
    for each in (sample(first, 0, "a"), sample(first, 2, "b", errored=True)):
        assert len(ledger.sample(each).events) == 1
    conclude(ledger, end(first, errored=1))
    conclude(ledger, end(second))
    conclude(ledger, end(whole, "failed", errored=1))
    ledger.new_round(2)
    counts = ledger.jobs[first.job_id].counts
    assert (counts.completed, counts.errored) == (1, 1)
    kept = ledger.sample(sample(first, 0, "a", round_=2))
    again = ledger.sample(sample(first, 2, "c", round_=2))
    assert (kept.events, [event["replaces"] for event in again.events]) == ([], ["b"])
    assert ledger.tokens == 21
    conclude(ledger, end(first, round_=2))
    conclude(ledger, end(whole, round_=2))
    assert all(job.said == {} for job in ledger.jobs.values())  # nothing can open it any more


@pytest.mark.parametrize(
    "more",
    [
        {"failure_category": Category.OOM, "log": None},
        {"failure_category": Category.STORAGE},
        {"samples": SampleCounts(total=4, completed=2, errored=1)},
    ],
)
def test_a_merge_that_failed_for_anything_but_errors_leaves_tolerated_ones_alone(more: dict[str, Any]) -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first, errored=1))
    conclude(ledger, end(second))
    conclude(ledger, end(whole, "failed", errored=1).model_copy(update=more))
    assert [job.spec for job in ledger.new_round(2)] == [whole]


def test_an_end_without_a_merged_log_counts_what_the_shards_have() -> None:
    ledger, (first, second, whole) = ledger_of()
    conclude(ledger, end(first, errored=1))
    ledger.sample(sample(second, 1, "a"))
    ended = end(whole, "cancelled", log=False).model_copy(update={"samples": SampleCounts(total=4)})
    assert conclude(ledger, ended)["samples"] == {"total": 4, "completed": 2, "errored": 1}
    assert view._row(ledger.jobs[whole.job_id], ledger.parts_of(ledger.jobs[whole.job_id]))[4:7] == [2, 1, 4]


def test_status_counts_the_shards_of_a_merge_without_a_log(tmp_path: Path) -> None:
    _, (first, second, whole) = ledger_of()
    done = end(whole, "failed", log=False).model_copy(update={"samples": SampleCounts(total=4)})
    record = JobDone(fleet_id=done.fleet_id, job_id=whole.job_id, round=1, log=None, attempt_done=done)
    storage = LocalStorage(tmp_path)
    storage.put(layout.job_done(done.fleet_id, whole.job_id, 1), record.to_bytes())
    told = [
        {"type": "result", "job_id": each.job_id, "sample_id": n, "epoch": 1, "status": status}
        for each, n, status in [(first, 0, "completed"), (first, 2, "errored"), (second, 1, "completed")]
    ]
    job = survey._end(storage, done.fleet_id, rows.Job(whole), 1, Progress.of(told), [])
    assert (job.completed, job.errored, job.ended) == (2, 1, "failed: task_error")


def test_without_a_single_log_there_is_nothing_to_merge() -> None:
    ledger, (first, second, whole) = ledger_of()
    merges = Merges(ledger)
    conclude(ledger, end(first, "failed", log=False))
    assert merges.hopeless(ledger.jobs[whole.job_id]) is None  # the other one may still leave one
    conclude(ledger, end(second, "failed", log=False))
    hopeless = merges.hopeless(ledger.jobs[whole.job_id])
    assert hopeless is not None
    assert hopeless.spec == first


def test_a_replayed_stream_gives_the_same_state() -> None:
    ledger, (first, second, whole) = ledger_of()
    events = [
        {"type": "fleet_start", "round": 1},
        *(conclude(ledger, done) for done in (end(first, "failed", errored=2), end(second), end(whole, errored=2))),
    ]
    again, _ = ledger_of()
    for event in events:
        again.replay({"fleet_id": "2026-11-29-14-05-33-1a2b3c4d", "ts": now().isoformat()} | event)
    assert [job.status for job in again.jobs.values()] == ["completed"] * 3
    assert again.open_jobs == []


def test_what_shards_have_kept_is_no_log_of_the_task_to_a_local_retry(tmp_path: Path) -> None:
    run_id, storage = "2026-11-29-14-05-33-1a2b3c4d", LocalStorage(tmp_path)
    _, (first, second, whole) = ledger_of()
    other = whole.model_copy(update={"job_id": "e" * 16, "merges": [], "ids": [], "name": "other"})
    manifest = Manifest(
        fleet_id=run_id,
        created=now(),
        backend="local",
        jobs=[first, second, whole, other],
        arguments={},
        models=["m"],
        submit_dir=".",
    )
    storage.put(layout.manifest(run_id), manifest.to_bytes())
    place = places.of_run(run_id, storage)
    assert local_run.unmerged(place, manifest, [whole, other]) == []  # nothing would be lost
    storage.put(layout.partial(run_id, first.job_id) + "x.eval", b"of a shard")
    storage.put(layout.partial(run_id, first.job_id) + ".buffer/x/manifest.json", b"{}")
    made = logmaker.make(tmp_path / "made", status="cancelled", results=False)
    storage.upload(made, layout.partial(run_id, other.job_id) + "y.eval")
    storage.upload(made, layout.partial(run_id, second.job_id) + "z.eval")
    assert local_run.unmerged(place, manifest, [other]) == []
    assert local_run.unmerged(place, manifest, [whole, other]) == ["t with m/m"]
    assert local_run.fetch_partials(place) == 1
    assert [info.key for info in storage.list(place.prefix)] == [f"{place.prefix}y.eval"]
