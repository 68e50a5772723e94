"""`ct cloud …` on moto's EC2: what is printed, and what is refused before anything is launched."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from click.testing import CliRunner, Result
from moto import mock_aws

from evalops.cloud import amis, image
from evalops.commands.cloud import cloud
from evalworker import aws

PARAMETER = "/inspect-fleet/default/image/x86_64"
CONFIG = {
    "schema": 1,
    "name": "default",
    "account": "123456789012",
    "region": "us-east-1",
    "bucket": "logs",
    "lanes": {},
    "secrets": {},
    "topic": "t",
    "metrics": "m",
    "repository": "r",
    "workers": {
        "images": {"x86_64": PARAMETER},
        "launch_templates": {},
        "instance_types": {},
        "subnets": ["subnet-1"],
        "role": "r",
        "max_lifetime_minutes": 60,
    },
    "batch": None,
}


@pytest.fixture(autouse=True)
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An account with one estate."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "INSPECT_FLEET_NAME", "AWS_ENDPOINT_URL", "INSPECT_FLEET_REGISTRY_AUTH"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        aws.forget_clients()
        ssm = boto3.client("ssm")
        ssm.put_parameter(Name="/inspect-fleet/default/config", Value=json.dumps(CONFIG), Type="String")
        ssm.put_parameter(Name=PARAMETER, Value="ami-0", Type="String")
        yield boto3.client("ec2")
    aws.forget_clients()


def ct(*arguments: str) -> Result:
    return CliRunner().invoke(cloud, arguments)


def make(ec2: Any, number: int) -> str:
    """A finished image of the estate."""
    instance = ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    image = str(ec2.create_image(InstanceId=instance, Name=f"{amis.prefix('default')}{number}")["ImageId"])
    tags = {amis.ESTATE_TAG: "default", "inspect-fleet-version": "0.1.0", "inspect-fleet-images": "none"}
    ec2.create_tags(Resources=[image], Tags=[{"Key": k, "Value": v} for k, v in tags.items()])
    ec2.terminate_instances(InstanceIds=[instance])
    return image


def test_an_image_is_activated_kept_and_the_others_removed(ec2: Any) -> None:
    first, second, third = (make(ec2, number) for number in range(3))
    assert ct("amis", "--activate", first, "--json").exit_code == 0
    assert boto3.client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"] == first
    planned = ct("clean-amis", "--keep", "1", "--dry-run")
    assert planned.exit_code == 0 and len(amis.listed(ec2, "default")) == 3
    assert f"would keep {first}: in use by parameter {PARAMETER}" in planned.stdout
    lines = [json.loads(line) for line in ct("clean-amis", "--keep", "0", "--json").stdout.splitlines()]
    assert {line["what"]: line["remove"] for line in lines} == {first: False, second: True, third: True}
    assert all(line["reason"] for line in lines)
    (left,) = json.loads(ct("amis", "--json").stdout)["images"]
    assert (left["image"], left["used_by"]) == (first, [f"parameter {PARAMETER}"])
    assert first in ct("amis").stdout


def test_an_unknown_or_unfinished_image_is_not_activated(ec2: Any) -> None:
    image = make(ec2, 1)
    ec2.delete_tags(Resources=[image], Tags=[{"Key": amis.ESTATE_TAG}])
    for wanted in (image, "ami-no-such"):
        said = ct("amis", "--activate", wanted)
        assert said.exit_code == 2 and f"{wanted} is no finished worker image" in said.stderr


def test_a_snapshot_that_cannot_go_is_said_and_the_rest_is_done(ec2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(ec2, 1)
    make(ec2, 2)
    whole = amis.deregister
    calls = iter([True, False])

    def deregister(client: Any, image: amis.Image) -> None:
        if next(calls):
            raise amis.CloudError("the snapshot snap-1 cannot be deleted: denied", 1)
        whole(client, image)

    monkeypatch.setattr(amis, "deregister", deregister)
    said = ct("clean-amis", "--keep", "0")
    assert said.exit_code == 1
    assert "could not remove" in said.stdout and said.stdout.count("removed ami-") == 1
    assert "run the command again later" in said.stderr


def test_check_without_an_image_says_what_to_do() -> None:
    said = ct("build-ami", "--check")
    assert said.exit_code == 1 and "has no x86_64 image: run `ct cloud build-ami`" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arch", "arm64", "--private"], "has no arm64 workers (only x86_64)"),
        (["--images", "no-such-file", "--private"], "--images no-such-file: No such file or directory"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_launched(
    arguments: list[str], complaint: str, ec2: Any
) -> None:
    said = ct("build-ami", "--from", "10.0.0.0/8", *arguments)
    assert said.exit_code == 2 and complaint in said.stderr, said.output
    assert ec2.describe_instances()["Reservations"] == []


def test_a_private_address_says_nothing_of_who_may_connect(monkeypatch: pytest.MonkeyPatch, ec2: Any) -> None:
    said = ct("build-ami", "--private")
    assert said.exit_code == 2 and "--private needs --from CIDR" in said.stderr

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("unreachable")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    said = ct("build-ami")
    assert said.exit_code == 2 and "give --from CIDR or --ssm PROFILE" in said.stderr
    assert ec2.describe_instances()["Reservations"] == []


def test_without_an_estate_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_FLEET_NAME", "nowhere")
    said = ct("build-ami", "--private", "--from", "10.0.0.0/8")
    assert said.exit_code == 2 and "there is no estate 'nowhere'" in said.stderr


def test_a_bad_registry_login_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packer = tmp_path / "packer"
    packer.write_text("#!/bin/sh\necho Packer v1.6.6\n")
    packer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("INSPECT_FLEET_REGISTRY_AUTH", "my-password")
    said = ct("build-ami", "--private", "--from", "10.0.0.0/8")
    assert said.exit_code == 2 and "must be a Docker config.json" in said.stderr
    assert "my-password" not in said.output


def test_a_registry_that_gives_no_login_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ecr = boto3.client("ecr")
    with Stubber(ecr) as stub:
        stub.add_client_error("get_authorization_token", "AccessDeniedException", "User ada is not authorized", 400)
        with pytest.raises(aws.ServiceError, match=r"cannot ask for the login to 1.dkr.ecr"):
            image.push(ecr, "1.dkr.ecr.us-east-1.amazonaws.com/worker", "latest", "1")
