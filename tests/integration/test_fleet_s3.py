"""A fleet whose root is a bucket: the same rules, the recipe for fetching a failed log, and a bucket that cannot be used."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from emulators import REGION, Emulator
from fleets import PATIENCE_S, Fleet, call, check, ended, environment, prepare, run, started
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries

from evalops.fleet import look
from evalworker.storage.s3 import S3Storage
from gateway import expired, gateway

BUCKET = "fleet-test"
SECRET = "never-to-be-stored-3f9a1c"


def surroundings(emulator: Emulator) -> dict[str, str]:
    """The standard variables, as a user with an endpoint of his own has them."""
    return {
        "S3_BUCKET_NAME": BUCKET,
        "AWS_ENDPOINT_URL": emulator.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
    }


@pytest.fixture(scope="module")
def fleet(ministack: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A task that completes and one of which a sample fails."""
    ministack.client("s3").create_bucket(Bucket=BUCKET)
    folder = prepare(tmp_path_factory.mktemp("bucket"))
    words = [
        "examples/linux_agent.py",
        "tasks/errors.py@one_error",
        "--model",
        "scripted/good",
        "--retry-attempts",
        "0",
        "--max-workers",
        "1",
    ]
    return run(folder, *words, **surroundings(ministack))


@pytest.fixture(scope="module")
def objects(fleet: Fleet, ministack: Emulator) -> Mapping[str, bytes]:
    """Everything in the bucket after the fleet."""
    client: Any = ministack.client("s3")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def test_the_same_rules_hold(fleet: Fleet, objects: Mapping[str, bytes]) -> None:
    prefix = f"{fleet.fleet_id}/events/"
    check(fleet, stored={key: body for key, body in objects.items() if key.startswith(prefix)})
    assert fleet.code == 1
    assert (fleet.done("linux_agent")["status"], fleet.done("one_error")["status"]) == ("completed", "failed")


def test_everything_lies_where_the_design_says(fleet: Fleet, objects: Mapping[str, bytes]) -> None:
    run_id = fleet.fleet_id
    assert {f"{run_id}/manifest.json", f"{run_id}/control.json"} <= objects.keys()
    for end in fleet.of("job_done"):
        job = end["job_id"]
        assert {
            f"{run_id}/{job}.eval",
            f"{run_id}/{job}.done-1.json",
            f"{run_id}/attempts/{job}/1.end.json",
        } <= objects.keys()
        assert objects[f"logs/working/{run_id}/{end['log_name']}"] == objects[f"{run_id}/{job}.eval"]
    assert sum(key.startswith(f"{run_id}/workers/") for key in objects) == 1
    assert not [key for key in objects if key.startswith("lanes/")]
    assert not (fleet.folder / "logs" / "working").exists()


def test_a_look_at_it_takes_five_calls(fleet: Fleet, ministack: Emulator) -> None:
    """Manifest, control, machines, how it stands, and that no segment is newer; however many segments there are."""
    client: Any = ministack.client("s3")
    calls: list[str] = []
    client.meta.events.register("before-call.s3", lambda model, **_: calls.append(model.name))
    sight = look.look(S3Storage(BUCKET, client), fleet.fleet_id)
    assert calls == ["GetObject"] * 5
    assert sight.summary == fleet.summary
    assert sight.ledger.samples.model_dump() == fleet.summary["samples"]


def test_nothing_stored_holds_the_credentials(fleet: Fleet, objects: Mapping[str, bytes]) -> None:
    assert not [key for key, body in objects.items() if SECRET.encode() in body]
    assert SECRET not in fleet.out + fleet.err + fleet.live.read_text()


def test_the_recipe_for_a_failed_log(fleet: Fleet, ministack: Emulator, tmp_path: Path) -> None:
    """As documented, with the bucket, the fleet, the job and this test's directory in it."""
    end = fleet.done("one_error")
    text = "aws s3 cp s3://<bucket>/<fleet_id>/<job_id>.eval /tmp/job.eval"
    filled = {"<bucket>": BUCKET, "<fleet_id>": fleet.fleet_id, "<job_id>": end["job_id"], "/tmp": str(tmp_path)}
    for name, value in filled.items():
        text = text.replace(name, value)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    surrounding = environment(tmp_path, **surroundings(ministack)) | {"PATH": path}
    subprocess.run(text, shell=True, env=surrounding, capture_output=True, text=True, check=True)
    log = read_eval_log(str(tmp_path / "job.eval"), header_only=True)
    assert (log.eval.task, log.status) == ("one_error", "error")
    uuids = {event["uuid"] for event in fleet.results(end["job_id"]).values()}
    assert {summary.uuid for summary in read_eval_log_sample_summaries(str(tmp_path / "job.eval"))} == uuids


def test_a_bucket_that_is_not_there(ministack: Emulator, tmp_path: Path) -> None:
    """One sentence that names it, before anything runs."""
    settings = surroundings(ministack) | {"S3_BUCKET_NAME": "no-such-bucket"}
    refused = run(prepare(tmp_path), "examples/arithmetic.py", "--model", "scripted/good", **settings)
    assert (refused.code, refused.out, refused.events) == (2, "", [])
    (said,) = (text for text in refused.err.splitlines() if text.startswith("Error"))
    assert "s3://no-such-bucket" in said


def test_expired_credentials_leave_the_fleet_alive(ministack: Emulator, tmp_path: Path) -> None:
    """The command ends with how to go on, the fleet does not; with new credentials it is driven to its end."""
    ministack.client("s3").create_bucket(Bucket=BUCKET)
    folder = prepare(tmp_path / "here")
    words = ("tasks/slow.py", "-T", "n=6", "--concurrency-per-worker", "2", "--model", "scripted/good")
    with gateway(ministack.endpoint) as guarded:
        aws = surroundings(ministack) | {"AWS_ENDPOINT_URL": guarded.endpoint}
        with started(folder, *words, "--max-workers", "1", **aws) as (process, watcher):
            watcher.wait(lambda events: [event for event in events if event["type"] == "result"])
            guarded.rule = lambda service, operation, body: expired(service)
            _, err = process.communicate(timeout=PATIENCE_S)
        fleet_id = watcher.events()[0]["fleet_id"]
        assert process.returncode == 4, err
        assert "the AWS credentials have expired" in err
        assert f"ct fleet attach {fleet_id}" in err
        guarded.rule = lambda service, operation, body: None
        attached = call(folder, "ct", "fleet", "attach", fleet_id, **aws)
    assert attached.returncode == 0, attached.stderr
    fleet = ended(folder, attached.returncode, attached.stdout, attached.stderr)
    fleet.root = folder / "nowhere"
    client: Any = ministack.client("s3")
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{fleet_id}/events/")["Contents"]]
    check(fleet, stored={key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys})
    assert fleet.summary["samples"]["completed"] == 6
