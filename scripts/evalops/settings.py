"""Where a run's files are kept and which estate it belongs to: the configuration of the operator's machine.

First wins: options, the environment, `.env` (found upwards from the current directory, as Inspect does). What Terraform made
is read from one SSM parameter by the backends that need AWS; nothing here calls AWS.
"""

import getpass
import os
from dataclasses import dataclass
from pathlib import Path

from dotenv import find_dotenv, load_dotenv


@dataclass(frozen=True)
class Settings:
    """What commands need to know of their surroundings.

    Attributes:
        root: `s3://bucket` or the absolute path of a directory.
        bucket: the bucket's name, None on a local root.
        estate: the `name` that Terraform was applied with; its configuration is the parameter `/inspect-fleet/<name>/config`.
        owner: who submits, as lanes and instances show it.
    """

    root: str
    bucket: str | None
    estate: str
    owner: str


def load_env() -> None:
    """Put `.env` into the environment, without replacing what is there already. Called once, before options are parsed."""
    path = find_dotenv(usecwd=True)
    if path:
        load_dotenv(path, override=False)


def settings() -> Settings:
    """The configuration as the environment has it now."""
    bucket = os.environ.get("S3_BUCKET_NAME", "").strip().removeprefix("s3://").rstrip("/") or None
    return Settings(
        root=f"s3://{bucket}" if bucket else str(Path.cwd()),
        bucket=bucket,
        estate=os.environ.get("INSPECT_FLEET_NAME", "default"),
        owner=os.environ.get("INSPECT_FLEET_OWNER") or _user(),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return str(os.getuid())
