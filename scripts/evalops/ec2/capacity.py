"""Asks EC2 for instances: one synchronous CreateFleet over many types and subnets, and what its answer means.

Instances and errors may come in one answer, and an error stands for a launch-template override, not for an instance. The request bucket
of EC2 holds 5 calls and gains 2 a second, so many instances are asked for at once.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws

Market = Literal["spot", "on-demand"]

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

QUOTAS = {
    "spot": ("All Standard Spot Instance Requests", "L-34B43A08"),
    "on-demand": ("Running On-Demand Standard instances", "L-1216C47A"),
}
"""The vCPU quotas of standard instance families, by market. Source: Service Quotas, service `ec2`."""

MAX_OVERRIDES = 300
"""CreateFleet's limit of overrides over all its launch templates."""


@dataclass(frozen=True)
class Source:
    """What instances are launched from: launch templates and instance types by architecture, and subnets.

    `image` overrides the template's own.
    """

    templates: dict[str, str]
    instance_types: dict[str, list[str]]
    subnets: list[str]
    image: str | None = None


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
    """What came of a request: instances, and errors by whether another try may help."""

    instances: list[Instance] = field(default_factory=list)
    retryable: list[LaunchError] = field(default_factory=list)
    final: list[LaunchError] = field(default_factory=list)

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
    for architecture, template in source.templates.items():
        overrides = [
            {"InstanceType": type_, "SubnetId": subnet, **({"ImageId": source.image} if source.image else {})}
            for type_ in source.instance_types.get(architecture, [])
            for subnet in source.subnets
        ]
        if overrides:
            specification = {"LaunchTemplateId": template, "Version": "$Default"}
            configurations.append(
                {"LaunchTemplateSpecification": specification, "Overrides": overrides[:MAX_OVERRIDES]}
            )
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


def launch(client: Any, source: Source, count: int, market: Market, tags: dict[str, str], token: str) -> Launched:
    """Ask once for `count` instances. Never raises for what EC2 answers: it is in the result."""
    try:
        answer = client.create_fleet(**request(source, count, market, tags, token))
    except (ClientError, BotoCoreError) as error:
        return sort([explain(error, market, count)])
    found = sort(_errors(answer, market, count))
    for entry in answer.get("Instances", []):
        found.instances += [
            Instance(instance_id, entry.get("InstanceType", ""), entry.get("Lifecycle", market))
            for instance_id in entry.get("InstanceIds", [])
        ]
    return found


def sort(errors: Iterable[LaunchError]) -> Launched:
    """Errors by whether another try may help, each sentence once."""
    found = Launched()
    for error in dict.fromkeys(errors):
        (found.retryable if error.retryable else found.final).append(error)
    return found


def _errors(answer: dict[str, Any], market: Market, count: int) -> list[LaunchError]:
    return [
        _sentence(entry.get("ErrorCode", ""), entry.get("ErrorMessage", ""), market, count)
        for entry in answer.get("Errors", [])
    ]


def explain(error: Exception, market: Market, count: int) -> LaunchError:
    """What an exception of the call means."""
    if not isinstance(error, ClientError):
        fault = aws.explain(error)
        return LaunchError(fault.code, f"EC2 cannot be asked for instances: {fault.text}", fault.retryable)
    body = error.response.get("Error", {})
    return _sentence(body.get("Code", ""), body.get("Message", ""), market, count)


def _sentence(code: str, message: str, market: Market, count: int) -> LaunchError:
    """Plain words for EC2's codes. Throttling hides among capacity errors, so the message is looked at as well."""
    if "request limit exceeded" in message.lower():
        code = "RequestLimitExceeded"
    retryable = code in RETRYABLE
    if code in ("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"):
        name, quota = QUOTAS[market]
        limit = re.search(r"limit of (\d+)", message)
        has = f" is {limit[1]} vCPUs" if limit else " is used up"
        text = (
            f"the quota {name} ({quota}){has}: {count} more {market} workers do not fit; ask for more in Service Quotas"
        )
        return LaunchError(code, text, retryable)
    texts = {
        "InsufficientInstanceCapacity": f"EC2 has no {market} capacity for these instance types and subnets now",
        "UnfulfillableCapacity": f"EC2 has no {market} capacity for these instance types and subnets now",
        "PendingVerification": "this AWS account is not verified for EC2 yet: wait for AWS's mail, usually within hours",
        "InvalidLaunchTemplateId.NotFound": "the launch template is gone: run `make apply`",
        "InvalidLaunchTemplateName.NotFoundException": "the launch template is gone: run `make apply`",
        "InvalidAMIID.NotFound": "the worker image is gone: run `make ami`, or choose one with `ct cloud amis --activate`",
        "InvalidAMIID.Unavailable": "the worker image is not available yet: wait, or choose another with `ct cloud amis --activate`",
        "InvalidParameterValue": f"EC2 refused a parameter: {message}",
        "RequestLimitExceeded": "EC2 throttles this account's calls; they are repeated more slowly",
        "UnauthorizedOperation": f"these credentials may not launch workers: {message}",
    }
    return LaunchError(code, texts.get(code) or f"EC2 answered {code}: {message}", retryable)


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
