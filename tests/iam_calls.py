"""The map from calls to IAM actions (terraform/iam-calls.json), and its comparison with policies and with recorded calls.

Each entry: {call: {"actions": […], "callers": {role: maker}}}. A maker that begins with `later` names code that does not exist
yet; one that says `not recorded: …` gives the reason why no test can see the call. `conftest.py` records, this compares.
Run as a program, `iam_calls.py DIR` says what a whole suite's record (INSPECT_FLEET_CALLS=DIR) lacks of the map.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

MAP = Path(__file__).parents[1] / "terraform" / "iam-calls.json"
ROLES = ("worker", "batch_job", "researcher", "operator", "ci")

WITHOUT_ARN = frozenset(
    f"ec2:Describe{what}"
    for what in (
        "AvailabilityZones", "Images", "InstanceStatus", "InstanceTypes", "Instances", "InternetGateways", "KeyPairs", "LaunchTemplates",
        "LaunchTemplateVersions", "NetworkAcls", "NetworkInterfaces", "PrefixLists", "Regions", "RouteTables", "SecurityGroups",
        "SecurityGroupRules", "Snapshots", "SpotPriceHistory", "Subnets", "Tags", "Volumes", "VpcEndpoints", "Vpcs",
    )
) | frozenset(
    f"batch:{what}"
    for what in (
        "DeregisterJobDefinition", "DescribeComputeEnvironments", "DescribeJobDefinitions", "DescribeJobQueues",
        "DescribeJobs", "ListJobs",
    )
) | frozenset(
    (
        "cloudwatch:PutMetricData", "ecr:GetAuthorizationToken", "pricing:GetProducts", "servicequotas:GetServiceQuota",
        "ssm:DescribeParameters", "sts:DecodeAuthorizationMessage",
    )
)  # fmt: skip
"""Actions that take no ARN, by AWS's Service Authorization Reference: only these may stand on `*`."""


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The map as it is."""
    found: dict[str, dict[str, Any]] = json.loads(MAP.read_text())
    return found


def calls(role: str, by: str = "") -> set[str]:
    """What a role may call; `by` limits it to makers that begin so."""
    return {
        call
        for call, entry in entries().items()
        if entry["callers"].get(role, "-").startswith(by) and role in entry["callers"]
    }


def recordable(role: str) -> set[str]:
    """Those calls of a role that some test must see."""
    return {call for call in calls(role) if not _unseen(entries()[call]["callers"][role])}


def _unseen(maker: str) -> bool:
    return maker.startswith("later") or "not recorded" in maker


def actions(role: str, skip: tuple[str, ...] = ()) -> set[str]:
    """The IAM actions that a role's calls need, without those of makers that a word of `skip` stands in."""
    return {
        action
        for call in calls(role)
        if not any(word in entries()[call]["callers"][role] for word in skip)
        for action in entries()[call]["actions"]
    }


def applied_policies(iam: Any, estate: str) -> dict[str, list[dict[str, Any]]]:
    """Each role's policy documents as AWS has them."""
    prefix = f"inspect-fleet-{estate}"
    found: dict[str, list[dict[str, Any]]] = {
        "worker": [iam.get_role_policy(RoleName=f"{prefix}-worker", PolicyName="worker")["PolicyDocument"]],
        "batch_job": [iam.get_role_policy(RoleName=f"{prefix}-batch-job", PolicyName="batch-job")["PolicyDocument"]],
    }
    for policy in iam.list_policies(Scope="Local")["Policies"]:
        role = policy["PolicyName"].removeprefix(f"{prefix}-").split("-")[0]
        version = iam.get_policy_version(PolicyArn=policy["Arn"], VersionId=policy["DefaultVersionId"])
        found.setdefault(role, []).append(version["PolicyVersion"]["Document"])
    return found


def texts(documents: list[dict[str, Any]]) -> list[str]:
    """The documents as JSON."""
    return [json.dumps(document, separators=(",", ":")) for document in documents]


def granted(documents: list[dict[str, Any]]) -> set[str]:
    """All actions that are allowed somewhere."""
    return {action for statement in _allowed(documents) for action in _many(statement["Action"])}


def on_everything(documents: list[dict[str, Any]]) -> set[str]:
    """Actions that are allowed on `*`."""
    return {
        a
        for statement in _allowed(documents)
        if "*" in _many(statement["Resource"])
        for a in _many(statement["Action"])
    }


def _allowed(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for document in documents for s in document["Statement"] if s["Effect"] == "Allow"]


def _many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


PROBES = {
    "s3:HeadBucket": "asks whether the bucket exists; a Batch job's is refused (its s3:ListBucket has a condition on the prefix)",
    "s3:CreateBucket": "tried by s3fs only where the bucket is missing; nobody but the operator may",
    "s3:DeleteObjects": "without versions, for which s3:DeleteObject is enough",
}
"""What s3fs calls for Inspect beside the map, and why no role needs an action more for it."""


def missing(recorded: set[tuple[str, tuple[str, ...], str]]) -> list[str]:
    """Recorded calls (package, roles, call) that none of their roles has in the map, as lines."""
    return sorted(
        f"{call} by {package} (as {' or '.join(roles)})"
        for package, roles, call in recorded
        if not any(role in entries().get(call, {"callers": {}})["callers"] for role in roles)
        and not (package == "s3fs" and call in PROBES)
    )


def unused(recorded: set[tuple[str, tuple[str, ...], str]]) -> list[str]:
    """Calls of the map that a whole suite should have made under one of their roles and has not, as lines."""
    made = {(role, call) for _, roles, call in recorded for role in roles}
    return sorted(
        f"{call} of {role} ({entry['callers'][role]})"
        for call, entry in entries().items()
        for role in entry["callers"]
        if not _unseen(entry["callers"][role])
        and not entry["callers"][role].startswith(
            ("terraform", "evalops.infra")
        )  # the emulator of the e2e tests sees these
        and (role, call) not in made
    )


if __name__ == "__main__":
    from aws_calls import recorded

    record = recorded(Path(sys.argv[1]))
    lines = [f"not in the map: {line}" for line in missing(record)] + [
        f"never called: {line}" for line in unused(record)
    ]
    print("\n".join(lines) or f"{len(record)} recorded calls and the map agree")
    sys.exit(1 if lines else 0)
