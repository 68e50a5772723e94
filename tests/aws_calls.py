"""Records which AWS calls the project's code makes during the tests, and for which role, so that the policies can be compared.

`install` hooks every botocore session of this process, aiobotocore's (Inspect's S3 access) among them. A call counts when a
module of the project, or Inspect, stands on the stack; what a test calls itself doesn't. Children that are forked inherit it.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import botocore.session

ROLES = (
    ("evalops.infra", ("operator", "researcher")),
    ("evalops.commands.infra", ("operator", "researcher")),
    ("evalops", ("researcher",)),
    ("evalworker", ("worker", "researcher")),
    ("inspect_ai", ("worker", "researcher", "batch_job")),
    ("s3fs", ("worker", "researcher", "batch_job")),
    ("s3transfer", ("worker", "researcher", "batch_job")),  # the threads of boto3's managed transfers
)
"""Package → the roles that its calls may be made under, any of them. The outermost of ours on the stack counts: storage called
by the controller is the researcher's, by the agent the worker's (or, on one's own machine, the researcher's)."""

THEIRS = ("inspect_ai", "s3fs", "s3transfer")
"""Packages that also call us: what our hook does inside an eval is ours."""


def role_names(frame: FrameType | None) -> tuple[str, tuple[str, ...]] | None:
    """(package, roles) of the outermost frame that is the project's or Inspect's; None where there is none."""
    found = None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        match = next((entry for entry in ROLES if name == entry[0] or name.startswith(entry[0] + ".")), None)
        if match and not (match[0] in THEIRS and found and found[0] not in THEIRS):
            found = match
        frame = frame.f_back
    return found


def install(directory: Path) -> None:
    """Append each call as `package<TAB>role,role<TAB>service:Operation` to a file of this process in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    seen: set[tuple[int, str, str]] = set()
    original = botocore.session.Session.__init__

    def record(model: Any, request_signer: Any = None, **_: Any) -> None:
        found = role_names(sys._getframe())
        if found is None or _embedded(request_signer):
            return
        service = SERVICES.get(model.service_model.service_name, model.service_model.service_name)
        call = f"{service}:{model.name}"
        key = (os.getpid(), found[0], call)
        if key not in seen:
            seen.add(key)
            with (directory / f"{os.getpid()}.tsv").open("a") as lines:
                lines.write(f"{found[0]}\t{','.join(found[1])}\t{call}\n")

    def hooked(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.get_component("event_emitter").register("before-call.*.*", record)

    botocore.session.Session.__init__ = hooked  # type: ignore[method-assign]


def _embedded(signer: Any) -> bool:
    """Whether a call goes to the queue server of this machine: it is no AWS, and no policy is needed for it."""
    return getattr(getattr(signer, "_credentials", None), "access_key", None) == "embedded"


SERVICES = {"service-quotas": "servicequotas"}
"""botocore's name → IAM's, where they differ."""


def recorded(directory: Path) -> set[tuple[str, tuple[str, ...], str]]:
    """Everything that was recorded: (package, roles, call)."""
    found = set()
    for file in directory.glob("*.tsv"):
        for line in file.read_text().splitlines():
            package, roles, call = line.split("\t")
            found.add((package, tuple(roles.split(",")), call))
    return found
