"""Which AMIs stay, which go and why; what a killed build has left; on moto's EC2."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws

from evalops.cloud import amis, build, leftovers
from evalops.cloud.payload import Fingerprint

PRINT = Fingerprint("0.1.0", "abc", lock="l1", worker="w1", scripts="s1")
PARAMETER = "/inspect-fleet/default/image/x86_64"
PARAMETERS = {"x86_64": PARAMETER}


def image(number: int, *, arch: str = "x86_64", complete: bool = True) -> amis.Image:
    tags = {amis.ESTATE_TAG: "default", **PRINT.tags()} if complete else {}
    created = f"2026-01-{number:02d}T00:00:00.000Z"
    return amis.Image(
        f"ami-{number}", f"{amis.prefix('default')}{number}", arch, created, "available", (f"snap-{number}",), tags
    )


def never(_: amis.Image) -> bool:
    return False


def test_the_newest_of_each_architecture_stay_and_each_has_a_reason() -> None:
    images = [image(1), image(2), image(3), image(1, arch="arm64")]
    decisions = amis.plan(images, 1, {}, never)
    said = {(d.image.image_id, d.image.architecture): (d.remove, d.reason) for d in decisions}
    assert said == {
        ("ami-3", "x86_64"): (False, "among the newest 1 of x86_64"),
        ("ami-2", "x86_64"): (True, "older than the newest 1 of x86_64"),
        ("ami-1", "x86_64"): (True, "older than the newest 1 of x86_64"),
        ("ami-1", "arm64"): (False, "among the newest 1 of arm64"),
    }


def test_what_is_in_use_stays_however_old() -> None:
    (old, new) = sorted(
        amis.plan([image(1), image(2)], 0, {"ami-1": ["instance i-1", "parameter p"]}, never),
        key=lambda d: d.image.created,
    )
    assert (old.remove, old.reason) == (False, "in use by instance i-1 and 1 more")
    assert new.remove


def test_an_unfinished_image_goes_unless_its_build_may_still_run() -> None:
    unfinished = image(5, complete=False)
    assert amis.plan([unfinished, image(1)], 1, {}, never)[0].reason == "its build did not end"
    assert amis.plan([unfinished], 0, {}, lambda _: True)[0] == amis.Decision(
        unfinished, False, "its build may still run"
    )
    # and takes no place among the newest
    assert not amis.plan([unfinished, image(1)], 1, {}, never)[1].remove


@given(st.sets(st.integers(1, 28)), st.integers(0, 5), st.sets(st.integers(1, 28)))
def test_no_used_image_ever_goes_and_enough_stay(numbers: set[int], keep: int, used: set[int]) -> None:
    decisions = amis.plan([image(n) for n in numbers], keep, {f"ami-{n}": ["instance i"] for n in used}, never)
    removed = {d.image.image_id for d in decisions if d.remove}
    assert not removed & {f"ami-{n}" for n in used}
    assert len(numbers) - len(removed) >= min(keep, len(numbers))
    assert len(decisions) == len(numbers)


def test_a_stale_image_says_what_has_changed() -> None:
    one = image(1)
    assert amis.stale(one, PRINT, with_sandboxes=True) == []
    (lock,) = amis.stale(one, replace(PRINT, lock="l2"), with_sandboxes=False)
    assert lock.startswith("uv.lock has changed") and "(l1 → l2)" in lock
    assert (
        len(amis.stale(one, replace(PRINT, lock="l2", scripts="s2", worker="w2", sandboxes="x"), with_sandboxes=True))
        == 4
    )
    assert amis.stale(one, replace(PRINT, sandboxes="x"), with_sandboxes=False) == []
    assert "unknown" in amis.stale(replace(one, tags={}), PRINT, with_sandboxes=False)[0]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield boto3.client("ec2"), boto3.client("ssm")


def make_ami(ec2: Any, name: str, tags: dict[str, str] | None = None) -> tuple[str, str]:
    """(image, instance that it was made of)."""
    instance = ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    found = ec2.create_image(InstanceId=instance, Name=name)["ImageId"]
    wanted = {amis.ESTATE_TAG: "default"} | (tags or {})
    ec2.create_tags(Resources=[found], Tags=[{"Key": k, "Value": v} for k, v in wanted.items()])
    ec2.terminate_instances(InstanceIds=[instance])
    return found, instance


def test_users_are_the_parameter_any_launch_template_and_living_instances(aws: tuple[Any, Any]) -> None:
    ec2, ssm = aws
    by_parameter, by_template, by_instance, free = (make_ami(ec2, f"{amis.prefix('default')}{n}")[0] for n in range(4))
    ssm.put_parameter(Name=PARAMETER, Value=by_parameter, Type="String")
    # an older version of somebody else's template counts too
    ec2.create_launch_template(LaunchTemplateName="mine", LaunchTemplateData={"ImageId": by_template})
    ec2.create_launch_template_version(LaunchTemplateName="mine", LaunchTemplateData={"ImageId": "ami-12c6146b"})
    instance = ec2.run_instances(ImageId=by_instance, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    found = amis.listed(ec2, "default")
    assert {one.image_id for one in found} == {by_parameter, by_template, by_instance, free}
    assert amis.uses(ec2, ssm, PARAMETERS, found) == {
        by_parameter: [f"parameter {PARAMETER}"],
        by_template: ["launch template mine version 1"],
        by_instance: [f"instance {instance}"],
    }
    ec2.terminate_instances(InstanceIds=[instance])
    assert by_instance not in amis.uses(ec2, ssm, PARAMETERS, found)


def test_another_estates_images_are_not_ours(aws: tuple[Any, Any]) -> None:
    ec2, _ = aws
    make_ami(ec2, f"{amis.prefix('default')}1", {amis.ESTATE_TAG: "default-two"})
    assert amis.listed(ec2, "default") == []
    assert len(amis.listed(ec2, "default-two")) == 1


def test_deregistering_takes_the_snapshots_along(aws: tuple[Any, Any]) -> None:
    ec2, _ = aws
    make_ami(ec2, f"{amis.prefix('default')}1")
    (one,) = amis.listed(ec2, "default")
    assert one.snapshots
    amis.deregister(ec2, one)
    assert amis.listed(ec2, "default") == []
    assert (
        ec2.describe_snapshots(SnapshotIds=[], Filters=[{"Name": "snapshot-id", "Values": list(one.snapshots)}])[
            "Snapshots"
        ]
        == []
    )
    amis.deregister(ec2, one)  # gone already: no error


def test_what_a_killed_build_leaves_is_found_and_goes(aws: tuple[Any, Any]) -> None:
    ec2, _ = aws
    build_id = leftovers.new_build_id(datetime(2026, 1, 1, tzinfo=UTC), "0123abcd")
    tags = [{"Key": amis.ESTATE_TAG, "Value": "default"}, {"Key": amis.BUILD_TAG, "Value": build_id}]
    specification = [{"ResourceType": "instance", "Tags": tags}]
    instance = ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1, TagSpecifications=specification)[
        "Instances"
    ][0]
    ec2.create_key_pair(KeyName=f"{leftovers.KEY_PREFIX}{build_id}")
    ec2.create_key_pair(KeyName="somebody-elses")
    group = ec2.create_security_group(
        GroupName="packer_1", Description="x", TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}]
    )
    found = leftovers.find(ec2, "default")
    assert {(left.kind, left.identity) for left in found} == {
        ("instance", instance["InstanceId"]),
        ("key", f"{leftovers.KEY_PREFIX}{build_id}"),
        ("group", group["GroupId"]),
    }
    assert {left.build for left in found} == {build_id}
    assert leftovers.find(ec2, "another") == [left for left in found if left.kind == "key"]
    for left in found:
        leftovers.remove(ec2, left, sleep=lambda _: None)
        leftovers.remove(ec2, left, sleep=lambda _: None)  # twice: gone is no error
    assert leftovers.find(ec2, "default") == []
    assert [key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]] == ["somebody-elses"]


def test_build_ids_tell_when_a_build_began() -> None:
    moment = datetime(2026, 11, 29, 16, 5, 7, tzinfo=UTC)
    build_id = leftovers.new_build_id(moment, "0123abcd")
    assert build_id == "20261129t160507z-0123abcd"
    assert leftovers.began(build_id) == moment
    assert leftovers.began("by-hand") is None
    assert leftovers.may_run(build_id, moment + timedelta(minutes=59), timedelta(hours=1))
    assert not leftovers.may_run(build_id, moment + timedelta(minutes=61), timedelta(hours=1))
    assert not leftovers.may_run("by-hand", moment, timedelta(hours=1))


def test_the_temporary_group_is_tagged_as_soon_as_it_exists(aws: tuple[Any, Any]) -> None:
    ec2, _ = aws
    shown: list[str] = []
    tagger = build.GroupTagger(ec2, "default", "20260101t000000z-0123abcd", shown.append)
    tagger.line("Creating temporary security group for this instance: packer_1")
    tagger.line("a line before it is there")
    group = ec2.create_security_group(GroupName="packer_1", Description="Temporary group for Packer")["GroupId"]
    tagger.line("Authorizing access to port 22")
    (left,) = leftovers.find(ec2, "default")
    assert (left.kind, left.identity, left.build) == ("group", group, "20260101t000000z-0123abcd")
    assert len(shown) == 3
