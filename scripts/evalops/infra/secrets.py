"""Provider keys: from `.env` to the SSM parameters that Terraform named. A value goes from the file to the request and
nowhere else: not to argv, the terminal, a log or Terraform's state.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from evalops.infra.estate import Estate
from evalworker.aws import ServiceError


class SecretError(RuntimeError):
    """A key that cannot be pushed; the text is one sentence."""


@dataclass(frozen=True)
class Secret:
    """One provider key as AWS has it. `is_set` is False while it holds Terraform's first value."""

    name: str
    parameter: str
    is_set: bool
    changed: datetime | None


def choose(estate: Estate, file: Path, names: tuple[str, ...]) -> dict[str, str]:
    """{name: value} of what is to be pushed from a dotenv file: the given names, or all that file and estate share.

    Raises SecretError for a name that the estate does not have or the file does not set.
    """
    if not file.is_file():
        raise SecretError(
            f"there is no {file}: copy .env.template to .env and fill in your keys, or name a file by --env-file"
        )
    values = {name: value for name, value in dotenv_values(file, interpolate=False).items() if value}
    for name in names:
        if name not in estate.secrets:
            raise SecretError(
                f"{name} is none of the estate's keys ({', '.join(sorted(estate.secrets))}): add it to secret_names and run `make apply`"
            )
        if name not in values:
            raise SecretError(f"{file} sets no {name}: add it there and push again")
    wanted = names or tuple(sorted(estate.secrets.keys() & values.keys()))
    if not wanted:
        raise SecretError(
            f"{file} sets none of {', '.join(sorted(estate.secrets))}: add your keys there and push again"
        )
    return {name: values[name] for name in wanted}


def push(client: Any, estate: Estate, values: dict[str, str]) -> None:
    """Write the values. `client` is boto3's for SSM. Raises ServiceError, naming the key and never its value."""
    for name, value in values.items():
        try:
            client.put_parameter(Name=estate.secrets[name], Value=value, Type="SecureString", Overwrite=True)
        except Exception as error:
            raise ServiceError.of(error, f"cannot write {estate.secrets[name]}") from None


def listed(client: Any, estate: Estate) -> list[Secret]:
    """The estate's keys in the order of their names; no value is read. Raises ServiceError."""
    found: dict[str, dict[str, Any]] = {}
    filters = [{"Key": "Name", "Option": "Equals", "Values": sorted(estate.secrets.values())}]
    if estate.secrets:
        try:
            for page in client.get_paginator("describe_parameters").paginate(ParameterFilters=filters):
                found |= {item["Name"]: item for item in page["Parameters"]}
        except Exception as error:
            raise ServiceError.of(error, "cannot list the provider keys") from error
    return [
        Secret(
            name,
            path,
            # Terraform's own first value is version 1; every push adds one.
            is_set=found.get(path, {}).get("Version", 0) > 1,
            changed=found.get(path, {}).get("LastModifiedDate"),
        )
        for name, path in sorted(estate.secrets.items())
    ]
