"""A fleet of workers on this machine that is fed through a lane of the applied estate and keeps its logs in its bucket.

A program of its own, so that the emulator sees each of its calls under one access key. The local command serves its queues
itself; here it takes a lane as a fleet on EC2 does, found by the SSM parameter. Prints one line of JSON at the end.
"""

import json
import os
import sys
from pathlib import Path

from evalops.cli import ct
from evalops.fleet import lanes, submit
from evalops.infra.estate import read_estate
from evalops.settings import Settings
from evalworker.contract.documents import Control, Lane, Manifest
from evalworker.storage import Storage

ESTATE = read_estate(os.environ.get("INSPECT_FLEET_NAME", "default"))
taken: list[Lane] = []


def take(settings: Settings, storage: Storage, manifest: Manifest, control: Control) -> Lane:
    lane = lanes.take(storage, manifest.fleet_id, settings.owner, control.deadline)
    queues = ESTATE.lanes[lane.name]
    assert (lane.jobs, lane.events, lane.dead) == (queues.jobs, queues.events, queues.dead)
    taken.append(lane)
    return lane


def main() -> int:
    os.environ["S3_BUCKET_NAME"] = ESTATE.bucket
    submit._embedded_lane = take
    task = Path(__file__).parents[2] / "examples" / "arithmetic.py"
    argv = ["run", "eval", str(task), "--model", "scripted/good", "--limit", "4", "--max-workers", "1"]
    try:
        ct(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    fleet_id = str(taken[0].fleet_id)
    last = Path("logs/fleet", fleet_id, "events.jsonl").read_text().splitlines()[-1]
    print(json.dumps({"fleet_id": fleet_id, "lane": taken[0].name, "outcome": json.loads(last).get("outcome")}))
    return code


if __name__ == "__main__":
    sys.exit(main())
