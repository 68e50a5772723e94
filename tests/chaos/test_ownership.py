"""Who owns what when two believe they do: two controllers of a fleet, two workers on a job, a lane whose fleet is dead."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from servers import ministack
from storm import Storm, storm_environment

from evalops.embedded import create_lane_queues
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.processes import tree


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """S3 and SQS for all tests of this module."""
    with ministack() as url:
        yield url


@pytest.fixture
def storm(request: pytest.FixtureRequest, endpoint: str, tmp_path: Path) -> Iterator[Storm]:
    """A run's directory and environment; nothing is left running."""
    name = request.node.name.replace("_", "-")[:50].rstrip("-")
    made = Storm(1, tmp_path, storm_environment(endpoint, name))
    made.make_bucket()
    yield made
    made.clean()


def client(storm: Storm, service: str) -> Any:
    """A client of the emulator, under the key of what Terraform does elsewhere: no policy needs its calls."""
    keys = {"aws_access_key_id": "embedded", "aws_secret_access_key": "embedded", "region_name": "us-east-1"}
    return boto3.client(service, endpoint_url=storm.environment["AWS_ENDPOINT_URL"], **keys)


def read(storm: Storm, key: str) -> dict[str, Any]:
    """A document below the root."""
    body = client(storm, "s3").get_object(Bucket=storm.environment["S3_BUCKET_NAME"], Key=key)["Body"].read()
    return dict(json.loads(body))


def write(storm: Storm, key: str, document: dict[str, Any]) -> None:
    """Put a document below the root."""
    client(storm, "s3").put_object(
        Bucket=storm.environment["S3_BUCKET_NAME"], Key=key, Body=json.dumps(document).encode()
    )


def wait_for(storm: Storm, condition: Any, seconds: float = 120) -> None:
    """Wait until something is seen; fails with the end of the stream."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, storm.tail()
        time.sleep(0.1)


def results(storm: Storm) -> int:
    """Results in the live stream."""
    path = storm.folder / "logs/fleet" / storm.fleet_id / "events.jsonl"
    return path.read_text().count('"type":"result"') if path.exists() else 0


def attach(storm: Storm) -> subprocess.CompletedProcess[str]:
    """`ct fleet attach` to its end."""
    return subprocess.run(storm.command("fleet", "attach", storm.fleet_id), **storm.in_folder(), timeout=200)


def test_a_second_controller_is_refused_by_the_name_of_the_first(storm: Storm) -> None:
    """While a controller lives nobody else drives its fleet; one that was displaced while it slept stops by itself."""
    storm.start_run()
    wait_for(storm, lambda: results(storm) > 5)
    first = storm.controller
    assert first is not None
    refused = attach(storm)
    assert refused.returncode == 2
    assert f":{first.pid} " in refused.stderr

    os.kill(first.pid, signal.SIGSTOP)
    control = read(storm, layout.control(storm.fleet_id))
    write(storm, layout.control(storm.fleet_id), control | {"beat": "2026-01-01T00:00:00Z"})
    second = subprocess.Popen(storm.command("fleet", "attach", storm.fleet_id), **storm.in_folder(capture=False))
    wait_for(storm, lambda: read(storm, layout.control(storm.fleet_id))["controller"].endswith(f":{second.pid}"))
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(60) == 4
    assert second.wait(200) == 0
    storm.killed.append((time.time(), "controller"))
    storm.verify()


def test_two_workers_on_one_job_give_one_result_set(storm: Storm) -> None:
    """A worker that stood still until its message went to another one wakes up and changes nothing."""
    storm.start_run()
    wait_for(storm, lambda: results(storm) > 5)
    victim = next(iter(storm.agents()))
    processes = tree(victim) | {child for member in tree(victim) for child in tree(member)}
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.time()
    storm.killed.append((stopped, "stopped"))
    assert storm.controller is not None
    wait_for(storm, lambda: time.time() - stopped > 20 or storm.controller.poll() is not None, 100)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    storm.killed.append((time.time(), "woken"))
    wait_for(storm, lambda: storm.controller.poll() is not None, 200)
    assert storm.controller.returncode == 0, storm.tail()
    storm.verify(redone_any_time=True)


def test_a_dead_fleet_is_closed_by_whoever_takes_its_lane(storm: Storm) -> None:
    """Its last messages are in its own segments and its summary is true; the next fleet runs on a clean lane."""
    jobs, events, dead = create_lane_queues(client(storm, "sqs"), "lane-01", 15)
    write(storm, layout.lane("lane-01"), Lane(name="lane-01", jobs=jobs, events=events, dead=dead).to_dict())
    storm.start_run("--queues", "estate")
    dead_fleet = storm.fleet_id
    wait_for(storm, lambda: results(storm) > 5, 120)
    assert storm.controller is not None
    storm.controller.kill()
    storm.controller.wait()
    time.sleep(3)  # what the workers say now nobody has heard
    over = {"deadline": "2026-01-01T00:00:00Z"}
    write(storm, layout.control(dead_fleet), read(storm, layout.control(dead_fleet)) | over)
    write(storm, layout.lane("lane-01"), read(storm, layout.lane("lane-01")) | {"until": over["deadline"]})
    wait_for(storm, lambda: not list(storm.agents()), 120)  # they end themselves at the deadline

    stored = len(storm.stored_events(dead_fleet))
    storm.start_run("--queues", "estate")
    assert storm.fleet_id != dead_fleet
    lines = storm.stored_events(dead_fleet)
    assert len(lines) > stored, "what the workers had said since the kill is missing"
    summary = lines[-1]
    assert (summary["type"], summary["outcome"]) == ("fleet_summary", "stopped")
    standing = {(line["job_id"], line["sample_id"]) for line in lines if line["type"] == "result"}
    assert summary["samples"]["completed"] == len(standing) > 5
    assert summary["completed"] + summary["failed"] + summary["cancelled"] == summary["expected"] == 6
    assert read(storm, layout.control(dead_fleet))["state"] == "ended"

    wait_for(storm, lambda: storm.controller.poll() is not None, 200)
    assert storm.controller.returncode == 0, storm.tail()
    storm.verify()
    assert read(storm, layout.lane("lane-01"))["fleet_id"] is None
