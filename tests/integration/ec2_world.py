"""An AWS account for fleet tests: an estate on moto as Terraform would make it, a gateway that can refuse, and a player of instances.

The player starts a real agent as a process of this machine for each running instance of the estate, with the instance's id, and keeps the
two lives tied: an agent that ends terminates its instance, an instance that is terminated ends its agent.
"""

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleets
from emulators import REGION, Emulator

import instances
from evalops.infra.estate import Estate, parameter, sync_lanes
from evalworker.storage.s3 import S3Storage
from gateway import Change
from instances import Player

SECRET = "sk-planted-marker-0123456789abcdef"
"""The value of the estate's one provider key, to be found nowhere."""

USER_DATA = "#!/bin/sh\nshutdown -P +1440\nS3_BUCKET_NAME={bucket}\n"
ACCOUNT = "123456789012"
IMAGE = "ami-1e749f67"
"""One of moto's own images, for x86_64."""


@dataclass
class World:
    """One estate."""

    moto: Emulator
    name: str
    estate: Estate
    folder: Path

    def client(self, service: str) -> Any:
        """A client that goes to the emulator directly."""
        return self.moto.client(service)

    @property
    def storage(self) -> S3Storage:
        """The bucket."""
        return S3Storage(self.estate.bucket, client=self.client("s3"))

    def environment(self, endpoint: str | None = None, **more: str) -> dict[str, str]:
        """What a command needs to use this account, through a gateway if one is given."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.moto.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "INSPECT_FLEET_NAME": self.name,
        } | more

    def instances(self, *states: str, **tags: str) -> list[dict[str, Any]]:
        """The estate's instances in these states (all: no state given) with these tags (`_` stands for `-`)."""
        filters = [{"Name": "tag:inspect-fleet", "Values": [self.name]}]
        filters += [{"Name": f"tag:{name.replace('_', '-')}", "Values": [value]} for name, value in tags.items()]
        if states:
            filters.append({"Name": "instance-state-name", "Values": list(states)})
        pages = self.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
        return [found for page in pages for each in page["Reservations"] for found in each["Instances"]]

    def segments(self, fleet_id: str) -> dict[str, bytes]:
        """The stored event segments of a fleet."""
        keys = [info.key for info in self.storage.list(f"{fleet_id}/events/")]
        return {Path(key).name: self.storage.get(key).body for key in keys}

    def events(self, fleet_id: str) -> list[dict[str, Any]]:
        """All stored events of a fleet."""
        text = b"".join(body for _, body in sorted(self.segments(fleet_id).items()))
        return [json.loads(line) for line in text.splitlines()]


def make(moto: Emulator, name: str, folder: Path, lanes: int = 4, visibility_s: int = 60) -> World:
    """An estate of that name with everything that Terraform would make and a fleet needs.

    `visibility_s`: after so long a message that nobody deleted comes back; Terraform's is 60 too.
    """
    bucket, prefix = f"bucket-{name}", f"inspect-fleet-{name}"
    s3, sqs, ec2, ssm, sns = (moto.client(service) for service in ("s3", "sqs", "ec2", "ssm", "sns"))
    s3.create_bucket(Bucket=bucket)
    names = {f"lane-{number:02d}": f"{prefix}-lane-{number:02d}" for number in range(1, lanes + 1)}
    queues = {lane: lane_queues(sqs, queue, visibility_s) for lane, queue in names.items()}
    image = IMAGE
    subnets = [each["SubnetId"] for each in ec2.describe_subnets()["Subnets"]][:2]
    tags = [{"Key": "inspect-fleet", "Value": name}, {"Key": "inspect-fleet-bucket", "Value": bucket}]
    template = ec2.create_launch_template(
        LaunchTemplateName=f"{prefix}-worker-x86-64",
        LaunchTemplateData={
            "ImageId": image,
            "InstanceType": "m5.large",
            "UserData": base64.b64encode(USER_DATA.format(bucket=bucket).encode()).decode(),
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
        },
    )["LaunchTemplate"]["LaunchTemplateId"]
    secret, image_name = f"/inspect-fleet/{name}/secrets/PLANTED_API_KEY", f"/inspect-fleet/{name}/image/x86_64"
    ssm.put_parameter(Name=secret, Value="unset", Type="SecureString")
    ssm.put_parameter(Name=secret, Value=SECRET, Type="SecureString", Overwrite=True)
    ssm.put_parameter(Name=image_name, Value=image, Type="String")
    topic = sns.create_topic(Name=prefix)["TopicArn"]
    inbox = sqs.create_queue(QueueName=f"{prefix}-inbox")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=inbox, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    content = {
        "schema": 1,
        "name": name,
        "account": ACCOUNT,
        "region": REGION,
        "bucket": bucket,
        "lanes": {lane: dict(zip(("jobs", "events", "dead"), urls, strict=True)) for lane, urls in queues.items()},
        "secrets": {"PLANTED_API_KEY": secret},
        "topic": topic,
        "metrics": "InspectFleet",
        "repository": "none",
        "workers": {
            "launch_templates": {"x86_64": template},
            "images": {"x86_64": image_name},
            "instance_types": {"x86_64": ["m5.large", "m6i.large"]},
            "subnets": subnets,
            "role": f"arn:aws:iam::{ACCOUNT}:role/{prefix}-worker",
            "max_lifetime_minutes": 1440,
        },
        "batch": None,
    }
    ssm.put_parameter(Name=parameter(name), Value=json.dumps(content), Type="String")
    world = World(moto, name, Estate.from_json(json.dumps(content)), folder)
    sync_lanes(world.storage, world.estate.lane_records())
    return world


def lane_queues(sqs: Any, name: str, visibility_s: int) -> tuple[str, str, str]:
    """A lane's queues as Terraform makes them; their URLs: jobs, events, dead letters."""
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    redrive = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 20})
    visible = {"VisibilityTimeout": str(visibility_s)}
    urls = [
        sqs.create_queue(QueueName=f"{name}-{kind}", Attributes=some)["QueueUrl"]
        for kind, some in (("jobs", visible | {"RedrivePolicy": redrive}), ("events", visible))
    ]
    return urls[0], urls[1], dead


def told(world: World) -> list[str]:
    """The subjects of what was sent to the estate's topic since the last call."""
    sqs = world.client("sqs")
    inbox = sqs.get_queue_url(QueueName=f"inspect-fleet-{world.name}-inbox")["QueueUrl"]
    found = []
    while messages := sqs.receive_message(QueueUrl=inbox, MaxNumberOfMessages=10).get("Messages", []):
        for message in messages:
            found.append(json.loads(message["Body"])["Subject"])
            sqs.delete_message(QueueUrl=inbox, ReceiptHandle=message["ReceiptHandle"])
    return found


# Instances


@dataclass
class Agents:
    """Starts an agent of this machine for an instance. `boots` says whether one starts at all, `endpoint` where it finds AWS."""

    world: World
    boots: Callable[[dict[str, Any]], bool] = lambda _: True
    endpoint: str | None = None
    command_lines: list[list[str]] = field(default_factory=list)

    def start(self, found: dict[str, Any]) -> "subprocess.Popen[bytes] | None":
        """The agent's process."""
        if not self.boots(found):
            return None
        tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
        work = self.world.folder / "instances" / found["InstanceId"]
        work.mkdir(parents=True)
        options = {
            "root": f"s3://{tags['inspect-fleet-bucket']}",
            "fleet": tags["fleet-id"],
            "lane": tags["lane"],
            "instance": found["InstanceId"],
            "instance-type": found["InstanceType"],
            "lifecycle": found.get("InstanceLifecycle", "on-demand"),
            "launched": f"{found['LaunchTime'].timestamp():.3f}",
            "work": str(work),
        }
        command = [sys.executable, "-P", "-m", "evalworker"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        self.command_lines.append(command)
        with (work / "agent.out").open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=fleets.environment(
                    self.world.folder,
                    **self.world.environment(self.endpoint, AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:1"),
                ),
            )


@dataclass
class Played:
    """A play that goes on. `agents` are the processes by instance."""

    agents: dict[str, subprocess.Popen[bytes]]
    command_lines: list[list[str]]


@contextmanager
def playing(
    world: World, boots: Callable[[dict[str, Any]], bool] = lambda _: True, endpoint: str | None = None
) -> Iterator[Played]:
    """Instances live while the block runs; `endpoint`: where their agents find AWS."""
    agents = Agents(world, boots, endpoint)
    ec2 = world.client("ec2")
    player = Player(world.instances, lambda name: ec2.terminate_instances(InstanceIds=[name]), agents.start)
    try:
        with instances.playing(player):
            yield Played(player.machines, agents.command_lines)
    finally:
        for left in fleets.left_running(world.folder):
            fleets.kill_tree(left)


def short_of(count: int, code: str, message: str) -> Callable[[bytes], Change]:
    """A CreateFleet that gives `count` instances at the most and an error for the rest."""

    def change(body: bytes) -> Change:
        field_ = rb"TargetCapacitySpecification\.TotalTargetCapacity=(\d+)"
        asked = int(re.search(field_, body)[1])  # type: ignore[index]
        less = re.sub(field_, b"TargetCapacitySpecification.TotalTargetCapacity=%d" % min(asked, count), body)
        error = f"<errorSet><item><errorCode>{code}</errorCode><errorMessage>{message}</errorMessage></item></errorSet>"
        return Change(
            less, lambda answer: answer.replace(b"</CreateFleetResponse>", error.encode() + b"</CreateFleetResponse>")
        )

    return change


def wait_for(what: Callable[[], Any], patience_s: float = 240.0) -> Any:
    """What `what` says as soon as it says anything."""
    end = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.2)
    return found
