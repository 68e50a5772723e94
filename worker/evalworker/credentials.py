"""The values of a run's secrets on a worker: from the environment, or from SSM on AWS. Names alone stand in the manifest.

Called by the agent at its start. The values go into the environment of the fork server and of jobs, and nowhere else.
"""

import os

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract.documents import Manifest

ESTATE = "INSPECT_FLEET_NAME"
"""Environment variable: the name that Terraform was applied with."""


def parameter(name: str, estate: str | None = None) -> str:
    """The SSM parameter (a SecureString) that holds a secret."""
    return f"/inspect-fleet/{estate or os.environ.get(ESTATE) or 'default'}/secrets/{name}"


def of_run(manifest: Manifest) -> dict[str, str]:
    """The secrets of a run by name. On this machine those of the environment, on AWS those that SSM holds.

    Raises ServiceError with a sentence when SSM cannot be read.
    """
    if manifest.backend == "local":
        return {name: os.environ[name] for name in manifest.secrets if name in os.environ}
    return from_ssm(manifest.secrets)


def from_ssm(names: list[str], estate: str | None = None) -> dict[str, str]:
    """The values that SSM holds of these secrets; one that is missing there is left out."""
    found: dict[str, str] = {}
    keys = {parameter(name, estate): name for name in names}
    client = aws.client("ssm") if keys else None
    for start in range(0, len(keys), 10):  # GetParameters takes ten names
        part = list(keys)[start : start + 10]
        try:
            answer = client.get_parameters(Names=part, WithDecryption=True)  # type: ignore[union-attr]
        except (BotoCoreError, ClientError) as error:
            raise ServiceError.of(error, "cannot read the run's secrets from SSM") from error
        found |= {keys[item["Name"]]: item["Value"] for item in answer["Parameters"]}
    return found
