"""The AMI that was built boots as an instance: systemd, cloud-init, the agent, a job from a queue to a result, and each kind of end."""

import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import ec2_bench
import fleet_on_s3
import instance_bench
import pytest
from image_fixtures import Built
from instance_bench import Instance, Metadata

from evalworker.contract import layout

pytest_plugins = ("image_fixtures",)

ROOT = Path(__file__).resolve().parents[2]
ID = "i-0123456789abcdef0"
USER_DATA = "#!/bin/sh\nshutdown -P +720 longest\necho user data ran >/var/lib/user-data\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[str, fleet_on_s3.Run]]:
    """(endpoint, a run of one job) on an emulator of its own."""
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(ROOT / "examples" / "arithmetic.py", code)
    with ec2_bench.moto_server(tmp_path) as endpoint, fleet_on_s3.reaching(endpoint):
        yield endpoint, fleet_on_s3.submit(code, "arithmetic.py@arithmetic", "arithmetic", 20)


def log_of(run: fleet_on_s3.Run) -> str:
    return run.storage.get(layout.worker_log(run.fleet_id, ID)).body.decode()


def wait_until(instance: Instance, *command: str, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not instance.exec(*command, check=False).strip():
        assert time.monotonic() < end, f"{command} said nothing within {timeout} s"
        time.sleep(0.2)


def test_an_instance_takes_a_job_to_its_result_and_goes_on_a_spot_notice(
    built: Built, run: tuple[str, fleet_on_s3.Run]
) -> None:
    endpoint, fleet = run
    metadata = Metadata(ID, fleet.tags, user_data=USER_DATA)
    with instance_bench.instance(built.image, metadata, endpoint) as instance:
        online = fleet.wait_for("worker_online")
        assert (online.instance_id, online.instance_type, online.lifecycle) == (ID, "m7i.large", "spot")
        done = fleet.wait_for("attempt_done")
        assert (done.status, done.samples.completed, done.error_summary) == ("completed", 20, None)
        assert fleet.storage.exists(done.log)
        report(instance, fleet)

        # the machine's own: credentials for the worker alone, the engine up, the switch set to the fleet's deadline
        wait_until(instance, "cat", "/var/lib/user-data")
        wait_until(instance, "docker", "info", "--format", "{{.Driver}}")
        asking = [
            "curl",
            "-sS",
            "-m",
            "3",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "http://169.254.169.254/latest/meta-data/instance-id",
        ]
        assert instance.exec(*asking, check=False) == "000"
        assert instance.exec("setpriv", "--regid", "inspect-fleet", "--clear-groups", *asking, check=False) == "401"
        timers = instance.exec(
            "systemctl", "show", "inspect-fleet-deadline.timer", "-p", "ActiveState", "-p", "TimersMonotonic"
        )
        assert "ActiveState=active" in timers
        assert instance.exec("cat", "/run/inspect-fleet/deadline").strip() == fleet.tags["fleet-deadline"]
        assert instance.exec("systemctl", "--failed", "--no-legend", "--plain").strip() == ""

        metadata.notice = '{"action": "terminate", "time": "2026-11-29T17:00:00Z"}'
        assert fleet.wait_for("worker_draining", 30).reason == "spot"
        assert instance.wait_off(60)
    assert "EC2 takes this spot instance back: terminate at 2026-11-29T17:00:00Z" in log_of(fleet)
    assert "the worker has ended: success" in log_of(fleet)


def report(instance: Instance, fleet: fleet_on_s3.Run) -> None:
    """Print when each part of the boot was done, from the start of the container."""
    asked = {path: moment for moment, path in reversed(instance.metadata.asked)}
    parts = {
        "boot.sh asks for its deadline": asked["meta-data/tags/instance/fleet-deadline"],
        "the agent asks who it is": asked["dynamic/instance-identity/document"],
        "worker_online": fleet.when("worker_online"),
        "first sample": fleet.when("sample_done"),
        "attempt_done": fleet.when("attempt_done"),
    }
    for part, moment in parts.items():
        print(f"{part}: {moment - instance.started:.2f} s after the start of the container")


def test_a_worker_that_cannot_start_says_why_and_the_machine_ends(
    built: Built, run: tuple[str, fleet_on_s3.Run]
) -> None:
    endpoint, fleet = run
    fleet.storage.delete(layout.manifest(fleet.fleet_id))
    with instance_bench.instance(built.image, Metadata(ID, fleet.tags), endpoint) as instance:
        said = fleet.wait_for("bootstrap_failed")
        assert said.instance_id == ID
        assert any("cannot start" in line and "manifest.json" in line for line in said.lines), said.lines
        assert instance.wait_off(60)
    assert "the worker has ended: exit-code (exited 1)" in log_of(fleet)


def test_a_machine_past_its_fleets_deadline_ends_at_once(built: Built, run: tuple[str, fleet_on_s3.Run]) -> None:
    endpoint, fleet = run
    tags = fleet.tags | {"fleet-deadline": "2026-01-01T00:00:00Z"}
    with instance_bench.instance(built.image, Metadata(ID, tags), endpoint) as instance:
        assert any(
            "the fleet's deadline 2026-01-01T00:00:00Z is past" in line
            for line in fleet.wait_for("bootstrap_failed").lines
        )
        assert instance.wait_off(60)


def test_the_deadline_ends_a_machine_whose_agent_hangs(built: Built, run: tuple[str, fleet_on_s3.Run]) -> None:
    endpoint, fleet = run
    fleet.deadline -= timedelta(hours=2) - timedelta(seconds=45)
    with instance_bench.instance(built.image, Metadata(ID, fleet.tags), endpoint) as instance:
        wait_until(instance, "cat", "/run/inspect-fleet/deadline")
        instance.exec("pkill", "-STOP", "-f", "evalworker --imds", check=False)
        # a stopped agent cannot flush: systemd kills it after its time
        assert instance.wait_off(180)


def test_user_data_that_fails_ends_the_machine(built: Built, run: tuple[str, fleet_on_s3.Run]) -> None:
    endpoint, fleet = run
    with instance_bench.instance(
        built.image, Metadata(ID, fleet.tags, user_data="#!/bin/sh\nexit 3\n"), endpoint
    ) as instance:
        assert instance.wait_off(90)
    assert "the worker has ended" in log_of(fleet)  # told before the machine goes
