"""What is asked of Batch: sizes, splits, overrides; and a submission that is refused, doubled or cut short leaves nothing behind."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from evalops.batch import living, record, request
from evalops.batch.request import LARGEST_MANIFEST, Wanted
from evalops.infra.estate import Batch, Estate, Workers
from evalops.ui import Failure
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, BatchRun, BatchSubmission, JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage, StorageError

RUN = "2026-11-29-14-05-33-1a2b3c4d"
ROOT = "s3://bucket"
URL = f"s3://bucket/{RUN}/manifest.json"
QUEUES = {"spot": "inspect-fleet-default-spot", "on-demand": "inspect-fleet-default-on-demand"}
NOBODY = Workers(launch_templates={}, images={}, instance_types={}, subnets=[], role="r", max_lifetime_minutes=1)
ESTATE = Estate(
    name="default", account="1", region="us-east-1", bucket="bucket", lanes={}, secrets={}, topic="t", metrics="m",
    repository="r", workers=NOBODY,
    batch=Batch(queues=QUEUES, job_definition="inspect-fleet-default-worker", log_group="/g", image="i"),
)  # fmt: skip


def manifest(jobs: int, **arguments: Any) -> Manifest:
    specs = [
        JobSpec(job_id=f"{n:016x}", task="t.py@t", name="t", model=f"m/{n}", model_index=n, samples=1)
        for n in range(jobs)
    ]
    return Manifest(
        fleet_id=RUN, created=now(), backend="batch", jobs=specs, arguments=arguments, models=[], submit_dir="."
    )


def made(jobs: int, array: bool, **wanted: Any) -> list[request.Request]:
    round_ = BatchRound(number=1, queue=QUEUES["spot"], array=array, jobs=list(range(jobs)))
    return request.requests(ESTATE, ROOT, manifest(jobs), round_, Wanted(QUEUES["spot"], array, **wanted))


def test_only_the_manifests_url_goes_to_batch() -> None:
    (one,) = made(4, array=False)
    assert one.call == {
        "jobName": f"t-m-0-and-3-more-{RUN}-r1",
        "jobQueue": QUEUES["spot"],
        "jobDefinition": "inspect-fleet-default-worker",
        "containerOverrides": {"command": ["python", "-P", "-m", "evalworker.batch_job", URL, "--round", "1"]},
    }
    assert (one.offset, one.size) == (0, None)


def test_what_the_user_wants_of_the_machine() -> None:
    (one,) = made(1, array=False, vcpus=4, memory=8192, timeout_s=90.0)
    assert one.call["containerOverrides"]["resourceRequirements"] == [
        {"type": "VCPU", "value": "4"},
        {"type": "MEMORY", "value": "8192"},
    ]
    assert one.call["timeout"] == {"attemptDurationSeconds": 90}


@pytest.mark.parametrize(
    ("jobs", "parts"),
    [
        (1, [(0, None)]),
        (2, [(0, 2)]),
        (10_000, [(0, 10_000)]),
        (10_001, [(0, 10_000), (10_000, None)]),
        (25_000, [(0, 10_000), (10_000, 10_000), (20_000, 5_000)]),
    ],
)
def test_arrays_of_one_are_plain_jobs_and_large_ones_are_split(jobs: int, parts: list[tuple[int, int | None]]) -> None:
    found = made(jobs, array=True)
    assert [(each.offset, each.size) for each in found] == parts
    assert [each.call.get("arrayProperties") for each in found] == [
        {"size": size} if size else None for _, size in parts
    ]
    assert [each.call["containerOverrides"]["command"][-2:] for each in found] == [
        ["--child", str(at)] for at, _ in parts
    ]
    assert len({each.call["jobName"] for each in found}) == len(found)


def test_the_queue() -> None:
    assert request.queue_of(ESTATE, None, None) == QUEUES["spot"]
    assert request.queue_of(ESTATE, "on-demand", None) == QUEUES["on-demand"]
    assert request.queue_of(ESTATE, None, "on-demand") == QUEUES["on-demand"]
    assert request.queue_of(ESTATE, None, QUEUES["spot"]) == QUEUES["spot"]
    with pytest.raises(Failure) as caught:
        request.queue_of(ESTATE, None, "fast")
    assert caught.value.message == (
        "--queue fast: the estate default has no such queue, only inspect-fleet-default-spot (spot), "
        "inspect-fleet-default-on-demand (on-demand)"
    )


def test_a_manifest_that_is_too_large() -> None:
    large = manifest(1, task_args={"text": "x" * LARGEST_MANIFEST})
    with pytest.raises(
        Failure, match=r"^the run's manifest has 33.6 MB and 33.6 MB is the most: put large arguments into a file"
    ):
        request.check(large, made(1, array=False))


def test_overrides_that_are_too_long() -> None:
    (one,) = made(1, array=False)
    one.call["containerOverrides"]["command"].append("x" * 8192)
    with pytest.raises(Failure, match="Batch takes 8192"):
        request.check(manifest(1), [one])


BLANK = BatchRun(fleet_id=RUN, estate="default", region="us-east-1", log_group="/g", rounds=[])


def submit(stub: Stubber, storage: LocalStorage, jobs: int = 2, run: BatchRun = BLANK, array: bool = True) -> BatchRun:
    round_ = BatchRound(number=len(run.rounds) + 1, queue=QUEUES["spot"], array=array, jobs=list(range(jobs)))
    calls = request.requests(ESTATE, ROOT, manifest(jobs), round_, Wanted(QUEUES["spot"], array))
    return request.submit(stub.client, storage, run, round_, calls)


def accepted(stub: Stubber, job_id: str, retries: int = 0) -> None:
    answer = {"jobName": "n", "jobId": job_id, "ResponseMetadata": {"RetryAttempts": retries}}
    named = {"jobName": ANY, "jobQueue": ANY, "jobDefinition": ANY, "containerOverrides": ANY}
    stub.add_response("submit_job", answer, named | {"arrayProperties": {"size": ANY}})


def test_a_submission_is_recorded(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    accepted(stub, "j1")
    run = submit(stub, storage)
    assert record.read(storage, RUN) == run
    assert [(s.job_id, s.size) for s in run.rounds[0].submissions] == [("j1", 2)]
    accepted(stub, "j2")
    assert [round_.number for round_ in submit(stub, storage, run=run).rounds] == [1, 2]


def test_a_permission_that_lacks_names_the_action_and_leaves_nothing(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    said = "User: arn:aws:iam::1:user/u is not authorized to perform: batch:SubmitJob on resource: arn:aws:batch:us-east-1:1:job-queue/q"
    stub.add_client_error("submit_job", "AccessDeniedException", said, http_status_code=403)
    with pytest.raises(Failure) as caught:
        submit(stub, storage)
    assert (
        "AWS Batch took no job (batch:SubmitJob to inspect-fleet-default-spot): access denied" in caught.value.message
    )
    assert said in caught.value.message and caught.value.exit_code == 2
    assert not storage.exists(layout.batch(RUN))


def test_a_split_submission_that_breaks_off_is_undone(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    accepted(stub, "first")
    stub.add_client_error("submit_job", "ClientException", "no", http_status_code=400)
    ended = {"jobId": "first", "reason": "the rest of its run could not be submitted"}
    stub.add_response("terminate_job", {}, ended)
    with pytest.raises(Failure, match="the 1 submitted before it were terminated"):
        submit(stub, storage, jobs=10_002)
    assert not storage.exists(layout.batch(RUN))


def listed(stub: Stubber, *ids: str) -> None:
    summaries = [{"jobId": job_id, "jobName": "n"} for job_id in ids]
    filters = [{"name": "JOB_NAME", "values": [f"t-m-0-and-1-more-{RUN}-r1"]}]
    stub.add_response("list_jobs", {"jobSummaryList": summaries}, {"jobQueue": QUEUES["spot"], "filters": filters})


def test_a_request_that_was_sent_twice_runs_once(stub: Stubber, tmp_path: Path) -> None:
    accepted(stub, "second", retries=1)
    listed(stub, "first", "second")
    stub.add_response("terminate_job", {}, {"jobId": "first", "reason": ANY})
    run = submit(stub, LocalStorage(tmp_path))
    assert run.rounds[0].submissions[0].job_id == "second"


def test_a_lost_answer_is_looked_up_by_name(stub: Stubber, tmp_path: Path) -> None:
    stub.add_client_error("submit_job", "InternalError", "lost", http_status_code=500)
    listed(stub, "there")
    listed(stub, "there")
    assert submit(stub, LocalStorage(tmp_path)).rounds[0].submissions[0].job_id == "there"
    aws.forget_clients()


def in_hand(stub: Stubber, storage: LocalStorage, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The submission of a job breaks off with this, although Batch has taken the job; it is ended."""
    listed(stub, "taken")
    stub.add_response("terminate_job", {}, {"jobId": "taken", "reason": "the rest of its run could not be submitted"})

    def broken(**call: Any) -> None:
        raise error

    monkeypatch.setattr(stub.client, "submit_job", broken)
    with pytest.raises(type(error)):
        submit(stub, storage)


def test_ctrl_c_leaves_no_job_behind_not_even_the_one_in_hand(
    stub: Stubber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(tmp_path)
    in_hand(stub, storage, KeyboardInterrupt(), monkeypatch)
    assert not storage.exists(layout.batch(RUN))
    assert "nothing was submitted; the 1 submitted before it were terminated" in capsys.readouterr().err


def test_a_store_that_fails_after_the_submission_leaves_no_job_behind(
    stub: Stubber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    accepted(stub, "j1")
    stub.add_response("terminate_job", {}, {"jobId": "j1", "reason": ANY})

    def failing(key: str, body: bytes, etag: str) -> str:
        raise StorageError("S3 is away")

    monkeypatch.setattr(storage, "replace", failing)
    with pytest.raises(
        Failure, match=r"^S3 is away; nothing runs on AWS Batch; the 1 submitted before it were terminated"
    ):
        submit(stub, storage)


def test_each_job_is_recorded_as_it_is_made(stub: Stubber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, seen = LocalStorage(tmp_path), []

    def submit_job(**call: Any) -> dict[str, str]:
        run = record.read(storage, RUN)
        assert run is not None
        seen.append((len(run.rounds[0].names), [each.job_id for each in run.rounds[0].submissions]))
        return {"jobId": f"j{len(seen)}"}

    monkeypatch.setattr(stub.client, "submit_job", submit_job)
    submit(stub, storage, jobs=10_002)
    assert seen == [(2, []), (2, ["j1"])]


def test_of_two_who_submit_a_run_again_one_does(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    accepted(stub, "j1")
    first = submit(stub, storage)
    accepted(stub, "j2")
    submit(stub, storage, run=first)
    for run in (first, BLANK):
        with pytest.raises(
            Failure, match=f"^somebody else is submitting the run {RUN} just now: see `ies batch list`$"
        ):
            submit(stub, storage, run=run)
    after = record.read(storage, RUN)
    assert after is not None and [round_.submissions[0].job_id for round_ in after.rounds] == ["j1", "j2"]


def test_the_loser_prepares_nothing(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put(layout.batch(RUN), BLANK.to_bytes())
    round_ = BatchRound(number=1, queue="q", jobs=[0])
    with pytest.raises(Failure, match="somebody else"):
        request.submit(stub.client, storage, BLANK, round_, made(1, array=False), lambda: pytest.fail("prepared"))


def killed(storage: LocalStorage, begun: timedelta, **more: Any) -> None:
    """The record of a submitter who was killed in the middle of a run's second round."""
    done = BatchRound(
        number=1, queue="q", jobs=[0], names=["n1"], submissions=[BatchSubmission(job_id="j1", name="n1")]
    )
    cut = BatchRound(number=2, queue="q", array=True, jobs=[0, 1], names=["n2"], begun=now() - begun, **more)
    storage.put(layout.batch(RUN), BLANK.model_copy(update={"rounds": [done, cut]}).to_bytes())


def test_a_job_that_was_not_recorded_is_found_by_its_name(stub: Stubber, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    killed(storage, timedelta(hours=1))
    asked = {"jobQueue": "q", "filters": [{"name": "JOB_NAME", "values": ["n2"]}]}
    summary = {"jobId": "j2", "jobName": "n2", "arrayProperties": {"size": 2}}
    stub.add_response("list_jobs", {"jobSummaryList": [summary]}, asked)
    found = record.target(storage, RUN)
    assert [(job.job_id, job.size) for job in found.jobs] == [("j2", 2)]
    assert found.round is not None and found.round.number == 2
    stub.add_response("list_jobs", {"jobSummaryList": [summary]}, asked)
    required = {"jobArn": "a", "jobQueue": "q", "startedAt": 1, "jobDefinition": "d", "jobName": "n"}
    stub.add_response("describe_jobs", {"jobs": [required | {"jobId": "j2", "status": "RUNNING"}]}, {"jobs": ["j2"]})
    assert living.on_batch(storage, RUN).alive is True, "a resume would run it twice"
    stub.add_response("list_jobs", {"jobSummaryList": []}, asked)
    assert [job.job_id for job in record.target(storage, RUN).jobs] == ["j1"], "nothing was sent: the round before"


def test_a_run_that_is_just_being_submitted_lives(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    killed(storage, timedelta(seconds=30))
    found = living.on_batch(storage, RUN)
    assert found.alive and found.clause.startswith("it is being submitted since ")
    assert found.round is not None and found.round.number == 2


def test_a_run_is_found_by_its_job(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    job = "5b2152b4-7c28-4d95-9303-45ebe8b08a9b"
    for run, job_id in (("2026-11-29-14-05-33-1a2b3c4d", job), ("2026-11-30-14-05-33-1a2b3c4d", "other")):
        submission = BatchSubmission(job_id=job_id, name="n", size=3)
        round_ = BatchRound(number=1, queue="q", array=True, jobs=[0, 1, 2], submissions=[submission])
        found = BLANK.model_copy(update={"fleet_id": run, "rounds": [round_]})
        storage.put(layout.batch(run), found.to_bytes())
    whole = record.target(storage, job)
    assert whole.run is not None and whole.run.fleet_id == RUN and whole.whole and whole.jobs[0].size == 3
    child = record.target(storage, f"{job}:2")
    assert not child.whole and [(each.job_id, each.size) for each in child.jobs] == [(f"{job}:2", None)]
    assert record.target(storage, RUN).jobs == whole.jobs
    stranger = record.target(storage, "00000000-0000-4000-8000-000000000000")
    assert stranger.run is None and stranger.jobs[0].job_id.startswith("0000")
    for text in ("nonsense", f"{job}:x", "2026-12-01-14-05-33-1a2b3c4d"):
        with pytest.raises(record.UnknownJob):
            record.target(storage, text)
