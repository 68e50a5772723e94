"""Real builds of the worker AMI: Debian's Packer, EC2 by moto, and containers as instances in which every script really runs."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker_bench
import ec2_bench
import pytest
from docker_bench import docker
from image_fixtures import BUILD, CT, Built, ct

import iam_calls

pytest_plugins = ("image_fixtures",)

SCRIPTS = ["10-packages.sh", "20-system.sh", "30-environment.sh", "40-worker.sh", "50-images.sh", "90-clean.sh"]


def in_image(built: Built, script: str) -> str:
    return docker("run", "--rm", "--entrypoint", "bash", built.image, "-c", script)


def test_a_build_runs_every_script_and_gives_an_image(built: Built) -> None:
    steps = [Path(step).name for step in re.findall(r"Provisioning with shell script: (\S+)", built.output)]
    assert [step for step in steps if step in SCRIPTS] == SCRIPTS
    assert re.fullmatch(r"ami-[0-9a-f]+", built.ami)
    assert (
        "building the sandbox of boxed" in built.output
        and "inspect-fleet: image inspect-fleet-bake-default:latest" in built.output
    )
    print(f"build: {built.seconds:.0f} s")


def test_an_operator_may_make_each_call_of_it(built: Built) -> None:
    made = {f"ec2:{call}" for call in built.cloud.calls}
    assert {"ec2:RunInstances", "ec2:CreateImage", "ec2:ModifyInstanceAttribute"} <= made
    assert made - iam_calls.calls("operator") == set()


def test_workers_boot_it_next(built: Built) -> None:
    (parameter,) = built.cloud.client("ssm").get_parameters(Names=["/inspect-fleet/default/image/x86_64"])["Parameters"]
    assert (parameter["Value"], parameter["DataType"]) == (built.ami, "aws:ec2:image")
    assert f"boot {built.ami} from their next launch on" in built.output


def test_it_says_what_it_is_made_of(built: Built) -> None:
    rows = json.loads(ct(built.cloud, "cloud", "amis", "--json").stdout)["images"]
    (row,) = [row for row in rows if row["image"] == built.ami]
    assert (row["sandboxes"], row["state"], row["architecture"]) == ("boxed", "available", "x86_64")
    assert row["used_by"] == ["parameter /inspect-fleet/default/image/x86_64"]
    assert "INSPECT_FLEET_IMAGE_VERSION=" in in_image(built, "cat /opt/inspect-fleet/image.env")
    assert ct(built.cloud, "cloud", "build-ami", "--check").stdout == f"{built.ami} is what this checkout would build\n"


def test_check_names_what_a_stale_image_lacks(built: Built) -> None:
    ec2 = built.cloud.client("ec2")
    tag = {"Key": "inspect-fleet-lock", "Value": "0123"}
    (before,) = [t for t in ec2.describe_images(ImageIds=[built.ami])["Images"][0]["Tags"] if t["Key"] == tag["Key"]]
    ec2.create_tags(Resources=[built.ami], Tags=[tag])
    try:
        said = ct(built.cloud, "cloud", "build-ami", "--check")
        why = "uv.lock has changed: jobs would run other package versions than those that are baked in"
        assert said.returncode == 1 and f"{why} (0123 → {before['Value']})" in said.stdout
    finally:
        ec2.create_tags(Resources=[built.ami], Tags=[before])


def test_nothing_of_the_build_machine_is_in_it(built: Built) -> None:
    said = in_image(
        built,
        "cat /etc/machine-id;"
        "ls /etc/ssh/ssh_host_* /home/admin/.ssh/authorized_keys /root/.bash_history 2>/dev/null;"
        "find /var/log -type f -size +0; ls -A /tmp /var/lib/apt/lists /dev/shm;"
        "grep -rl BEGIN.*PRIVATE /etc /home /root /var/lib/inspect-fleet || true",
    )
    assert sorted(said.split()) == ["/dev/shm:", "/tmp:", "/var/lib/apt/lists:"]


def test_the_environment_has_its_bytecode_and_leaves_out_what_a_worker_never_needs(built: Built) -> None:
    said = in_image(
        built,
        "cd /opt/inspect-fleet/venv/lib/python3*/site-packages && ls -d ministack debugpy 2>/dev/null;"
        "for package in boto3 evalworker inspect_ai; do ls $package/__pycache__/__init__.*.pyc; done;"
        "uv --version; docker --version; docker compose version",
    )
    lines = said.splitlines()
    assert [line.split("/")[0] for line in lines[:3]] == ["boto3", "evalworker", "inspect_ai"]
    assert lines[4].startswith("Docker version 26.") and "2.26" in lines[5]


def test_a_build_leaves_nothing_temporary(built: Built) -> None:
    # what others run from the image meanwhile is theirs
    with docker_bench.container(image=built.image, command=("sleep", "60")):
        assert nothing_left(built.cloud)


def nothing_left(cloud: ec2_bench.Cloud) -> bool:
    """Whether no instance, key, group, and no untagged image is left of any build."""
    ec2 = cloud.client("ec2")
    states = [i["State"]["Name"] for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
    groups = [
        g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"] if g["GroupName"].startswith("packer")
    ]
    keys = [key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]]
    images = [i["ImageId"] for i in ec2.describe_images(Owners=["self"])["Images"] if not i.get("Tags")]
    left = {
        "instances": set(states) - {"terminated"},
        "keys": keys,
        "groups": groups,
        "images": images,
        "containers": cloud.containers(),
    }
    assert not any(left.values()), left
    return True


# Builds that do not end well. They begin from the image that was built: every script still runs, and finds its work done.


@pytest.fixture(scope="module")
def cloud(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ec2_bench.Cloud]:
    """Another cloud, whose stock image is the one that was built."""
    image = "inspect-fleet-test/provisioned:latest"
    dockerfile = (
        f"FROM {built.image}\nRUN touch /etc/inspect-fleet/disabled /etc/cloud/cloud-init.disabled && ssh-keygen -A\n"
    )
    docker("build", "--quiet", "--tag", image, "-", stdin=dockerfile.encode())
    with ec2_bench.cloud(tmp_path_factory.mktemp("failing"), image) as found:
        yield found


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    if "cloud" in request.fixturenames:
        cloud: ec2_bench.Cloud = request.getfixturevalue("cloud")
        cloud.calls.clear()
        cloud.hold_images = False
    yield


def test_a_failing_script_is_named_with_its_last_lines(cloud: ec2_bench.Cloud, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.write_text("registry.invalid/nothing:1\n")
    done = ct(cloud, *BUILD, "--images", str(images))
    assert (done.returncode, done.stdout) == (1, "")
    end = done.stderr[done.stderr.index("Error: ") :]
    assert end.startswith("Error: the build failed (Packer's status 1) at: 50-images.sh\n")
    assert "the image registry.invalid/nothing:1 cannot be pulled: check its name, and the registry login" in end
    assert nothing_left(cloud)


def test_without_a_way_to_the_internet_the_build_says_so(cloud: ec2_bench.Cloud, tmp_path: Path) -> None:
    with ec2_bench.cloud(tmp_path, cloud.boots, internal=True) as cut_off:
        done = ct(cut_off, *BUILD)
        assert done.returncode == 1
        assert "at: 10-packages.sh\n" in done.stderr
        assert "Debian's package archive cannot be reached: the build needs a way to the internet" in done.stderr
        assert nothing_left(cut_off)


class Running:
    """A build that goes on; `until` reads its output up to a line."""

    def __init__(self, cloud: ec2_bench.Cloud) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with this object
        self.process = subprocess.Popen(
            [CT, *BUILD], env=cloud.environment(), stdout=self._file, stderr=self._file, start_new_session=True
        )

    def output(self) -> str:
        self._file.seek(0)
        return self._file.read().decode(errors="replace")

    def until(self, text: str, timeout: float = 300) -> None:
        end = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None and time.monotonic() < end, self.output()[-3000:]
            time.sleep(0.1)

    def packer_group(self) -> int:
        """The process group of its Packer."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def end(self) -> str:
        self.process.wait(timeout=180)
        return self.output()


def test_ctrl_c_while_a_script_runs(cloud: ec2_bench.Cloud) -> None:
    build = Running(cloud)
    build.until("10-packages.sh")
    build.process.send_signal(signal.SIGINT)
    said = build.end()
    assert build.process.returncode == 130
    assert "the build was interrupted at: 10-packages.sh" in said
    assert nothing_left(cloud)


def test_ctrl_c_while_the_image_is_waited_for(cloud: ec2_bench.Cloud) -> None:
    cloud.hold_images = True
    build = Running(cloud)
    build.until("Waiting for AMI to become ready")
    build.process.send_signal(signal.SIGINT)
    cloud.wait_for("DeleteKeyPair")
    cloud.hold_images = False
    said = build.end()
    assert build.process.returncode == 130
    assert "the build was interrupted at: Waiting for AMI to become ready" in said
    assert "removed the unfinished image ami-" in said
    assert nothing_left(cloud)
    assert cloud.client("ec2").describe_images(Owners=["self"])["Images"] == []


def test_a_killed_packer_is_cleaned_up_after(cloud: ec2_bench.Cloud) -> None:
    build = Running(cloud)
    build.until("10-packages.sh")
    os.killpg(build.packer_group(), signal.SIGKILL)
    said = build.end()
    assert build.process.returncode == 137
    assert "the build was killed by signal 9 at: 10-packages.sh" in said
    assert "removed instance i-" in said and "removed key packer_inspect-fleet-" in said and "removed group sg-" in said
    assert nothing_left(cloud)


def test_when_all_is_killed_clean_amis_finds_it(cloud: ec2_bench.Cloud) -> None:
    build = Running(cloud)
    build.until("10-packages.sh")
    build.process.send_signal(signal.SIGSTOP)
    os.killpg(build.packer_group(), signal.SIGKILL)
    build.process.kill()
    build.process.wait()
    clean = ("cloud", "clean-amis", "--keep", "0")
    kept = ct(cloud, *clean)
    assert kept.returncode == 0 and kept.stdout.count("its build may still run") == 3, kept.stdout
    told = ct(cloud, *clean, "--unfinished-after", "0", "--dry-run")
    assert told.stdout.count("would remove ") == 3
    done = ct(cloud, *clean, "--unfinished-after", "0")
    assert done.returncode == 0, done.stderr
    kinds = sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith("removed "))
    assert kinds == ["group", "instance", "key"]
    assert nothing_left(cloud)


def test_what_is_denied_is_reported_and_removed_later(cloud: ec2_bench.Cloud) -> None:
    cloud.denied = {"TerminateInstances", "DeleteKeyPair", "DeleteSecurityGroup"}
    build = Running(cloud)
    build.until("10-packages.sh")
    build.process.send_signal(signal.SIGINT)
    said = build.end()
    cloud.denied = set()
    assert "not removed: the instance i-" in said and "run `ct cloud clean-amis` later" in said
    assert ct(cloud, "cloud", "clean-amis", "--keep", "0", "--unfinished-after", "0").returncode == 0
    assert nothing_left(cloud)


def test_a_dry_run_launches_nothing(cloud: ec2_bench.Cloud) -> None:
    done = ct(cloud, *BUILD, "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["values"]["subnet_id"] == cloud.subnet and plan["activate"] is True
    assert not {"RunInstances", "CreateKeyPair"} & set(cloud.calls)
