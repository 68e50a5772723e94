"""What a build of an AMI leaves when it is killed: an instance, a key, a security group, an unfinished image, snapshots.

Called after each build that did not end well, for that build alone, and by `clean-amis` for all. Everything temporary is marked
with the build's id: by a tag where Packer tags, by the name of the key where it doesn't.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud import amis
from evalops.cloud.amis import BUILD_TAG, ESTATE_TAG
from evalops.cloud.payload import CloudError
from evalworker import aws

KEY_PREFIX = "packer_inspect-fleet-"

UNFINISHED_AFTER = timedelta(hours=3)
"""A build that began so long ago has ended: its machine shuts itself down before."""

GROUP_TRIES = 8
"""A security group stays in use until its instance is gone for good."""

_BUILD_ID = re.compile(r"(\d{8}t\d{6})z-[0-9a-f]{8}")


@dataclass(frozen=True)
class Leftover:
    """One thing. `kind` is instance, key, group or snapshot; `build` the build's id."""

    kind: str
    identity: str
    build: str

    def __str__(self) -> str:
        return f"{self.kind} {self.identity} of build {self.build}"


def new_build_id(moment: datetime, random: str) -> str:
    """The id of a build that begins now; `random` are eight hex digits."""
    return f"{moment.astimezone(UTC):%Y%m%dt%H%M%Sz}-{random}"


def began(build: str) -> datetime | None:
    """When a build began, by its id; None for an id that is none of ours."""
    match = _BUILD_ID.fullmatch(build)
    return datetime.strptime(match.group(1), "%Y%m%dt%H%M%S").replace(tzinfo=UTC) if match else None


def may_run(build: str, moment: datetime, after: timedelta) -> bool:
    """Whether a build may still be running."""
    start = began(build)
    return start is not None and moment - start < after


def find(ec2: Any, estate: str, build: str | None = None) -> list[Leftover]:
    """What there is of this build, or of all builds of the estate. Raises CloudError."""
    mine = [{"Name": f"tag:{ESTATE_TAG}", "Values": [estate]}, {"Name": f"tag:{BUILD_TAG}", "Values": [build or "*"]}]
    found: list[Leftover] = []
    for reservation in amis.pages(ec2, "describe_instances", "Reservations", Filters=mine):
        for instance in reservation["Instances"]:
            if instance["State"]["Name"] not in ("terminated", "shutting-down"):
                found.append(Leftover("instance", instance["InstanceId"], _build_of(instance)))
    builds = {left.build for left in found} | ({build} if build else set())
    try:
        keys = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [f"{KEY_PREFIX}{build or ''}*"]}])[
            "KeyPairs"
        ]
    except (ClientError, BotoCoreError) as error:
        raise CloudError(f"EC2 (describe_key_pairs): {aws.explain(error).text}") from None
    for key in keys:
        of = key["KeyName"].removeprefix(KEY_PREFIX)
        if began(of) is not None or of in builds:
            found.append(Leftover("key", key["KeyName"], of))
    for group in amis.pages(ec2, "describe_security_groups", "SecurityGroups", Filters=mine):
        found.append(Leftover("group", group["GroupId"], _build_of(group)))
    return found + _snapshots(ec2, mine)


def _snapshots(ec2: Any, mine: list[dict[str, Any]]) -> list[Leftover]:
    """Tagged snapshots of no image. An untagged one is found by the unfinished image that it belongs to."""
    snapshots = amis.pages(ec2, "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=mine)
    if not snapshots:
        return []
    images = amis.pages(ec2, "describe_images", "Images", Owners=["self"])
    used = {snapshot for raw in images for snapshot in amis.parse(raw).snapshots}
    return [Leftover("snapshot", s["SnapshotId"], _build_of(s)) for s in snapshots if s["SnapshotId"] not in used]


def _build_of(thing: dict[str, Any]) -> str:
    return str(next((tag["Value"] for tag in thing.get("Tags", []) if tag["Key"] == BUILD_TAG), ""))


def remove(ec2: Any, left: Leftover, sleep: Callable[[float], None] = time.sleep) -> None:
    """Remove one thing; one that is gone is no error. Raises CloudError."""
    calls: dict[str, Callable[[], Any]] = {
        "instance": lambda: ec2.terminate_instances(InstanceIds=[left.identity]),
        "key": lambda: ec2.delete_key_pair(KeyName=left.identity),
        "group": lambda: ec2.delete_security_group(GroupId=left.identity),
        "snapshot": lambda: amis.delete_snapshot(ec2, left.identity, sleep),
    }
    for turn in range(GROUP_TRIES):
        try:
            calls[left.kind]()
            return
        except (ClientError, BotoCoreError) as error:
            fault = aws.explain(error)
            if fault.code.endswith("NotFound"):
                return
            if fault.code != "DependencyViolation" or turn == GROUP_TRIES - 1:
                raise CloudError(f"the {left} cannot be removed: {fault.text}", 1) from None
        sleep(min(30.0, 2.0**turn))
