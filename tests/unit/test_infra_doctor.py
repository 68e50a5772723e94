"""The doctor's checks, each on values or on botocore's Stubber: emulators lack quotas and policy simulation."""

import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from test_infra_guard import FLEET, estate

from evalops.infra import doctor
from evalops.infra.doctor import Check
from evalops.infra.estate import Batch, sync_lanes
from evalops.settings import Settings
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now
from evalworker.storage import Denied, Storage, open_storage

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROLE = "arn:aws:iam::123456789012:role/Researcher"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def client(service: str) -> Any:
    return boto3.client(service, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


@pytest.mark.parametrize(
    ("environ", "state", "text"),
    [
        ({}, "ok", "the default profile or role"),
        ({"AWS_PROFILE": "lab"}, "ok", "profile lab"),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "ok", "the environment"),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROFILE": "lab"}, "fail", "two sets at once"),
        ({"AWS_ACCESS_KEY_ID": "a"}, "fail", "one is missing"),
    ],
)
def test_credential_sources(home: Path, environ: dict[str, str], state: str, text: str) -> None:
    found = doctor.credential_sources(environ)
    assert found.state == state and text in found.text


def test_keys_beside_a_default_profile_are_worth_a_word(home: Path) -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text("[default]\naws_access_key_id = other\n")
    found = doctor.credential_sources({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    assert found.state == "warn"


@pytest.mark.parametrize(("skew", "state"), [(0, "ok"), (59, "ok"), (-59, "ok"), (61, "fail"), (-400, "fail")])
def test_clock(skew: int, state: str) -> None:
    answer = {"ResponseMetadata": {"HTTPHeaders": {"date": format_datetime(NOON, usegmt=True)}}}
    found = doctor.clock(answer, NOON + timedelta(seconds=skew))
    assert found.state == state
    if state == "fail":
        assert ("ahead of" if skew > 0 else "behind") in found.text


def test_another_account() -> None:
    assert doctor.same_account(estate(), "123456789012").state == "ok"
    assert doctor.same_account(estate(), "999999999999").state == "fail"


@pytest.mark.parametrize(
    ("arn", "source"),
    [
        ("arn:aws:iam::123456789012:root", None),
        ("arn:aws:iam::123456789012:user/ada", "arn:aws:iam::123456789012:user/ada"),
        ("arn:aws:sts::123456789012:assumed-role/Researcher/ada", ROLE),
    ],
)
def test_principal(arn: str, source: str | None) -> None:
    assert doctor.principal(arn) == source


def test_permissions_names_what_is_denied_and_the_policy_to_attach() -> None:
    iam = client("iam")
    batch = Batch(queues={"spot": "q"}, job_definition="d", log_group="g", image=None)
    with_batch = estate(batch=batch)
    wanted = doctor.needed(with_batch)
    assert ("batch:SubmitJob", "arn:aws:batch:us-east-1:123456789012:job-queue/q") in wanted
    with Stubber(iam) as stub:
        for action, resource in wanted:
            context = []
            if action == "iam:PassRole":
                context = [
                    {
                        "ContextKeyName": "iam:PassedToService",
                        "ContextKeyValues": ["ec2.amazonaws.com"],
                        "ContextKeyType": "string",
                    }
                ]
            decision = "implicitDeny" if action == "ec2:CreateFleet" else "allowed"
            stub.add_response(
                "simulate_principal_policy",
                {"EvaluationResults": [{"EvalActionName": action, "EvalDecision": decision}]},
                {
                    "PolicySourceArn": ROLE,
                    "ActionNames": [action],
                    "ResourceArns": [resource],
                    "ContextEntries": context,
                },
            )
        found = doctor.permissions(iam, with_batch, "arn:aws:sts::123456789012:assumed-role/Researcher/ada")
        stub.assert_no_pending_responses()
    assert found.state == "fail"
    assert f"{ROLE} may not ec2:CreateFleet: attach the policy inspect-fleet-default-researcher" == found.text


@pytest.mark.parametrize(("value", "state"), [(0.0, "fail"), (1.0, "fail"), (5.0, "warn"), (64.0, "ok")])
def test_quota(value: float, state: str) -> None:
    quotas = client("service-quotas")
    with Stubber(quotas) as stub:
        stub.add_response(
            "get_service_quota", {"Quota": {"Value": value}}, {"ServiceCode": "ec2", "QuotaCode": "L-34B43A08"}
        )
        found = doctor.quota(quotas, "quota spot", doctor.SPOT_QUOTA)
    assert found.state == state and found.text.startswith(f"{value:.0f} vCPUs")


def test_lanes(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    assert doctor.lanes(store, estate()).state == "fail"
    sync_lanes(store, estate().lane_records())
    assert doctor.lanes(store, estate()) == Check("lanes", "ok", "2 of 2 free")
    for name, until in (("lane-01", now() + timedelta(hours=1)), ("lane-02", now() - timedelta(hours=1))):
        lane = Lane.from_json(store.get(layout.lane(name)).body)
        held = lane.model_copy(update={"fleet_id": FLEET, "owner": "ada", "until": until})
        store.put(layout.lane(name), held.to_bytes())
    found = doctor.lanes(store, estate())
    assert found.state == "warn" and found.text.startswith("0 of 2 free; past their deadline: lane-02")


class Refusing:
    """A store that answers 403."""

    def head(self, key: str) -> None:
        raise Denied("no", aws.Fault("403", 403, None, False, False, "access denied"))


def test_bucket_tells_403_from_404(tmp_path: Path) -> None:
    refused: Any = Refusing()
    assert doctor.bucket(refused, "b").state == "fail" and "403" in doctor.bucket(refused, "b").text
    store: Storage = open_storage(str(tmp_path))
    assert doctor.bucket(store, "b").state == "ok"


@pytest.mark.parametrize(
    ("owner", "age", "state"), [(doctor.DEBIAN, 1, "warn"), ("self", 1, "ok"), ("self", 45, "warn"), (None, 0, "fail")]
)
def test_image(monkeypatch: pytest.MonkeyPatch, owner: str | None, age: int, state: str) -> None:
    ssm, ec2 = client("ssm"), client("ec2")
    monkeypatch.setattr(aws, "client", {"ssm": ssm, "ec2": ec2}.__getitem__)
    created = (now() - timedelta(days=age, minutes=1)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    images = [] if owner is None else [{"ImageId": "ami-1", "OwnerId": owner, "CreationDate": created}]
    with Stubber(ssm) as parameters, Stubber(ec2) as machines:
        parameters.add_response("get_parameter", {"Parameter": {"Value": "ami-1"}}, {"Name": "/p"})
        machines.add_response("describe_images", {"Images": images}, {"ImageIds": ["ami-1"]})
        assert doctor.image("x86_64", "/p").state == state


def test_a_check_whose_call_fails_does_not_end_the_others() -> None:
    def fails() -> Check:
        raise ConnectionError("refused")

    assert doctor._guarded("quota", fails) == Check("quota", "skip", "could not be looked at: refused")


def test_two_sets_of_credentials_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    found = doctor.examine(Settings(root="s3://b", bucket="b", estate="default", owner="ada"))
    assert [check.name for check in found] == ["credentials"] and found[0].state == "fail"


def test_debians_account_is_the_same_wherever_it_must_stand() -> None:
    """Terraform and Packer cannot read each other's files, and the doctor also runs where no checkout is."""
    root = Path(__file__).parents[2]
    for file in ("packer/versions.env", "packer/worker.pkr.hcl", "terraform/workers.tf"):
        assert re.findall(r"\b\d{12}\b", (root / file).read_text()) == [doctor.DEBIAN], file
