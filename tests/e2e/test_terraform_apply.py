"""A real apply with the real provider on a fresh moto server, from two lanes over four to three, to nothing.

The tests run in the order in which they stand: one estate serves them all, and the last one destroys it.
"""

import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from terraform_bench import HERE, Estate

import iam_calls
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now

EMULATOR_DEFECTS = {
    r"aws_batch_job_queue\.this\[.*\]": "it drops a queue's state-time limits",
    r'module\.lane\[".*"\]\.aws_sqs_queue\.jobs': "it writes the redrive policy with other white space",
    r"aws_launch_template\.(worker|batch)\[.*\]": "it gives a template's own tags back as a tag specification",
}
"""Addresses that a second plan changes on moto, and the defect behind each."""

MARKER = "sk-planted-marker-5f1c"
state: dict[str, Any] = {}


def unexpected(plan: dict[str, Any]) -> list[str]:
    return [
        change["address"]
        for change in plan["resources"]
        if change["actions"] != ["update"]
        or not any(re.fullmatch(known, change["address"]) for known in EMULATOR_DEFECTS)
    ]


def test_apply_reports_what_it_makes(applied: Estate) -> None:
    said = applied.said["apply"]
    assert re.search(r"will make aws_s3_bucket\.this", said)
    assert re.search(r"made aws_s3_bucket\.this\[0\] \(\d+ s\)", said)
    assert re.search(r"Apply complete! Resources: \d+ added, 0 changed, 0 destroyed", said)
    assert "recorded lane-01" in said and "recorded lane-02" in said


def test_second_plan_changes_only_what_the_emulator_cannot_keep(applied: Estate) -> None:
    done = applied.ies("infra", "plan", "--json")
    assert done.returncode == 0, done.stderr
    assert unexpected(json.loads(done.stdout)) == []


def test_outputs_and_parameter_have_the_same_content(applied: Estate) -> None:
    done = applied.ies("infra", "outputs", "--json")
    assert done.returncode == 0, done.stderr
    value = applied.client("ssm").get_parameter(Name="/inspect-fleet/default/config")["Parameter"]["Value"]
    assert json.loads(done.stdout) == json.loads(value)
    assert len(value) < 4096  # a free parameter holds no more
    fixed = json.loads(value) | {"lanes": {}, "secrets": {}}
    fixed["workers"] |= {"instance_types": {}, "subnets": []}
    assert (
        len(json.dumps(fixed)) < 1600 - 500
    )  # outputs.tf estimates so much for what no variable but names makes longer
    table = applied.ies("infra", "outputs").stdout
    assert re.search(r"lanes\.lane-01\.jobs +http.*inspect-fleet-default-lane-01-jobs", table)


def test_nothing_accepts_a_connection(applied: Estate) -> None:
    ec2 = applied.client("ec2")
    groups = ec2.describe_security_groups(Filters=[{"Name": "tag:inspect-fleet", "Values": ["default"]}])[
        "SecurityGroups"
    ]
    assert [group["GroupName"] for group in groups if not group["IpPermissions"]] == [
        group["GroupName"] for group in groups
    ]
    assert any(group["GroupName"] == "default" and not group["IpPermissionsEgress"] for group in groups)
    template = ec2.describe_launch_templates(LaunchTemplateNames=["inspect-fleet-default-worker-x86-64"])[
        "LaunchTemplates"
    ][0]
    data = ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"])
    made = data["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert made["InstanceInitiatedShutdownBehavior"] == "terminate" and "KeyName" not in made


def test_policies_and_map_agree_both_ways(applied: Estate) -> None:
    documents = iam_calls.applied_policies(applied.client("iam"), "default")
    assert set(documents) == {"worker", "batch_job", "researcher", "operator", "ci"}
    for role, document in documents.items():
        granted = iam_calls.granted(document)
        needed = iam_calls.actions(role, skip=("ssm_access", "kms_key_arn", "fleet ssh"))
        assert granted - iam_calls.actions(role) == set(), f"{role} may do what no call needs"
        assert needed - granted == set(), f"{role} lacks what a call needs"
        assert all(len(re.sub(r"\s", "", text)) <= 6144 for text in iam_calls.texts(document))


def test_no_wildcard_where_an_arn_is_taken(applied: Estate) -> None:
    for role, document in iam_calls.applied_policies(applied.client("iam"), "default").items():
        everywhere = iam_calls.on_everything(document)
        assert everywhere - iam_calls.WITHOUT_ARN == set(), f"{role} has * where the API takes an ARN"


def test_secrets_are_pushed_and_reach_neither_state_nor_plan_nor_log(applied: Estate, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"OPENAI_API_KEY={MARKER}\nS3_BUCKET_NAME=x\n")
    before = applied.ies("secrets", "list", "--json")
    assert {row["state"] for row in json.loads(before.stdout)["secrets"]} == {"not set"}
    done = applied.ies("secrets", "push", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "pushed OPENAI_API_KEY\n"), done.stderr
    listed = json.loads(applied.ies("secrets", "list", "--json").stdout)["secrets"]
    after = {row["name"]: row["state"] for row in listed}
    assert after.pop("OPENAI_API_KEY") == "set" and set(after.values()) == {"not set"} and len(after) == 6
    stored = applied.client("ssm").get_parameter(
        Name="/inspect-fleet/default/secrets/OPENAI_API_KEY", WithDecryption=True
    )
    assert stored["Parameter"]["Value"] == MARKER
    planned = applied.terraform("plan", "-out=marked", "-input=false", "-no-color")
    shown = applied.terraform("show", "-json", "marked")
    assert planned.returncode == shown.returncode == 0
    assert MARKER not in planned.stdout + planned.stderr + shown.stdout
    assert holding(MARKER, applied.directory) == []
    changes = [
        {"address": change["address"], "actions": change["change"]["actions"]}
        for change in json.loads(shown.stdout)["resource_changes"]
        if change["change"]["actions"] not in (["no-op"], ["read"])
    ]
    assert unexpected({"resources": changes}) == []


def holding(text: str, directory: Path) -> list[Path]:
    """Files of a Terraform directory (state, its backup, plans) that hold a text."""
    files = [file for file in directory.rglob("*") if file.is_file() and ".terraform" not in file.parts]
    return [file for file in files if text.encode() in file.read_bytes()]


def test_doctor_has_a_line_for_each_thing(applied: Estate) -> None:
    done = applied.ies("infra", "doctor", "--json", who="researcher")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert list(checks) == [
        "credentials",
        "identity",
        "clock",
        "estate",
        "permissions",
        "quota on-demand",
        "quota spot",
        "bucket",
        "lanes",
        "image x86_64",
        "secrets",
    ]
    good = {name for name, check in checks.items() if check["state"] == "ok"}
    assert {"credentials", "identity", "clock", "estate", "bucket", "lanes", "secrets"} <= good
    assert checks["lanes"]["text"] == "2 of 2 free"
    assert "stock Debian" in checks["image x86_64"]["text"]
    assert done.returncode == (1 if any(check["state"] == "fail" for check in checks.values()) else 0)
    made = {call for who, call in applied.emulator.calls() if who == "researcher"}
    assert made - iam_calls.calls("researcher") == set(), "called by the doctor, but not in the map"
    assert iam_calls.calls("researcher", by="evalops.infra") - made == set(), "in the map, but never called"


def test_lanes_2_to_4_replaces_no_queue(applied: Estate) -> None:
    applied.variables(lanes=4)
    done = applied.ies("infra", "apply", "--yes")
    assert done.returncode == 0, done.stderr
    planned = re.findall(r"^will (\w+) (\S+)", done.stderr, re.M)
    assert {action for action, _ in planned} <= {"make", "change"}
    made = [address for action, address in planned if action == "make"]
    assert made and all(re.match(r'module\.lane\["lane-0[34]"\]', address) for address in made)
    assert re.findall(r"^recorded (\S+)", done.stderr, re.M) == ["lane-03", "lane-04"]
    assert holding(MARKER, applied.directory) == []  # this apply has refreshed the state after the key was pushed


def test_local_fleet_on_the_applied_bucket_and_lane(applied: Estate, tmp_path: Path) -> None:
    before = applied.emulator.calls()
    done = subprocess.run(
        [sys.executable, str(HERE / "fleet_on_estate.py")],
        env=applied.environment("fleet") | {"INSPECT_FLEET_NAME": "default"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    bucket = json.loads(applied.ies("infra", "outputs", "--json").stdout)["bucket"]
    keys = [item["Key"] for item in applied.client("s3").list_objects_v2(Bucket=bucket)["Contents"]]
    assert found["lane"] == "lane-01" and found["outcome"] == "complete"
    assert any(key.startswith(f"logs/working/{found['fleet_id']}/") and key.endswith(".eval") for key in keys)
    calls = {call for who, call in applied.emulator.calls() - before if who == "fleet"}
    assert "sqs:SendMessageBatch" in calls and "sqs:ReceiveMessage" in calls
    allowed = iam_calls.calls("researcher") | iam_calls.calls("worker")
    assert calls - allowed == set(), "calls of a fleet that the map does not have"
    assert (
        Lane.from_json(
            applied.client("s3").get_object(Bucket=bucket, Key=layout.lane("lane-01"))["Body"].read()
        ).fleet_id
        is None
    )
    state["fleet"] = calls


def test_a_plan_that_removes_an_owned_lane_is_stopped(applied: Estate) -> None:
    bucket = json.loads(applied.ies("infra", "outputs", "--json").stdout)["bucket"]
    s3 = applied.client("s3")
    lane = Lane.from_json(s3.get_object(Bucket=bucket, Key=layout.lane("lane-04"))["Body"].read())
    owned = lane.model_copy(
        update={"fleet_id": "2026-11-29-14-05-33-1a2b3c4d", "owner": "ada", "until": now() + timedelta(hours=3)}
    )
    s3.put_object(Bucket=bucket, Key=layout.lane("lane-04"), Body=owned.to_bytes())
    applied.variables(lanes=3)
    stopped = applied.ies("infra", "apply", "--yes")
    assert stopped.returncode == 2
    assert "lane-04 is owned by 2026-11-29-14-05-33-1a2b3c4d of ada until" in stopped.stderr.splitlines()[-1]
    queues = applied.client("sqs").list_queues(QueueNamePrefix="inspect-fleet-default-lane-04")["QueueUrls"]
    assert len(queues) == 3
    refused = applied.ies("infra", "destroy", "--yes")
    assert refused.returncode == 2 and "still holds logs (2" in refused.stderr
    s3.put_object(Bucket=bucket, Key=layout.lane("lane-04"), Body=lane.to_bytes())


def test_lanes_4_to_3_removes_the_last_only(applied: Estate) -> None:
    done = applied.ies("infra", "apply", "--yes")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^removed (module\S+)", done.stderr, re.M) and "replaced" not in done.stderr
    assert set(re.findall(r'^removed module\.lane\["(.*?)"\]', done.stderr, re.M)) == {"lane-04"}
    assert "removed the record of lane-04" in done.stderr
    queues = applied.client("sqs").list_queues(QueueNamePrefix="inspect-fleet-default-")["QueueUrls"]
    assert len(queues) == 9


def test_ci_plans_without_refresh_and_without_keys(applied: Estate) -> None:
    done = applied.terraform("plan", "-refresh=false", "-input=false", "-no-color", who="ci")
    assert done.returncode == 0, done.stderr
    made = {call for who, call in applied.emulator.calls() if who == "ci"}
    assert made - {"sts:GetCallerIdentity"} == set(iam_calls.calls("ci", by="terraform"))


def test_destroy_leaves_nothing(applied: Estate) -> None:
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    applied.client("ecr").put_image(
        repositoryName="inspect-fleet-default-worker", imageTag="v1", imageManifest=json.dumps(manifest)
    )
    done = applied.ies("infra", "destroy", "--yes", "--force")
    assert done.returncode == 0, done.stderr
    assert left(applied) == []
    assert json.loads((applied.directory / "terraform.tfstate").read_text())["resources"] == []


def left(estate: Estate) -> list[str]:
    """What of ours the emulator still has."""
    found = estate.client("s3").list_buckets()["Buckets"]
    names = [bucket["Name"] for bucket in found]
    names += estate.client("sqs").list_queues().get("QueueUrls", [])
    names += [role["RoleName"] for role in estate.client("iam").list_roles()["Roles"]]
    names += [policy["PolicyName"] for policy in estate.client("iam").list_policies(Scope="Local")["Policies"]]
    names += [item["Name"] for item in estate.client("ssm").describe_parameters()["Parameters"]]
    names += [
        item["LaunchTemplateName"] for item in estate.client("ec2").describe_launch_templates()["LaunchTemplates"]
    ]
    names += [vpc["VpcId"] for vpc in estate.client("ec2").describe_vpcs()["Vpcs"] if not vpc["IsDefault"]]
    batch = estate.client("batch")
    names += [item["jobQueueName"] for item in batch.describe_job_queues()["jobQueues"]]
    names += [item["computeEnvironmentName"] for item in batch.describe_compute_environments()["computeEnvironments"]]
    names += [item["jobDefinitionName"] for item in batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]]
    names += [item["repositoryName"] for item in estate.client("ecr").describe_repositories()["repositories"]]
    names += [item["logGroupName"] for item in estate.client("logs").describe_log_groups()["logGroups"]]
    names += [item["TopicArn"] for item in estate.client("sns").list_topics()["Topics"]]
    names += [item["AlarmName"] for item in estate.client("cloudwatch").describe_alarms()["MetricAlarms"]]
    names += [item["DashboardName"] for item in estate.client("cloudwatch").list_dashboards()["DashboardEntries"]]
    names += [item["Name"] for item in estate.client("events").list_rules()["Rules"]]
    return names


def test_calls_of_terraform_and_map_agree_both_ways(applied: Estate) -> None:
    """Everything that Terraform called in this session is in the map, and nothing stands there that it never calls."""
    made = {call for who, call in applied.emulator.calls() if who == "operator"}
    assert made - iam_calls.calls("operator") == set(), "called, but not in the map"
    images = iam_calls.calls("operator", by="evalops.cloud")  # their own tests see them
    assert iam_calls.recordable("operator") - images - made == set(), "in the map, but never called"
