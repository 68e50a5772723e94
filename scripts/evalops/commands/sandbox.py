"""`ies sandbox`: Docker on this machine, as Inspect's sandboxes need it."""

from typing import Any

import click

from evalops import ui
from evalops.commands.options import dry_run_option, json_option
from evalops.commands.params import RunId
from evalops.inspect_options import collect_tasks, task_options
from evalops.logs import places
from evalops.sandbox import check as checks
from evalops.sandbox import cleanup as leftovers
from evalops.sandbox import fetch, images, owners
from evalops.sandbox.docker import DockerError
from evalworker.contract.labels import run_mark


@click.group()
def sandbox() -> None:
    """Check Docker, list and fetch images, remove what jobs left."""


@sandbox.command()
@json_option
def check(as_json_: bool) -> None:
    """Say whether this machine can run Inspect's Docker sandboxes, and what to mend. Exit code 1 when it cannot."""
    findings = checks.judge(checks.gather())
    if as_json_:
        ui.emit_json(
            {"ok": all(item.ok is not False for item in findings), "findings": [vars(item) for item in findings]}
        )
    else:
        words = {True: "ok", False: "MEND", None: "unknown"}
        ui.table(
            ("what", "found", "needed", "", "what to do"),
            [(item.what, item.found, item.needed, words[item.ok], item.help) for item in findings],
        )
    if any(item.ok is False for item in findings):
        raise SystemExit(ui.EXIT_FAILURES)


def _arguments(values: tuple[str, ...]) -> dict[str, Any]:
    from evalworker.inspect_internals import parse_task_args

    return parse_task_args(values)


@sandbox.command(name="images")
@task_options
@click.option("-T", "task_args", multiple=True, metavar="NAME=VALUE", help="Argument of the tasks, as for Inspect.")
@json_option
def images_(tasks: tuple[str, ...], task_names: tuple[str, ...], task_args: tuple[str, ...], as_json_: bool) -> None:
    """List the images that the tasks' sandboxes use. --json is what `ct cloud build-ami --images` reads, as long as none is built."""
    found = _images(tasks, task_names, task_args)
    if as_json_:
        ui.emit_json({"images": [image.as_json() for image in found]})
        return
    rows = [(image.label, "build" if image.built else "pull", image.compose, ", ".join(image.tasks)) for image in found]
    ui.table(("image", "how", "compose file", "tasks"), rows)


@sandbox.command()
@task_options
@click.option("-T", "task_args", multiple=True, metavar="NAME=VALUE", help="Argument of the tasks, as for Inspect.")
@click.option("--refresh", is_flag=True, help="Pull again what is here already.")
@dry_run_option
def pull(
    tasks: tuple[str, ...], task_names: tuple[str, ...], task_args: tuple[str, ...], refresh: bool, dry_run: bool
) -> None:
    """Pull or build the images that the tasks' sandboxes use. Exit code 1 when one could not be had."""
    found = _images(tasks, task_names, task_args)
    failed = 0
    with ui.progress("images") as bar:
        bar.update(bar.task_ids[0], total=len(found))
        for image in found:
            bar.update(bar.task_ids[0], description=image.label)
            try:
                failed += not _have(image, refresh, dry_run)
            except DockerError as error:
                ui.note(str(error))
                failed += 1
            bar.advance(bar.task_ids[0])
    if failed:
        raise SystemExit(ui.EXIT_FAILURES)


def _have(image: images.Image, refresh: bool, dry_run: bool) -> bool:
    if dry_run:
        click.echo(f"docker {' '.join(fetch.command(image))}")
    elif not refresh and fetch.have(image):
        click.echo(f"have    {image.label}")
    else:
        fetch.fetch(image, ui.note)
        click.echo(f"{'built ' if image.built else 'pulled'}  {image.label}")
    return True


def _images(tasks: tuple[str, ...], task_names: tuple[str, ...], task_args: tuple[str, ...]) -> list[images.Image]:
    specs = collect_tasks(tasks, task_names)
    if not specs:
        ui.fail("Say which tasks: `ies sandbox images TASK…`.")
    try:
        found, said = images.of_tasks(specs, _arguments(task_args))
    except images.ImagesError as error:
        ui.fail(str(error))
    for remark in said:
        ui.note(remark)
    if not found:
        ui.note("These tasks use no Docker sandbox.")
    return found


@sandbox.command()
@click.option("--run-id", type=RunId(), help="Only what this run's jobs left; refused while the run lives.")
@click.option("--force", is_flag=True, help="Remove also what belongs to runs that live.")
@dry_run_option
@json_option
def cleanup(run_id: str | None, force: bool, dry_run: bool, as_json_: bool) -> None:
    """Remove the containers, networks and volumes that jobs left behind: those of Compose projects named after a job, no others.

    What belongs to a run that lives is kept, and so is a project with a running container whose run cannot be found.
    """
    try:
        found = leftovers.find(run_id)
        kept = {} if force else _kept(found, run_id)
        gone = [item for item in found if item.project not in kept]
        if not dry_run:
            leftovers.clean(gone)
    except DockerError as error:
        ui.fail(str(error), ui.EXIT_FAILURES)
    if as_json_:
        stays = [item.as_json() | {"why": kept[item.project]} for item in found if item.project in kept]
        ui.emit_json({"dry_run": dry_run, "removed": [item.as_json() for item in gone], "kept": stays})
        return
    if gone:
        ui.table(("kind", "id", "name"), [(item.kind, item.id, item.name) for item in gone])
    for project, why in kept.items():
        ui.note(f"kept {project}: {why}")
    if kept:
        ui.note("--force removes it all the same.")
    elif not gone:
        ui.note("Jobs have left nothing behind.")


def _kept(found: list[leftovers.Leftover], run_id: str | None) -> dict[str, str]:
    """The projects that stay, each with why. A run that is named and lives is refused."""
    if not found:
        return {}
    fates = owners.fates({item.mark for item in found}, run_id, places.root)
    if run_id and (lives := fates.get(run_mark(run_id))):
        ui.fail(f"{lives}; stop it first, or --force removes its sandboxes all the same")
    return leftovers.kept(found, fates)
