"""The estate's worker AMIs: which there are, who uses them, which may go and why, and whether the newest is stale.

Called by `ct cloud amis`, `clean-amis` and `build-ami --check`. What is decided is decided by functions of values (`plan`,
`stale`); the calls of AWS stand around them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud.payload import CloudError, Fingerprint
from evalworker import aws

ESTATE_TAG = "inspect-fleet-image"
"""On every AMI, snapshot and temporary thing of a build; the value is the estate."""

BUILD_TAG = "inspect-fleet-build"

SNAPSHOT_TRIES = 6
"""A snapshot stays in use for some seconds after its AMI is gone."""


@dataclass(frozen=True)
class Image:
    """One AMI. `created` as EC2 writes it (ISO, UTC), so that text order is time order."""

    image_id: str
    name: str
    architecture: str
    created: str
    state: str
    snapshots: tuple[str, ...]
    tags: dict[str, str]
    gb: int = 0

    @property
    def complete(self) -> bool:
        """Whether its build ended well: Packer tags an image only then."""
        return ESTATE_TAG in self.tags and self.state == "available"


@dataclass(frozen=True)
class Decision:
    """What is to become of an image, and why."""

    image: Image
    remove: bool
    reason: str


def prefix(estate: str) -> str:
    """What the names of an estate's images begin with."""
    return f"inspect-fleet-worker-{estate}-"


def listed(ec2: Any, estate: str) -> list[Image]:
    """The estate's AMIs, the newest first, unfinished ones among them. Raises CloudError."""
    by_tag = pages(ec2, "describe_images", "Images", Owners=["self"], Filters=[_filter(f"tag:{ESTATE_TAG}", estate)])
    by_name = pages(ec2, "describe_images", "Images", Owners=["self"], Filters=[_filter("name", f"{prefix(estate)}*")])
    found = {image["ImageId"]: image for image in [*by_name, *by_tag]}
    mine = [image for image in map(parse, found.values()) if image.tags.get(ESTATE_TAG, estate) == estate]
    return sorted(mine, key=lambda image: (image.created, image.image_id), reverse=True)


def parse(raw: dict[str, Any]) -> Image:
    """An image from EC2's answer."""
    disks = [mapping["Ebs"] for mapping in raw.get("BlockDeviceMappings", []) if "Ebs" in mapping]
    return Image(
        image_id=raw["ImageId"],
        name=raw.get("Name", ""),
        architecture=raw.get("Architecture", ""),
        created=raw.get("CreationDate", ""),
        state=raw.get("State", ""),
        snapshots=tuple(disk["SnapshotId"] for disk in disks if disk.get("SnapshotId")),
        tags={tag["Key"]: tag["Value"] for tag in raw.get("Tags", [])},
        gb=sum(int(disk.get("VolumeSize", 0)) for disk in disks),
    )


def uses(ec2: Any, ssm: Any, parameters: dict[str, str], images: Iterable[Image]) -> dict[str, list[str]]:
    """Who uses each image: a parameter, a launch template (any version, of anybody), an instance that is not terminated.

    `parameters`: what the launch templates resolve, by architecture (`Estate.workers.images`).
    Raises CloudError when one of the three cannot be asked: what is not known to be free is in use.
    """
    wanted = {image.image_id for image in images}
    found: dict[str, list[str]] = {}
    for architecture, value in active(ssm, parameters).items():
        found.setdefault(value, []).append(f"parameter {parameters[architecture]}")
    for template in pages(ec2, "describe_launch_templates", "LaunchTemplates"):
        identity = template["LaunchTemplateId"]
        for version in pages(
            ec2, "describe_launch_template_versions", "LaunchTemplateVersions", LaunchTemplateId=identity
        ):
            image = version["LaunchTemplateData"].get("ImageId", "")
            if image in wanted:
                found.setdefault(image, []).append(
                    f"launch template {template['LaunchTemplateName']} version {version['VersionNumber']}"
                )
    if wanted:
        for reservation in pages(
            ec2, "describe_instances", "Reservations", Filters=[_filter("image-id", *sorted(wanted))]
        ):
            for instance in reservation["Instances"]:
                if instance["State"]["Name"] != "terminated":
                    found.setdefault(instance["ImageId"], []).append(f"instance {instance['InstanceId']}")
    return found


def active(ssm: Any, parameters: dict[str, str]) -> dict[str, str]:
    """By architecture the image that workers boot next. Raises CloudError."""
    try:
        answer = ssm.get_parameters(Names=sorted(parameters.values()))
    except (ClientError, BotoCoreError) as error:
        raise CloudError(f"cannot read the image parameters: {aws.explain(error).text}") from None
    values = {item["Name"]: item["Value"] for item in answer["Parameters"]}
    return {architecture: values[name] for architecture, name in parameters.items() if name in values}


def activate(ssm: Any, parameter: str, image: str) -> None:
    """Let the launch template resolve to this image from the next launch on. Raises CloudError."""
    try:
        ssm.put_parameter(Name=parameter, Value=image, Type="String", DataType="aws:ec2:image", Overwrite=True)
    except (ClientError, BotoCoreError) as error:
        raise CloudError(f"cannot set {parameter} to {image}: {aws.explain(error).text}", 1) from None


def plan(
    images: list[Image], keep: int, used: dict[str, list[str]], building: Callable[[Image], bool]
) -> list[Decision]:
    """What becomes of each image: used ones and the newest `keep` of each architecture stay.

    `building` says of an unfinished image whether its build may still run.
    """
    kept: dict[str, int] = {}
    decisions = []
    for image in sorted(images, key=lambda image: (image.created, image.image_id), reverse=True):
        if users := used.get(image.image_id):
            rest = f" and {len(users) - 1} more" if len(users) > 1 else ""
            decision = Decision(image, False, f"in use by {users[0]}{rest}")
        elif not image.complete and building(image):
            decision = Decision(image, False, "its build may still run")
        elif not image.complete:
            decision = Decision(image, True, "its build did not end")
        elif kept.get(image.architecture, 0) < keep:
            decision = Decision(image, False, f"among the newest {keep} of {image.architecture}")
        else:
            decision = Decision(image, True, f"older than the newest {keep} of {image.architecture}")
        if image.complete:
            kept[image.architecture] = kept.get(image.architecture, 0) + 1
        decisions.append(decision)
    return decisions


def deregister(ec2: Any, image: Image, sleep: Callable[[float], None] = time.sleep) -> None:
    """Deregister the image and delete its snapshots. Raises CloudError with what is left."""
    try:
        ec2.deregister_image(ImageId=image.image_id)
    except (ClientError, BotoCoreError) as error:
        if aws.explain(error).code not in ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable"):
            raise CloudError(f"{image.image_id} cannot be deregistered: {aws.explain(error).text}", 1) from None
    for snapshot in image.snapshots:
        delete_snapshot(ec2, snapshot, sleep)


def delete_snapshot(ec2: Any, snapshot: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Delete a snapshot; one that is gone is no error. Raises CloudError."""
    for turn in range(SNAPSHOT_TRIES):
        try:
            ec2.delete_snapshot(SnapshotId=snapshot)
            return
        except (ClientError, BotoCoreError) as error:
            fault = aws.explain(error)
            if fault.code == "InvalidSnapshot.NotFound":
                return
            if fault.code != "InvalidSnapshot.InUse" or turn == SNAPSHOT_TRIES - 1:
                raise CloudError(f"the snapshot {snapshot} cannot be deleted: {fault.text}", 1) from None
        sleep(2.0**turn)


def stale(image: Image, now: Fingerprint, with_sandboxes: bool) -> list[str]:
    """Why an image is behind the working tree; nothing when it is not.

    Args:
        with_sandboxes: whether `now` says which sandboxes are wanted; else those of the image are not judged.
    """
    told = {
        "lock": "uv.lock has changed: jobs would run other package versions than those that are baked in",
        "scripts": "the provisioning scripts or units have changed",
        "worker": "the worker package has changed: it is fetched anew at each start",
        "sandboxes": "other sandbox images are asked for",
    }
    reasons = []
    for name, text in told.items():
        if name == "sandboxes" and not with_sandboxes:
            continue
        baked, wanted = image.tags.get(f"inspect-fleet-{name}"), getattr(now, name)
        if baked != wanted:
            reasons.append(f"{text} ({baked or 'unknown'} → {wanted})")
    return reasons


def _filter(name: str, *values: str) -> dict[str, Any]:
    return {"Name": name, "Values": list(values)}


def pages(ec2: Any, operation: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    """All entries of a listing, page by page. Raises CloudError."""
    try:
        pages = ec2.get_paginator(operation).paginate(**arguments)
        return [entry for page in pages for entry in page[key]]
    except (ClientError, BotoCoreError) as error:
        raise CloudError(f"EC2 ({operation}): {aws.explain(error).text}") from None
