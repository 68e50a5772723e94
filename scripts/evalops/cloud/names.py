"""What the AMI build needs to know of an estate: the names that Terraform wrote into one SSM parameter."""

import json
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud.payload import CloudError
from evalworker import aws


@dataclass(frozen=True)
class Names:
    """Of one estate. `images` maps an architecture to the parameter that the launch template resolves."""

    region: str
    images: dict[str, str]
    launch_templates: dict[str, str]
    subnets: list[str]
    repository: str


def read(ssm: Any, estate: str) -> Names:
    """The estate's names. Raises CloudError."""
    name = f"/inspect-fleet/{estate}/config"
    try:
        content = json.loads(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        workers = content["workers"]
        return Names(
            region=content["region"],
            images=dict(workers["images"]),
            launch_templates=dict(workers["launch_templates"]),
            subnets=list(workers["subnets"]),
            repository=content["repository"],
        )
    except (ClientError, BotoCoreError) as error:
        fault = aws.explain(error)
        if fault.code == "ParameterNotFound":
            raise CloudError(
                f"there is no estate {estate!r} in this account and region (no parameter {name}): run `make apply`, or set "
                "INSPECT_FLEET_NAME and AWS_DEFAULT_REGION to those of one"
            ) from None
        raise CloudError(f"cannot read {name}: {fault.text}") from None
    except (ValueError, KeyError, TypeError):
        raise CloudError(
            f"{name} was written by another version of Inspect Fleet: run `make apply` from this checkout"
        ) from None


def activate(ssm: Any, parameter: str, image: str) -> None:
    """Let the launch template resolve to this image from the next launch on. Raises CloudError."""
    try:
        ssm.put_parameter(Name=parameter, Value=image, Type="String", DataType="aws:ec2:image", Overwrite=True)
    except (ClientError, BotoCoreError) as error:
        raise CloudError(f"cannot set {parameter} to {image}: {aws.explain(error).text}", 1) from None
