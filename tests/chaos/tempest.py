"""All kinds of faults over one run of six jobs and 200 samples, by a seeded schedule; what must hold afterwards is `storm.Storm.verify`.

Processes are killed, frozen and told to go, memory and disk run out, and AWS fails as `weather` has it: every process of the fleet reaches
S3 and SQS through the proxy of `tests/gateway.py`. Some samples have a Docker sandbox, on an engine of the tempest's own: containers are
killed, the engine is stopped, or crashes. Workers in containers are killed by tests/e2e/test_ec2_boots.py. Needs root and Docker: the disk
is a tmpfs of its own, memory ends by a cgroup.
`python tests/chaos/tempest.py SEEDS [FIRST]` runs many seeds and prints what each has met; `test_tempest.py` runs a few.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
for place in (HERE.parent, HERE.parent / "e2e", HERE):
    if str(place) not in sys.path:
        sys.path.append(str(place))

import boxes  # noqa: E402
import clock  # noqa: E402
import servers  # noqa: E402
from clock import Clock  # noqa: E402
from engine_bench import Engine  # noqa: E402
from storm import RUN, VICTIMS, Broken, Storm, check, play, storm_environment  # noqa: E402
from weather import KINDS, Weather  # noqa: E402

from evalops.embedded import create_lane_queues  # noqa: E402
from evalworker.contract import layout  # noqa: E402
from evalworker.contract.documents import Lane  # noqa: E402
from evalworker.processes import alive, children, tree  # noqa: E402
from gateway import Gateway, gateway  # noqa: E402

VISIBILITY_S = 15
FROZEN_S = VISIBILITY_S + 3.0
"""Longer than a message stays invisible: another worker gets it meanwhile."""

FULL_S = 5.0
"""How long the disk is full."""

DISK = "3g"
"""Of the fleet's own disk, at the most: none of it is taken before it is written."""

MEMORY = "/sys/fs/cgroup/memory"

ON_MACHINE = (*VICTIMS, "notice", "freeze", "disk full", "memory", "clock jump", *boxes.KINDS)
DECK = (*ON_MACHINE, *KINDS)
"""Every kind."""

HANDS = 5
"""So many seeds in a row meet every kind."""

COSTLY = ("job", "memory", "disk full", "clock jump", "all", "docker restart")
"""Kinds that may end a job's attempt. Two a seed at the most: a job has three attempts, and another failure would be a truthful end, but
none with all samples."""

PAUSE_S = (0.5, 2.5)
FINISH_S = 300.0
WORDS = tuple(word.replace("latency=1", "latency=1.5") for word in RUN)


def drawn(seed: int) -> list[str]:
    """The kinds of a seed, in the order in which they come: seeds 1 to 5 share out one shuffled deck, 6 to 10 another, and so on."""
    round_, turn = divmod(seed - 1, HANDS)
    shuffled = random.Random(round_)
    costly, others = list(COSTLY), [kind for kind in DECK if kind not in COSTLY]
    shuffled.shuffle(costly)
    shuffled.shuffle(others)
    hand = [*costly[turn::HANDS], *others[turn::HANDS]]
    random.Random(seed).shuffle(hand)
    return hand


@dataclass
class Tempest(Storm):
    """One seed. `weather` is what the proxy does, `docker` the engine of the samples' sandboxes, `clock` that of its processes;
    `met` what has happened."""

    task: str = boxes.TASK
    words: tuple[str, ...] = WORDS
    docker: Engine = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    weather: Weather = field(default_factory=lambda: Weather(0, ""))
    met: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.folder / "compose.yaml").write_text(boxes.COMPOSE)

    def run(self) -> None:
        """Start, let everything of this seed happen, attach whenever the controller has gone, and check."""
        with self._disk(), self._memory():
            try:
                self.start_run("--queues", "estate")
                for kind in drawn(self.seed):
                    time.sleep(self.random.uniform(*PAUSE_S))
                    if self._ended():
                        break
                    self._happen(kind)
                    self._revive()
                end = time.monotonic() + FINISH_S
                while not self._ended():
                    check(time.monotonic() < end, f"the fleet did not end within {FINISH_S:.0f} s:\n{self.tail()}")
                    self._revive()
                    time.sleep(0.2)
                self.weather.clear()
                self.verify(redone_any_time=True)
            finally:
                self.weather.clear()
                self.clock.set(0)
                self.clean()

    def _happen(self, kind: str) -> None:
        if kind in boxes.KINDS and not boxes.wait(self.docker, self._ended):
            return
        self.met.append(kind)
        if kind in VICTIMS:
            self._kill(kind)
            return
        self.killed.append((time.time(), kind))
        if kind in KINDS:
            time.sleep(self.weather.begin(kind) / 2)
        elif kind in boxes.KINDS:
            boxes.happen(kind, self.docker, self.random)
        else:
            {
                "notice": self._notice,
                "freeze": self._freeze,
                "disk full": self._fill,
                "memory": self._starve,
                "clock jump": self._jump,
            }[kind]()

    def _verify_left_over(self) -> None:
        super()._verify_left_over()
        end = time.monotonic() + boxes.GONE_S
        while left := self.docker.left():
            check(time.monotonic() < end, f"left on the Docker engine: {left}")
            time.sleep(0.5)

    def clean(self) -> None:
        """Leave nothing running, no container either."""
        super().clean()
        self.docker.clear()

    def _revive(self) -> None:
        """Attach a new controller when the last one was killed; while AWS is away that may take some tries."""
        while (status := self._status()) not in (None, 0):
            check(status == -signal.SIGKILL, f"the controller ended with {status}:\n{self.tail()}")
            try:
                self._start(["fleet", "attach", self.fleet_id, "--json"])
            except Broken:
                check(not self.weather.fair, f"the fleet could not be attached to:\n{self.tail()}")
                assert self.controller is not None
                self.controller.wait()
                self.controller.returncode = -signal.SIGKILL
                time.sleep(1)

    def _status(self) -> int | None:
        assert self.controller is not None
        return self.controller.poll()

    # What happens on the machine

    def _notice(self) -> None:
        """A worker is told to go, as by a spot notice."""
        if agents := sorted(self.agents()):
            os.kill(self.random.choice(agents), signal.SIGTERM)

    def _freeze(self) -> None:
        """A worker stands still until its jobs have gone to another one, and wakes up."""
        if not (agents := sorted(self.agents())):
            return
        agent = self.random.choice(agents)
        frozen = tree(agent) | {child for member in tree(agent) for child in tree(member)}
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(FROZEN_S)

    def _fill(self) -> None:
        """Nothing more fits on the disk of workers and controller."""
        taken = os.statvfs(self.folder / "logs")
        used = (taken.f_blocks - taken.f_bfree) * taken.f_frsize
        self._mount(f"remount,size={used + (64 << 10)}")
        time.sleep(FULL_S)
        self._mount(f"remount,size={DISK}")

    def _jump(self) -> None:
        """The wall clock of all of the fleet's processes jumps, and back."""
        self.clock.set(self.random.choice(clock.JUMPS_S))
        time.sleep(clock.WRONG_S)
        self.clock.set(0)

    def _mount(self, options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tempest", str(self.folder / "logs")], check=True)

    def _starve(self) -> None:
        """A worker's memory ends: the kernel kills its greatest process. Without a cgroup of its own, we do in its place."""
        agents = sorted(self.agents())
        jobs = [(agent, job) for agent in agents for server in children(agent) for job in children(server)]
        if not jobs:
            return
        agent, job = self.random.choice(jobs)
        if not Path(MEMORY, "memory.limit_in_bytes").exists():
            os.kill(job, signal.SIGKILL)
            return
        group = self._group()
        with contextlib.suppress(OSError):
            for pid in (agent, *children(agent), job):
                (group / "cgroup.procs").write_text(str(pid))
            Path(f"/proc/{job}/oom_score_adj").write_text("1000")
            (group / "memory.limit_in_bytes").write_text(str(1 << 20))
        end = time.monotonic() + 10
        while alive(job) and time.monotonic() < end:
            time.sleep(0.01)
        (group / "memory.limit_in_bytes").write_text("-1")

    # Its own disk and memory

    @contextmanager
    def _disk(self) -> Iterator[None]:
        logs = self.folder / "logs"
        logs.mkdir()
        self._mount(f"size={DISK}")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(logs)], check=True)

    def _group(self) -> Path:
        return Path(MEMORY, f"tempest-{os.getpid()}-{self.seed}")

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """A cgroup that is empty at first; what is left in it at the end goes back."""
        if not Path(MEMORY, "memory.limit_in_bytes").exists():
            yield
            return
        self._group().mkdir()
        try:
            yield
        finally:
            for pid in (self._group() / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    Path(MEMORY, "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self._group().rmdir()


@contextmanager
def tempest(seed: int, endpoint: str, docker: Engine, folder: Path) -> Iterator[Tempest]:
    """A seed with a bucket and a lane of its own on the emulator, a proxy before it, and a clock."""
    with gateway(endpoint) as gate, clock.library() as library:
        own = Clock(library, folder / "clock")
        environment = storm_environment(gate.endpoint, f"tempest-{seed}") | docker.environment | own.environment
        made = Tempest(seed, folder, environment, weather=Weather(seed, endpoint), docker=docker, clock=own)
        gate.faults = made.weather
        made.make_bucket()
        make_lane(made, gate)
        yield made


def make_lane(made: Storm, gate: Gateway) -> None:
    """A lane of its own for a fleet, as the estate has them."""
    import boto3

    # Under this key calls are known as those that Terraform makes elsewhere: no policy has them.
    keys = {"aws_access_key_id": "embedded", "aws_secret_access_key": "embedded", "region_name": "us-east-1"}
    sqs = boto3.client("sqs", endpoint_url=gate.endpoint, **keys)
    name = f"lane-{made.seed:02d}"
    jobs, events, dead = create_lane_queues(sqs, name, VISIBILITY_S)
    body = json.dumps(Lane(name=name, jobs=jobs, events=events, dead=dead).to_dict()).encode()
    boto3.client("s3", endpoint_url=gate.endpoint, **keys).put_object(
        Bucket=made.environment["S3_BUCKET_NAME"], Key=layout.lane(name), Body=body
    )


def told(made: Tempest) -> str:
    """What a seed has met."""
    touched = {kind: count for kind, count in made.weather.met.items() if count}
    return f"met {made.met}, calls touched {touched}"


def main(seeds: int, first: int = 1) -> int:
    """Play seeds on one emulator; the number of those that broke."""
    with servers.ministack() as endpoint, boxes.engine() as docker:
        return play(
            "tempest", range(first, first + seeds), lambda seed, folder: tempest(seed, endpoint, docker, folder), told
        )


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), *(int(word) for word in sys.argv[2:]))))
