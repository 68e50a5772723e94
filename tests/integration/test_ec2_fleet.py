"""Whole fleets on EC2: the real command on moto's EC2, SQS, S3, SSM and SNS, with an agent of this machine for each instance."""

import gzip
import io
import itertools
import re
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ec2_world
import fleets
import pytest
import zipfile_zstd  # noqa: F401 - makes zipfile read Inspect's logs
from ec2_world import SECRET, World, playing, short_of, wait_for
from emulators import Emulator

from evalops.fleet import lanes
from evalworker.contract import layout
from evalworker.contract.documents import Control, MachineBook
from gateway import Change, ec2_error, expired, gateway

TASK = ("examples/arithmetic.py", "--model", "scripted/good", "--limit", "4", "--ec2")
SLOW = (
    "tasks/slow.py",
    "-T",
    "n=8",
    "-T",
    "seconds=2",
    "--concurrency-per-worker",
    "1",
    "--model",
    "scripted/good",
    "--ec2",
)
ENDLESS = tuple("n=90" if word == "n=8" else word for word in SLOW)
"""For tests that stop it: it cannot come to its end before, however busy the machine is."""
LEAKY = """
import os
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def leaky():
    print("printed", os.environ["PLANTED_API_KEY"])
    return Task(dataset=[Sample(input="What is 1 + 1?", target="2")], solver=generate(), scorer=includes())
"""


_numbers = itertools.count(1)


@pytest.fixture
def world(moto: Emulator, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """An estate of the test's own."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:30].strip("-") + f"-{next(_numbers)}"
    return ec2_world.make(moto, name, fleets.prepare(tmp_path / "here"), visibility_s=30)


def ct(world: World, *arguments: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """A `ct` command to its end, in another directory, as on another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    more = {fleets.MARK: str(world.folder), "S3_BUCKET_NAME": world.estate.bucket} | more
    return fleets.call(folder, "ct", *arguments, **world.environment(**more))


def first_result(events: list[dict[str, Any]]) -> bool:
    return any(event["type"] == "result" for event in events)


def fleet_id_of(events: list[dict[str, Any]]) -> str | None:
    return events[0]["fleet_id"] if events else None


def finished(folder: Path, world: World, fleet_id: str, code: int, err: str) -> fleets.Fleet:
    """A fleet as the controller of this directory has left it, checked against what is stored."""
    fleet = fleets.ended(folder, code, "", err)
    fleet.root = fleet.folder
    assert fleet.fleet_id == fleet_id
    fleets.check(fleet, stored=world.segments(fleet_id))
    return fleet


def test_a_run_from_launch_to_summary(world: World) -> None:
    (world.folder / "leaky.py").write_text(LEAKY)
    environment = world.environment(PLANTED_API_KEY=SECRET, INSPECT_FLEET_OWNER="a <b>")
    with gateway(world.moto.endpoint) as recorded, playing(world, endpoint=recorded.endpoint) as player:
        recorded.rule = lambda service, operation, body: (
            Change(body, lambda answer: answer.replace(b"0.00001", b"0.04"))  # moto's price is next to nothing
            if operation == "DescribeSpotPriceHistory"
            else None
        )
        words = ("leaky.py", *TASK, "--deadline", "3h", "--max-workers", "2")
        fleet = fleets.run(world.folder, *words, **environment | {"AWS_ENDPOINT_URL": recorded.endpoint})
    assert fleet.code == 0, fleet.err
    fleets.check(fleet, stored=world.segments(fleet.fleet_id))

    born = world.instances(fleet_id=fleet.fleet_id)
    assert len(born) == 2
    tags = {tag["Key"]: tag["Value"] for tag in born[0]["Tags"]}
    assert tags["owner"] == "a _b_"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", tags["fleet-deadline"])
    assert (tags["lane"], tags["inspect-fleet-bucket"]) == ("lane-01", world.estate.bucket)
    assert {each["State"]["Name"] for each in born} == {"terminated"}
    online = fleet.of("worker_online")
    assert {event["instance_id"] for event in online} == {each["InstanceId"] for each in born}
    assert {event["lifecycle"] for event in online} == {"spot"}
    assert all(event["bootstrap_s"] > 0 for event in online)

    assert fleet.events[0]["backend"] == "ec2"
    assert 0.04 / 60 * 2 <= fleet.summary["cost_usd"]["machines"] < 0.04
    book = MachineBook.from_json(world.storage.get(layout.machines(fleet.fleet_id)).body)
    assert {record.instance_id for record in book.machines} == {each["InstanceId"] for each in born}
    assert all(record.ended is not None and record.price_from for record in book.machines)
    assert all(lane.fleet_id is None for lane, _ in lanes.lanes(world.storage))
    assert [subject for subject in ec2_world.told(world) if "has ended: complete" in subject]

    words = ("run", "eval", "leaky.py", *TASK, "--estimate")
    estimated = ct(world, *words, folder=world.folder, PLANTED_API_KEY=SECRET)
    assert estimated.returncode == 0, estimated.stderr
    assert "a worker: m5.large spot, $0.0000 an hour (today's cheapest zone)" in estimated.stdout
    assert "a worker: m5.large on-demand, $0.0960 an hour (table of 2025-06-01)" in estimated.stdout
    assert re.search(rf"about .* s, machines .*, tokens .* \(as in {fleet.fleet_id}\)", estimated.stdout)
    reaped = ct(world, "fleet", "reap", folder=world.folder)
    assert (reaped.returncode, reaped.stdout) == (0, ""), reaped.stderr  # nothing is left over

    assert "printed [redacted PLANTED_API_KEY]" in stored_text(world, fleet.fleet_id)
    assert_found_nowhere(world, fleet, player, recorded)


def stored_text(world: World, fleet_id: str) -> str:
    logs = world.storage.list(layout.worker_logs(fleet_id))
    return b"".join(world.storage.get(info.key).body for info in logs).decode()


def assert_found_nowhere(world: World, fleet: fleets.Fleet, player: ec2_world.Played, recorded: Any) -> None:
    """The value of a secret: in storage, on the wire, in machines, on disks, in argument lists, on the terminal."""
    marker = SECRET.encode()
    for info in world.storage.list(""):
        assert marker not in b"".join(_unpacked(info.key, world.storage.get(info.key).body)), info.key
    assert any(b"sample_done" in body for body in recorded.bodies)
    assert [body for body in recorded.bodies if marker in body] == []
    assert SECRET not in str(world.instances())
    ec2 = world.client("ec2")
    for template in world.estate.workers.launch_templates.values():
        versions = ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"]
        assert SECRET not in str(versions)
    assert player.command_lines
    assert SECRET not in str(player.command_lines)
    assert SECRET not in fleet.err + fleet.out
    for path in world.folder.rglob("*"):
        if path.is_file():
            assert marker not in b"".join(_unpacked(path.name, path.read_bytes())), path


def _unpacked(name: str, body: bytes) -> Iterator[bytes]:
    """A file's bytes, and those of what it packs."""
    yield body
    if name.endswith(".gz"):
        yield gzip.decompress(body)
    elif name.endswith((".eval", ".whl")):
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            yield from (archive.read(member) for member in archive.namelist())


def test_partial_capacity_and_a_machine_that_is_taken(world: World) -> None:
    """Spot gives one of two, on-demand the other; one is terminated in mid-run and replaced."""
    with gateway(world.moto.endpoint) as guarded:
        spot = short_of(1, "InsufficientInstanceCapacity", "There is no Spot capacity available")

        def rule(service: str, operation: str, body: bytes) -> Any:
            return spot(body) if operation == "CreateFleet" and guarded.count("ec2", "CreateFleet") == 1 else None

        guarded.rule = rule
        words = (*SLOW, "--model", "scripted/mixed", "--max-workers", "2")
        with (
            playing(world) as player,
            fleets.started(world.folder, *words, **world.environment(guarded.endpoint)) as (process, watcher),
        ):
            watcher.wait(first_result)
            fleet_id = fleet_id_of(watcher.events()) or ""
            markets = sorted(each.get("InstanceLifecycle", "on-demand") for each in world.instances("running"))
            online = {event["instance_id"] for event in watcher.events() if event["type"] == "worker_online"}
            victim = sorted(online)[0]
            fleets.kill_tree(player.agents[victim].pid)  # no notice, no goodbye
            world.client("ec2").terminate_instances(InstanceIds=[victim])
            _, err = process.communicate(timeout=fleets.PATIENCE_S)
    assert markets == ["on-demand", "spot"]
    assert "EC2 has no spot capacity" in err
    fleet = finished(world.folder, world, fleet_id, process.returncode, err)
    assert fleet.summary["completed"] + fleet.summary["failed"] == 2
    assert fleet.summary["samples"]["total"] == 16
    assert len(world.instances(fleet_id=fleet_id)) == 3
    assert [event["reason"] for event in fleet.of("worker_lost", instance_id=victim)] == [
        "EC2 says Client.UserInitiatedShutdown"
    ]


def test_when_no_machine_comes_online_the_fleet_ends_at_once(world: World) -> None:
    ec2 = world.client("ec2")

    def dies(found: dict[str, Any]) -> bool:
        ec2.terminate_instances(InstanceIds=[found["InstanceId"]])
        return False

    with playing(world, dies):
        fleet = fleets.run(world.folder, *TASK, "--max-workers", "1", **world.environment())
    assert fleet.code == 3, fleet.err
    assert fleet.summary["reason"].startswith("no worker could start")
    assert len(fleet.of("bootstrap_failed")) == 1
    assert len(world.instances(fleet_id=fleet.fleet_id)) == 1
    fleets.check(fleet, stored=world.segments(fleet.fleet_id))
    assert all(lane.fleet_id is None for lane, _ in lanes.lanes(world.storage))


def test_a_launch_that_can_never_be_ends_the_fleet(world: World) -> None:
    def refuse(service: str, operation: str, body: bytes) -> Any:
        refusal = ec2_error("VcpuLimitExceeded", "your current vCPU limit of 1 allows")
        return refusal if operation == "CreateFleet" else None

    with gateway(world.moto.endpoint) as guarded:
        guarded.rule = refuse
        fleet = fleets.run(world.folder, *TASK, "--on-demand", **world.environment(guarded.endpoint))
    assert fleet.code == 3, fleet.err
    assert "the quota Running On-Demand Standard instances (L-1216C47A) is 1" in fleet.summary["reason"]
    assert world.instances() == []
    assert all(lane.fleet_id is None for lane, _ in lanes.lanes(world.storage))


def test_after_kill_9_another_directory_drives_the_fleet_on(world: World, tmp_path: Path) -> None:
    with (
        playing(world),
        fleets.started(world.folder, *SLOW, "--max-workers", "1", **world.environment()) as (process, watcher),
    ):
        watcher.wait(first_result)
        fleet_id = fleet_id_of(watcher.events()) or ""
        process.send_signal(signal.SIGKILL)
        process.wait()
        (instance,) = world.instances("running")
        elsewhere = tmp_path / "elsewhere"
        attached = ct(world, "fleet", "attach", fleet_id, folder=elsewhere)
    assert attached.returncode == 0, attached.stderr
    fleet = finished(elsewhere, world, fleet_id, attached.returncode, attached.stderr)
    assert fleet.of("attached")
    assert len(fleet.of("result")) == 8
    assert [each["InstanceId"] for each in world.instances(fleet_id=fleet_id)] == [instance["InstanceId"]]
    assert world.instances("running") == []


def test_ctrl_c_leaves_the_fleet_and_stop_ends_it(world: World, tmp_path: Path) -> None:
    with (
        playing(world),
        fleets.started(world.folder, *ENDLESS, "--max-workers", "1", **world.environment()) as (process, watcher),
    ):
        watcher.wait(first_result)
        fleet_id = fleet_id_of(watcher.events()) or ""
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=fleets.PATIENCE_S)
        assert process.returncode == 4, err
        assert f"S3_BUCKET_NAME={world.estate.bucket} ct fleet attach {fleet_id}" in err
        assert f"ct fleet stop {fleet_id}" in err
        assert len(world.instances("running")) == 1
        elsewhere = tmp_path / "elsewhere"
        status = ct(world, "fleet", "status", fleet_id, folder=elsewhere)
        stopped = ct(world, "fleet", "stop", fleet_id, folder=elsewhere)
        cost = ct(world, "fleet", "cost", fleet_id, folder=elsewhere)
        shell = ct(world, "fleet", "ssh", fleet_id, folder=elsewhere)
    assert "unattended" in status.stdout or "running" in status.stdout
    assert stopped.returncode == 0, stopped.stderr
    assert cost.returncode == 0, cost.stderr
    assert (shell.returncode, "none of its machines runs" in shell.stderr) == (2, True)
    assert "m5.large" in cost.stdout
    fleet = finished(elsewhere, world, fleet_id, stopped.returncode, stopped.stderr)
    assert fleet.summary["outcome"] == "stopped"
    assert world.instances("running") == []


def test_two_ctrl_c_stop_the_fleet(world: World) -> None:
    with playing(world), fleets.started(world.folder, *ENDLESS, "--max-workers", "1", **world.environment()) as started:
        process, watcher = started
        watcher.wait(first_result)
        fleet_id = fleet_id_of(watcher.events()) or ""
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("leaving the fleet running" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=fleets.PATIENCE_S)
    assert process.returncode == 130, err
    fleet = finished(world.folder, world, fleet_id, process.returncode, err)
    assert fleet.summary["outcome"] == "cancelled"
    assert world.instances("running") == []


def test_expired_credentials_leave_the_fleet_alive(world: World, tmp_path: Path) -> None:
    with gateway(world.moto.endpoint) as guarded, playing(world):
        words = (*SLOW, "--max-workers", "1")
        with fleets.started(world.folder, *words, **world.environment(guarded.endpoint)) as (process, watcher):
            watcher.wait(first_result)
            fleet_id = fleet_id_of(watcher.events()) or ""
            guarded.rule = lambda service, operation, body: expired(service)
            _, err = process.communicate(timeout=fleets.PATIENCE_S)
            assert process.returncode == 4, err
            assert "the AWS credentials have expired" in err
            assert "aws sso login" in err
            assert len(world.instances("running")) == 1
            attached = ct(world, "fleet", "attach", fleet_id, folder=tmp_path / "elsewhere")
    assert attached.returncode == 0, attached.stderr
    fleet = finished(tmp_path / "elsewhere", world, fleet_id, 0, attached.stderr)
    assert len(fleet.of("result")) == 8


def test_throttled_describe_calls_do_no_harm(world: World) -> None:
    """Not one look at the instances succeeds while the fleet runs: it completes, and its machines end themselves."""
    with gateway(world.moto.endpoint) as guarded, playing(world):
        guarded.rule = lambda service, operation, body: (
            ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)
            if operation == "DescribeInstances"
            else None
        )
        fleet = fleets.run(world.folder, *SLOW, "--max-workers", "1", **world.environment(guarded.endpoint))
        wait_for(lambda: not world.instances("running"))
    assert fleet.code == 0, fleet.err
    assert guarded.count("ec2", "DescribeInstances") > 1
    assert "EC2 cannot be asked for the fleet's instances" in fleet.err
    fleets.check(fleet, stored=world.segments(fleet.fleet_id))


@contextmanager
def four_fleets(world: World, folders: list[Path]) -> Iterator[list[Any]]:
    """Four commands of two users, each in its own directory."""
    running = []
    try:
        for index, folder in enumerate(folders):
            environment = world.environment(INSPECT_FLEET_OWNER=("ann", "bob")[index % 2])
            context = fleets.started(folder, *TASK, "--max-workers", "1", "--new-fleet", **environment)
            running.append((context, *context.__enter__()))
        yield running
    finally:
        for context, *_ in running:
            context.__exit__(None, None, None)


def test_four_lanes_are_separate_and_the_fifth_is_refused(world: World) -> None:
    folders = [fleets.prepare(world.folder / f"user-{index}") for index in range(4)]
    go = []
    with playing(world, lambda _: bool(go)), four_fleets(world, folders) as running:
        ids = [wait_for(lambda watcher=watcher: fleet_id_of(watcher.events())) for _, _, watcher in running]
        fifth = fleets.run(world.folder, *TASK, "--new-fleet", **world.environment(INSPECT_FLEET_OWNER="cid"))
        assert fifth.code == 2
        for fleet_id, owner in zip(ids, ("ann", "bob", "ann", "bob"), strict=True):
            assert f"{fleet_id} of {owner} until" in fifth.err
        assert len(world.instances("running")) == 4
        go.append(True)
        for index, (_, process, _) in enumerate(running):
            _, err = process.communicate(timeout=fleets.PATIENCE_S)
            assert process.returncode == 0, err
            fleet = fleets.ended(folders[index], 0, "", err)
            assert fleet.fleet_id == ids[index]
            assert {event["fleet_id"] for event in world.events(ids[index])} == {ids[index]}
            assert len(fleet.of("result")) == 4
            (machine,) = world.instances(fleet_id=ids[index])
            assert {event["instance_id"] for event in fleet.of("worker_online")} == {machine["InstanceId"]}
    assert all(lane.fleet_id is None for lane, _ in lanes.lanes(world.storage))
    assert Control.from_json(world.storage.get(layout.control(ids[0])).body).state == "ended"
