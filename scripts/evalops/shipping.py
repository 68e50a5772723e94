"""What a run takes with it to its workers: its code, the packages it needs, the names of its secrets, and with what it was planned.

Called by the commands that submit a run: `prepare` before anything is planned, `ship` when the root is known to be usable. Both end
with one sentence when something is missing; what they return goes into the manifest.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalops import code, locks, wheel
from evalops.hints import SHIP_ANEW
from evalops.infra import secrets as infra_secrets
from evalops.infra.estate import Estate
from evalops.settings import file_secrets
from evalops.ui import fail, note
from evalworker import aws, credentials, redact
from evalworker.contract.documents import Backend, Manifest
from evalworker.contract.jsonio import canonical
from evalworker.storage import Storage

OPTIONS = ("packages", "require_clean", "ship_code")
"""The parameters of commands that only have a meaning where code is shipped. (`--secret` has one for a resume too.)"""


@dataclass(frozen=True)
class Wishes:
    """What the user asked for.

    Attributes:
        packages: `--package`, requirements as pip takes them. secrets: `--secret`, names.
        require_clean: refuse a tree that nobody could bring back. ship_code: pack the code although workers run on this machine.
    """

    packages: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    require_clean: bool = False
    ship_code: bool = False


@dataclass(frozen=True)
class Luggage:
    """What is known before planning.

    Attributes:
        tree: the submit directory's tree. path: its directories from which modules are imported, relative to its root.
        secrets: names of the secrets that the run will have.
    """

    tree: code.Tree
    path: list[str]
    secrets: list[str]

    @property
    def import_path(self) -> list[str]:
        """From where tasks are imported here, as jobs do it there; the submit directory first."""
        return [str((self.tree.root / folder).resolve()) for folder in (self.tree.submit_dir, *self.path)]


def prepare(wishes: Wishes, backend: Backend, estate: str, folder: Path, names: Estate | None = None) -> Luggage:
    """Check what can be checked before the tasks are loaded. `names`: of the estate, where the backend is one on AWS."""
    for package in wishes.packages:
        if re.search(r"https?://[^/@\s]+@", package):
            fail("--package: the URL holds a credential, and requirements are stored with the run: leave it out")
    tree = code.tree_of(folder)
    if wishes.require_clean:
        locks.check_clean(tree)
    return Luggage(tree, code.python_path(tree, sys.path), secrets(wishes, backend, estate, names))


def secrets(wishes: Wishes, backend: Backend, estate: str, names: Estate | None = None) -> list[str]:
    """The names of the secrets that jobs will have: those asked for, and those of known providers and of `.env` that are there."""
    for name in wishes.secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            fail("--secret takes the name of an environment variable, never its value")
    known = list(dict.fromkeys([*wishes.secrets, *redact.PROVIDER_SECRETS, *file_secrets()]))
    if names is not None:
        return _named(wishes, names, known)
    if backend == "local":
        found = {name: os.environ[name] for name in known if os.environ.get(name)}
    else:
        found = credentials.from_ssm(known, estate)
    redact.learn(found)
    for name in wishes.secrets:
        if name not in found and backend == "local":
            fail(f"--secret {name}: there is no such variable in the environment or in .env")
        if name not in found:
            key = credentials.parameter(name, estate)
            fail(f"--secret {name}: there is no SSM parameter {key}: create it as a SecureString")
    return sorted(found)


def _named(wishes: Wishes, estate: Estate, known: list[str]) -> list[str]:
    """The secrets that the estate holds a value of: by name, because who submits need not be able to read them."""
    set_ = {each.name for each in infra_secrets.listed(aws.client("ssm", estate.region), estate) if each.is_set}
    for name in wishes.secrets:
        if name not in estate.secrets:
            fail(f"--secret {name}: the estate has no such key: add it to secret_names and run `make apply`")
        if name not in set_:
            fail(f"--secret {name}: {estate.secrets[name]} has no value yet: `ies secrets push {name}`")
    redact.learn({name: os.environ[name] for name in known if os.environ.get(name)})
    return sorted(set_)


def ship(wishes: Wishes, luggage: Luggage, backend: Backend, storage: Storage) -> dict[str, Any]:
    """Store what workers fetch, and return the manifest's fields about code, environment and secrets."""
    tree = luggage.tree
    fields: dict[str, Any] = {
        "code_root": str(tree.root),
        "code": None,
        "submit_dir": tree.submit_dir,
        "python_path": luggage.path,
        "worker": None,
        "lock": None,
        "requirements": [],
        "secrets": luggage.secrets,
        "versions": versions(),
    }
    packed = backend != "local" or wishes.ship_code
    lock = locks.lock_of(tree) if packed else None
    if packed:
        fields |= {"code": code.ship(tree, storage), "lock": tree.relative(lock) if lock else None}
    if lock is not None or wishes.packages:
        fields["requirements"] = locks.pin(list(wishes.packages), lock)
    if packed or wishes.packages:
        fields["worker"] = wheel.ship(storage)
    return fields


def versions() -> dict[str, str]:
    """With what a run was planned: Python, the main packages, and `environment`, a hash of all packages' names and versions."""
    found = {"python": platform.python_version()}
    found |= {name: version for name in locks.MAIN_PACKAGES if (version := locks.installed(name)) is not None}
    about = (each.metadata for each in importlib.metadata.distributions())  # each look parses a file
    everything = sorted({f"{one['Name']}=={one['Version']}" for one in about})
    found["environment"] = hashlib.sha256(canonical(everything).encode()).hexdigest()[:16]
    return found


def check_versions(manifest: Manifest, *, force: bool) -> None:
    """Refuse to resume under another Inspect: finished work might look new, and halves of one run would not be comparable."""
    theirs, ours = manifest.versions.get("inspect-ai"), locks.installed("inspect-ai")
    if theirs is not None and theirs != ours and not force:
        fail(
            f"the run {manifest.fleet_id} was started with Inspect {theirs} and this is {ours}: "
            f"install inspect-ai=={theirs}, or add --force"
        )


def check_no_secret(manifest: Manifest) -> None:
    """Refuse what the user typed if it holds the value of a secret, because it would be stored with the run."""
    typed = [manifest.arguments, manifest.models, manifest.environment, manifest.requirements]
    typed += [job.task_args for job in manifest.jobs]
    name = redact.find_in(typed)
    if name is not None:
        fail(
            f"an option holds the value of {name}, and options are stored with the run: "
            "let the task or the model read it from the environment"
        )


def same_code(luggage: Luggage, manifest: Manifest) -> dict[str, Any]:
    """The fields that a resume changes when it leaves the code as it was; says so where the code that was packed is another by now."""
    tree = replace(luggage.tree, submit_dir=manifest.submit_dir)
    if manifest.code is not None and manifest.code_root == str(tree.root) and code.digest(tree) != manifest.code:
        note(f"the run {manifest.fleet_id} goes on with the code of its start: {SHIP_ANEW}")
    return {"secrets": sorted({*manifest.secrets, *luggage.secrets})}
