"""`ies infra …` and `ies secrets …`: plan, apply and destroy the estate, look at it, and push provider keys."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from evalops import settings, ui
from evalops.commands.options import json_option
from evalops.infra import doctor as infra_doctor
from evalops.infra import guard
from evalops.infra import secrets as infra_secrets
from evalops.infra.estate import Estate, read_estate, sync_lanes
from evalops.infra.terraform import Change, Terraform, TerraformError
from evalworker import aws
from evalworker.contract.wire import stamp
from evalworker.storage import StorageError, open_storage

CHECKOUT = Path(__file__).resolve().parents[3]


def _directory() -> Path:
    """The configuration: below the current directory, or the checkout's."""
    here = Path.cwd() / "terraform"
    return here if (here / "versions.tf").is_file() else CHECKOUT / "terraform"


_dir = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="INSPECT_FLEET_TERRAFORM",
    help="The Terraform configuration.  [default: terraform/ here or in the checkout]",
)
_yes = click.option("--yes", is_flag=True, help="Do not ask.")


@click.group()
def infra() -> None:
    """The AWS estate: what Terraform owns."""


@infra.command()
@_dir
def init(directory: Path | None) -> None:
    """Install the AWS provider and connect the state's backend."""
    with _sentences():
        terraform = _terraform(directory)
        terraform.init()
    ui.note(f"initialised {terraform.directory}")


@infra.command()
@_dir
@json_option
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Keep the plan in this file.")
def plan(directory: Path | None, as_json_: bool, out: Path | None) -> None:
    """Show what an apply would change. Exit code 0 with and without changes."""
    with _sentences(), _plan_file(out) as file:
        terraform = _terraform(directory)
        change = terraform.plan(file)
        shown = terraform.show(file)
    hurt = guard.removed_lanes(shown)
    if hurt:
        ui.note(f"removes queues of {', '.join(hurt)}: an apply stops if a fleet owns them")
    if as_json_:
        ui.emit_json({"changes": change is Change.CHANGES, "resources": _changes(shown), "lanes_removed": hurt})
    elif change is Change.NONE:
        click.echo("nothing to change")


@infra.command()
@_dir
@_yes
@click.option("--force", is_flag=True, help="Also remove lanes that a fleet owns; its messages are lost.")
def apply(directory: Path | None, yes: bool, force: bool) -> None:
    """Plan, ask, and apply exactly that plan."""
    with _sentences(), _plan_file(None) as file:
        terraform = _terraform(directory)
        change = terraform.plan(file)
        shown = terraform.show(file)
        if change is Change.CHANGES:
            if guard.removed_bucket(shown):
                ui.fail("the plan would remove the bucket with all logs: only `ies infra destroy` does that")
            _ask(yes, "Apply this plan?")
            with _lanes_kept(shown, force):
                terraform.apply(file)
        outputs = terraform.outputs()
        estate = Estate.model_validate(outputs)
        for line in sync_lanes(open_storage(f"s3://{estate.bucket}"), estate.lane_records()):
            ui.note(line)
    click.echo(f"estate {estate.name} in {estate.region}: bucket {estate.bucket}, {len(estate.lanes)} lanes")


@infra.command()
@_dir
@_yes
@click.option(
    "--force", is_flag=True, help="Although lanes are owned or logs remain; every log in the bucket is deleted."
)
def destroy(directory: Path | None, yes: bool, force: bool) -> None:
    """Remove the estate. Refuses while a fleet owns a lane or the bucket holds logs."""
    with _sentences(), _plan_file(None) as file:
        terraform = _terraform(directory)
        change = terraform.plan(file, destroy=True)
        if change is Change.NONE:
            click.echo("nothing to remove")
            return
        shown = terraform.show(file)
        if registry := guard.kept_registry(shown):
            ui.fail(
                f"AWS would not remove the registry {registry} with its images: `make apply` once, then destroy again"
            )
        bucket = guard.removed_bucket(shown)
        if bucket and not force and (logs := guard.remaining_logs(open_storage(f"s3://{bucket}"))):
            ui.fail(
                f"s3://{bucket} still holds logs ({', '.join(logs)}, …): copy away what you need, then --force deletes the rest"
            )
        warning = f", and every log in s3://{bucket}" if bucket and force else ""
        _ask(yes, f"Remove the whole estate{warning}?")
        with _lanes_kept(shown, force):
            if bucket:
                count = guard.empty_bucket(aws.client("s3"), bucket, ui.note)
                ui.note(f"deleted {count} versions from s3://{bucket}")
            terraform.apply(file)
    click.echo("the estate is removed")


@infra.command()
@_dir
@json_option
def outputs(directory: Path | None, as_json_: bool) -> None:
    """The names of everything, as the SSM parameter has them too."""
    with _sentences():
        found = _terraform(directory).outputs()
    if not found:
        ui.fail("there is no estate in this state: run `make apply`")
    if as_json_:
        ui.emit_json(found)
        return
    ui.table(("name", "value"), list(_flat(found)))


@infra.command()
@json_option
def doctor(as_json_: bool) -> None:
    """Say whether this shell can use the estate. Exit code 1 when something must be mended."""
    checks = infra_doctor.examine(settings.settings())
    if as_json_:
        ui.emit_json({"checks": [check.to_dict() for check in checks]})
    else:
        ui.table(("check", "", "what"), [(check.name, check.state, check.text) for check in checks])
    if any(check.state == "fail" for check in checks):
        sys.exit(ui.EXIT_FAILURES)


@click.group()
def secrets() -> None:
    """Provider keys in the estate."""


@secrets.command("push")
@click.argument("names", nargs=-1)
@click.option(
    "--env-file", type=click.Path(path_type=Path), default=Path(".env"), show_default=True, help="Where the values are."
)
def secrets_push(names: tuple[str, ...], env_file: Path) -> None:
    """Copy keys from .env to the estate: NAMES, or all that both know."""
    with _sentences():
        estate = read_estate(settings.settings().estate)
        values = infra_secrets.choose(estate, env_file, names)
        infra_secrets.push(aws.client("ssm"), estate, values)
    for name in values:
        click.echo(f"pushed {name}")


SECRET_COLUMNS = ("name", "parameter", "state", "changed")


@secrets.command("list")
@json_option
def secrets_list(as_json_: bool) -> None:
    """Which keys have a value; no value is shown."""
    with _sentences():
        estate = read_estate(settings.settings().estate)
        found = infra_secrets.listed(aws.client("ssm"), estate)
    rows = [
        (s.name, s.parameter, "set" if s.is_set else "not set", stamp(s.changed) if s.changed else None) for s in found
    ]
    if as_json_:
        ui.emit_json({"secrets": [dict(zip(SECRET_COLUMNS, row, strict=True)) for row in rows]})
        return
    ui.table(SECRET_COLUMNS, rows)


def _terraform(directory: Path | None) -> Terraform:
    terraform = Terraform((directory or _directory()).resolve(), ui.note)
    terraform.check()
    return terraform


@contextmanager
def _sentences() -> Iterator[None]:
    """What a user can cause ends with its sentence."""
    try:
        yield
    except (TerraformError, infra_secrets.SecretError, StorageError, aws.ServiceError) as error:
        ui.fail(str(error))


@contextmanager
def _plan_file(kept: Path | None) -> Iterator[Path]:
    """Where a plan is kept: it holds values, so a temporary one is readable by its owner alone and goes at the end."""
    if kept:
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-") as folder:
        yield Path(folder) / "plan"


@contextmanager
def _lanes_kept(plan: dict[str, Any], force: bool) -> Iterator[None]:
    """Run the body with the lanes that the plan removes fenced off; refuse when a fleet owns one, unless forced."""
    names, bucket = guard.removed_lanes(plan), guard.planned_bucket(plan)
    if not names or not bucket:
        yield
        return
    storage = open_storage(f"s3://{bucket}")
    held = guard.fence(storage, names)
    if held and not force:
        guard.unfence(storage, names)
        ui.fail(
            f"the plan removes queues of a running fleet: {guard.say_owned(held)}; wait for its end or stop it "
            "(`ct fleet stop`), or lose its messages with --force"
        )
    try:
        yield
    except BaseException:
        try:
            guard.unfence(storage, names)
        except StorageError as error:  # the bucket may be gone already
            ui.note(str(error))
        raise


def _ask(yes: bool, question: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        ui.fail("nobody can be asked without a terminal: look at the plan, then add --yes")
    if not click.confirm(question, err=True):
        ui.fail("nothing was changed")


def _changes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Address and actions of what a plan changes; no values."""
    return [
        {"address": change["address"], "actions": change["change"]["actions"]}
        for change in plan.get("resource_changes", [])
        if change["change"]["actions"] not in (["no-op"], ["read"])
    ]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Nested values as rows of dotted name and value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        yield path, ", ".join(str(item) for item in value)
    else:
        yield path, value
