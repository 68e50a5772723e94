"""A fleet on EC2 whose instances really boot: the applied estate, the baked image, and machines that go in mid-run."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fleet_bench
import pytest
from fleet_bench import Fleets
from terraform_bench import Estate

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

import fleets
from ec2_storm import Ec2Storm

import iam_calls
from evalops.fleet import lanes
from evalworker.storage.s3 import S3Storage
from gateway import Gateway, gateway

pytest_plugins = ("image_fixtures",)

SAMPLES = 24
RUN = (
    "tasks/slow.py",
    "-T",
    f"n={SAMPLES}",
    "-T",
    "seconds=1",
    "--model",
    "scripted/good",
    "--model",
    "scripted/mixed",
)
STORMS = range(101, 101 + int(os.environ.get("MACHINE_CHAOS_SEEDS", "1")))
WORKERS = ("--ec2", "--max-workers", "2", "--slots", "1", "--concurrency-per-worker", "1", "--deadline", "2h")


@pytest.fixture
def gate(applied: Estate) -> Iterator[Gateway]:
    """All that instances and commands say to AWS goes through it."""
    with gateway(applied.emulator.url) as made:
        yield made


@pytest.fixture
def bench(applied: Estate, baked: str, gate: Gateway) -> Iterator[Fleets]:
    """The estate with instances that live; what a test stores does not stay."""
    with fleet_bench.serving(applied, baked, gate.endpoint) as serving:
        storage = storage_of(serving)
        before = {info.key: storage.get(info.key).body for info in storage.list("")}
        yield serving
        for key in {info.key for info in storage.list("")} - before.keys():
            storage.delete(key)
        for key, body in before.items():
            storage.put(key, body)  # a lane that a test has failed to give back would be missed by all others


def bucket_of(bench: Fleets) -> str:
    parameter = bench.estate.client("ssm").get_parameter(Name=f"/inspect-fleet/{bench.name}/config")
    return str(json.loads(parameter["Parameter"]["Value"])["bucket"])


def storage_of(bench: Fleets) -> S3Storage:
    return S3Storage(bucket_of(bench), client=bench.estate.client("s3"))


def aws_of(environment: dict[str, str], **more: str) -> dict[str, str]:
    """The part of an environment that says which AWS there is."""
    return {name: value for name, value in environment.items() if name.startswith(("AWS_", "INSPECT_"))} | more


def wait_until(what: Callable[[], Any], timeout: float = 120) -> Any:
    end = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.2)
    return found


def test_two_machines_boot_one_is_taken_back_and_one_dies(bench: Fleets, tmp_path: Path) -> None:
    folder = fleets.prepare(tmp_path / "here")
    environment = bench.environment("fleet-ec2")
    with fleets.started(folder, *RUN, *WORKERS, **aws_of(environment)) as (process, watcher):

        def both_work(events: list[dict[str, Any]]) -> bool:
            results = [event for event in events if event["type"] == "result"]
            return len({event["instance_id"] for event in results}) == 2 and len(results) >= 6

        watcher.wait(both_work)
        taken, dying = sorted(bench.boxes)
        bench.take_back(taken)
        bench.boxes[dying].kill()
        _, err = process.communicate(timeout=fleets.PATIENCE_S)
    print(err)
    fleet = fleets.ended(folder, process.returncode, "", err)
    fleet.root = folder
    storage = storage_of(bench)
    keys = [info.key for info in storage.list(f"{fleet.fleet_id}/events/")]
    fleets.check(fleet, stored={Path(key).name: storage.get(key).body for key in keys})

    assert process.returncode == 0, err
    assert fleet.summary["samples"] == {"total": 2 * SAMPLES, "completed": 2 * SAMPLES, "errored": 0}
    for done in fleet.of("job_done"):
        assert len(fleet.results(done["job_id"])) == SAMPLES
    assert [event["reason"] for event in fleet.of("worker_draining", instance_id=taken)] == ["spot"]
    assert [event["instance_id"] for event in fleet.of("worker_lost")] == [dying]
    online = {event["instance_id"]: event for event in fleet.of("worker_online")}
    assert len(online) == 4
    assert all(event["lifecycle"] == "spot" and event["instance_type"] == "m7i.large" for event in online.values())
    assert all(0 < event["bootstrap_s"] < 300 for event in online.values())

    # two lives, one end: no machine is left of any instance, and no instance of any machine
    wait_until(lambda: not bench.instances("pending", "running", "shutting-down"))
    wait_until(lambda: all(box.poll() is not None for box in bench.boxes.values()))
    assert len(bench.instances("terminated")) == 4
    assert all(lane.fleet_id is None for lane, _ in lanes.lanes(storage))
    logs = {info.key: storage.get(info.key).body.decode() for info in storage.list(f"{fleet.fleet_id}/workers/")}
    assert "EC2 takes this spot instance back" in logs[f"{fleet.fleet_id}/workers/{taken}.log"]

    made = bench.estate.emulator.calls()
    assert {call for who, call in made if who == "fleet-ec2"} - iam_calls.calls("researcher") == set()
    assert {call for who, call in made if who == "ASIABENCH"} - iam_calls.calls("worker") == set()
    assert {call for who, call in made if who == "ASIABENCH"} >= {"sqs:ReceiveMessage", "s3:PutObject"}
    for instance_id in (taken, dying):
        metadata = bench.boxes[instance_id].instance.metadata
        assert "shutdown -P +" in metadata.user_data
        assert "user-data" in {path for _, path in metadata.asked}


def test_a_terminated_instance_shuts_its_machine_down(bench: Fleets) -> None:
    bench.files["/etc/inspect-fleet/disabled"] = ""  # no worker runs that could end it
    tags = [{"Key": "fleet-id", "Value": "none"}, {"Key": "inspect-fleet", "Value": bench.name}]
    (born,) = bench.ec2.run_instances(
        LaunchTemplate={"LaunchTemplateName": f"inspect-fleet-{bench.name}-worker-x86-64"},
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )["Instances"]
    box = wait_until(lambda: bench.boxes.get(born["InstanceId"]))
    wait_until(lambda: box.instance.exec("systemctl", "is-active", "docker", check=False).strip() == "active")
    bench.ec2.terminate_instances(InstanceIds=[born["InstanceId"]])
    wait_until(lambda: box.poll() is not None)


@pytest.mark.parametrize("seed", STORMS)
def test_machines_die_on_an_aws_that_fails_and_doubles(seed: int, bench: Fleets, gate: Gateway, tmp_path: Path) -> None:
    """The storm over fleets on EC2 with whole machines; `tests/chaos` plays it with processes."""
    environment = fleets.environment(tmp_path, **aws_of(bench.environment("storm"), S3_BUCKET_NAME=bucket_of(bench)))
    storm = Ec2Storm(
        seed,
        tmp_path,
        environment,
        kills=4,
        machines=bench.boxes,
        gate=gate,
        running=lambda: bench.instances("pending", "running"),
        pause_s=(8.0, 16.0),
    )
    storm.run()
    assert storm.killed
    wait_until(lambda: all(box.poll() is not None for box in bench.boxes.values()))
    assert gate.faults is not None
    print(f"{len(storm.killed)} machines killed, {gate.faults.failed} of {len(gate.calls)} answers failed")
