"""EC2 for whole fleets: the applied estate on the emulator, and each running instance of it a container that really boots.

An instance gets its launch template's own user data, a metadata service with its tags, and a life tied both ways to EC2's state of it. A
spot notice is sent by the tag `bench-notice` (or `bench-rebalance`), which the instance does not see. The tests of fleets on EC2 use it;
`make bench-ec2` starts it for people: `fleet_bench.py [COMMAND…]` runs a command, or a shell, whose AWS it is.
"""

import base64
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import aws_emulator  # noqa: E402
import instance_bench  # noqa: E402
import terraform_bench  # noqa: E402
from docker_bench import docker  # noqa: E402
from instance_bench import Instance, Metadata  # noqa: E402
from terraform_bench import Estate  # noqa: E402

from instances import Player, playing  # noqa: E402

HIDDEN = "bench-"
"""Tags that begin so are the bench's, not the instance's."""

NOTICE = '{"action": "terminate", "time": "2026-11-29T17:00:00Z"}'
REBALANCE = '{"noticeTime": "2026-11-29T17:00:00Z"}'

SHUTDOWN_S = 60
"""How long a terminated instance may shut down before its power goes."""


@dataclass
class Box:
    """An instance that is a container, as `instances.Machine` wants it."""

    instance: Instance
    _over: contextlib.ExitStack
    _end: "subprocess.Popen[bytes]"

    def poll(self) -> int | None:
        """How its container ended."""
        return self._end.poll()

    def terminate(self) -> None:
        """The power button; after a while the plug."""
        threading.Thread(
            target=docker,
            args=("stop", "--time", str(SHUTDOWN_S), self.instance.container),
            kwargs={"check": False},
            daemon=True,
        ).start()

    def kill(self) -> None:
        """The plug."""
        docker("kill", self.instance.container, check=False)

    def wait(self) -> None:
        """Wait for its end and remove it."""
        self._end.wait()
        self._over.close()


@dataclass
class Fleets:
    """A running bench. `boxes` are the containers by instance, `files` what is put into each before it boots.

    `endpoint`: where instances and commands find AWS.
    """

    estate: Estate
    image: str
    endpoint: str
    name: str = "default"
    files: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)

    @property
    def ec2(self) -> Any:
        """EC2 as nobody of the fleet calls it."""
        return self.estate.client("ec2", "bench")

    def environment(self, who: str = "bench") -> dict[str, str]:
        """What `ct` needs to use this account; `who` stands for its credentials in the emulator's record."""
        foreign = ("S3_", "INSPECT_")
        kept = {k: v for k, v in self.estate.environment(who).items() if not k.startswith(foreign)}
        # A key like a real one: code that holds its value is not shipped, and the emulator's is a plain word.
        own = {"INSPECT_FLEET_NAME": self.name, "AWS_ENDPOINT_URL": self.endpoint}
        return kept | own | {"AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30)}

    def instances(self, *states: str) -> list[dict[str, Any]]:
        """The estate's workers in these states (all: no state given)."""
        filters = [{"Name": "tag:inspect-fleet", "Values": [self.name]}, {"Name": "tag-key", "Values": ["fleet-id"]}]
        if states:
            filters.append({"Name": "instance-state-name", "Values": list(states)})
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
        return [found for page in pages for each in page["Reservations"] for found in each["Instances"]]

    def take_back(self, instance_id: str, tag: str = "bench-notice") -> None:
        """EC2 sends a spot notice."""
        self.ec2.create_tags(Resources=[instance_id], Tags=[{"Key": tag, "Value": "now"}])

    def boot(self, found: dict[str, Any]) -> Box:
        """Start the container of an instance that EC2 has launched."""
        data = self.ec2.describe_instance_attribute(InstanceId=found["InstanceId"], Attribute="userData")
        metadata = Metadata(
            found["InstanceId"],
            {name: value for name, value in _tags(found).items() if not name.startswith(HIDDEN)},
            lifecycle=found.get("InstanceLifecycle", "on-demand"),
            instance_type=found["InstanceType"],
            user_data=base64.b64decode(data.get("UserData", {}).get("Value", "")).decode(),
            launched=found["LaunchTime"],
        )
        over = contextlib.ExitStack()
        instance = over.enter_context(instance_bench.instance(self.image, metadata, self.endpoint, self.files))
        end = subprocess.Popen(["docker", "wait", instance.container], stdout=subprocess.DEVNULL)
        return Box(instance, over, end)

    def look(self, found: dict[str, Any], box: Box) -> None:
        """Pass on what the bench's tags say."""
        tags = _tags(found)
        box.instance.metadata.notice = NOTICE if "bench-notice" in tags else None
        box.instance.metadata.rebalance = REBALANCE if "bench-rebalance" in tags else None


def _tags(found: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}


@contextmanager
def serving(estate: Estate, image: str, endpoint: str | None = None) -> Iterator[Fleets]:
    """An applied estate whose instances live while the block runs, and boot a container image as their AMI.

    `endpoint`: of a gateway before the emulator.
    """
    bench = Fleets(estate, image, endpoint or estate.emulator.url)
    ssm, parameter = estate.client("ssm", "bench"), f"/inspect-fleet/{bench.name}/image/x86_64"
    stock = ssm.get_parameter(Name=parameter)["Parameter"]["Value"]
    ami = bench.ec2.register_image(Name=f"bench-{os.getpid()}", Architecture="x86_64", RootDeviceName="/dev/xvda")
    kind = {"Name": parameter, "DataType": "aws:ec2:image", "Overwrite": True}
    ssm.put_parameter(Value=ami["ImageId"], **kind)

    def end(name: str) -> None:
        bench.ec2.terminate_instances(InstanceIds=[name])

    try:
        with playing(Player(bench.instances, end, bench.boot, bench.look, bench.boxes)):
            yield bench
    finally:
        for found in bench.instances("pending", "running"):
            end(found["InstanceId"])
        ssm.put_parameter(Value=stock, **kind)
        bench.ec2.deregister_image(ImageId=ami["ImageId"])


HELP = """
In this shell AWS is the bench: the estate is applied, and instances boot as containers. Leave it to end the bench. For example:

  ct run eval examples/arithmetic.py --model scripted/good --ec2
  docker ps                                                      the machines, by the names of their containers
  docker exec CONTAINER journalctl -fu inspect-fleet-worker      what a worker says
  docker kill CONTAINER                                          a machine dies
  aws ec2 create-tags --resources INSTANCE --tags Key=bench-notice,Value=now     EC2 takes a spot machine back
"""


def main(command: list[str]) -> int:
    """Start the bench, run a command or a shell in it, end it."""
    import image_fixtures

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("bench-ec2: the worker image …", file=sys.stderr)
    image = image_fixtures.kept()
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-bench-") as folder:
        emulator = aws_emulator.start(Path(folder))
        try:
            print("bench-ec2: terraform apply on the emulator (a minute or two) …", file=sys.stderr)
            estate = terraform_bench.initialised(Path(folder, "terraform"), emulator)
            terraform_bench.apply(estate, lanes=2)
            with serving(estate, image) as bench:
                if not command:
                    print(HELP, file=sys.stderr)
                shell = command or [os.environ.get("SHELL", "/bin/sh")]
                path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
                return subprocess.run(shell, env=bench.environment() | {"PATH": path}, check=False).returncode
        finally:
            emulator.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
