"""The embedded default: a real SQS-compatible server on this machine's loopback, with one lane, for a fleet without AWS.

Called by the controller. The server belongs to `evalops.embedded_guard`, a small process in a session of its own: the fleet
goes on when its controller is killed, and the server ends with the fleet. Only SQS is served; everything else is the user's.
"""

import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now

RETENTION_S = 14 * 24 * 3600
"""SQS's longest."""

MAX_RECEIVES = 20
"""Receives of a job before it becomes a dead letter: a guard against poison, not the retry policy."""

EVENTS_VISIBILITY_S = 60
"""For which the controller holds events until their segment is stored."""

REGION = "us-east-1"
STOP_S = 5.0
"""For the guard to end by itself before it is killed."""


class EmbeddedError(RuntimeError):
    """The embedded queues could not be started; the text is one sentence."""


@dataclass(frozen=True)
class Embedded:
    """A running server: the lane it serves, and the guard process that ends it."""

    lane: Lane
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self.process.pid


def start(root_url: str, fleet_id: str, log_path: Path, visibility_s: int) -> Embedded:
    """Start the server for one fleet and create its lane; returns when the queues are there. Raises EmbeddedError.

    It ends when the fleet's control document below `root_url` says `ended`, two minutes after the deadline in it, at `stop`,
    or after ten minutes without such a document. The document's `beat` must be later than this call. When the document cannot be read any
    more, what the live events and the processes of this machine say counts too.

    Args:
        log_path: takes what guard and server say; beside it lie the live events.
        visibility_s: of the jobs queue.
    """
    started = now()
    with socket.socket() as listening:
        # The socket listens before anything runs: the port is ours, and who connects early waits instead of failing.
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        options = {
            "fd": listening.fileno(),
            "port": port,
            "root": root_url,
            "fleet-id": fleet_id,
            "folder": str(log_path.parent),
            "started": started.isoformat(),
        }
        process = _start_guard([f"--{name}={value}" for name, value in options.items()], listening.fileno(), log_path)
    endpoint = f"http://127.0.0.1:{port}"
    name = f"embedded-{fleet_id}"
    lane = Lane(name=name, jobs="", events="", dead="", region=REGION, endpoint=endpoint)
    try:
        jobs, events, dead = create_lane_queues(aws.sqs(lane), name, visibility_s)
    except BaseException as error:
        stop(Embedded(lane, process))
        if isinstance(error, ClientError | BotoCoreError):
            raise EmbeddedError(f"the embedded queue server did not start; see {log_path}") from error
        raise
    return Embedded(lane.model_copy(update={"jobs": jobs, "events": events, "dead": dead}), process)


def stop(embedded: Embedded) -> None:
    """End guard and server; nothing happens when they have ended."""
    embedded.process.terminate()
    try:
        embedded.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        embedded.process.kill()  # the server dies with it
        embedded.process.wait()


def create_lane_queues(client: Any, name: str, visibility_s: int) -> tuple[str, str, str]:
    """Create a lane's queues and return their URLs (jobs, events, dead letters). In AWS, Terraform makes them."""
    kept = {"MessageRetentionPeriod": str(RETENTION_S)}
    dead = client.create_queue(QueueName=f"{name}-dead", Attributes=kept)["QueueUrl"]
    arn = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    redrive = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": MAX_RECEIVES})
    jobs = kept | {"VisibilityTimeout": str(visibility_s), "RedrivePolicy": redrive}
    events = kept | {"VisibilityTimeout": str(EVENTS_VISIBILITY_S)}
    return (
        client.create_queue(QueueName=f"{name}-jobs", Attributes=jobs)["QueueUrl"],
        client.create_queue(QueueName=f"{name}-events", Attributes=events)["QueueUrl"],
        dead,
    )


def _start_guard(options: list[str], fd: int, log_path: Path) -> subprocess.Popen[bytes]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            # -P: a user's own signal.py in the current directory is not ours to import.
            [sys.executable, "-P", "-m", "evalops.embedded_guard", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(fd,),
            start_new_session=True,
        )
