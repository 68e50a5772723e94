"""What is sent first, and what is kept of what tasks took."""

from datetime import datetime
from pathlib import Path

from evalops.fleet import placement
from evalops.fleet.ledger import JobState, Ledger
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec, Shard, Timing
from evalworker.contract.messages import AttemptDone, SampleCounts
from evalworker.contract.wire import now
from evalworker.storage import open_storage

FLEET = "2026-11-29-14-05-33-1a2b3c4d"


def spec(name: str, samples: int, number: int = 0, model: str = "scripted/good", **more: object) -> JobSpec:
    job_id = f"{abs(hash((name, number, model))) % 16**16:016x}"
    return JobSpec(job_id=job_id, task=f"t.py@{name}", name=name, model=model, samples=samples, **more)


def names(jobs: list[JobState]) -> list[str]:
    return [job.spec.name for job in jobs]


def test_the_longest_goes_first_by_what_it_took_and_unknown_ones_by_what_others_take() -> None:
    jobs = [JobState(spec(name, samples)) for name, samples in [("a", 10), ("slow", 10), ("b", 30), ("c", 10)]]
    assert names(placement.longest_first(jobs, {})) == ["b", "a", "slow", "c"]
    known = {("slow", "scripted/good"): 60.0, ("b", "scripted/good"): 1.0, ("a", "scripted/good"): 2.0}
    assert names(placement.longest_first(jobs, known)) == ["slow", "b", "a", "c"]


def done(job: JobSpec, round_: int = 1, seconds: float = 8.0, kept: int = 0, status: str = "completed") -> AttemptDone:
    return AttemptDone(
        fleet_id=FLEET, instance_id="w", ts=now(), round=round_, job_id=job.job_id, attempt=1, status=status, ended=True,
        duration_s=seconds, samples=SampleCounts(total=job.samples, completed=job.samples), kept=kept,
    )  # fmt: skip


def shards_of(name: str) -> list[JobSpec]:
    parts = [spec(name, 2, n, shard=Shard(index=n, of=2, ids=[n, n + 2])) for n in range(2)]
    return [*parts, spec(name, 4, 9, merges=[part.job_id for part in parts])]


def test_a_task_is_kept_when_all_of_it_was_run_in_one_round() -> None:
    whole, failed, resumed = spec("whole", 4), spec("failed", 4), spec("resumed", 4)
    divided, halved = shards_of("divided"), shards_of("halved")
    ledger = Ledger([whole, failed, resumed, *divided, *halved], 2)
    for end in [
        done(whole, 2), done(failed, 2, status="failed"), done(resumed, 2, kept=1), *(done(each, 2) for each in divided),
        done(halved[0], 1), *(done(each, 2) for each in halved[1:]),
    ]:  # fmt: skip
        ledger.round = end.round
        ledger.attempt(end)
        ledger.conclude(end)
    kept = {timing.task: timing.seconds_per_sample for _, timing in placement.timings(ledger, FLEET)}
    assert kept == {"t.py@whole": 2.0, "t.py@divided": 4.0}


def test_what_is_written_is_read_and_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    jobs = [spec("a", 4), spec("broken", 4), spec("never", 4)]
    ledger = Ledger(jobs)
    ledger.attempt(done(jobs[0]))
    ledger.conclude(done(jobs[0]))
    placement.write(storage, ledger, FLEET)
    storage.put(layout.timing("t.py@broken", "scripted/good"), b"{}")
    assert placement.read(storage, ledger.jobs.values()) == {("a", "scripted/good"): 2.0}
    stored = Timing.from_json(storage.get(layout.timing("t.py@a", "scripted/good")).body)
    assert (stored.fleet_id, stored.samples, type(stored.as_of)) == (FLEET, 4, datetime)
