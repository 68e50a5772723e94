"""One build of a worker AMI, from the working tree to the parameter that the launch template resolves.

Called by `ct cloud build-ami`. It prepares Packer's folder, runs Packer, and after any other end than a good one removes what the
build has left behind.
"""

import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud import amis, leftovers, packer, payload, sandboxes
from evalops.cloud.payload import CloudError, Fingerprint
from evalops.infra.estate import Estate
from evalops.ui import EXIT_INTERRUPTED
from evalworker import aws
from evalworker.contract.wire import now

DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
BUILT_ON = {"x86_64": "m7i.large", "arm64": "m7g.large"}
"""Machines to build on."""

IMAGE_S = 3600
"""How long an unfinished image is waited for before it can be removed."""

SSM_AGENT = """#!/bin/sh
shutdown -P +180
apt-get -qq update && apt-get -qqy install curl
arch=$(dpkg --print-architecture)
curl -fsS --retry 5 -o /tmp/ssm.deb "https://s3.amazonaws.com/ec2-downloads-linux/SSMAgent/latest/debian_$arch/amazon-ssm-agent.deb"
dpkg -i /tmp/ssm.deb && systemctl enable --now amazon-ssm-agent
"""
"""User data of a machine that is reached by a session of Systems Manager: Debian's image has no agent."""


@dataclass(frozen=True)
class Order:
    """What is to be built.

    Attributes:
        estate: whose workers boot the image.
        architecture: x86_64 or arm64.
        tasks, images: what is baked in (`evalops.cloud.sandboxes`).
        ssh_from: networks that may connect while it is built.
        ssm_profile: an instance profile for a session of Systems Manager instead of SSH from outside; None: SSH.
        private: whether Packer reaches the machine by its private address.
        kms_key: the image's key; None takes the account's default.
        poll_seconds: between two looks at the image's state.
    """

    estate: str
    architecture: str = "x86_64"
    tasks: tuple[str, ...] = ()
    images: Path | None = None
    ssh_from: tuple[str, ...] = ()
    ssm_profile: str | None = None
    private: bool = False
    subnet: str = ""
    kms_key: str | None = None
    poll_seconds: int = 15


@dataclass(frozen=True)
class Prepared:
    """A build that is ready to run: Packer's folder with template, values and payload."""

    packer: packer.Packer
    folder: Path
    build_id: str
    fingerprint: Fingerprint
    values: dict[str, Any]
    baked: dict[str, bytes]

    @property
    def values_file(self) -> Path:
        """Packer's variables."""
        return self.folder / "values.pkrvars.json"


@contextmanager
def prepared(order: Order, root: Path, region: str) -> Iterator[Prepared]:
    """Everything that Packer needs, in a folder that goes afterwards. Raises CloudError."""
    versions = payload.versions(root)
    found = packer.find(versions["PACKER_AT_LEAST"])
    baked = sandboxes.collect(list(order.tasks), order.images)
    print_ = payload.fingerprint(root, baked)
    build_id = leftovers.new_build_id(now(), secrets.token_hex(4))
    auth = payload.registry_auth(os.environ.get("INSPECT_FLEET_REGISTRY_AUTH"))
    folder = Path(tempfile.mkdtemp(prefix="inspect-fleet-ami-"))  # 0700: the registry login is in it
    try:
        template = folder / "template"
        template.mkdir()
        packer.stage(root, template, found.modern)
        tar = payload.archive(root, {"image.env": payload.image_env(print_), **baked})
        (folder / "payload.tar.gz").write_bytes(payload.compressed(tar))
        (folder / "registry.json").write_bytes(auth)
        values = _values(order, root, versions, folder, build_id, print_, baked, region)
        ready = Prepared(found, template, build_id, print_, values, baked)
        packer.write_values(ready.values_file, values)
        yield ready
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _values(
    order: Order,
    root: Path,
    versions: dict[str, str],
    folder: Path,
    build_id: str,
    print_: Fingerprint,
    baked: dict[str, bytes],
    region: str,
) -> dict[str, Any]:
    tags = print_.tags() | {"inspect-fleet-images": sandboxes.summary(baked) or "none"}
    values = {
        "estate": order.estate,
        "region": region,
        "architecture": order.architecture,
        "debian_architecture": DEBIAN_ARCHITECTURES[order.architecture],
        "debian_release": versions["DEBIAN_RELEASE"],
        "debian_owner": versions["DEBIAN_OWNER"],
        "instance_type": BUILT_ON[order.architecture],
        "kms_key_id": order.kms_key or "",
        "subnet_id": order.subnet,
        "ssh_interface": "private_ip" if order.private else "public_ip",
        "ssh_from": list(order.ssh_from),
        "build_id": build_id,
        "ami_name": f"{amis.prefix(order.estate)}{order.architecture.replace('_', '-')}-{build_id}",
        "image_tags": tags,
        "payload": str(folder / "payload.tar.gz"),
        "registry_auth": str(folder / "registry.json"),
        "scripts": str(root / "packer" / "provision"),
        "manifest": str(folder / "manifest.json"),
        "poll_seconds": order.poll_seconds,
    }
    if order.ssm_profile is not None:
        # The session reaches the machine from within: nothing outside may connect.
        values |= {
            "ssh_interface": "session_manager",
            "ssh_from": ["127.0.0.1/32"],
            "instance_profile": order.ssm_profile,
        }
        values |= {"user_data": SSM_AGENT}
    return values


def run(ready: Prepared, ec2: Any, estate: str, show: Callable[[str], None]) -> str:
    """Build, and return the image's id. Raises CloudError with the failing step and its last lines, after cleaning up."""
    packer.init(ready.packer, ready.folder)
    packer.validate(ready.packer, ready.folder, ready.values_file)
    groups = GroupTagger(ec2, estate, ready.build_id, show)
    result = packer.build(ready.packer, ready.folder, ready.values_file, groups.line)
    if result.status == 0 and not result.interrupted:
        return packer.artifact(Path(ready.values["manifest"]))
    show(f"the build has ended with status {result.status}; looking for what it left")
    remains = clean(ec2, estate, ready.build_id, ready.values["ami_name"], show)
    raise CloudError(explain(result, remains), _exit_code(result))


class GroupTagger:
    """Tags the temporary security group as soon as Packer speaks of it: Packer 1.6 does not, and its name says nothing.

    Without the tag nobody could tell later whose group a killed build has left.
    """

    def __init__(self, ec2: Any, estate: str, build_id: str, show: Callable[[str], None]) -> None:
        self._ec2 = ec2
        self._tags = [{"Key": amis.ESTATE_TAG, "Value": estate}, {"Key": amis.BUILD_TAG, "Value": build_id}]
        self._show = show
        self._name: str | None = None

    def line(self, said: str) -> None:
        """One line of Packer's output; it is shown after what it says has been done."""
        self._show(said)
        if self._name is not None:
            self._tag(self._name)
        elif found := re.search(r"temporary security group for this instance: (\S+)", said):
            self._name = found.group(1)

    def _tag(self, name: str) -> None:
        try:
            groups = self._ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])[
                "SecurityGroups"
            ]
            if groups:
                self._ec2.create_tags(Resources=[group["GroupId"] for group in groups], Tags=self._tags)
                self._name = None
        except (ClientError, BotoCoreError) as error:
            self._name = None
            self._show(f"the security group {name} could not be tagged: {aws.explain(error).text}")


def _exit_code(result: packer.Result) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    return result.status if result.status >= 128 else 1


def explain(result: packer.Result, remains: list[str]) -> str:
    """Why there is no image: the step, its last lines, and what could not be removed."""
    what = "was interrupted" if result.interrupted else f"failed (Packer's status {result.status})"
    if result.status > 128 and not result.interrupted:
        what = f"was killed by signal {result.status - 128}"
    text = f"the build {what} at: {result.step or 'the start'}"
    lines = [*result.lines, *result.errors[:5]]
    if lines:
        text += "\n" + "\n".join(f"    {line}" for line in lines)
    if remains:
        text += "\nnot removed: " + "; ".join(remains) + " (run `ct cloud clean-amis` later)"
    return text


def clean(ec2: Any, estate: str, build_id: str, ami_name: str, show: Callable[[str], None]) -> list[str]:
    """Remove all that a build has left; what could not be removed, as sentences. Never raises."""
    remains = []
    try:
        for image in amis.listed(ec2, estate):
            if image.name == ami_name:
                _await_image(ec2, image)
                again = [one for one in amis.listed(ec2, estate) if one.image_id == image.image_id]
                for one in again or [image]:
                    amis.deregister(ec2, one)
                show(f"removed the unfinished image {image.image_id} with its snapshots")
        for left in leftovers.find(ec2, estate, build_id):
            try:
                leftovers.remove(ec2, left)
                show(f"removed {left}")
            except CloudError as error:
                remains.append(str(error))
    except CloudError as error:
        remains.append(str(error))
    return remains


def _await_image(ec2: Any, image: amis.Image) -> None:
    """An image that is still pending knows no snapshots yet: wait until it does, within bounds."""
    end = time.monotonic() + IMAGE_S
    while image.state == "pending" and time.monotonic() < end:
        try:
            found = ec2.describe_images(ImageIds=[image.image_id])["Images"]
        except (ClientError, BotoCoreError):
            return
        if not found or found[0].get("State") != "pending":
            return
        time.sleep(5)


def preflight(order: Order, estate: Estate | None, region: str, activate: bool) -> None:
    """What can be refused before money is spent. Raises CloudError."""
    if order.architecture not in DEBIAN_ARCHITECTURES:
        raise CloudError(f"--arch {order.architecture}: must be one of {', '.join(DEBIAN_ARCHITECTURES)}")
    if activate and estate is not None and order.architecture not in estate.workers.images:
        known = ", ".join(sorted(estate.workers.images)) or "none"
        raise CloudError(
            f"the estate {order.estate!r} has no {order.architecture} workers (only {known}): add an instance type of that "
            "architecture to terraform.tfvars and run `make apply`, or build with --no-activate"
        )
    if estate is not None and estate.region != region:
        raise CloudError(f"the estate {order.estate!r} is in {estate.region}, not in {region}: set AWS_DEFAULT_REGION")


def account(sts: Any) -> str:
    """The account in use. Raises CloudError when the credentials do not serve."""
    try:
        return str(sts.get_caller_identity()["Account"])
    except (ClientError, BotoCoreError) as error:
        raise CloudError(aws.explain(error).text) from None
