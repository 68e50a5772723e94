"""Asks EC2 for instances: one synchronous CreateFleet over many types and subnets, and what its answer means.

Instances and errors may come in one answer, and an error stands for a launch-template override, not for an instance. The request bucket
of EC2 holds 5 calls and gains 2 a second, so many instances are asked for at once.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws
from evalworker.contract.documents import Market

RETRYABLE = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacity",
        "UnfulfillableCapacity",
        "InsufficientFreeAddressesInSubnet",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "RequestLimitExceeded",
        "Throttling",
        "InternalError",
        "Unavailable",
        "ServiceUnavailable",
    }
)
"""Errors after which other types, the other market or a little time may serve."""

NONE_CAME = frozenset(code for code in RETRYABLE if "Capacity" in code) | {"InsufficientFreeAddressesInSubnet"}
"""Errors that say for certain that nothing was launched, whatever their HTTP status."""

QUOTAS: dict[Market, dict[str, tuple[str, str]]] = {
    "spot": {
        "standard": ("All Standard Spot Instance Requests", "L-34B43A08"),
        "g": ("All G and VT Spot Instance Requests", "L-3819A6DF"),
        "p": ("All P4, P3 and P2 Spot Instance Requests", "L-7212CCBC"),
        "inf": ("All Inf Spot Instance Requests", "L-B5D1601B"),
        "x": ("All X Spot Instance Requests", "L-E3A00192"),
        "f": ("All F Spot Instance Requests", "L-88CF9481"),
    },
    "on-demand": {
        "standard": ("Running On-Demand Standard instances", "L-1216C47A"),
        "g": ("Running On-Demand G and VT instances", "L-DB2E81BA"),
        "p": ("Running On-Demand P instances", "L-417A185B"),
        "inf": ("Running On-Demand Inf instances", "L-1945791B"),
        "x": ("Running On-Demand X instances", "L-7295265B"),
        "f": ("Running On-Demand F instances", "L-74FC7D96"),
    },
}
"""The vCPU quotas (name and code) by market and kind of instance type. Source: Service Quotas, service `ec2`."""

KINDS = {"g": "g", "gr": "g", "vt": "g", "p": "p", "inf": "inf", "x": "x", "f": "f"} | dict.fromkeys(
    ["a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"], "standard"
)
"""The kind by the letters with which an instance type begins; others have quotas of their own, which are met at the launch."""

MAX_OVERRIDES = 300
"""CreateFleet's limit of overrides over all its launch templates."""


@dataclass(frozen=True)
class Source:
    """What instances are launched from: launch templates, instance types and images by architecture, and subnets.

    An image given here overrides the template's own, so that all workers of a fleet have the same.
    """

    templates: dict[str, str]
    instance_types: dict[str, list[str]]
    subnets: list[str]
    images: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Instance:
    """A launched instance."""

    instance_id: str
    instance_type: str
    market: Market


@dataclass(frozen=True)
class LaunchError:
    """Why an override gave nothing. `sentence` is for a person."""

    code: str
    sentence: str
    retryable: bool


@dataclass
class Launched:
    """What came of a request: instances, and errors by whether another try may help.

    `unclear`: no answer came, so EC2 may have launched what was asked for; the same request with the same token tells.
    """

    instances: list[Instance] = field(default_factory=list)
    retryable: list[LaunchError] = field(default_factory=list)
    final: list[LaunchError] = field(default_factory=list)
    unclear: bool = False

    def add(self, other: "Launched") -> None:
        """Take another answer's parts."""
        self.instances += other.instances
        self.retryable += other.retryable
        self.final += other.final


def request(source: Source, count: int, market: Market, tags: dict[str, str], token: str) -> dict[str, Any]:
    """The arguments of one CreateFleet of type `instant`.

    Args:
        tags: put on the instances by the same call, so that none exists without an owner.
        token: makes a repeated call one call (`ClientToken`).
    """
    configurations = []
    room = MAX_OVERRIDES
    for architecture, template in source.templates.items():
        image = {"ImageId": source.images[architecture]} if architecture in source.images else {}
        overrides = [
            {"InstanceType": type_, "SubnetId": subnet, **image}
            for type_ in source.instance_types.get(architecture, [])
            for subnet in source.subnets
        ][:room]
        room -= len(overrides)
        if overrides:
            specification = {"LaunchTemplateId": template, "Version": "$Default"}
            configurations.append({"LaunchTemplateSpecification": specification, "Overrides": overrides})
    capacity = {"TotalTargetCapacity": count, "DefaultTargetCapacityType": market}
    return {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": configurations,
        "TargetCapacitySpecification": capacity,
        # The default spot strategy is the lowest price, which is interrupted the most.
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized", "InstanceInterruptionBehavior": "terminate"},
        "OnDemandOptions": {"AllocationStrategy": "lowest-price"},
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
    }


def quota_of(market: Market, instance_type: str) -> tuple[str, str] | None:
    """Name and code of the vCPU quota that an instance type counts against; None where it is not known."""
    found = re.match(r"([a-z]+)(\d*)", instance_type)
    letters, generation = found.groups() if found else ("", "")
    if market == "spot" and letters == "p" and generation > "4":  # from the fifth on each has one of its own
        return None
    return QUOTAS[market].get(KINDS.get(letters, ""))


def launch(client: Any, source: Source, count: int, market: Market, tags: dict[str, str], token: str) -> Launched:
    """Ask once for `count` instances. What EC2 answers is in the result; raises ServiceError for unusable credentials alone."""
    try:
        answer = client.create_fleet(**request(source, count, market, tags, token))
    except ClientError as error:
        fault = aws.explain(error)
        if fault.credentials:
            raise aws.ServiceError.of(error, "EC2 cannot be asked for instances") from error
        body = error.response.get("Error", {})
        types = [name for some in source.instance_types.values() for name in some]
        told = explain(body.get("Code", ""), body.get("Message", ""), market, count, types)
        answered = sort([replace(told, retryable=told.retryable or fault.retryable)])
        # Of a server error, or a request that had been sent before, nobody knows what came; "no capacity" is an answer.
        answered.unclear = told.code not in NONE_CAME and (fault.status >= 500 or fault.resent)
        return answered
    except BotoCoreError as error:
        fault = aws.explain(error)
        if fault.credentials:
            raise aws.ServiceError.of(error, "EC2 cannot be asked for instances") from error
        text = f"EC2 cannot be asked for instances: {fault.text}"
        return Launched(retryable=[LaunchError(fault.code, text, True)], unclear=True)
    found = sort(
        explain(entry.get("ErrorCode", ""), entry.get("ErrorMessage", ""), market, count, _types_of(entry))
        for entry in answer.get("Errors", [])
    )
    for entry in answer.get("Instances", []):
        found.instances += [
            Instance(instance_id, entry.get("InstanceType", ""), entry.get("Lifecycle", market))
            for instance_id in entry.get("InstanceIds", [])
        ]
    return found


def _types_of(entry: dict[str, Any]) -> list[str]:
    """The instance type that an error of CreateFleet's answer is about."""
    override = entry.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    return [override["InstanceType"]] if "InstanceType" in override else []


def sort(errors: Iterable[LaunchError]) -> Launched:
    """Errors by whether another try may help; of each code the first, since every override may give the same one."""
    found = Launched()
    for error in {error.code: error for error in reversed(list(errors))}.values():
        (found.retryable if error.retryable else found.final).insert(0, error)
    return found


def explain(code: str, message: str, market: Market, count: int, types: Iterable[str] = ()) -> LaunchError:
    """Plain words for EC2's codes. Throttling hides among capacity errors, so the message is looked at as well.

    Args:
        types: the instance types that the error is about.
    """
    if "request limit exceeded" in message.lower():
        code = "RequestLimitExceeded"
    if code in ("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"):
        return LaunchError(code, _quota_text(message, market, count, types), code in RETRYABLE)
    no_capacity = f"EC2 has no {market} capacity for these instance types and subnets now"
    gone = "the launch template is gone: run `make apply`"
    unverified = "this AWS account may not launch instances yet: wait for AWS's mail, usually within hours"
    image = "choose another with --ami or `ct cloud amis --activate`, or run `make ami`"
    texts = {
        "InsufficientInstanceCapacity": no_capacity,
        "InsufficientCapacity": no_capacity,
        "UnfulfillableCapacity": no_capacity,
        "PendingVerification": unverified,
        "Blocked": unverified,
        "InvalidLaunchTemplateId.NotFound": gone,
        "InvalidLaunchTemplateId.NotFoundException": gone,
        "InvalidLaunchTemplateName.NotFoundException": gone,
        "InvalidSubnetID.NotFound": "a subnet of the estate is gone: run `make apply`",
        "InvalidAMIID.NotFound": f"the worker image is gone: {image}",
        "InvalidAMIID.Unavailable": f"the worker image is not available: {image}",
        "InvalidParameterValue": f"EC2 refused a parameter: {message}",
        "RequestLimitExceeded": "EC2 throttles this account's calls; they are repeated more slowly",
        "UnauthorizedOperation": f"these credentials may not launch workers: {message}",
    }
    return LaunchError(code, texts.get(code) or f"EC2 answered {code}: {message}", code in RETRYABLE)


def _quota_text(message: str, market: Market, count: int, types: Iterable[str]) -> str:
    quotas = dict.fromkeys(quota_of(market, name) for name in types)
    known = [f"{quota[0]} ({quota[1]})" for quota in quotas if quota is not None]
    shown = " or ".join(known) if known else f"of {market} vCPUs of these instance types"
    limit = re.search(r"limit of (\d+)", message)
    has = f" is {limit[1]} vCPUs" if limit else " is used up"
    return f"the quota {shown}{has}: {count} more {market} workers do not fit; ask for more in Service Quotas"


def decode_denial(sts: Any, message: str) -> str:
    """The action and resource behind an encoded authorization failure, or the message itself where it cannot be decoded."""
    found = re.search(r"Encoded authorization failure message:\s*(\S+)", message)
    if not found:
        return message
    try:
        decoded = sts.decode_authorization_message(EncodedMessage=found[1])["DecodedMessage"]
    except (ClientError, BotoCoreError):
        return message[: found.start()].strip() or "not authorized"
    action = re.search(r'"action":"([^"]+)"', decoded)
    resource = re.search(r'"resource":"([^"]+)"', decoded)
    return f"{action[1] if action else 'an action'} on {resource[1] if resource else 'a resource'} is not allowed"
