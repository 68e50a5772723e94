"""The controller with workers on other machines: what it launches, loses, replaces, leaves. A pool that is told, queues in memory."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_controller import FLEET, JOB, controller  # noqa: F401 - the fixture

from evalops.fleet.controller import Controller
from evalops.fleet.ledger import JobState
from evalops.fleet.workers import CannotLaunch, Lost, Pool
from evalworker.aws import Fault, ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec
from evalworker.contract.messages import BootstrapFailed, Heartbeat, SampleDone, WorkerDraining, WorkerOnline
from evalworker.contract.wire import now

EXPIRED = ServiceError(
    "the AWS credentials have expired; renew them", Fault("ExpiredToken", 403, "x", credentials=True)
)


class FarPool(Pool):
    """Instances by name; `gone` are told of at the next look, `trouble` is raised by it."""

    stays = True

    def __init__(self) -> None:
        self.names: list[str] = []
        self.launched = 0
        self.gone: list[Lost] = []
        self.lost: list[str] = []
        self.trouble: Exception | None = None
        self.refusal: Exception | None = None
        self.stopped: list[bool] = []
        self.asked: list[int] = []
        self.capacity = 99

    @property
    def alive(self) -> int:
        return len(self.names)

    @property
    def waiting_for(self) -> str | None:
        missing = sum(self.asked) - self.launched
        return f"EC2 capacity for {missing} workers" if missing else None

    def start(self, count: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(count)
        for _ in range(min(count, self.capacity - len(self.names))):
            self.launched += 1
            self.names.append(f"i-{self.launched}")

    def ended(self) -> list[Lost]:
        if self.trouble is not None:
            raise self.trouble
        found, self.gone = self.gone, []
        self.names = [name for name in self.names if name not in {lost.instance_id for lost in found}]
        return found

    def left(self, instance_id: str) -> None:
        self.names.remove(instance_id)

    def lose(self, instance_id: str, reason: str) -> Lost | None:
        self.lost.append(instance_id)
        self.names.remove(instance_id)
        return Lost(instance_id, reason, [])

    def stop(self, *, now: bool = False) -> None:
        self.stopped.append(now)
        self.names.clear()

    def cost(self) -> tuple[float | None, str | None]:
        return 1.25, "a note"


class Clock:
    """Monotonic time that the test moves; nobody sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sleeps: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.sleeps()


CLOCKS: list[Clock] = []


@pytest.fixture
def far(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Controller:  # noqa: F811
    controller.fleet.pool = FarPool()
    controller.fleet.plan.workers = 2
    controller.fleet.plan.replacements = 3
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    CLOCKS[:] = [clock]
    return controller


def pool(far: Controller) -> FarPool:
    assert isinstance(far.fleet.pool, FarPool)
    return far.fleet.pool


def clock() -> Clock:
    return CLOCKS[0]


def events(far: Controller, type_: str) -> list[str]:
    return [line for line in far.fleet.stream.path.read_text().splitlines() if f'"type":"{type_}"' in line]


def online(far: Controller, *names: str, running: tuple[str, ...] = ()) -> None:
    for name in names:
        common = {"fleet_id": FLEET, "instance_id": name, "ts": now()}
        far.apply(WorkerOnline(**common, bootstrap_s=1, instance_type="m", lifecycle="spot", slots=1))
        far.apply(Heartbeat(**common, running=list(running), load=0, disk_free=1, memory_free=1))


def beat(far: Controller, *, moved: bool) -> None:
    common = {"fleet_id": FLEET, "instance_id": "i-1", "ts": now()}
    far.apply(Heartbeat(**common, running=[JOB], load=0, disk_free=1, memory_free=1, moved=moved))


def goodbye(far: Controller, name: str, reason: str) -> None:
    far.apply(WorkerDraining(fleet_id=FLEET, instance_id=name, ts=now(), reason=reason))


def cycle(far: Controller, seconds: float = 1.0) -> None:
    clock().time += seconds
    far.inbox.receive(far.apply)
    far.staff.look_after()


def test_no_more_workers_than_jobs(far: Controller) -> None:
    far.staff.start()
    assert pool(far).launched == 1


def test_no_worker_comes_for_a_merge_that_waits_for_its_shard(far: Controller) -> None:
    merge = JobSpec(job_id="f" * 16, task="t.py@t", name="t", model="scripted/good", samples=1, merges=[JOB])
    far.fleet.ledger.jobs[merge.job_id] = JobState(merge)
    far.staff.start()
    assert pool(far).launched == 1


def test_a_silent_worker_is_ended_and_replaced(far: Controller) -> None:
    pool(far).start(1)
    online(far, "i-1")
    for _ in range(8):
        cycle(far, 10)
    assert (pool(far).lost, pool(far).launched) == ([], 1)
    for _ in range(3):
        cycle(far, 10)
    assert (pool(far).lost, pool(far).launched) == (["i-1"], 2)
    assert len(events(far, "worker_lost")) == 1


def test_nobody_is_lost_while_the_queue_cannot_be_read_or_the_controller_slept(far: Controller) -> None:
    pool(far).start(1)
    online(far, "i-1")
    far.fleet.events.failures = 0  # type: ignore[attr-defined]
    receive = far.fleet.events.receive

    def broken(*_: Any) -> Any:
        raise ServiceError("cannot be reached", Fault("x", 500, "x", retryable=True))

    far.fleet.events.receive = broken  # type: ignore[method-assign]
    for _ in range(20):
        cycle(far, 10)
    far.fleet.events.receive = receive  # type: ignore[method-assign]
    cycle(far, 10)
    assert pool(far).lost == []
    cycle(far, 3600)  # suspended
    assert pool(far).lost == []
    for _ in range(10):
        cycle(far, 10)
    assert pool(far).lost == ["i-1"]


def test_a_worker_whose_machine_is_taken_is_replaced_at_once_and_one_that_is_idle_is_not(far: Controller) -> None:
    pool(far).start(2)
    online(far, "i-1", "i-2")
    goodbye(far, "i-1", "idle")
    assert pool(far).launched == 2
    goodbye(far, "i-2", "spot")
    cycle(far)
    assert pool(far).launched == 3
    pool(far).gone = [Lost("i-2", "EC2 says Server.SpotInstanceTermination", [])]
    cycle(far)
    assert (pool(far).launched, events(far, "worker_lost")) == (3, [])


def test_a_worker_that_drains_is_known_at_once_to_whoever_looks(far: Controller) -> None:
    def told() -> dict[str, str]:
        far._cycle()
        return Control.from_json(far.fleet.storage.get(layout.control(FLEET)).body).draining

    far.staff.start()
    online(far, "i-1")
    assert told() == {}
    far.apply(
        Heartbeat(
            fleet_id=FLEET,
            instance_id="i-1",
            ts=now(),
            running=[JOB],
            load=0,
            disk_free=1,
            memory_free=1,
            leaving="spot",
        )
    )
    assert told() == {"i-1": "spot"}
    goodbye(far, "i-1", "spot")
    assert told() == {}


def test_replacements_are_bounded(far: Controller) -> None:
    pool(far).start(2)
    for number in range(1, 6):
        name = pool(far).names[-1]
        online(far, name)
        pool(far).gone = [Lost(name, f"EC2 says {number}", [])]
        cycle(far)
    assert pool(far).launched == 2 + 3
    assert far.fleet.verdict is not None
    assert far.fleet.verdict.reason == "too many workers were lost"


def test_a_fleet_that_gets_on_may_lose_as_many_again(far: Controller) -> None:
    pool(far).start(2)
    for number in range(1, 9):
        name = pool(far).names[-1]
        online(far, name)
        if number % 3 == 0:
            sample(far, number)
        pool(far).gone = [Lost(name, f"EC2 says {number}", [])]
        cycle(far)
    assert (far.fleet.verdict, pool(far).launched) == (None, 2 + 8)


def sample(far: Controller, id_: int) -> None:
    common = {"fleet_id": FLEET, "instance_id": "i-1", "ts": now(), "round": 2, "job_id": JOB, "attempt": 1}
    about = {"task": "t", "model": "scripted/good", "sample_id": id_, "epoch": 1, "uuid": f"u{id_}", "scores": {}}
    far.apply(SampleDone.model_validate(common | about | {"duration_s": 1.0, "status": "completed"}))


def test_a_goodbye_that_comes_twice_is_one(far: Controller) -> None:
    pool(far).start(2)
    online(far, "i-1", "i-2")
    goodbye(far, "i-1", "spot")
    goodbye(far, "i-1", "spot")
    cycle(far)
    assert (pool(far).launched, len(events(far, "worker_draining"))) == (3, 1)


def test_workers_that_go_at_once_are_asked_for_at_once(far: Controller) -> None:
    pool(far).start(4)
    online(far, "i-1", "i-2", "i-3", "i-4")
    goodbye(far, "i-1", "spot")
    goodbye(far, "i-2", "spot")
    pool(far).gone = [Lost("i-3", "EC2 says so", [])]
    cycle(far)
    assert pool(far).asked == [4, 3]


def test_no_capacity_is_waited_for_and_is_no_loss(far: Controller) -> None:
    pool(far).capacity = 0
    far.staff.start()
    for _ in range(30):
        cycle(far, 10)
    assert (far.fleet.verdict, pool(far).asked) == (None, [1])


def test_what_is_asked_for_already_is_not_asked_for_again(far: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    far.fleet.plan.workers = 8
    pool(far).capacity = 2
    pool(far).start(8)
    monkeypatch.setattr(far.fleet.jobs, "counts", lambda: module_counts(99))
    for _ in range(30):
        online(far, "i-1", "i-2", running=("00000000000000aa",))
        cycle(far, 30)
    assert pool(far).asked == [8]


def test_when_the_first_boots_all_fail_the_fleet_ends(far: Controller) -> None:
    pool(far).start(2)
    far.apply(BootstrapFailed(fleet_id=FLEET, instance_id="i-1", ts=now(), lines=["no disk"]))
    pool(far).gone = [Lost("i-1", "it shut itself down", [])]
    cycle(far)
    assert (far.fleet.verdict, pool(far).launched) == (None, 2)  # the other one may come
    pool(far).gone = [Lost("i-2", "EC2 says Server.InternalError", [])]
    cycle(far)
    assert far.fleet.verdict is not None
    assert pool(far).launched == 2
    assert (far.fleet.verdict.reason or "").startswith("no worker could start")
    first, second = events(far, "bootstrap_failed")
    assert "no disk" in first
    assert "EC2 says Server.InternalError" in second


def test_what_can_never_be_launched_ends_the_fleet_with_the_reason(far: Controller) -> None:
    pool(far).refusal = CannotLaunch("the launch template is gone: run `make apply`")
    far.staff.start()
    assert far.fleet.verdict is not None
    assert far.fleet.verdict.reason == "the launch template is gone: run `make apply`"


def test_throttled_looks_are_said_once_and_end_nothing(far: Controller) -> None:
    said: list[str] = []
    far.fleet.view.note = said.append  # type: ignore[method-assign]
    pool(far).start(1)
    pool(far).trouble = ServiceError("EC2 throttles", Fault("RequestLimitExceeded", 503, "x", retryable=True))
    for _ in range(12):
        cycle(far, 15)
    assert said == ["the workers: EC2 throttles; going on"]
    assert (far.fleet.verdict, pool(far).names) == (None, ["i-1"])


def test_more_workers_come_while_jobs_wait_and_all_are_busy(far: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    pool(far).start(1)
    online(far, "i-1", running=("00000000000000aa",))
    cycle(far)
    assert pool(far).launched == 1
    monkeypatch.setattr(far.fleet.jobs, "counts", lambda: module_counts(1))
    cycle(far, 30)
    assert pool(far).launched == 2
    cycle(far, 30)
    assert pool(far).launched == 2


def module_counts(visible: int) -> Any:
    from evalworker.queues import Counts

    return Counts(visible, 0, 0)


def test_expired_credentials_leave_the_fleet(far: Controller) -> None:
    pool(far).start(1)
    pool(far).trouble = EXPIRED
    verdict = far.run()
    assert (verdict.ending, verdict.reason) == ("left", str(EXPIRED))
    assert (pool(far).stopped, pool(far).names) == ([], ["i-1"])
    control = Control.from_json(far.fleet.storage.get(layout.control(FLEET)).body)
    assert (control.state, control.controller) == ("running", "")


def interrupt(far: Controller) -> None:
    """Ctrl-C as the loop reaches the workers."""
    ended = far.fleet.pool.ended

    def once() -> list[Lost]:
        far.fleet.pool.ended = ended  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)
        return []

    far.fleet.pool.ended = once  # type: ignore[method-assign]


def test_ctrl_c_leaves_and_a_second_one_stops(far: Controller) -> None:
    pool(far).start(1)
    interrupt(far)
    assert far.run().ending == "left"
    assert pool(far).names == ["i-1"]


def test_a_second_ctrl_c_within_seconds_stops(far: Controller) -> None:
    pool(far).start(1)
    online(far, "i-1")
    interrupt(far)

    def again() -> None:
        clock().sleeps = lambda: None
        signal.raise_signal(signal.SIGINT)
        goodbye(far, "i-1", "stopped")

    clock().sleeps = again
    assert far.run().ending == "cancelled"
    assert pool(far).stopped == [False]


def test_the_end_is_told_and_says_what_it_cost(far: Controller) -> None:
    told: list[tuple[str, str]] = []
    far.fleet.tell = lambda subject, text: told.append((subject, text))
    assert far.close("its deadline passed").ending == "stopped"
    assert told == [
        (f"fleet {FLEET} has ended: stopped", "0 of 1 jobs and 0 of 1 samples completed; its deadline passed")
    ]
    (summary,) = events(far, "fleet_summary")
    assert '"cost_usd":{"tokens":0.0,"machines":1.25,"note":"a note"}' in summary


def test_samples_that_get_on_are_no_silence_however_long_they_last(far: Controller) -> None:
    control = far.fleet.control
    guarded = control.guards.model_copy(update={"stall_after_s": 60})
    far.fleet.control = control.model_copy(update={"guards": guarded})
    pool(far).start(1)
    online(far, "i-1")
    for _ in range(5):
        clock().time += 59
        beat(far, moved=True)
        far._react()
    assert (far.fleet.verdict, events(far, "stalled")) == (None, [])
    for _ in range(3):
        clock().time += 59
        beat(far, moved=False)
        far._react()
    assert far.fleet.verdict is not None
    assert len(events(far, "stalled")) == 1


def test_a_fleet_without_a_machine_says_that_it_waits_for_capacity_and_is_not_stopped(far: Controller) -> None:
    control = far.fleet.control
    guarded = control.guards.model_copy(update={"stall_after_s": 60})
    far.fleet.control = control.model_copy(update={"guards": guarded})
    pool(far).capacity = 0
    pool(far).start(1)
    far.fleet.watch.happened(clock().time)
    for _ in range(10):
        clock().time += 59
        far._react()
    assert far.fleet.verdict is None
    (told,) = events(far, "stalled")
    assert "EC2 capacity for 1 workers" in told
    pool(far).names, pool(far).launched = ["i-1"], 1  # a machine comes, and never says anything
    clock().time += 119
    far._react()
    assert far.fleet.verdict is None
    clock().time += 2
    far._react()
    assert far.fleet.verdict is not None


def test_a_stall_and_a_stop_by_a_guard_are_told_elsewhere_once(far: Controller) -> None:
    told: list[tuple[str, str]] = []
    far.fleet.tell = lambda subject, text: told.append((subject, text))
    control = far.fleet.control
    guarded = control.guards.model_copy(update={"stall_after_s": 60})
    far.fleet.control = control.model_copy(update={"guards": guarded})
    pool(far).start(1)
    online(far, "i-1")
    clock().time += 61
    far._react()
    far._react()
    ((subject, text),) = told
    assert subject == f"fleet {FLEET} has stalled"
    assert text.startswith("nothing has happened for 6")
    clock().time += 61
    far._react()
    far._react()
    assert [subject for subject, _ in told[1:]] == [f"fleet {FLEET} is being stopped"]
    assert told[1][1].startswith("nothing happened for 12")
