"""Runs a list of evaluations one after the other, each only if something of it has changed since it last succeeded. For cron.

`scripts/cron/nightly` calls it through `evalops.commands.nightly`. Each run is a `ct run eval` of its own, so that what it says and how
it ends is what a person would see; here is only what to run, what to skip, and what to remember.
"""

import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalops import code, shipping
from evalops.ui import fail
from evalworker.contract.jsonio import canonical, dumps
from evalworker.contract.wire import describe, now, stamp

STATE = Path("logs", "nightly.json")
LOCK = Path("logs", "nightly.lock")

Options = dict[str, bool | str | int | float | list[str] | dict[str, Any]]


class Entry(BaseModel):
    """One run of the list. `options` are those of `ct run eval` without their dashes: true for a flag, a list to repeat one."""

    model_config = ConfigDict(extra="forbid")

    name: str
    tasks: list[str] = Field(min_length=1)
    models: list[str] = Field(min_length=1)
    options: Options = {}


class Nightly(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid")

    runs: list[Entry] = Field(min_length=1)


class Busy(RuntimeError):
    """Another one runs."""


@dataclass(frozen=True)
class Ended:
    """How a run ended: `ct`'s exit code, its done record if it wrote one, the last line that it said."""

    code: int
    record: dict[str, Any]
    last: str


def read(path: Path) -> Nightly:
    """The list; ends with one sentence when it cannot be used."""
    try:
        found = Nightly.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    except yaml.YAMLError as error:
        fail(f"{path} is no YAML: {' '.join(str(error).split())}")
    except ValidationError as error:
        fail(f"{path} cannot be used: {describe(error)}")
    names = [entry.name for entry in found.runs]
    if twice := {name for name in names if names.count(name) > 1}:
        fail(f"{path} has two runs of the name {sorted(twice)[0]}")
    return found


def words(entry: Entry) -> list[str]:
    """A run as the words of `ct run eval`."""
    found = list(entry.tasks)
    for model in entry.models:
        found += ["--model", model]
    for name, value in entry.options.items():
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                found += [word for key, part in each.items() for word in (option, f"{key}={_text(part)}")]
            elif each is True:
                found.append(option)
            elif each is not False:
                found += [option, str(each)]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def code_digest(folder: Path) -> str:
    """A hash of the code that a run would take with it, and of the packages installed."""
    tree = code.tree_of(folder)
    with tempfile.TemporaryFile() as archive:
        try:
            packed = code.pack(tree, code.choose(tree).files, archive)
        except OSError as error:
            fail(f"the code under {tree.root} changed while it was read, or cannot be read: {error}")
    return hashlib.sha256(canonical([packed, shipping.versions()]).encode()).hexdigest()


def fingerprint(entry: Entry, digest: str) -> str:
    """What decides whether a run would give something new."""
    return hashlib.sha256(canonical([words(entry), digest]).encode()).hexdigest()


@contextmanager
def lock(path: Path = LOCK) -> Iterator[None]:
    """Held while the list is worked through; the system gives it back whatever happens. Raises Busy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None
        yield


def remembered(path: Path = STATE) -> dict[str, dict[str, str]]:
    """Each run's last success by its name."""
    try:
        found: dict[str, dict[str, str]] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def work(
    runs: Nightly,
    digest: str,
    run: Callable[[list[str]], Ended],
    *,
    again: bool = False,
    state: Path = STATE,
) -> Iterator[tuple[str, bool]]:
    """Work through the list: a line for each run when it has ended, and whether it is well."""
    known = remembered(state)
    for entry in runs.runs:
        print_, before = fingerprint(entry, digest), known.get(entry.name, {})
        if not again and before.get("fingerprint") == print_:
            yield f"skipped {entry.name}: unchanged since {before['at']} ({before['fleet_id']})", True
            continue
        ended = run(words(entry))
        fleet_id = ended.record.get("fleet_id", "no fleet")
        if ended.code == 0:
            known[entry.name] = {"fingerprint": print_, "fleet_id": fleet_id, "at": stamp(now())}
            _store(known, state)
            samples = ended.record.get("samples", {})
            yield (
                f"completed {entry.name}: {fleet_id}, {samples.get('completed')} of {samples.get('total')} samples",
                True,
            )
        else:
            yield f"failed {entry.name}: {fleet_id}, exit code {ended.code}: {ended.last}", False


def _store(known: dict[str, dict[str, str]], path: Path) -> None:
    partial = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    partial.replace(path)


def run_eval(arguments: list[str]) -> Ended:
    """`ct run eval` with these words, to its end; its last remark stands for a reason where its record has none."""
    command = [sys.executable, "-P", "-m", "evalops", "ct", "run", "eval", *arguments, "--yes", "--json"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    out, err = process.communicate()
    record: dict[str, Any] = {}
    for line in out.splitlines():
        try:
            record |= json.loads(line)
        except ValueError:
            continue
    said = [line for line in err.splitlines() if line.strip()]
    last = record.get("reason") or (said[-1] if said else "it said nothing")
    return Ended(process.returncode, record, str(last))
