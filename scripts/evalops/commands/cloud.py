"""`ct cloud …`: build the worker AMI and the worker image, list what there is, remove what is not needed."""

import sys
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click

from evalops import ui
from evalops.cloud import amis as amis_
from evalops.cloud import build, image, leftovers, packer, payload, sandboxes
from evalops.cloud.payload import CloudError
from evalops.commands.options import json_option
from evalops.infra.estate import Estate, read_estate
from evalops.settings import settings
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract.wire import now

OWN_ADDRESS = "https://checkip.amazonaws.com"
"""Says from which address this machine is seen: the only one that may connect while an image is built."""

EXIT_STALE = 1


class CloudGroup(click.Group):
    """Turns errors of AWS, Packer and Docker into one sentence, for every command below."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except CloudError as error:
            ui.fail(str(error), error.exit_code)
        except ServiceError as error:
            ui.fail(str(error))


@click.group(cls=CloudGroup)
def cloud() -> None:
    """Build and keep the worker AMI and the worker image."""


arch_option = click.option(
    "--arch",
    type=click.Choice(["x86_64", "arm64"]),
    default="x86_64",
    show_default=True,
    help="Architecture of the image.",
)


def _region() -> str:
    return str(aws.client("ec2").meta.region_name)


@cloud.command("build-ami")
@click.option("--tasks", "tasks", multiple=True, help="Bake in the sandbox images of this task; may be repeated.")
@click.option(
    "--images",
    type=click.Path(path_type=Path),
    help="Bake in the images that this file names: one a line, or what `ies sandbox images --json` prints.",
)
@arch_option
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be built; nothing is launched.")
@click.option("--no-activate", is_flag=True, help="Build, but let workers boot the image they boot now.")
@click.option(
    "--check",
    is_flag=True,
    help="Build nothing: say whether the newest image is behind this checkout, and why (exit 1).",
)
@click.option(
    "--from",
    "ssh_from",
    multiple=True,
    metavar="CIDR",
    help="Who may connect by SSH meanwhile (default: this machine's own address).",
)
@click.option("--private", is_flag=True, help="Reach the build machine by its private address; needs --from.")
@click.option(
    "--ssm",
    "ssm_profile",
    metavar="PROFILE",
    help="Reach it by a Systems Manager session; the instance profile that allows it.",
)
@click.option("--subnet", default="", help="Where to build (default: the estate's first subnet).")
@click.option("--kms-key", help="Key that encrypts the image (default: the account's own for EBS).")
@click.option(
    "--poll",
    "poll_seconds",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Seconds between looks at the image's state.",
)
def build_ami(
    tasks: tuple[str, ...],
    images: Path | None,
    arch: str,
    dry_run: bool,
    no_activate: bool,
    check: bool,
    ssh_from: tuple[str, ...],
    private: bool,
    ssm_profile: str | None,
    subnet: str,
    kms_key: str | None,
    poll_seconds: int,
) -> None:
    """Build the worker AMI of this checkout and let workers boot it from their next launch on."""
    name, root = settings().estate, payload.checkout()
    if check:
        _check(name, root, arch, tasks, images)
        return
    if private and not (ssh_from or ssm_profile):
        ui.fail(
            "--private needs --from CIDR, the private addresses that this machine may connect from (the network's, or a VPN's): "
            "they cannot be told from here"
        )
    build.account(aws.client("sts"))
    estate = _estate(name, needed=not no_activate)
    region = _region()
    order = build.Order(
        estate=name,
        architecture=arch,
        tasks=tasks,
        images=images,
        ssh_from=ssh_from or (() if ssm_profile or dry_run else (_own_address(),)),
        ssm_profile=ssm_profile,
        private=private,
        subnet=subnet or (estate.workers.subnets[0] if estate and estate.workers.subnets else ""),
        kms_key=kms_key,
        poll_seconds=poll_seconds,
    )
    build.preflight(order, estate, region, not no_activate)
    with build.prepared(order, root, region) as ready:
        if dry_run:
            _show_plan(ready, root, no_activate)
            return
        found = build.run(ready, aws.client("ec2"), name, ui.note)
    if estate is not None and not no_activate:
        amis_.activate(aws.client("ssm"), estate.workers.images[arch], found)
        ui.note(f"workers of {name!r} boot {found} from their next launch on")
    click.echo(found)


def _estate(name: str, needed: bool) -> Estate | None:
    try:
        return read_estate(name)
    except ui.Failure:
        if needed:
            raise
        return None


def _own_address() -> str:
    try:
        with urllib.request.urlopen(OWN_ADDRESS, timeout=10) as answer:
            return f"{answer.read(64).decode().strip()}/32"
    except (OSError, ValueError):
        ui.fail(f"{OWN_ADDRESS} does not say which address this machine has: give --from CIDR or --ssm PROFILE")


def _show_plan(ready: build.Prepared, root: Path, no_activate: bool) -> None:
    packer.init(ready.packer, ready.folder)
    packer.validate(ready.packer, ready.folder, ready.values_file)
    shown = {
        name: value for name, value in ready.values.items() if name not in ("registry_auth", "payload", "manifest")
    }
    ui.emit_json(
        {
            "packer": ".".join(map(str, ready.packer.version)),
            "values": shown,
            "files": len(payload.files(root)),
            "sandboxes": sorted(ready.baked),
            "activate": not no_activate,
        }
    )


def _check(estate: str, root: Path, arch: str, tasks: tuple[str, ...], images: Path | None) -> None:
    baked = sandboxes.collect(list(tasks), images)
    wanted = payload.fingerprint(root, baked)
    found = [one for one in amis_.listed(aws.client("ec2"), estate) if one.complete and one.architecture == arch]
    if not found:
        ui.fail(f"the estate {estate!r} has no {arch} image: run `ct cloud build-ami`", EXIT_STALE)
    reasons = amis_.stale(found[0], wanted, with_sandboxes=bool(tasks or images))
    if not reasons:
        click.echo(f"{found[0].image_id} is what this checkout would build")
        return
    click.echo(f"{found[0].image_id} of {found[0].created} is behind this checkout:")
    for reason in reasons:
        ui.say(f"  {reason}")
    sys.exit(EXIT_STALE)


@cloud.command()
@click.option("--activate", "activate_id", metavar="AMI", help="Let workers boot this image from their next launch on.")
@json_option
def amis(activate_id: str | None, as_json_: bool) -> None:
    """List the worker AMIs, or choose the one that workers boot."""
    estate, ec2, ssm = settings().estate, aws.client("ec2"), aws.client("ssm")
    parameters = read_estate(estate).workers.images
    found = amis_.listed(ec2, estate)
    if activate_id:
        _activate(activate_id, found, parameters)
    used = amis_.uses(ec2, ssm, parameters, found)
    rows = [_row(one, used.get(one.image_id, [])) for one in found]
    if as_json_:
        ui.emit_json({"images": rows})
        return
    columns = ["image", "architecture", "created", "state", "version", "commit", "GB", "sandboxes", "in use by"]
    shown = [
        [
            *(row[c] for c in ("image", "architecture", "created", "state", "version", "commit", "gb", "sandboxes")),
            ", ".join(row["used_by"]) or None,
        ]
        for row in rows
    ]
    ui.table(columns, shown, right=["GB"])


def _activate(image_id: str, found: list[amis_.Image], parameters: dict[str, str]) -> None:
    wanted = next((one for one in found if one.image_id == image_id), None)
    if wanted is None or not wanted.complete:
        ui.fail(f"{image_id} is no finished worker image of this estate: `ct cloud amis` lists them")
    if wanted.architecture not in parameters:
        ui.fail(f"{image_id} is for {wanted.architecture}, and the estate has no such workers")
    amis_.activate(aws.client("ssm"), parameters[wanted.architecture], image_id)
    ui.note(f"workers boot {image_id} from their next launch on")


def _row(one: amis_.Image, used: list[str]) -> dict[str, Any]:
    return {
        "image": one.image_id,
        "name": one.name,
        "architecture": one.architecture,
        "created": one.created,
        "state": one.state if one.complete else f"unfinished ({one.state})",
        "version": one.tags.get("inspect-fleet-version"),
        "commit": one.tags.get("inspect-fleet-commit"),
        "gb": one.gb,
        "sandboxes": one.tags.get("inspect-fleet-images"),
        "snapshots": list(one.snapshots),
        "used_by": used,
    }


@cloud.command("clean-amis")
@click.option("--keep", type=click.IntRange(0), required=True, help="How many of the newest of each architecture stay.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and touch nothing.")
@click.option(
    "--unfinished-after",
    type=click.FloatRange(0),
    default=leftovers.UNFINISHED_AFTER // timedelta(minutes=1),
    show_default=True,
    help="Minutes after which a build cannot be running any more.",
)
@json_option
def clean_amis(keep: int, dry_run: bool, unfinished_after: float, as_json_: bool) -> None:
    """Remove old worker AMIs with their snapshots, and what killed builds have left; never what is in use."""
    estate, ec2, ssm = settings().estate, aws.client("ec2"), aws.client("ssm")
    after, moment = timedelta(minutes=unfinished_after), now()
    parameters = read_estate(estate).workers.images
    found = amis_.listed(ec2, estate)

    def building(one: amis_.Image) -> bool:
        return leftovers.may_run("-".join(one.name.rsplit("-", 2)[1:]), moment, after)

    steps: list[tuple[str, bool, str, Callable[[], None]]] = []
    for decision in amis_.plan(found, keep, amis_.uses(ec2, ssm, parameters, found), building):
        one = decision.image
        steps.append((one.image_id, decision.remove, decision.reason, partial(amis_.deregister, ec2, one)))
    for left in leftovers.find(ec2, estate):
        running = leftovers.may_run(left.build, moment, after)
        reason = "its build may still run" if running else f"left by the build {left.build}"
        steps.append((f"{left.kind} {left.identity}", not running, reason, partial(leftovers.remove, ec2, left)))
    done = [_carry_out(*step, dry_run=dry_run, as_json_=as_json_) for step in steps]
    if not all(done):
        ui.fail("not all could be removed: see above, and run the command again later", 1)


def _carry_out(
    what: str, remove: bool, reason: str, action: Callable[[], None], *, dry_run: bool, as_json_: bool
) -> bool:
    """Do one step of the clean-up and say it; whether nothing went wrong."""
    error = None
    if remove and not dry_run:
        try:
            action()
        except CloudError as failure:
            error = str(failure)
    if as_json_:
        ui.emit_json({"what": what, "remove": remove, "reason": reason, "error": error, "dry_run": dry_run})
    else:
        verb = ("would remove" if dry_run else "removed") if remove else ("would keep" if dry_run else "kept")
        ui.say(f"{verb} {what}: {reason}" if error is None else f"could not remove {what}: {error}")
    return error is None


@cloud.command("boot-script")
def boot_script() -> None:
    """Print the script with which the stock Debian image becomes a worker at boot (230 s instead of 65 s)."""
    click.echo(payload.boot_script(payload.checkout()), nl=False)


@cloud.command("build-image")
@click.option("--base", default="debian:trixie-slim", show_default=True, help="A Debian 13 image to build on.")
@click.option("--tag", default="latest", show_default=True, help="Tag on this machine.")
def build_image(base: str, tag: str) -> None:
    """Build the worker image (Docker in Docker) of this checkout."""
    click.echo(image.build(payload.checkout(), base, tag))


@cloud.command("push-image")
@click.option("--tag", default="latest", show_default=True, help="Tag on this machine.")
def push_image(tag: str) -> None:
    """Push the worker image to the estate's registry and tell Terraform its digest."""
    root = payload.checkout()
    estate = read_estate(settings().estate)
    print_ = payload.fingerprint(root)
    version = (
        f"{print_.version}-{print_.commit.replace('+', '-changed-')}{print_.worker if '+' in print_.commit else ''}"
    )
    digest = image.push(aws.client("ecr"), estate.repository, tag, version)
    file = root / "terraform" / "terraform.tfvars"
    if image.write_digest(file, digest):
        ui.note(f"wrote the digest into {file.name}: run `make apply`")
    else:
        ui.note(
            f'put this into terraform/terraform.tfvars, then run `make apply`: batch = {{ image_digest = "{digest}" }}'
        )
    click.echo(digest)
