"""EC2 whose instances are containers: moto's answers, and a proxy before it that makes them true.

The proxy turns RunInstances into a container on a network with the subnet's addresses, CreateImage into `docker commit`, and so on; the
temporary key of the caller gets into the container as cloud-init would put it. Used by the tests of AMI builds.
"""

import http.client
import http.server
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import boto3
import docker_bench
from docker_bench import docker

from ports import free_port

REGION = "us-east-1"
NETWORK = "10.98.0.0/16"
_third = itertools.count(os.getpid() % 200)  # several test processes at once, and what a killed one has left
DEBIAN_AMI = {
    "ami_id": "ami-00000000000debian",
    "state": "available",
    "public": True,
    "owner_id": "136693071363",
    "image_location": "amazon/debian-13",
    "sriov": "simple",
    "root_device_type": "ebs",
    "root_device_name": "/dev/xvda",
    "description": "Debian 13",
    "image_type": "machine",
    "platform": None,
    "architecture": "x86_64",
    "name": "debian-13-amd64-20260101-0001",
    "virtualization_type": "hvm",
    "hypervisor": "xen",
}


def _text(body: bytes, tag: str) -> str:
    """The first element of this name in an answer of EC2, whatever its namespace."""
    for element in ElementTree.fromstring(body).iter():
        if element.tag.rpartition("}")[2] == tag:
            return element.text or ""
    return ""


@dataclass
class Cloud:
    """A running bench.

    Attributes:
        endpoint: of EC2 and everything else, by way of the proxy.
        boots: the container image that new instances are made of.
        hold_images: while set, new images stay pending.
        calls: the EC2 operations seen, in order.
        committed: the container image of each AMI.
    """

    endpoint: str
    moto: str
    network: str
    boots: str
    subnet: str = ""
    hold_images: bool = False
    calls: list[str] = field(default_factory=list)
    committed: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def client(self, service: str) -> Any:
        """A client that nobody's configuration reaches."""
        return boto3.client(
            service, region_name=REGION, endpoint_url=self.endpoint, aws_access_key_id="a", aws_secret_access_key="b"
        )

    def environment(self) -> dict[str, str]:
        """What a command needs to see this cloud alone."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_", "INSPECT_"))}
        return kept | {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ENDPOINT_URL_EC2": self.endpoint,
            "NO_PROXY": "127.0.0.1,10.98.0.0/16",
        }

    def containers(self) -> list[str]:
        """Names of the containers that are instances."""
        return docker("ps", "--all", "--filter", f"label=ec2-bench={self.network}", "--format", "{{.Names}}").split()

    # What the proxy does after an answer

    def after(self, action: str, form: dict[str, str], body: bytes) -> bytes:
        """Make an answer true; returns the answer as the caller shall see it."""
        if action == "CreateKeyPair":
            self.keys[form["KeyName"]] = _public(_text(body, "keyMaterial"))
        elif action == "RunInstances":
            self._run(_text(body, "instanceId"), _text(body, "privateIpAddress"), form.get("KeyName", ""))
        elif action == "StopInstances":
            docker("stop", "--time", "20", f"ec2-{form['InstanceId.1']}", check=False)
        elif action == "TerminateInstances":
            docker("rm", "--force", "--volumes", f"ec2-{form['InstanceId.1']}", check=False)
        elif action == "CreateImage":
            image = _text(body, "imageId")
            self.committed[image] = f"inspect-fleet-test/{image}:latest"
            # an image takes its container's labels along: what runs from it is not a machine of this cloud for that
            docker("commit", "--change", "LABEL ec2-bench=", f"ec2-{form['InstanceId']}", self.committed[image])
        elif action == "DeregisterImage":
            docker("image", "rm", "--force", self.committed.pop(form["ImageId"], "none"), check=False)
        elif action == "DescribeImages" and self.hold_images:
            body = body.replace(b"<imageState>available<", b"<imageState>pending<")
        with self.changed:
            self.calls.append(action)
            self.changed.notify_all()
        return body

    def wait_for(self, action: str, timeout: float = 300) -> None:
        """Wait until an operation has been called."""
        with self.changed:
            assert self.changed.wait_for(lambda: action in self.calls, timeout), (
                f"{action} was not called: {self.calls}"
            )

    def _run(self, instance: str, address: str, key: str) -> None:
        found = f"ec2-{instance}"
        docker(
            "create",
            "--name",
            found,
            "--label",
            f"ec2-bench={self.network}",
            "--privileged",
            "--cgroupns=private",
            "--network",
            self.network,
            "--ip",
            address,
            "--volume",
            "/var/lib/docker",
            "--hostname",
            instance,
            self.boots,
            "/sbin/init",
        )
        with tempfile.TemporaryDirectory() as folder:
            authorized = Path(folder, "authorized_keys")
            authorized.write_text(self.keys.get(key, ""))
            authorized.chmod(0o644)
            docker("cp", str(authorized), f"{found}:/home/admin/.ssh/authorized_keys")
        docker("start", found)


def _public(private: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text(private)
        key.chmod(0o600)
        return subprocess.run(["ssh-keygen", "-y", "-f", key], check=True, capture_output=True, text=True).stdout


def _handler(cloud: Cloud) -> type[http.server.BaseHTTPRequestHandler]:
    host, port = cloud.moto.rpartition("/")[2].split(":")

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            form = dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace")))
            is_ec2 = "/ec2/" in self.headers.get("Authorization", "")
            action = form.get("Action", "") if is_ec2 else ""
            status, headers, answer = 0, [], b""
            if action in cloud.denied:
                status, headers = 403, [("Content-Type", "text/xml")]
                answer = b"<Response><Errors><Error><Code>UnauthorizedOperation</Code><Message>denied</Message></Error></Errors></Response>"
            else:
                upstream = http.client.HTTPConnection(host, int(port), timeout=120)
                kept = {name: value for name, value in self.headers.items() if name.lower() not in ("connection",)}
                upstream.request(self.command, self.path, body, kept)
                got = upstream.getresponse()
                status, headers, answer = got.status, got.getheaders(), got.read()
                upstream.close()
                if action and status == 200:
                    answer = cloud.after(action, form, answer)
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _pass

        def log_message(self, *_: object) -> None:
            pass

    return Proxy


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """A moto server of its own; its endpoint."""
    port = free_port()
    amis = folder / "amis.json"
    amis.write_text(json.dumps([DEBIAN_AMI]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=kept | {"MOTO_AMIS_PATH": str(amis)}, start_new_session=True
        )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "moto.log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cloud(folder: Path, boots: str, estate: str = "default", internal: bool = False) -> Iterator[Cloud]:
    """A cloud with one estate in it: a subnet, the image parameter, a launch template that resolves it, the configuration.

    `internal`: instances have no way to the internet. Several clouds at once have networks of their own.
    """
    subnet = f"10.98.{next(_third)}.0/24"
    with moto_server(folder) as moto, docker_bench.network(subnet, *(["--internal"] if internal else [])) as network:
        found = Cloud("", moto, network, boots)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(found))
        found.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            _estate(found, estate, subnet)
            yield found
        finally:
            for container in found.containers():
                docker("rm", "--force", "--volumes", container, check=False)
            server.shutdown()
            server.server_close()


def _estate(cloud: Cloud, name: str, subnet: str) -> None:
    ec2, ssm = cloud.client("ec2"), cloud.client("ssm")
    vpc = ec2.create_vpc(CidrBlock="10.98.0.0/16")["Vpc"]["VpcId"]
    cloud.subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=subnet)["Subnet"]["SubnetId"]
    parameter = f"/inspect-fleet/{name}/image/x86_64"
    ssm.put_parameter(Name=parameter, Value=DEBIAN_AMI["ami_id"], Type="String")
    template = ec2.create_launch_template(
        LaunchTemplateName=f"inspect-fleet-{name}-worker-x86-64",
        LaunchTemplateData={"ImageId": f"resolve:ssm:{parameter}", "InstanceType": "m7i.large"},
    )["LaunchTemplate"]["LaunchTemplateId"]
    config = {
        "schema": 1,
        "name": name,
        "account": "123456789012",
        "region": REGION,
        "bucket": "logs",
        "lanes": {},
        "secrets": {},
        "topic": "none",
        "metrics": "none",
        "repository": f"123456789012.dkr.ecr.{REGION}.amazonaws.com/inspect-fleet-{name}-worker",
        "workers": {
            "images": {"x86_64": parameter},
            "launch_templates": {"x86_64": template},
            "instance_types": {"x86_64": ["m7i.large"]},
            "subnets": [cloud.subnet],
            "role": "none",
            "max_lifetime_minutes": 60,
        },
        "batch": None,
    }
    ssm.put_parameter(Name=f"/inspect-fleet/{name}/config", Value=json.dumps(config), Type="String")
