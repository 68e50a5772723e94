"""What must be so before an EC2 fleet may cost money, and what it will be launched from: each failure is one sentence.

`ct run eval --ec2` calls `machines` before anything is planned on AWS. Nothing is changed here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud import payload
from evalops.ec2.capacity import Source, quota_of
from evalops.infra.doctor import DEBIAN
from evalops.infra.estate import Estate, read_estate
from evalops.settings import Settings
from evalops.ui import fail, note
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Machines, Market
from evalworker.storage import Storage

ARCHITECTURES = ("x86_64", "arm64")
SPOT_FIRST: list[Market] = ["spot", "on-demand"]


@dataclass(frozen=True)
class Wanted:
    """What the user wants of the machines; see the options of `ct run eval` for each.

    `images`: by architecture, those with which a run goes on.
    """

    workers: int
    markets: list[Market]
    on_demand_base: int = 0
    instance_types: tuple[str, ...] = ()
    image: str | None = None
    images: dict[str, str] = field(default_factory=dict)


def surroundings(settings: Settings) -> tuple[Settings, Estate]:
    """The estate in use, and the settings with its bucket as the root. Ends with a sentence when the two do not fit."""
    try:
        account = aws.client("sts").get_caller_identity()["Account"]
    except (ClientError, BotoCoreError, aws.ServiceError) as error:
        fail(f"AWS cannot be used: {aws.explain(error).text}")
    estate = read_estate(settings.estate)
    if account != estate.account:
        fail(f"the credentials are for the account {account}, the estate {estate.name} is in {estate.account}")
    if settings.bucket not in (None, estate.bucket):
        fail(
            f"S3_BUCKET_NAME is {settings.bucket} and the estate's bucket is {estate.bucket}: workers reach that one alone; "
            "unset S3_BUCKET_NAME, or choose the estate by INSPECT_FLEET_NAME"
        )
    return replace(settings, root=f"s3://{estate.bucket}", bucket=estate.bucket), estate


def check_deadline(deadline: timedelta, estate: Estate) -> None:
    """Refuse a deadline that the machines would not live to see."""
    most = estate.workers.max_lifetime_minutes
    if deadline > timedelta(minutes=most):
        fail(
            f"--deadline is longer than the {most} minutes that a worker of {estate.name} lives: choose a shorter one, "
            "or raise max_lifetime_minutes and run `make apply`"
        )


def machines(estate: Estate, wanted: Wanted) -> Machines:
    """From what the fleet's workers will be launched: images that exist, types that fit them, within the quota."""
    ec2 = aws.client("ec2", estate.region)
    types = _types(ec2, estate, wanted)
    images = _images(ec2, estate, wanted, types)
    types = {architecture: some for architecture, some in types.items() if architecture in images}
    if not types:
        fail(f"--ami {wanted.image} fits none of the instance types: name one of its architecture by --instance-type")
    _check_quota(ec2, estate, wanted, types)
    return Machines(
        estate=estate.name,
        markets=wanted.markets,
        on_demand_base=wanted.on_demand_base,
        images=images,
        instance_types=types,
        workers=wanted.workers,
    )


def check_keys(estate: Estate, models: Iterable[str], secrets: list[str]) -> None:
    """Refuse a model whose provider's key the estate has a place for and no value."""
    for model in models:
        name = f"{model.split('/')[0].upper().replace('-', '_')}_API_KEY"
        if name in estate.secrets and name not in secrets:
            fail(f"{model} needs {name}, and {estate.secrets[name]} has no value: `ies secrets push {name}`")


def source(estate: Estate, machines: Machines) -> Source:
    """What CreateFleet is asked with."""
    return Source(
        templates=estate.workers.launch_templates,
        instance_types=machines.instance_types,
        subnets=estate.workers.subnets,
        images=machines.images,
    )


def prepare_boot(storage: Storage, machines: Machines, estate: Estate) -> None:
    """The stock image installs the worker by a script in the bucket: store this checkout's before machines boot that need it."""
    images = _described(aws.client("ec2", estate.region), list(machines.images.values()))
    bare = [image["ImageId"] for image in images if image.get("OwnerId") == DEBIAN]
    if not bare:
        return
    try:
        storage.put(layout.BOOT_SCRIPT, payload.boot_script(payload.checkout()))
    except payload.CloudError as error:
        if not storage.exists(layout.BOOT_SCRIPT):
            fail(f"the image {bare[0]} is no worker image, and nothing can make it one: {error}")
    note(f"workers boot the image {bare[0]} and install everything first; `make ami` bakes one that boots in a minute")


def _types(ec2: Any, estate: Estate, wanted: Wanted) -> dict[str, list[str]]:
    if not wanted.instance_types:
        return estate.workers.instance_types
    found: dict[str, list[str]] = {}
    for entry in _vcpu_entries(ec2, wanted.instance_types):
        supported = entry["ProcessorInfo"]["SupportedArchitectures"]
        architecture = next((name for name in ARCHITECTURES if name in supported), None)
        if architecture not in estate.workers.launch_templates or architecture is None:
            fail(
                f"--instance-type {entry['InstanceType']}: the estate has no launch template for {'/'.join(supported)}; "
                "add a type of that architecture to instance_types and run `make apply`"
            )
        found.setdefault(architecture, []).append(entry["InstanceType"])
    order = list(wanted.instance_types)
    return {architecture: sorted(some, key=order.index) for architecture, some in found.items()}


def _vcpu_entries(ec2: Any, types: tuple[str, ...]) -> list[dict[str, Any]]:
    try:
        pages = ec2.get_paginator("describe_instance_types").paginate(InstanceTypes=list(types))
        return [entry for page in pages for entry in page["InstanceTypes"]]
    except (ClientError, BotoCoreError) as error:
        fault = aws.explain(error)
        if fault.code == "InvalidInstanceType":
            fail(f"--instance-type: {fault.text.removeprefix(f'{fault.code}: ')}")
        fail(f"the instance types cannot be looked at: {fault.text}")


def _images(ec2: Any, estate: Estate, wanted: Wanted, types: dict[str, list[str]]) -> dict[str, str]:
    """The image of each architecture that is used: --ami, that of a run that goes on, or what the estate's parameter says now."""
    if wanted.image is not None:
        (image,) = _described(ec2, [wanted.image])
        return {image["Architecture"]: wanted.image}
    kept = {architecture: wanted.images[architecture] for architecture in types if architecture in wanted.images}
    names = {estate.workers.images[architecture]: architecture for architecture in types if architecture not in kept}
    if not names:
        _described(ec2, list(kept.values()))
        return kept
    try:
        answer = aws.client("ssm", estate.region).get_parameters(Names=list(names))
    except (ClientError, BotoCoreError) as error:
        fail(f"the workers' image cannot be looked up: {aws.explain(error).text}")
    if answer.get("InvalidParameters"):
        fail(f"there is no parameter {answer['InvalidParameters'][0]}: run `make apply`")
    images = kept | {names[item["Name"]]: item["Value"] for item in answer["Parameters"]}
    _described(ec2, list(images.values()))
    return images


def _described(ec2: Any, images: list[str]) -> list[dict[str, Any]]:
    choose = "choose another with --ami or `ct cloud amis --activate`, or run `make ami`"
    try:
        found: list[dict[str, Any]] = ec2.describe_images(ImageIds=images)["Images"]
    except (ClientError, BotoCoreError) as error:
        fault = aws.explain(error)
        if fault.code.startswith("InvalidAMIID"):
            fail(f"the image {', '.join(images)} does not exist: {choose}")
        fail(f"the image {', '.join(images)} cannot be looked at: {fault.text}")
    if missing := set(images) - {image["ImageId"] for image in found}:
        fail(f"the image {', '.join(sorted(missing))} does not exist: {choose}")
    for image in found:
        if image.get("State", "available") != "available":
            fail(f"the image {image['ImageId']} is {image['State']}: wait for it, or {choose}")
    return found


def _check_quota(ec2: Any, estate: Estate, wanted: Wanted, types: dict[str, list[str]]) -> None:
    """Refuse what cannot ever run at once; a quota that cannot be looked at is met at the launch."""
    names = tuple(name for some in types.values() for name in some)
    sizes = {entry["InstanceType"]: int(entry["VCpuInfo"]["DefaultVCpus"]) for entry in _vcpu_entries(ec2, names)}
    least: dict[tuple[str, str], int] = {}  # by quota: the vCPUs of the smallest type that counts against it
    for market in wanted.markets:
        for name, size in sizes.items():
            if (quota := quota_of(market, name)) is None:
                return  # as one that cannot be looked at: what it allows may be enough
            least[quota] = min(size, least.get(quota, size))
    limits: dict[tuple[str, str], float] = {}
    for quota in least:
        try:
            answer = aws.client("service-quotas", estate.region).get_service_quota(
                ServiceCode="ec2", QuotaCode=quota[1]
            )
            limits[quota] = answer["Quota"]["Value"]
        except (ClientError, BotoCoreError, KeyError):
            return
    room = sum(int(limits[quota] // size) for quota, size in least.items())
    if wanted.workers > room:
        (name, code), *_ = least
        need = wanted.workers * min(least.values())
        shown = " and ".join(f"{quota[0]} is {value:.0f}" for quota, value in limits.items())
        fail(
            f"{wanted.workers} workers need {need} vCPUs and the quota {shown}: lower --max-workers to "
            f"{room}, or ask for more of {name} ({code}) in Service Quotas"
        )
