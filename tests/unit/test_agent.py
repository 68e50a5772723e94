"""Which messages an agent takes, how it shares out samples, and why it leaves. Queues and attempts are stand-ins here."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalworker import agent as module
from evalworker.agent import Agent, adapted, share_of
from evalworker.attempt import Attempt
from evalworker.aws import Fault
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Lane, Limits, Manifest
from evalworker.contract.failures import Category
from evalworker.contract.messages import Heartbeat, Hung, Job, read_from_worker
from evalworker.contract.wire import now
from evalworker.job import JobLook
from evalworker.queues import Received
from evalworker.storage import LocalStorage, StorageError
from evalworker.worker import Config

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
OTHER = "2026-11-29-14-05-34-1a2b3c4d"
JOBS = [f"{n:016x}" for n in range(5)]
LANE = Lane(name="lane-00", jobs="jobs", events="events", dead="dead", endpoint="http://127.0.0.1:9")
PATIENCE_S = 30.0


class FakeQueue:
    """Remembers what was sent, extended and deleted; gives what was put."""

    made: dict[str, "FakeQueue"] = {}

    def __init__(self, _client: Any, url: str) -> None:
        FakeQueue.made[url] = self
        self.put: list[Received] = []
        self.sent: list[str] = []
        self.extended: list[tuple[str, int]] = []
        self.deleted: list[str] = []

    def send(self, bodies: list[str], delay_s: int = 0) -> None:
        self.sent += bodies

    def receive(self, max_messages: int = 1, wait_s: int = 20) -> list[Received]:
        if not self.put:
            time.sleep(0.01)
        return [self.put.pop(0)] if self.put else []

    def extend(self, receipts: list[str], seconds: int) -> set[str]:
        self.extended += [(receipt, seconds) for receipt in receipts]
        return set()

    def delete(self, receipts: list[str]) -> set[str]:
        self.deleted += receipts
        return set()


class FakeAttempt:
    """Runs until it is told to end."""

    made: list["FakeAttempt"] = []
    process = None
    category: Category | None = None
    has_run = True
    waiting_for = "t with scripted/good: its samples"

    def __init__(self, worker: Any, received: Received, message: Job, spec: JobSpec, manifest: Manifest) -> None:
        self.received, self.message, self.spec = received, message, spec
        self.shares: list[int] = []
        self.interrupted: list[Category] = []
        self.heard = SimpleNamespace(look=JobLook(rate_limited=2))
        self.over = threading.Event()
        FakeAttempt.made.append(self)

    def run(self) -> None:
        assert self.over.wait(PATIENCE_S)

    def set_share(self, share: int, connections: int | None = None) -> None:
        self.shares.append(share)

    def adopt(self, received: Received) -> bool:
        self.received = received
        return not self.over.is_set()

    def interrupt(self, why: Category) -> None:
        self.interrupted.append(why)
        self.over.set()

    def save_partial(self) -> None:
        pass


def control(**changes: Any) -> Control:
    made = Control(
        fleet_id=FLEET,
        round=2,
        state="running",
        deadline=now() + timedelta(hours=1),
        beat=now(),
        limits=Limits(concurrency_per_worker=10, slots=4, control_s=0.01, heartbeat_s=0.01),
    )
    return made.model_copy(update=changes)


def manifest(jobs: list[str]) -> Manifest:
    specs = [JobSpec(job_id=job, task="t.py@t", name="t", model="scripted/good", samples=1) for job in jobs]
    return Manifest(
        fleet_id=FLEET,
        created=now(),
        backend="local",
        jobs=specs,
        arguments={},
        models=["scripted/good"],
        submit_dir=".",
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.put(layout.lane(LANE.name), LANE.to_bytes())
    storage.put(layout.manifest(FLEET), manifest(JOBS[:4]).to_bytes())
    storage.put(layout.control(FLEET), control().to_bytes())
    return storage


@pytest.fixture
def agent(store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    FakeAttempt.made = []
    monkeypatch.setattr(module, "Queue", FakeQueue)
    monkeypatch.setattr(module, "Attempt", FakeAttempt)
    monkeypatch.setattr(module.aws, "sqs", lambda lane: None)
    config = Config(
        root=str(store.root),
        fleet_id=FLEET,
        lane=LANE.name,
        instance_id="local-1",
        instance_type="local",
        lifecycle="local",
        launched=time.time(),
        work=tmp_path / "work",
    )
    made = Agent(config)
    yield made
    made.leave("over")
    for attempt in FakeAttempt.made:
        attempt.over.set()
    made.worker.poster.close(PATIENCE_S)
    made.worker.keeper.stop()


def received(job: str, receipt: str, *, fleet: str = FLEET, round_: int = 2, attempt: int = 1) -> Received:
    return Received(Job(fleet_id=fleet, round=round_, job_id=job, attempt=attempt).to_json(), receipt, 1)


def jobs_queue() -> FakeQueue:
    return FakeQueue.made["jobs"]


def until(true: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.005)


@pytest.mark.parametrize("total", [1, 3, 10])
@pytest.mark.parametrize("jobs", [1, 2, 3, 7])
def test_all_samples_in_flight_are_shared_out(total: int, jobs: int) -> None:
    shares = [share_of(total, jobs, index) for index in range(jobs)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_a_job_alone_gets_all_and_gets_it_back(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "r0"))
    agent._begin(received(JOBS[1], "r1"))
    agent._begin(received(JOBS[2], "r2"))
    first, second, third = FakeAttempt.made
    assert (first.shares, second.shares, third.shares) == ([10, 5, 4], [5, 3], [3])
    second.over.set()
    until(lambda: len(agent._running) == 2, "the second one has ended")
    third.over.set()
    until(lambda: len(agent._running) == 1, "the third one has ended")
    assert first.shares[-1] == 10


def test_a_merge_takes_no_samples_from_its_neighbours(agent: Agent) -> None:
    agent._specs[JOBS[1]] = agent._specs[JOBS[1]].model_copy(update={"merges": [JOBS[2]]})
    agent._begin(received(JOBS[1], "r1"))
    agent._begin(received(JOBS[0], "r0"))
    merge, job = FakeAttempt.made
    assert (merge.shares, job.shares) == ([], [10])


def test_refused_calls_of_jobs_that_have_ended_still_count(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "r0"))
    agent._begin(received(JOBS[1], "r1"))
    FakeAttempt.made[0].over.set()
    until(lambda: len(agent._running) == 1, "the first one has ended")
    beat = agent._heartbeat()
    assert (beat.rate_limited, beat.refused) == (2, 4)


def test_messages_of_an_older_round_another_fleet_or_an_unknown_job_are_deleted(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "old", round_=1))
    agent._begin(received(JOBS[0], "foreign", fleet=OTHER, round_=9))
    agent._begin(received(JOBS[4], "unknown"))
    assert jobs_queue().deleted == ["old", "foreign", "unknown"]
    assert FakeAttempt.made == []


@pytest.mark.parametrize("sign", ["its control says so", "the lane says so", "the lane is gone"])
def test_a_worker_that_outlives_its_fleet_gives_the_next_one_s_messages_back(
    agent: Agent, store: LocalStorage, sign: str
) -> None:
    if sign == "its control says so":
        store.put(layout.control(FLEET), control(state="ended").to_bytes())
    elif sign == "the lane says so":
        store.put(layout.lane(LANE.name), LANE.model_copy(update={"fleet_id": OTHER}).to_bytes())
    else:
        store.delete(layout.lane(LANE.name))
    agent._begin(received(JOBS[0], "r", fleet=OTHER, round_=1))
    assert (jobs_queue().deleted, jobs_queue().extended, agent._leaving) == ([], [("r", 0)], "over")


def test_another_fleet_s_message_is_left_alone_while_the_lane_cannot_be_read(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(key: str) -> None:
        raise StorageError("the store is away")

    monkeypatch.setattr(agent.worker.storage, "get", away)
    agent._begin(received(JOBS[0], "r", fleet=OTHER))
    assert (jobs_queue().deleted, jobs_queue().extended, agent._leaving) == ([], [], None)


def test_a_message_of_a_newer_round_makes_the_agent_read_what_changed(agent: Agent, store: LocalStorage) -> None:
    store.put(layout.manifest(FLEET), manifest(JOBS).to_bytes())
    store.put(layout.control(FLEET), control(round=3).to_bytes())
    agent._begin(received(JOBS[4], "r", round_=3))
    assert [attempt.spec.job_id for attempt in FakeAttempt.made] == [JOBS[4]]
    assert jobs_queue().deleted == []


def test_a_worker_made_of_old_code_leaves_when_a_round_brings_new_code(agent: Agent, store: LocalStorage) -> None:
    store.put(layout.manifest(FLEET), manifest(JOBS).model_copy(update={"code": "new"}).to_bytes())
    store.put(layout.control(FLEET), control(round=3).to_bytes())
    agent._begin(received(JOBS[4], "r", round_=3))
    assert agent._leaving == "outdated"
    assert agent._running == {}
    assert (jobs_queue().deleted, jobs_queue().extended) == ([], [("r", 0)]), "another worker shall have it at once"


def test_an_unreadable_message_stays_for_the_dead_letters_and_is_reported(agent: Agent) -> None:
    agent._begin(Received("{not json", "r", 1))
    assert jobs_queue().deleted == []
    until(lambda: FakeQueue.made["events"].sent, "the warning is sent")
    (warning,) = map(read_from_worker, FakeQueue.made["events"].sent)
    assert warning.type == "warning"
    assert "could not be read" in warning.text


def test_a_running_message_that_comes_again_is_adopted(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "first"))
    agent._begin(received(JOBS[0], "second"))
    assert [attempt.received.receipt for attempt in FakeAttempt.made] == ["second"]
    agent._begin(received(JOBS[0], "other attempt", attempt=2))
    assert len(FakeAttempt.made) == 2


def test_a_message_that_comes_while_the_agent_leaves_goes_back_at_once(agent: Agent) -> None:
    agent.leave("sigterm")
    agent._begin(received(JOBS[0], "r"))
    assert jobs_queue().extended == [("r", 0)]
    assert agent._running == {}


def test_a_job_that_failed_on_this_machine_is_left_to_others_for_a_moment(agent: Agent) -> None:
    def come(avoid: str, times: int) -> Received:
        job = Job(fleet_id=FLEET, round=2, job_id=JOBS[0], attempt=2, avoid=avoid)
        return Received(job.to_json(), f"{avoid} {times}", times)

    agent.manifest = agent.manifest.model_copy(update={"backend": "ec2"})
    agent._begin(come("local-1", 1))
    agent._begin(come("local-1", module.ELSEWHERE_TRIES))
    assert jobs_queue().extended == [(f"local-1 {n}", module.ELSEWHERE_S) for n in (1, module.ELSEWHERE_TRIES)]
    assert FakeAttempt.made == []
    agent._begin(come("local-1", module.ELSEWHERE_TRIES + 1))  # nobody else has taken it
    assert len(FakeAttempt.made) == 1


def test_workers_of_one_machine_take_what_failed_there_at_once(agent: Agent) -> None:
    job = Job(fleet_id=FLEET, round=2, job_id=JOBS[0], attempt=2, avoid="local-1")
    agent._begin(Received(job.to_json(), "r", 1))
    assert len(FakeAttempt.made) == 1


def test_a_worker_whose_credentials_stay_expired_leaves(
    agent: Agent, store: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise StorageError("expired", fault=Fault("ExpiredToken", 400, "expired", credentials=True))

    answer = store.get_if_changed(layout.control(FLEET), None)
    monkeypatch.setattr(module, "EXPIRED_S", 0.0)
    monkeypatch.setattr(agent.worker.storage, "get_if_changed", refuse)
    agent._read_control()
    assert agent._leaving is None
    monkeypatch.setattr(agent.worker.storage, "get_if_changed", lambda *_: answer)
    agent._read_control()
    monkeypatch.setattr(agent.worker.storage, "get_if_changed", refuse)
    agent._read_control()
    assert agent._leaving is None  # they were renewed in between
    agent._read_control()
    assert agent._leaving == "credentials"


@pytest.mark.parametrize(("reason", "why"), [("stopped", Category.CANCELLED), ("sigterm", Category.SPOT)])
def test_leaving_interrupts_what_runs_and_says_goodbye(
    agent: Agent, reason: str, why: Category, store: LocalStorage
) -> None:
    agent._begin(received(JOBS[0], "r"))
    agent.leave(reason)
    agent._end(reason)
    assert FakeAttempt.made[0].interrupted == [why]
    first = read_from_worker(FakeQueue.made["events"].sent[0])
    assert isinstance(first, Heartbeat)
    assert first.leaving == reason
    last = read_from_worker(FakeQueue.made["events"].sent[-1])
    assert (last.type, getattr(last, "reason", None)) == ("worker_draining", reason)
    assert store.exists(layout.worker_log(FLEET, "local-1"))


def test_when_the_fleet_has_ended_no_goodbye_is_posted(agent: Agent, store: LocalStorage) -> None:
    """Nobody reads it, and the queues of a local fleet may have gone: the worker would wait for them in vain."""
    store.put(layout.control(FLEET), control(state="ended").to_bytes())
    agent.leave("sigterm")
    agent._end("sigterm")
    assert "worker_draining" not in [read_from_worker(body).type for body in FakeQueue.made["events"].sent]
    assert store.exists(layout.worker_log(FLEET, "local-1"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "ended"}, "over"),
        ({"state": "stopping"}, "stopped"),
        ({"state": "draining"}, "drained"),
        ({"deadline": now() - timedelta(seconds=1)}, "deadline"),
        ({"limits": Limits(idle_s=0, control_s=0.01)}, "idle"),
    ],
)
def test_reasons_to_leave(agent: Agent, store: LocalStorage, changes: dict[str, Any], reason: str) -> None:
    store.put(layout.control(FLEET), control(**changes).to_bytes())
    agent._duties()
    assert agent._leaving == reason


def test_a_draining_agent_finishes_what_runs_and_takes_nothing(agent: Agent, store: LocalStorage) -> None:
    agent._begin(received(JOBS[0], "r"))
    store.put(layout.control(FLEET), control(state="draining").to_bytes())
    agent._read_control()
    assert not agent._may_take()
    duties = threading.Thread(target=agent._duties)
    duties.start()
    until(lambda: len(FakeQueue.made["events"].sent) >= 2, "two heartbeats")
    assert agent._leaving is None
    FakeAttempt.made[0].over.set()
    duties.join(PATIENCE_S)
    assert agent._leaving == "drained"


@pytest.mark.parametrize(("budgeted", "takes"), [(True, False), (False, True)])
def test_when_nobody_counts_the_money_no_job_is_taken(
    agent: Agent, store: LocalStorage, budgeted: bool, takes: bool
) -> None:
    silent = now() - timedelta(seconds=Limits().controller_silent_s + 1)
    store.put(layout.control(FLEET), control(budgeted=budgeted, beat=silent).to_bytes())
    agent._read_control()
    assert agent._may_take() is takes
    agent._begin(received(JOBS[0], "came with the last long poll"))
    assert [bool(agent._running), bool(jobs_queue().extended)] == [takes, not takes]


def test_without_disk_no_job_is_taken_and_it_is_said_once(agent: Agent, store: LocalStorage) -> None:
    limits = control().limits.model_copy(update={"disk_free_min": 10**18})
    store.put(layout.control(FLEET), control(limits=limits).to_bytes())
    agent._read_control()
    assert [agent._may_take(), agent._may_take()] == [False, False]
    until(lambda: FakeQueue.made["events"].sent, "the warning")
    agent.worker.poster.close(PATIENCE_S)
    (said,) = [read_from_worker(body) for body in FakeQueue.made["events"].sent]
    assert (said.type, "takes no more jobs" in getattr(said, "text", "")) == ("warning", True)


@pytest.mark.parametrize(
    ("before", "ended_with", "after"),
    [
        (10, Category.RATE_LIMIT, 5),
        (5, Category.RATE_LIMIT, 2),
        (1, Category.RATE_LIMIT, 1),
        (5, None, 6),
        (10, None, 10),
        (5, Category.TASK_ERROR, 5),
    ],
)
def test_samples_in_flight_after_an_attempt(before: int, ended_with: Category | None, after: int) -> None:
    assert adapted(before, 10, ended_with) == after


def test_a_rate_limit_lowers_this_workers_samples_until_attempts_complete(agent: Agent) -> None:
    for n, (category, share) in enumerate([(Category.RATE_LIMIT, 10), (None, 5), (None, 6), (None, 7)]):
        agent._begin(received(JOBS[0], f"r{n}", attempt=n + 1))
        attempt = FakeAttempt.made[-1]
        assert attempt.shares == [share]
        attempt.category = category
        attempt.over.set()
        until(lambda: not agent._running, "the attempt has ended")


@pytest.mark.parametrize("state", ["running", "ended"])
def test_whoever_leaves_a_fleet_that_has_ended_does_not_wait_to_be_heard(
    agent: Agent, store: LocalStorage, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The queues of a fleet on this machine end with it, and a worker may need longer than that to leave."""
    patience: list[float] = []
    store.put(layout.control(FLEET), control(state=state).to_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(agent.worker.poster, "close", patience.append)
        agent._end("sigterm")
    assert (patience == [module.AFTER_END_S]) == (state == "ended")


def let_a_sandbox_fail(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "r0"))
    FakeAttempt.made[0].category = Category.SANDBOX
    FakeAttempt.made[0].over.set()
    until(lambda: not agent._running, "it has ended")
    assert not agent._may_take()


def test_a_machine_that_never_had_an_engine_is_not_waited_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SANDBOXES_S", 0.01)
    monkeypatch.setattr(module.containers, "engine_answers", lambda: False)
    let_a_sandbox_fail(agent)
    threading.Thread(target=agent._sandboxes, daemon=True).start()
    until(agent._may_take, "jobs are taken again")
    assert agent._leaving is None


@pytest.mark.parametrize("comes_back", [True, False])
def test_after_a_sandboxs_failure_no_job_is_taken_until_the_engine_answers(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    asked, answers = threading.Semaphore(0), threading.Event()
    answers.set()

    def engine_answers() -> bool:
        answer = answers.is_set()
        asked.release()
        return answer

    monkeypatch.setattr(module, "SANDBOXES_S", 0.01)
    monkeypatch.setattr(module.containers, "engine_answers", engine_answers)
    threading.Thread(target=agent._sandboxes, daemon=True).start()
    assert asked.acquire(timeout=PATIENCE_S)
    answers.clear()
    let_a_sandbox_fail(agent)
    assert asked.acquire(timeout=PATIENCE_S)
    assert not agent._may_take()
    if comes_back:
        answers.set()
        until(agent._may_take, "jobs are taken again")
        assert agent._leaving is None
    else:
        monkeypatch.setattr(module, "ENGINE_AWAY_S", 0.0)
        until(lambda: agent._leaving == "docker", "it makes room for another worker")


def test_what_has_not_run_says_nothing_of_the_load(agent: Agent) -> None:
    for n, (category, ran) in enumerate([(Category.RATE_LIMIT, True), (None, False)]):
        agent._begin(received(JOBS[0], f"r{n}", attempt=n + 1))
        attempt = FakeAttempt.made[-1]
        attempt.category, attempt.has_run = category, ran
        attempt.over.set()
        until(lambda: not agent._running, "the attempt has ended")
    assert agent._in_flight == 5


def test_a_heartbeat_says_what_runs_and_what_it_is_in(agent: Agent) -> None:
    agent._begin(received(JOBS[0], "r0"))
    agent._begin(received(JOBS[1], "r1"))
    hung = [Hung(job_id=JOBS[0], attempt=1, sample_id=n, epoch=1, quiet_s=9, activity="a call") for n in range(30)]
    agent.worker.hung.extend(hung)
    beat = agent._heartbeat()
    assert beat.running == JOBS[:2]
    assert (beat.rate_limited, len(beat.hung), beat.waits) == (
        4,
        module.MOST_HUNG,
        dict.fromkeys(JOBS[:2], FakeAttempt.waiting_for),
    )
    assert beat.hung + agent._heartbeat().hung == hung  # each is named once


def test_a_heartbeat_says_once_that_a_sample_has_got_on(agent: Agent) -> None:
    message = Job(fleet_id=FLEET, round=2, job_id=JOBS[0], attempt=1)
    attempt = Attempt(agent.worker, received(JOBS[0], "r0"), message, agent._specs[JOBS[0]], agent.manifest)
    attempt._looked(JobLook())
    assert not agent._heartbeat().moved
    attempt._looked(JobLook(moved=True))
    attempt._looked(JobLook())
    assert [agent._heartbeat().moved for _ in range(2)] == [True, False]


def test_no_more_jobs_than_slots(agent: Agent) -> None:
    jobs_queue().put = [received(JOBS[0], str(n), attempt=n) for n in range(1, 7)]
    receiving = threading.Thread(target=agent._receive)
    receiving.start()
    until(lambda: len(FakeAttempt.made) == 4, "four slots are taken")
    FakeAttempt.made[2].over.set()
    until(lambda: len(FakeAttempt.made) == 5, "the free slot is taken again")
    until(lambda: len(agent._running) == 4, "it counts as running")
    agent.leave("over")
    receiving.join(PATIENCE_S)
    assert len(jobs_queue().put) == 1


def test_control_that_cannot_be_read_changes_nothing(agent: Agent, store: LocalStorage) -> None:
    store.put(layout.control(FLEET), b"{half")
    agent._read_control()
    assert agent.worker.control.state == "running"


def test_a_worker_whose_thread_breaks_leaves(agent: Agent, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("the work directory has gone")

    agent._guarded(broken)
    assert agent._leaving == "failed"
    assert "the work directory has gone" in (tmp_path / "work" / "worker.log").read_text()
