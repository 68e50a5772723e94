"""What one controller can hear: a million messages from a queue in its process, by rate, CPU and memory.

The whole controller runs, its threads, ledger, stream and segments included, with a directory as its storage. What SQS and S3 add is
waiting, for which it has threads, and some 1.5 ms of CPU for each call of ten messages.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure

FIXTURES = Path(__file__).parents[1] / "fixtures"
JOBS = 2000
SAMPLES = 500
AT_ONCE = 20
"""Jobs that run at a time."""

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import crowd

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
print(json.dumps({"ending": verdict.ending, "events": queue.received, "wall": wall, "cpu": cpu, "early": early, "late": late}))
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
            Figure("controller, cores in use", found["cpu"] / found["wall"], "cores", 1.05, note=note),
            Figure("controller, events for a second of CPU", found["events"] / found["cpu"], "/s", 2000, at_least=True),
            Figure(
                "controller, memory after a million events",
                found["late"] / 1e6,
                "MB",
                1.25,
                found["early"] / 1e6,
                "after a tenth of them",
                note="most of it is 8 bytes for each sample and 5 kB for each job that has ended",
            ),
        ]
