"""Where a run's files are kept and which estate it belongs to: the configuration of the operator's machine.

First wins: options, the environment, `.env` (found upwards from the current directory, as Inspect does). What Terraform made
is read from one SSM parameter by the backends that need AWS; nothing here calls AWS.
"""

import getpass
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dotenv import dotenv_values, find_dotenv, load_dotenv

from evalworker import redact

_FILE_SECRETS: dict[str, str] = {}


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
    """Put `.env` into the environment, without replacing what is there already, and learn what must not be shown.

    Called once, before options are parsed.
    """
    path = find_dotenv(usecwd=True)
    if path:
        load_dotenv(path, override=False)
        found = redact.secrets_of_file(dotenv_values(path))
        _FILE_SECRETS.update(found)
        redact.learn(found)
    redact.learn_environment()
    sys.excepthook = _report


def file_secrets() -> list[str]:
    """The names of the secrets that `.env` holds."""
    return sorted(_FILE_SECRETS)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A bug's traceback on stderr, without secrets."""
    sys.stderr.write(redact.text("".join(traceback.format_exception(kind, error, trace))))


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
