"""AWS that says no, answers late, loses its replies or goes away, under whole fleets with an S3 root.

Each kind has its category and its line; what can be waited out is waited out.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fleets
import pytest
from emulators import Emulator

from evalworker.processes import children

FAULTS = Path(__file__).parent / "faults"
ARITHMETIC = str(fleets.REPOSITORY / "examples" / "arithmetic.py")


def bucket(ministack: Emulator, name: str) -> dict[str, str]:
    """A root of its own in the emulator, and the environment that names it."""
    ministack.client("s3").create_bucket(Bucket=name)
    return {
        "S3_BUCKET_NAME": name,
        "AWS_ENDPOINT_URL": ministack.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def injected(*faults: dict[str, Any]) -> dict[str, str]:
    """The environment that injects faults."""
    return {"PYTHONPATH": fleets.python_path(FAULTS), "FAULTS": json.dumps(faults)}


RUN = (ARITHMETIC, "--model", "scripted/good", "--limit", "3", "--max-workers", "1", "--slots", "1")


def test_errors_that_pass_are_waited_out(ministack: Emulator, tmp_path: Path) -> None:
    """500, 503, 409, slow answers and lost replies of S3, in controller and worker, cost nothing but time."""
    faults = injected(
        {"operation": "PutObject", "url": "/attempts/", "times": 2, "status": 500, "code": "InternalError"},
        {"operation": "PutObject", "url": "/events/", "times": 1, "status": 503, "code": "SlowDown"},
        {"operation": "PutObject", "url": ".end.json", "times": 1, "status": 409, "code": "ConditionalRequestConflict"},
        {"operation": "PutObject", "url": ".done-1.json", "times": 1, "lost": True},
        {"operation": "PutObject", "url": "/events/", "times": 1, "lost": True},
        {"operation": "GetObject", "url": "control.json", "times": 3, "delay_s": 2.0},
    )
    fleet = fleets.run(tmp_path, *RUN, **bucket(ministack, "passing"), **faults)
    assert fleet.code == 0, fleet.err
    assert [event["type"] for event in fleet.events].count("job_done") == 1
    assert fleet.summary["samples"] == {"total": 3, "completed": 3, "errored": 0}


@pytest.mark.parametrize(
    ("status", "code", "category"), [(403, "AccessDenied", "storage"), (403, "RequestTimeTooSkewed", "clock")]
)
def test_storage_that_refuses_has_its_category(
    ministack: Emulator, tmp_path: Path, status: int, code: str, category: str
) -> None:
    """What S3 refuses for good ends the job after three attempts, with one line that says what."""
    fault = {"operation": "PutObject", "url": "/attempts/", "status": status, "code": code}
    fleet = fleets.run(tmp_path, *RUN, **bucket(ministack, f"refusing-{category}"), **injected(fault))
    assert fleet.code == 1, fleet.err
    (done,) = fleet.of("job_done")
    assert (done["status"], done["failure_category"], done["attempts"]) == ("failed", category, 3)
    assert len(fleet.of("result")) >= 3, "the scores had been streamed before"
    assert f"({category})" in fleet.err


def test_a_root_without_permission_ends_before_anything_starts(ministack: Emulator, tmp_path: Path) -> None:
    """A 403 on the probe is a sentence and exit code 2, not a fleet."""
    fault = {"operation": "PutObject", "status": 403, "code": "AccessDenied"}
    fleet = fleets.run(tmp_path, *RUN, **bucket(ministack, "denied"), **injected(fault))
    assert fleet.code == 2
    assert not fleet.events
    assert "denied" in fleet.err.lower()
    assert "Traceback" not in fleet.err


def test_sqs_that_is_away_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """The queue's server stands still for a minute in mid-run; the stream goes on where it was."""
    words = (ARITHMETIC, "-T", "n=60", "--model", "scripted/good", "-M", "latency=0.5", "--max-workers", "1")
    with fleets.started(tmp_path, *words, "--concurrency-per-worker", "2", "--slots", "1") as (process, watcher):
        watcher.wait(lambda events: sum(event["type"] == "result" for event in events) >= 2)
        servers = _queue_servers(process.pid)
        assert servers
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(60)
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
        out, err = process.communicate(timeout=fleets.PATIENCE_S)
    fleet = fleets.ended(tmp_path, process.returncode, out, err)
    assert fleet.code == 0, fleet.err
    fleets.check(fleet)
    assert fleet.summary["samples"] == {"total": 60, "completed": 60, "errored": 0}


def _queue_servers(controller: int) -> list[int]:
    """The guard of the embedded queues and its server."""
    guards = [pid for pid in children(controller) if "embedded_guard" in Path(f"/proc/{pid}/cmdline").read_text()]
    return [*guards, *(child for guard in guards for child in children(guard))]
