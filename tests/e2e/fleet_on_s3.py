"""A run on a bucket and queues of an emulator, as a controller leaves it for workers, and what workers say of it.

For tests of workers alone: nothing here drives the run on.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from evalops import code, wheel
from evalworker import aws
from evalworker.arguments import encode
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Limits, Manifest
from evalworker.contract.ids import job_id, new_run_id
from evalworker.contract.messages import FromWorker, Job, read_from_worker
from evalworker.contract.wire import now
from evalworker.queues import Queue
from evalworker.storage import Storage, open_storage

BUCKET = "bench-logs"
LANE = "lane-01"
REGION = "us-east-1"


@contextmanager
def reaching(endpoint: str) -> Iterator[None]:
    """While this holds, this process's AWS is the emulator alone."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": REGION,
    }
    aws.forget_clients()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        aws.forget_clients()


@dataclass
class Run:
    """A run. `heard` are the workers' messages so far, each with the time at which it was received."""

    fleet_id: str
    storage: Storage
    lane: Lane
    jobs: Queue
    events: Queue
    deadline: datetime
    heard: list[tuple[float, FromWorker]] = field(default_factory=list)

    @property
    def tags(self) -> dict[str, str]:
        """What the instances of the run are tagged with."""
        deadline = self.deadline.strftime("%Y-%m-%dT%H:%M:%SZ")
        tags = {"fleet-id": self.fleet_id, "lane": LANE, "owner": "bench", "fleet-deadline": deadline}
        return tags | {"inspect-fleet": "default", "inspect-fleet-bucket": BUCKET}

    def control(self, state: Any = "running", **limits: Any) -> None:
        """Write the control document."""
        wanted = Limits(control_s=1.0, heartbeat_s=5.0, slots=1, disk_free_min=0, **limits)
        body = Control(fleet_id=self.fleet_id, round=1, state=state, deadline=self.deadline, beat=now(), limits=wanted)
        self.storage.put(layout.control(self.fleet_id), body.to_bytes())

    def wait_for(self, type_: str, timeout: float = 90) -> Any:
        """The first message of this type; fails with all that was heard."""
        end = time.monotonic() + timeout
        while True:
            found = next((message for _, message in self.heard if message.type == type_), None)
            if found is not None:
                return found
            assert time.monotonic() < end, (
                f"no {type_} within {timeout} s, but: {[message for _, message in self.heard]}"
            )
            self.listen()

    def listen(self) -> None:
        """Receive once."""
        for received in self.events.receive(10, 1):
            self.heard.append((time.time(), read_from_worker(received.body)))
            self.events.delete([received.receipt])

    def when(self, type_: str) -> float:
        """When the first message of this type was received, in seconds since the epoch."""
        return next(moment for moment, message in self.heard if message.type == type_)


def submit(
    folder: Path,
    task: str,
    name: str,
    samples: int,
    model: str = "scripted/good",
    deadline: timedelta = timedelta(hours=2),
) -> Run:
    """A run of one job whose code is a folder; needs `reaching`."""
    s3, sqs = aws.client("s3"), aws.client("sqs")
    s3.create_bucket(Bucket=BUCKET)
    urls = {kind: sqs.create_queue(QueueName=f"{LANE}-{kind}")["QueueUrl"] for kind in ("jobs", "events", "dead")}
    storage = open_storage(f"s3://{BUCKET}")
    lane = Lane(name=LANE, region=REGION, **urls)
    fleet_id = new_run_id()
    tree = code.Tree(folder.resolve(), ".", git=False)
    spec = JobSpec(
        job_id=job_id(task=task, task_args={}, model=model), task=task, name=name, model=model, samples=samples
    )
    manifest = Manifest(
        fleet_id=fleet_id,
        created=now(),
        backend="ec2",
        jobs=[spec],
        arguments=encode({"display": "none", "ctl_server": False}),
        models=[model],
        submit_dir=".",
        code=code.ship(tree, storage),
        worker=wheel.ship(storage),
    )
    run = Run(
        fleet_id,
        storage,
        lane,
        Queue(aws.sqs(lane), lane.jobs),
        Queue(aws.sqs(lane), lane.events),
        datetime.now(UTC) + deadline,
    )
    storage.put(layout.lane(LANE), lane.to_bytes())
    storage.put(layout.manifest(fleet_id), manifest.to_bytes())
    run.control()
    run.jobs.send([Job(fleet_id=fleet_id, round=1, job_id=spec.job_id, attempt=1).to_json()])
    return run
