"""One small class around python-terraform, whose `cmd` is all that is used of it: explicit arguments, live progress from
Terraform's JSON messages, a plan that is kept in a file and applied from it, and one sentence for each thing that goes wrong.

Called by `evalops.commands.infra`. It knows Terraform, not AWS: what a plan means to fleets is the business of `guard`.
"""

import contextlib
import enum
import json
import logging
import os
import re
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import python_terraform

# It logs every exit code but 0 as an error with all that Terraform said: 2 means changes, and we say what went wrong ourselves.
logging.getLogger("python_terraform").setLevel(logging.CRITICAL)

MINIMUM = (1, 11)
"""Write-only arguments, which keep provider keys out of the state, came with 1.11."""

LOCK_TIMEOUT = "60s"
"""After that the state is said to be locked."""

_COMMON = ("-input=false", "-no-color")


class TerraformError(RuntimeError):
    """Terraform could not do what was asked; the text is one sentence that says what to do."""


class Change(enum.Enum):
    """What a plan found."""

    NONE = 0
    CHANGES = 2


@dataclass
class _Heard:
    """What a run of Terraform said: its errors, and its text where it does not speak JSON."""

    errors: list[dict[str, Any]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class _WithoutState(python_terraform.Terraform):  # type: ignore[misc]
    """python-terraform reads a local state into memory when it is made and after each command, and fails at an empty one."""

    def read_state_file(self, file_path: str | None = None) -> None:
        """Read nothing: what Terraform knows, it is asked."""


class Terraform:
    """Terraform in one directory.

    Args:
        directory: the configuration.
        report: gets a line for each thing that Terraform has planned, made, changed or removed.
        lock_timeout: how long to wait for another operator's run, as Terraform writes durations.
    """

    def __init__(
        self, directory: Path, report: Callable[[str], None] = lambda line: None, lock_timeout: str = LOCK_TIMEOUT
    ) -> None:
        self.directory = directory
        self._lock = f"-lock-timeout={lock_timeout}"
        self._report = report
        self._terraform = _WithoutState(working_dir=str(directory))

    def check(self) -> str:
        """The version on PATH. Raises TerraformError where there is none, or one too old, or no configuration."""
        if not (self.directory / "versions.tf").is_file():
            raise TerraformError(
                f"there is no Terraform configuration in {self.directory}: run this in the checkout, or name it by --dir"
            )
        if shutil.which("terraform") is None:
            raise TerraformError(
                f"terraform is not on PATH: install version {_dotted(MINIMUM)} or newer (developer.hashicorp.com/terraform/install)"
            )
        code, out, err = self._quiet("version", "-json")
        try:
            version = str(json.loads(out)["terraform_version"])
        except (ValueError, KeyError, TypeError):
            raise TerraformError(f"`terraform version -json` failed (exit {code}): {_one_line(err or out)}") from None
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MINIMUM:
            raise TerraformError(
                f"terraform {version} is too old: install {_dotted(MINIMUM)} or newer (developer.hashicorp.com/terraform/install)"
            )
        return version

    def init(self) -> None:
        """Install the providers that the lock file names and connect the backend. Raises TerraformError."""
        code, out, err = self._quiet("init", *_COMMON, self._lock)
        if code:
            raise TerraformError(explain(_plain_error(err or out)))

    def plan(self, out: Path, *, destroy: bool = False, arguments: tuple[str, ...] = ()) -> Change:
        """Write a plan to `out`. `arguments` are further options such as `-refresh=false`. Raises TerraformError."""
        extra = (*arguments, "-destroy") if destroy else arguments
        code = self._live("plan", f"-out={out}", "-detailed-exitcode", self._lock, *_COMMON, "-json", *extra)
        return Change(code)

    def show(self, plan: Path) -> dict[str, Any]:
        """A plan file as Terraform's JSON. It holds values: never print it whole."""
        code, out, err = self._quiet("show", "-json", "-no-color", str(plan))
        if code:
            raise TerraformError(explain(_plain_error(err or out)))
        shown: dict[str, Any] = json.loads(out)
        return shown

    def apply(self, plan: Path) -> None:
        """Do what a plan file says, and nothing else. Raises TerraformError."""
        self._live("apply", self._lock, *_COMMON, "-json", str(plan))

    def outputs(self) -> dict[str, Any]:
        """The outputs' values; sensitive ones are left out. Raises TerraformError."""
        code, out, err = self._quiet("output", "-json", "-no-color")
        if code:
            raise TerraformError(explain(_plain_error(err or out)))
        found = json.loads(out)
        return {name: entry["value"] for name, entry in found.items() if not entry.get("sensitive")}

    def _quiet(self, command: str, *arguments: str) -> tuple[int, str, str]:
        with _automation():
            code, out, err = self._terraform.cmd(command, *arguments)
        return int(code), str(out), str(err)

    def _live(self, command: str, *arguments: str) -> int:
        """Run with each JSON message reported as it comes; the exit code, or TerraformError with the first error."""
        heard = _Heard()
        with _automation(), _listening(lambda line: self._hear(line, heard)):
            code, _, _ = self._terraform.cmd(command, *arguments, capture_output=False)
        if code not in (0, 2) or heard.errors:
            raise TerraformError(explain(heard.errors[0] if heard.errors else _plain_error("\n".join(heard.text))))
        return int(code)

    def _hear(self, line: str, heard: _Heard) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            heard.text.append(line)
            return
        if message.get("type") == "diagnostic" and message.get("diagnostic", {}).get("severity") == "error":
            heard.errors.append(message["diagnostic"])
        elif text := progress_line(message):
            self._report(text)


_DONE = {"create": "made", "update": "changed", "delete": "removed", "replace": "replaced"}
_PLANNED = {"create": "make", "update": "change", "delete": "remove", "replace": "replace", "read": "read"}


def progress_line(message: dict[str, Any]) -> str | None:
    """What one of Terraform's JSON messages tells a person; None for the many that need no line."""
    kind = message.get("type")
    if kind == "planned_change":
        change = message["change"]
        action = _PLANNED.get(change["action"])
        return f"will {action} {change['resource']['addr']}" if action and action != "read" else None
    if kind == "apply_complete":
        hook = message["hook"]
        action = _DONE.get(hook["action"], hook["action"])
        return f"{action} {hook['resource']['addr']} ({hook.get('elapsed_seconds', 0):.0f} s)"
    if kind == "apply_errored":
        return f"failed: {message['hook']['resource']['addr']}"
    if kind == "apply_progress" and message["hook"].get("elapsed_seconds", 0) % 30 < 10:
        return f"still at {message['hook']['resource']['addr']} ({message['hook']['elapsed_seconds']:.0f} s)"
    if kind == "change_summary":
        return str(message["@message"])
    return None


@dataclass(frozen=True)
class _Known:
    """A failure that users meet: a pattern in the error's text, and the sentence that replaces it."""

    pattern: re.Pattern[str]
    sentence: str


def _known(pattern: str, sentence: str) -> _Known:
    return _Known(re.compile(pattern, re.DOTALL | re.IGNORECASE), sentence)


_RENEW = "renew them (`aws sso login`, or new values in the environment) and run the same command again"
_KNOWN = (
    _known(
        r"Error acquiring the state lock.*?ID:\s+(?P<id>\S+).*?Who:\s+(?P<who>\S+).*?Created:\s+(?P<since>\S+ \S+)",
        "the state is locked by {who} since {since}: wait for that run to end, or, when it is surely dead, "
        "`terraform -chdir=terraform force-unlock {id}`",
    ),
    _known(r"Error acquiring the state lock", "the state is locked by another run: wait for it to end and try again"),
    _known(r"ExpiredToken|token.{0,20}expired|RequestExpired", f"the AWS credentials have expired: {_RENEW}"),
    _known(
        r"InvalidClientTokenId|UnrecognizedClient|AuthFailure|InvalidAccessKeyId",
        f"AWS does not know the credentials: {_RENEW}",
    ),
    _known(r"No valid credential sources", f"there are no AWS credentials: {_RENEW}"),
    _known(
        r"creating S3 Bucket \((?P<bucket>[^)]+)\).*(BucketAlreadyExists|BucketAlreadyOwnedByYou)",
        "the bucket name {bucket} is taken: set bucket_name to another one in terraform.tfvars, "
        "or, if the bucket is yours, use_existing_bucket = true",
    ),
    _known(
        r"(Inconsistent dependency lock file|Backend initialization required|Module not installed|Required plugins are not installed)",
        "the configuration is not initialised here: run `make init` (or `ies infra init`) and try again",
    ),
    _known(r"Saved plan is stale", "the state has changed since the plan was made: plan again"),
    _known(
        r"Invalid region value|invalid AWS Region: (?P<region>\S+)|Missing region",
        "no usable AWS region: set `region` in terraform.tfvars, or AWS_DEFAULT_REGION",
    ),
)


def explain(diagnostic: dict[str, Any]) -> str:
    """One sentence for one of Terraform's error diagnostics ({summary, detail, address?})."""
    summary, detail = str(diagnostic.get("summary", "")), str(diagnostic.get("detail", ""))
    text = f"{summary}\n{detail}"
    for known in _KNOWN:
        if found := known.pattern.search(text):
            return known.sentence.format(**{key: value or "?" for key, value in found.groupdict().items()})
    if summary in ("Invalid value for variable", "Resource precondition failed"):
        # The configuration's own sentence; what follows is where the rule stands.
        return _one_line(detail.split("\n\nThis was checked by")[0])
    where = f" ({diagnostic['address']})" if diagnostic.get("address") else ""
    return _one_line(f"{summary}{where}: {detail}" if detail else f"{summary}{where}")


def _plain_error(text: str) -> dict[str, Any]:
    """The first error of a command that does not speak JSON, as a diagnostic."""
    body = "\n".join(line.strip("│╷╵ ") for line in text.splitlines())
    found = re.search(r"Error: (?P<summary>[^\n]+)\n*(?P<detail>.*?)(?=\n\s*Error: |\Z)", body, re.DOTALL)
    return found.groupdict() if found else {"summary": body.strip() or "terraform ended without a word", "detail": ""}


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


@contextlib.contextmanager
def _automation() -> Iterator[None]:
    """TF_IN_AUTOMATION for the child: python-terraform hands on this process's environment and takes no other."""
    before = os.environ.get("TF_IN_AUTOMATION")
    os.environ["TF_IN_AUTOMATION"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TF_IN_AUTOMATION"]
        else:
            os.environ["TF_IN_AUTOMATION"] = before


@contextlib.contextmanager
def _listening(hear: Callable[[str], None]) -> Iterator[None]:
    """Have python-terraform give the child a pipe as stdout and stderr, and each line of it to `hear` at once, on a thread.

    It hands on what its own module calls `sys.stdout`; this process's streams stay, for `hear` writes to them. Leaving waits
    for the pipe's end: after Ctrl-C Terraform finishes what it is at and unlocks the state, and we wait for it.
    """
    reading, writing = os.pipe()

    def listen() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                hear(line.rstrip("\n"))

    listener = threading.Thread(target=listen, name="terraform-output")
    listener.start()
    streams = python_terraform.sys
    try:
        with os.fdopen(writing, "w") as pipe:
            python_terraform.sys = types.SimpleNamespace(stdout=pipe, stderr=pipe)
            yield
    finally:
        python_terraform.sys = streams
        listener.join()
