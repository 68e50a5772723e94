"""The recorder of AWS calls, the map, and their comparison."""

import inspect
import os
import re
import sys
import types
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

import aws_calls
import iam_calls
from evalworker.contract import layout
from iam_calls import MAP

CREDENTIALS = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}


def module(name: str, source: str) -> dict[str, Any]:
    """A module of that name with functions of `source`."""
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made.__dict__


def test_the_map_is_well_formed() -> None:
    assert len(iam_calls.entries()) > 150
    for call, entry in iam_calls.entries().items():
        assert call.count(":") == 1 and entry["callers"], call
        assert set(entry["callers"]) <= set(iam_calls.ROLES), call
        assert all(action.count(":") == 1 and "*" not in action for action in entry["actions"]), call
    assert set(iam_calls.entries()["ec2:CreateFleet"]["actions"]) == {
        "ec2:CreateFleet", "ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "ssm:GetParameters",
    }  # fmt: skip


def test_calls_of_the_project_are_recorded_and_those_of_tests_are_not() -> None:
    directory = Path(os.environ["INSPECT_FLEET_CALLS"])
    call = "def call(client):\n    return client.list_buckets()\n"
    with mock_aws():
        client = boto3.client("s3", **CREDENTIALS)  # type: ignore[call-overload]
        client.list_buckets()
        mine = directory / f"{os.getpid()}.tsv"
        before = mine.read_text() if mine.exists() else ""
        assert "s3:ListBuckets" not in before
        module("evalworker.probe_of_the_recorder", call)["call"](client)
    lines = mine.read_text().splitlines()
    assert lines[-1] == "evalworker\tworker,researcher\ts3:ListBuckets"
    mine.write_text(before)  # it is no call that the project makes


@pytest.mark.parametrize(
    ("stack", "package"),
    [
        (["evalworker.storage.s3"], "evalworker"),
        (["evalops.fleet.controller", "evalworker.storage.s3"], "evalops"),
        (["evalops.commands.infra", "evalops.infra.guard"], "evalops.commands.infra"),
        (["inspect_ai.log", "s3fs.core"], "inspect_ai"),
        (["evalworker.publish", "inspect_ai.log", "s3fs.core"], "evalworker"),
        (["s3fs.core"], "s3fs"),
        (["evalopsy"], None),
    ],
)
def test_the_outermost_module_of_ours_tells_the_role(stack: list[str], package: str | None) -> None:
    def innermost() -> Any:
        return aws_calls.role_names(sys._getframe())

    run: Callable[[], Any] = innermost
    for name in reversed(stack):
        run = _through(name, run)
    found = run()
    assert (found[0] if found else None) == package


def _through(name: str, inner: Callable[[], Any]) -> Callable[[], Any]:
    outer: Callable[[Callable[[], Any]], Any] = module(name, "def call(inner):\n    return inner()\n")["call"]
    return lambda: outer(inner)


def test_missing_and_unused() -> None:
    roles = ("worker", "researcher")
    assert iam_calls.missing({("evalworker", roles, "s3:GetObject")}) == []
    assert iam_calls.missing({("evalworker", roles, "s3:PutBucketAcl")}) == [
        "s3:PutBucketAcl by evalworker (as worker or researcher)"
    ]
    everything = iam_calls.unused(set())
    assert "sqs:ReceiveMessage of worker (evalworker)" in everything
    assert not any(line.startswith(("batch:CreateJobQueue", "kms:")) for line in everything)
    assert "sqs:ReceiveMessage of worker (evalworker)" not in iam_calls.unused(
        {("evalworker", roles, "sqs:ReceiveMessage")}
    )


AMAZON_EBS = {
    "AttachVolume", "AuthorizeSecurityGroupIngress", "CopyImage", "CreateImage", "CreateKeyPair", "CreateSecurityGroup",
    "CreateSnapshot", "CreateTags", "CreateVolume", "DeleteKeyPair", "DeleteSecurityGroup", "DeleteSnapshot", "DeleteVolume",
    "DeregisterImage", "DescribeImageAttribute", "DescribeImages", "DescribeInstances", "DescribeInstanceStatus",
    "DescribeRegions", "DescribeSecurityGroups", "DescribeSnapshots", "DescribeSubnets", "DescribeTags", "DescribeVolumes",
    "DetachVolume", "GetPasswordData", "ModifyImageAttribute", "ModifyInstanceAttribute", "ModifySnapshotAttribute",
    "RegisterImage", "RunInstances", "StopInstances", "TerminateInstances",
}  # fmt: skip
"""What Packer's manual says that its Amazon builders need together."""

NOT_OURS = {
    "chroot and surrogate builders": {
        "AttachVolume",
        "CreateSnapshot",
        "CreateVolume",
        "DetachVolume",
        "RegisterImage",
    },
    "copies and shares": {"CopyImage", "ModifySnapshotAttribute"},
    "Windows": {"GetPasswordData"},
}


def test_an_operator_may_do_what_packer_is_documented_to_need() -> None:
    ours = AMAZON_EBS - set().union(*NOT_OURS.values())
    granted = {action.removeprefix("ec2:") for action in iam_calls.actions("operator") if action.startswith("ec2:")}
    assert ours - granted == set()
    assert (AMAZON_EBS - ours) & granted == set()
    assert {call.removeprefix("ec2:") for call in iam_calls.calls("operator", by="packer")} - ours == {
        "EnableImageDeprecation"  # modern/options.hcl: deprecate_at
    }


def test_a_batch_job_may_ask_where_its_bucket_is() -> None:
    """Inspect's `eval_set` on S3 makes its log directory first, which fails where neither of s3fs's two questions is answered."""
    assert "s3:GetBucketLocation" in iam_calls.actions("batch_job") - iam_calls.actions("worker")
    assert iam_calls.missing({("s3fs", ("batch_job",), "s3:GetBucketLocation")}) == []
    assert "s3:GetBucketLocation" not in iam_calls.PROBES


def every_key() -> dict[str, str]:
    """A key of each kind that the layout builds, by the name of its function or constant."""
    given = {
        "fleet_id": "2026-11-29-14-05-33-1a2b3c4d", "run_id": "2026-11-29-14-05-33-1a2b3c4d", "job_id": "0" * 16,
        "number": 1, "attempt": 1, "round_": 1, "worker": "w", "name": "lane-01", "task": "pkg/t", "model": "m/x",
        "digest": "d", "environment": "stage", "log": "logs/working/a.eval",
    }  # fmt: skip
    found = {}
    for name, value in vars(layout).items():
        if isinstance(value, str) and name.isupper() and not name.endswith("SUFFIX"):
            found[name] = value
        elif inspect.isfunction(value) and value.__module__ == layout.__name__ and not name.startswith("_"):
            signature = inspect.signature(value)
            if signature.return_annotation is str and "key" not in signature.parameters:
                found[name] = value(**{argument: given[argument] for argument in signature.parameters})
    return found


def test_the_researcher_may_write_every_key_that_the_layout_builds() -> None:
    """The comparison of calls and policies knows actions alone: a key outside of all prefixes is a 403 in the field."""
    policy = (MAP.parent / "iam.tf").read_text()
    lists = dict(re.findall(r"^  (run_prefixes|shipped_code) += \[(.*)\]$", policy, re.M))
    researcher = policy.partition('"aws_iam_policy_document" "researcher"')[2]
    names, more = re.search(r'sid += "Runs".*?concat\(([a-z_., ]*)\[(.*?)\]\)', researcher, re.S).groups()  # type: ignore[union-attr]
    assert set(re.findall(r"local\.(\w+)", names)) == set(lists)
    prefixes = re.findall(r'"([^"]+)"', " ".join([*lists.values(), more]))
    keys = every_key()
    assert {"PUBLISH_LOCK", "timing", "manifest", "promoted_run"} <= set(keys)
    assert {name for name, key in keys.items() if not any(fnmatch(key, prefix) for prefix in prefixes)} == set()
    assert {name for name, key in keys.items() if not layout.is_ours(key)} == set()
