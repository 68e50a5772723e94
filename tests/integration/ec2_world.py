"""An AWS account for fleet tests: an estate on moto as Terraform would make it, a gateway that can refuse, and a player of instances.

The player starts a real agent as a process of this machine for each running instance of the estate, with the instance's id, and keeps the
two lives tied: an agent that ends terminates its instance, an instance that is terminated ends its agent.
"""

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fleets
from emulators import REGION, Emulator

from evalops.infra.estate import Estate, parameter, sync_lanes
from evalworker.storage.s3 import S3Storage

SECRET = "sk-planted-marker-0123456789abcdef"
"""The value of the estate's one provider key, to be found nowhere."""

USER_DATA = "#!/bin/sh\nshutdown -P +1440\nS3_BUCKET_NAME={bucket}\n"
ACCOUNT = "123456789012"


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


def make(moto: Emulator, name: str, folder: Path, lanes: int = 4) -> World:
    """An estate of that name with everything that Terraform would make and a fleet needs."""
    bucket, prefix = f"bucket-{name}", f"inspect-fleet-{name}"
    s3, sqs, ec2, ssm, sns = (moto.client(service) for service in ("s3", "sqs", "ec2", "ssm", "sns"))
    s3.create_bucket(Bucket=bucket)
    names = {f"lane-{number:02d}": f"{prefix}-lane-{number:02d}" for number in range(1, lanes + 1)}
    queues = {lane: lane_queues(sqs, queue) for lane, queue in names.items()}
    image = next(each for each in ec2.describe_images()["Images"] if each["Architecture"] == "x86_64")["ImageId"]
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


def lane_queues(sqs: Any, name: str) -> tuple[str, str, str]:
    """A lane's queues as Terraform makes them; their URLs: jobs, events, dead letters."""
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    redrive = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 20})
    jobs = {"VisibilityTimeout": "60", "RedrivePolicy": redrive}
    urls = [
        sqs.create_queue(QueueName=f"{name}-{kind}", Attributes=some)["QueueUrl"]
        for kind, some in (("jobs", jobs), ("events", {"VisibilityTimeout": "60"}))
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
class Player:
    """Plays the estate's instances. `boots` says of an instance whether its agent starts at all."""

    world: World
    boots: Callable[[dict[str, Any]], bool] = lambda _: True
    endpoint: str | None = None
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    command_lines: list[list[str]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def play(self) -> None:
        """Until it is over."""
        while not self._over.wait(0.5):
            self._step()

    def _step(self) -> None:
        ec2 = self.world.client("ec2")
        for found in self.world.instances():
            name, state = found["InstanceId"], found["State"]["Name"]
            agent = self.agents.get(name)
            if agent is None and state == "running" and self.boots(found):
                self.agents[name] = self._start(found)
            elif agent is not None and state in ("terminated", "shutting-down") and agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
            elif agent is not None and state == "running" and agent.poll() is not None:
                ec2.terminate_instances(InstanceIds=[name])

    def _start(self, found: dict[str, Any]) -> "subprocess.Popen[bytes]":
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

    def stop(self) -> None:
        """End what still runs."""
        self._over.set()
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for left in fleets.left_running(self.world.folder):
            fleets.kill_tree(left)


@contextmanager
def playing(
    world: World, boots: Callable[[dict[str, Any]], bool] = lambda _: True, endpoint: str | None = None
) -> Iterator[Player]:
    """Instances live while the block runs; `endpoint`: where their agents find AWS."""
    player = Player(world, boots, endpoint)
    thread = threading.Thread(target=player.play, name="player", daemon=True)
    thread.start()
    try:
        yield player
    finally:
        player.stop()
        thread.join()


# The gateway

Answer = tuple[int, bytes]


@dataclass
class Change:
    """Pass the request on with another body, and its answer back changed."""

    body: bytes
    answer: Callable[[bytes], bytes] = lambda answer: answer


Rule = Callable[[str, str, bytes], Answer | Change | None]


@dataclass
class Gateway:
    """Stands before the emulator; `rule` may answer (service, operation, body) in its place. `calls` are what came."""

    endpoint: str
    rule: Rule = lambda service, operation, body: None
    calls: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def count(self, service: str, operation: str) -> int:
        """How often something was called."""
        return self.calls.count((service, operation))


@contextmanager
def gateway(moto: Emulator) -> Iterator[Gateway]:
    """A gateway on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def _handle(self) -> None:
            assert "Transfer-Encoding" not in self.headers, "a body in chunks is not read here"
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            service, operation = _operation(self, body)
            found.calls.append((service, operation))
            found.bodies.append(body)
            verdict = found.rule(service, operation, body)
            if isinstance(verdict, tuple):
                self._answer(verdict[0], {"Content-Type": "text/xml"}, verdict[1])
                return
            change = verdict or Change(body)
            dropped = ("content-length", "expect", "transfer-encoding", "connection")
            kept = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection = http.client.HTTPConnection(moto.endpoint.removeprefix("http://"), timeout=60)
            connection.request(self.command, self.path, change.body, kept)
            answer = connection.getresponse()
            status, headers, content = answer.status, answer.headers, answer.read()
            connection.close()
            self._answer(status, dict(headers.items()), change.answer(content))

        def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            else:
                self.send_header("Content-Length", headers.get("Content-Length", "0"))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Gateway(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def _operation(request: BaseHTTPRequestHandler, body: bytes) -> tuple[str, str]:
    scope = re.search(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/", request.headers.get("Authorization", ""))
    service = scope[1] if scope else ""
    if target := request.headers.get("X-Amz-Target"):
        return service, target.rpartition(".")[2]
    action = re.search(rb"(?:^|&)Action=(\w+)", body)
    return service, action[1].decode() if action else request.command


def ec2_error(code: str, message: str, status: int = 400) -> Answer:
    """EC2's answer to a call that failed."""
    text = f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>r</RequestID></Response>"
    return status, text.encode()


def expired(service: str) -> Answer:
    """What a service says of credentials that have expired."""
    if service == "s3":
        return 400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    if service == "sqs":
        return 403, b'{"__type":"com.amazonaws.sqs#ExpiredTokenException","message":"The token has expired"}'
    return ec2_error("ExpiredToken", "The security token included in the request is expired", 403)


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


def kill_group(process: "subprocess.Popen[str]") -> None:
    """kill -9 of a command alone, as when its machine lost it."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
