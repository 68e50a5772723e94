"""Packer as a subprocess: the one place that knows its command line, its versions, what it prints, and how it is interrupted.

Called by the AMI build. Packer runs in a process group of its own: its outer process ignores SIGINT sent to it alone, so a Ctrl-C
is passed on to the group, and Packer then removes what it has made. What it leaves all the same is `evalops.cloud.leftovers`' business.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from evalops.cloud import payload
from evalops.cloud.payload import CloudError

LAST_LINES = 20
"""Lines of a failing step that are shown at the end."""

MODERN = (1, 9, 0)
"""From this version on the modern options and required plugins are used; before 1.7 they are unknown."""

MARK = "  # modern/options.hcl goes here\n"
PR_SET_PDEATHSIG = 1

FAILING = ("Provisioning step had errors", "Build 'amazon-ebs.worker' errored", "Cancelling build")
"""How what Packer says of a failure begins."""


@dataclass(frozen=True)
class Packer:
    """An installed Packer."""

    path: str
    version: tuple[int, ...]

    @property
    def modern(self) -> bool:
        """Whether it knows plugins and today's options."""
        return self.version >= MODERN


def find(oldest: str) -> Packer:
    """The Packer on PATH. Raises CloudError when there is none, or one older than `oldest`."""
    path = shutil.which("packer")
    if path is None:
        raise CloudError(
            "packer is not on PATH: install it (apt-get install packer, or from developer.hashicorp.com/packer)"
        )
    try:
        said = subprocess.run([path, "version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CloudError(f"{path} does not run: {error}") from None
    match = re.search(r"Packer v(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise CloudError(f"{path} is not HashiCorp's Packer (`packer version` says {said.strip()[:60]!r}): check PATH")
    version = tuple(int(part) for part in match.groups())
    if version < tuple(int(part) for part in oldest.split(".")):
        raise CloudError(f"Packer {'.'.join(match.groups())} is too old: install {oldest} or later")
    return Packer(path, version)


def stage(root: Path, folder: Path, modern: bool) -> None:
    """Write the template for this kind of Packer into an empty folder."""
    text = (root / "packer" / "worker.pkr.hcl").read_text()
    if MARK not in text:
        raise CloudError("packer/worker.pkr.hcl has lost its line for the modern options")
    options = (root / "packer" / "modern" / "options.hcl").read_text() if modern else ""
    (folder / "worker.pkr.hcl").write_text(text.replace(MARK, options))
    if modern:
        bound = payload.versions(root)["PACKER_AMAZON_PLUGIN"]
        plugins = (root / "packer" / "modern" / "plugins.pkr.hcl").read_text()
        (folder / "plugins.pkr.hcl").write_text(plugins.replace("@PACKER_AMAZON_PLUGIN@", bound))


def write_values(file: Path, values: Mapping[str, Any]) -> None:
    """The template's variables as a file: a list cannot be given on the command line, and a process list shows everything."""
    file.write_text(json.dumps(values, indent=2))
    file.chmod(0o600)


@dataclass
class Result:
    """How a build ended.

    Attributes:
        status: Packer's exit status; 128+N when it was killed by signal N.
        step: what it was doing last: a script's name, or Packer's own words.
        lines: the last lines of that step.
        errors: what Packer itself calls errors.
        interrupted: whether we passed a signal on.
        failing: whether it has begun to clean up: what follows is no step of the build any more.
    """

    status: int = 0
    step: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False
    failing: bool = False


def init(packer: Packer, folder: Path) -> None:
    """Fetch the plugins that a modern Packer needs. Raises CloudError."""
    if packer.modern:
        _checked([packer.path, "init", str(folder)], "Packer cannot fetch its plugin")


def validate(packer: Packer, folder: Path, values: Path) -> None:
    """Let Packer check the template with these values. Raises CloudError with its words."""
    _checked([packer.path, "validate", f"-var-file={values}", str(folder)], "Packer does not accept the template")


def build(
    packer: Packer,
    folder: Path,
    values: Path,
    show: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run `packer build`, showing its progress line by line. Interrupts are passed on to it; returns when it is gone."""
    command = [packer.path, "build", "-machine-readable", "-color=false", f"-var-file={values}", str(folder)]
    result = Result()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "CHECKPOINT_DISABLE": "1", "PACKER_NO_COLOR": "1", **(environment or {})},
        preexec_fn=_end_with_parent,
    )
    assert process.stdout is not None
    with process.stdout, _passing_on(process, result):
        for line in process.stdout:
            _take(line.rstrip("\n"), result, show)
        process.wait()
    status = process.returncode
    result.status = status if status >= 0 else 128 - status
    return result


def _end_with_parent() -> None:
    """SIGTERM (which Packer answers by cleaning up) when we are killed and can pass nothing on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def _passing_on(process: "subprocess.Popen[str]", result: Result) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGHUP on to Packer's group as SIGINT; the third one kills it."""
    count = 0

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        result.interrupted = result.failing = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT if count < 3 else signal.SIGKILL)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _take(line: str, result: Result, show: Callable[[str], None]) -> None:
    """One line of `-machine-readable`: `epoch,target,type,data…`, commas within data as %!(PACKER_COMMA)."""
    parts = line.split(",", 3)
    if len(parts) < 4 or not parts[0].isdigit():
        if line.strip():
            result.lines.append(line)
        return
    kind = parts[2]
    if kind != "ui":
        return
    level, _, text = parts[3].partition(",")
    for one in _plain(text).split("\n"):
        said = re.sub(r"^(==> |    )?amazon-ebs\.worker: ?", "", one).rstrip()
        if not said:
            continue
        script = re.search(r"Provisioning with shell script: (\S+)", said)
        if level == "error":
            result.errors.append(said)
            result.failing = True
        elif result.failing or said.startswith(FAILING):
            result.failing = True
        elif script or level == "say":
            result.step = Path(script.group(1)).name if script else said.rstrip(".")
            result.lines.clear()
        else:
            result.lines.append(said)
        show(said if level == "say" else f"    {said}")


def _plain(text: str) -> str:
    return text.replace("%!(PACKER_COMMA)", ",").replace("\\n", "\n").replace("\\r", "")


def artifact(manifest: Path) -> str:
    """The image's id from the manifest, of its last run alone: Packer appends to an existing one. Raises CloudError."""
    try:
        content = json.loads(manifest.read_text())
        last = content["last_run_uuid"]
        (found,) = [build["artifact_id"] for build in content["builds"] if build["packer_run_uuid"] == last]
    except (OSError, ValueError, KeyError):
        raise CloudError(f"Packer has written no result into {manifest.name}", 1) from None
    return str(found.partition(":")[2])


def _checked(command: list[str], failed: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise CloudError(f"{failed}: {' '.join((done.stdout + done.stderr).split())[:1000]}")
