"""What one controller can hear: a million messages from a queue in its process, by rate, CPU and memory.

The whole controller runs, its threads, ledger, stream and segments included, with a directory as its storage. What SQS adds is
waiting, for which there are threads, and the CPU of its calls, which is measured against a server that only answers.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import Figure
from sqs_stub import Sqs

from evalworker import aws
from evalworker.contract.documents import Lane
from evalworker.queues import Queue

FIXTURES = Path(__file__).parents[1] / "fixtures"
JOBS = 2000
SAMPLES = 500
CALLS = 300
AT_ONCE = 20
"""Jobs that run at a time."""

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import crowd
from evalops.fleet.ledger import Ledger
from evalops.fleet.stream import read_events

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

jobs = crowd.specs(*map(int, sys.argv[3:5]))
controller = crowd.controller(Path(sys.argv[2]), jobs, crowd.messages(jobs, int(sys.argv[5])))
queue, seen = controller.fleet.events, []
wanted = len(jobs) * jobs[0].samples
over = threading.Event()

def look():
    while not over.wait(0.05):
        seen.append((queue.received, resident()))

looking = threading.Thread(target=look)
looking.start()
wall, cpu = time.monotonic(), time.process_time()
verdict = controller.run()
wall, cpu = time.monotonic() - wall, time.process_time() - cpu
over.set()
looking.join()
early = max(size for count, size in seen if wanted * 0.08 < count <= wanted * 0.12)
late = max(size for count, size in seen if count > wanted * 0.9)
again, replayed = time.process_time(), 0
ledger = Ledger(jobs)
for event in read_events(controller.fleet.storage, crowd.FLEET):
    ledger.replay(event)
    replayed += 1
again = time.process_time() - again
print(json.dumps({"ending": verdict.ending, "events": queue.received, "wall": wall, "cpu": cpu, "early": early, "late": late,
                  "replayed": replayed, "again": again, "segments": controller.fleet.stream.segment}))
"""


def bench_a_million_events() -> list[Figure]:
    """2,000 jobs of 500 samples each, and the heartbeats of 100 workers."""
    with tempfile.TemporaryDirectory(prefix="inspect-fleet-bench-") as folder:
        words = [str(FIXTURES), folder, str(JOBS), str(SAMPLES), str(AT_ONCE)]
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the controller broke: {done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if found["ending"] != "complete":
            raise RuntimeError(f"the fleet ended as {found['ending']}")
        note = f"{found['events']:,} messages"
        return [
            Figure("controller, events", found["events"] / found["wall"], "/s", 2000, at_least=True, note=note),
            Figure("controller, cores for 2,000 events a second", 2000 * found["cpu"] / found["events"], "cores", 1.0),
            Figure(
                "a fleet's stream read back, events for a second of CPU",
                found["replayed"] / found["again"],
                "/s",
                note=f"as attach does; {found['segments']:,} segments",
            ),
            Figure(
                "controller, memory after a million events",
                found["late"] / 1e6,
                "MB",
                1.3,
                found["early"] / 1e6,
                "after a tenth of them",
                note="most of it is 8 bytes for each sample and 5 kB for each job that has ended",
            ),
        ]


def bench_sqs_calls() -> list[Figure]:
    """What receiving and deleting ten messages costs the one who asks."""
    server = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        lane = Lane(name="l", jobs=f"{url}/0/jobs", events=f"{url}/0/events", dead=f"{url}/0/dead", endpoint=url)
        queue = Queue(aws.sqs(lane), lane.events)
        receipts = [received.receipt for received in queue.receive(10, 0)]
        receive = _cpu_of(lambda: queue.receive(10, 0))
        delete = _cpu_of(lambda: queue.delete(receipts))
    finally:
        server.kill()
        server.wait()
    note = f"mean of {CALLS}"
    return [
        Figure("receiving ten messages from SQS", receive * 1000, "CPU ms", note=note),
        Figure("deleting ten messages from SQS", delete * 1000, "CPU ms", note=note),
        Figure("messages from SQS and back for a second of CPU", 10 / (receive + delete), "/s", 2000, at_least=True),
    ]


def _cpu_of(call: Callable[[], Any]) -> float:
    """Seconds of this process's CPU for one call."""
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) / CALLS


def _serve() -> None:
    sys.path.append(str(FIXTURES))
    import crowd

    bodies = list(crowd.messages(crowd.specs(1, 10), 1))[:10]
    messages = [
        {
            "MessageId": str(number),
            "ReceiptHandle": f"{number:0200d}",
            "MD5OfBody": hashlib.md5(body.encode(), usedforsecurity=False).hexdigest(),
            "Body": body,
            "Attributes": {"ApproximateReceiveCount": "1"},
        }
        for number, body in enumerate(bodies)
    ]
    ten = json.dumps({"Messages": messages}).encode()
    server = Sqs(lambda: ten)
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
