"""Run ids, job ids, and names that are safe where they are shown or stored.

Ids that come from users, logs and messages are opaque: `a:b`, `001`, 1 and `../../x` are legal sample ids and different
ones. They keep their type and never become a path; what needs a name gets `slug` or a hash.
"""

import hashlib
import posixpath
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from evalworker.contract.jsonio import canonical

_RUN_ID = re.compile(
    r"(?P<stamp>\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2})(-[0-9a-f]{8})?"
    r"|\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}\+\d{2}-\d{2}-[0-9a-f]{4,8}",
    re.ASCII,
)
_JOB_ID = re.compile(r"[0-9a-f]{16}")

SampleId = int | str
"""A dataset's sample id: 1 and "1" are two samples."""


class BadId(ValueError):
    """An id that is none; the text is one sentence for the user."""


def new_run_id(now: datetime | None = None) -> str:
    """A fresh run id, `YYYY-MM-DD-hh-mm-ss-<8 hex>` in UTC. The same string is the fleet's id."""
    now = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{now:%Y-%m-%d-%H-%M-%S}-{secrets.token_hex(4)}"


def check_run_id(text: str) -> str:
    """The run id itself if it is one (three historic forms are read); raises BadId."""
    if not _RUN_ID.fullmatch(text):
        raise BadId(f"{text!r} is not a run id: expected something like 2026-11-29-14-05-33-1a2b3c4d")
    return text


def check_job_id(text: str) -> str:
    """The job id itself if it is one; raises BadId."""
    if not _JOB_ID.fullmatch(text):
        raise BadId(f"{text!r} is not a job id: expected 16 hex digits")
    return text


def job_id(
    *, task: str, task_args: dict[str, Any], model: str, shard: Any = None, arguments: dict[str, Any] | None = None
) -> str:
    """The id of one job: a hash of exactly what makes its result another one.

    `arguments` are the run's Inspect options that change results (model arguments among them). Reruns of the same
    submission therefore find their finished work, and nothing else does.
    """
    identity = {"task": task, "args": task_args, "model": model, "shard": shard, "arguments": arguments or {}}
    return hashlib.sha256(canonical(identity).encode("ascii")).hexdigest()[:16]


def task_file(path: str | None) -> str:
    """What of a task's file is the same wherever its run is: the path below the submit directory, or else the name alone.

    "" for a task of a package. Two tasks of one name in one run are told apart by it.
    """
    place = posixpath.normpath(path) if path else ""
    return posixpath.basename(place) if place.startswith(("/", "..")) else place


def sample_key(sample_id: SampleId, epoch: int) -> tuple[str, int]:
    """A dictionary key for (sample, epoch) that tells 1 from "1"."""
    return canonical(sample_id), epoch


def digest_of_keys(samples: Iterable[tuple[tuple[str, int], str | None]]) -> str:
    """A fingerprint of (sample key, uuid) pairs in any order."""
    lines = sorted(canonical([key, epoch, uuid]) for (key, epoch), uuid in samples)
    return hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()[:32]


def slug(text: str, limit: int = 64) -> str:
    """A readable name of letters, digits, `_` and `-` for a label or a file; not unique, so never an identity."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:limit] or "x"
