"""Guards, lane records, keys: what of `evalops.infra` works on a store or on AWS, here on a directory and on moto."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from evalops.fleet import lanes
from evalops.infra import guard, secrets
from evalops.infra.estate import REMOVAL, Estate, LaneQueues, Workers, read_estate, sync_lanes
from evalops.ui import Failure
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now
from evalworker.storage import Storage, open_storage

FLEET = "2026-11-29-14-05-33-1a2b3c4d"


def estate(lanes: int = 2, **more: Any) -> Estate:
    names = {f"lane-{n:02d}": LaneQueues(jobs=f"u/{n}j", events=f"u/{n}e", dead=f"u/{n}d") for n in range(1, lanes + 1)}
    values: dict[str, Any] = {
        "name": "default",
        "account": "123456789012",
        "region": "us-east-1",
        "bucket": "logs",
        "lanes": names,
        "secrets": {name: f"/inspect-fleet/default/secrets/{name}" for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY")},
        "topic": "arn:aws:sns:us-east-1:123456789012:inspect-fleet-default",
        "metrics": "InspectFleet",
        "repository": "r",
        "workers": Workers(
            launch_templates={"x86_64": "lt-0aaa"},
            images={"x86_64": "/inspect-fleet/default/image/x86_64"},
            instance_types={"x86_64": ["m7i.large"]},
            subnets=["subnet-0aaa"],
            role="arn:aws:iam::123456789012:role/inspect-fleet-default-worker",
            max_lifetime_minutes=1440,
        ),
        "batch": None,
    }
    return Estate(**(values | more))


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        aws.forget_clients()
        yield
    aws.forget_clients()


def read(store: Storage, name: str) -> Lane:
    return Lane.from_json(store.get(layout.lane(name)).body)


def own(store: Storage, name: str) -> Lane:
    lane = read(store, name).model_copy(update={"fleet_id": FLEET, "owner": "ada", "until": now() + timedelta(hours=1)})
    store.put(layout.lane(name), lane.to_bytes())
    return lane


def change(address: str, *actions: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"address": address, "change": {"actions": list(actions), "before": before}}


def test_removed_lanes_counts_replaced_queues_and_nothing_else() -> None:
    plan = {
        "resource_changes": [
            change('module.lane["lane-04"].aws_sqs_queue.dead', "delete"),
            change('module.lane["lane-02"].aws_sqs_queue.jobs', "delete", "create"),
            change('module.lane["lane-03"].aws_sqs_queue.jobs', "update"),
            change('module.lane["lane-05"].aws_sqs_queue.jobs', "create"),
            change('module.lane["lane-01"].aws_cloudwatch_metric_alarm.dead', "delete"),
        ]
    }
    assert guard.removed_lanes(plan) == ["lane-02", "lane-04"]
    assert guard.removed_lanes({}) == []


def test_removed_bucket() -> None:
    gone = change("aws_s3_bucket.this[0]", "delete", before={"bucket": "logs"})
    assert guard.removed_bucket({"resource_changes": [gone]}) == "logs"
    assert guard.removed_bucket({"resource_changes": [change("aws_s3_bucket.this[0]", "update")]}) is None


def test_planned_bucket_is_that_of_the_state() -> None:
    plan = {"prior_state": {"values": {"outputs": {"bucket": {"value": "logs"}}}}}
    assert guard.planned_bucket(plan) == "logs"
    assert guard.planned_bucket({}) is None


def test_sync_makes_corrects_and_removes_records_but_never_an_owned_one(store: Storage) -> None:
    assert sync_lanes(store, estate(4).lane_records()) == [f"recorded lane-0{n}" for n in range(1, 5)]
    assert sync_lanes(store, estate(4).lane_records()) == []
    held = own(store, "lane-04")
    own(store, "lane-01")
    moved = [lane.model_copy(update={"jobs": "elsewhere"}) for lane in estate(2).lane_records()]
    assert sync_lanes(store, moved) == ["corrected lane-02", "removed the record of lane-03"]
    assert read(store, "lane-01").jobs == "u/1j"
    assert read(store, "lane-02").jobs == "elsewhere"
    assert read(store, "lane-04") == held


def test_sync_leaves_the_lanes_of_this_machine_alone(store: Storage) -> None:
    embedded = Lane(name="local-1", jobs="j", events="e", dead="d", endpoint="http://127.0.0.1:1")
    store.put(layout.lane("local-1"), embedded.to_bytes())
    sync_lanes(store, estate(1).lane_records())
    assert read(store, "local-1") == embedded


def test_fence_takes_free_lanes_and_names_owned_ones(store: Storage) -> None:
    sync_lanes(store, estate(3).lane_records())
    held = own(store, "lane-03")
    assert guard.fence(store, ["lane-02", "lane-03"]) == [held]
    assert read(store, "lane-02").fleet_id == REMOVAL
    guard.unfence(store, ["lane-02", "lane-03"])
    assert read(store, "lane-02").fleet_id is None
    assert read(store, "lane-03") == held
    assert guard.say_owned([held]).startswith(f"lane-03 is owned by {FLEET} of ada until 20")


def test_a_fenced_lane_goes_with_its_queues(store: Storage) -> None:
    sync_lanes(store, estate(2).lane_records())
    assert guard.fence(store, ["lane-02"]) == []
    assert sync_lanes(store, estate(1).lane_records()) == ["removed the record of lane-02"]


def test_an_owner_past_its_deadline_still_holds_the_lane(store: Storage) -> None:
    sync_lanes(store, estate(1).lane_records())
    late = own(store, "lane-01").model_copy(update={"until": now() - timedelta(days=1)})
    store.put(layout.lane("lane-01"), late.to_bytes())
    assert guard.owned(store, ["lane-01", "lane-09"]) == [late]


def test_a_fenced_lane_that_is_there_after_an_apply_is_free_again(store: Storage) -> None:
    """Its queues were replaced, or the apply was killed and the change taken back: nobody else would ever give it back."""
    sync_lanes(store, estate(2).lane_records())
    guard.fence(store, ["lane-01", "lane-02"])
    until = now() + timedelta(hours=1)
    with pytest.raises(lanes.NoLane, match=REMOVAL):
        lanes.take(store, FLEET, "ada", until)
    replaced = [lane.model_copy(update={"jobs": f"new/{lane.name}"}) for lane in estate(2).lane_records()]
    assert sync_lanes(store, replaced) == ["freed lane-01", "freed lane-02"]
    assert [read(store, lane.name) for lane in replaced] == replaced
    assert lanes.take(store, FLEET, "ada", until).jobs == "new/lane-01"


def test_a_record_that_cannot_be_read_is_said_and_the_others_are_made(store: Storage) -> None:
    store.put(layout.lane("lane-01"), b"{")
    line, made = sync_lanes(store, estate(2).lane_records())
    assert "lane-01.json cannot be read" in line and made == "recorded lane-02"


@pytest.mark.usefixtures("cloud")
def test_remaining_logs_and_emptying() -> None:
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="our-logs")
    s3.put_bucket_versioning(Bucket="our-logs", VersioningConfiguration={"Status": "Enabled"})
    store = open_storage("s3://our-logs")
    for key in ("lanes/lane-01.json", "code/a.tar.gz", "worker/b.whl", layout.PUBLISH_LOCK, layout.timing("t", "m/x")):
        store.put(key, b"x")
    assert guard.remaining_logs(store) == []
    for key in ("notes.txt", "logs/prod/a/b.eval", f"{FLEET}/manifest.json", f"{FLEET}/control.json"):
        store.put(key, b"x")
    assert sorted(guard.remaining_logs(store)) == [f"{FLEET}/", "logs/", "notes.txt"]
    store.put("notes.txt", b"y")
    store.delete("logs/prod/a/b.eval")
    assert guard.empty_bucket(s3, "our-logs", print) == 11
    s3.delete_bucket(Bucket="our-logs")  # refuses while a version is left


@pytest.mark.usefixtures("cloud")
def test_read_estate() -> None:
    ssm = boto3.client("ssm")
    with pytest.raises(Failure, match=r"there is no estate 'default' in this account and region.*make apply"):
        read_estate("default")
    ssm.put_parameter(Name="/inspect-fleet/default/config", Value=estate().to_json(), Type="String")
    assert read_estate("default") == estate()
    assert [lane.name for lane in read_estate("default").lane_records()] == ["lane-01", "lane-02"]
    ssm.put_parameter(Name="/inspect-fleet/default/config", Value='{"schema":2}', Type="String", Overwrite=True)
    with pytest.raises(Failure, match="was written by another version of this project"):
        read_estate("default")


def test_choose_keys(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    with pytest.raises(secrets.SecretError, match=r"there is no .*\.env: copy \.env\.template"):
        secrets.choose(estate(), file, ())
    file.write_text("OPENAI_API_KEY='sk-$HOME'\nANTHROPIC_API_KEY=\nOTHER=1\n")
    assert secrets.choose(estate(), file, ()) == {"OPENAI_API_KEY": "sk-$HOME"}
    with pytest.raises(secrets.SecretError, match="OTHER is none of the estate's keys"):
        secrets.choose(estate(), file, ("OTHER",))
    with pytest.raises(secrets.SecretError, match="sets no ANTHROPIC_API_KEY"):
        secrets.choose(estate(), file, ("ANTHROPIC_API_KEY",))
    file.write_text("OTHER=1\n")
    with pytest.raises(secrets.SecretError, match="sets none of ANTHROPIC_API_KEY, OPENAI_API_KEY"):
        secrets.choose(estate(), file, ())


@pytest.mark.usefixtures("cloud")
def test_push_and_list(caplog: pytest.LogCaptureFixture) -> None:
    ssm = boto3.client("ssm")
    for name in estate().secrets.values():
        ssm.put_parameter(Name=name, Value="unset", Type="SecureString")
    secrets.push(ssm, estate(), {"OPENAI_API_KEY": "sk-value"})
    found = secrets.listed(ssm, estate())
    assert [(secret.name, secret.is_set) for secret in found] == [
        ("ANTHROPIC_API_KEY", False),
        ("OPENAI_API_KEY", True),
    ]
    stored = ssm.get_parameter(Name=estate().secrets["OPENAI_API_KEY"], WithDecryption=True)
    assert stored["Parameter"]["Value"] == "sk-value"
    assert "sk-value" not in caplog.text and "sk-value" not in json.dumps([str(secret) for secret in found])
