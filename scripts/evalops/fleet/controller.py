"""Drives one fleet from its first message to its summary: receive, write, retry, replace, end.

One thread, one loop. What messages mean is the ledger's business, how they are kept the stream's, what is known of workers the
roster's; here is what happens when. No AWS error ends a healthy fleet: it is said once, and the loop goes on. Design, section 7.
"""

import math
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from evalops.fleet import guards, lanes
from evalops.fleet.guards import Verdict
from evalops.fleet.ledger import JobState, Ledger, Outcome
from evalops.fleet.recovery import LostMessages
from evalops.fleet.roster import Roster
from evalops.fleet.stream import EventStream, Fenced
from evalops.fleet.view import ProgressLine
from evalops.fleet.watch import Watch
from evalops.fleet.workers import CannotLaunch, Lost, Pool
from evalworker import aws, publish
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobDone, Lane, Manifest
from evalworker.contract.events import Event
from evalworker.contract.failures import Category
from evalworker.contract.ids import digest_of_keys
from evalworker.contract.jsonio import dumps
from evalworker.contract.messages import (
    AttemptDone,
    BootstrapFailed,
    FromWorker,
    Heartbeat,
    Job,
    SampleCounts,
    SampleDone,
    Warning_,
    WorkerDraining,
    WorkerOnline,
    read_from_worker,
)
from evalworker.contract.wire import Unreadable, now
from evalworker.queues import Queue
from evalworker.storage import AlreadyExists, Changed, Storage

RECEIVE_WAIT_S = 1
"""One long poll of the events queue; the rest of the loop runs at least so often."""

BEAT_S = 10.0
"""Between two signs of life in control.json."""

DEAD_LETTERS_S = 10.0
"""Between two looks into the dead letters."""

GROW_S = 20.0
"""Between two looks whether more workers would help."""

ASLEEP_S = 20.0
"""A cycle that took longer: this process was suspended or hung, so the silence was its own."""

RECEIVE_MOST = 10
"""Messages that one call brings; as many as that, and there may be more."""

AS_IT_SHOULD = ("idle", "over", "drained", "stopped", "deadline")
"""Why workers leave that nobody has to replace."""

CHANGE_MIND_S = 3.0
"""After a first Ctrl-C that leaves workers running: how long a second one stops them instead."""

INSIST_S = 60.0
"""How long the end of a fleet is tried to be stored."""

STOP_PATIENCE_S = 60.0
"""How long stopping workers may take to hand over before what is open is called cancelled."""

FAR_S = 30.0
"""How much longer those of other machines may take: they look less often whether to stop."""

EVENTS_RETURN_S = 75.0
"""How long messages that a killed controller had received stay away: the events queue's visibility timeout, and some more."""

RELEASE_TRIES = 3
"""How often the lane is given back: nobody else has it until the deadline otherwise."""

DRAIN_S = 30.0
"""The longest that the end of a fleet spends on emptying its lane."""


@dataclass
class Plan:
    """What a controller is told to do.

    Attributes:
        workers: how many workers to keep while there is work for them.
        replacements: how many lost workers may be replaced in all.
    """

    workers: int
    replacements: int = 10


class Left(RuntimeError):
    """The controller goes, the fleet stays; the text says why."""


@dataclass
class Due:
    """A job message to be sent at a time (monotonic seconds)."""

    at: float
    message: Job


@dataclass
class Controller:
    """See the module. Make one, then `run` it. `tell` sends a subject and a text to whoever waits for the fleet's end."""

    manifest: Manifest
    control: Control
    control_etag: str
    storage: Storage
    lane: Lane
    ledger: Ledger
    stream: EventStream
    pool: Pool
    view: ProgressLine
    plan: Plan
    started: float = field(default_factory=time.monotonic)
    tell: Callable[[str, str], None] | None = None

    def __post_init__(self) -> None:
        client = aws.sqs(self.lane)
        self._jobs = Queue(client, self.lane.jobs)
        self._events = Queue(client, self.lane.events)
        self._dead = Queue(client, self.lane.dead)
        self.roster = Roster()
        self._first = self.plan.workers
        self._due: list[Due] = []
        self._interrupts = 0
        self._stopped_at_once = False
        self.signal_number: int | None = None
        self._verdict: Verdict | None = None
        self._stopping_since: float | None = None
        self._last: dict[str, float] = {}
        self._lost_messages = LostMessages()
        self.watch = Watch(self.ledger, time.monotonic())
        self._troubles: set[str] = set()

    @property
    def fleet_id(self) -> str:
        """The fleet's id."""
        return self.manifest.fleet_id

    # The loop

    def run(self) -> Verdict:
        """Follow the fleet to its end, or leave it. Raises `Fenced` when another controller has taken over."""
        try:
            with self._signals():
                while self.ledger.open_jobs:
                    self._cycle()
                return self._finish()
        except Left as left:
            return self._leave(str(left))

    def _cycle(self) -> None:
        self._receive()
        self._store()
        self._look_after_workers()
        self._send_due()
        if self._every("dead letters", DEAD_LETTERS_S):
            self._read_dead_letters()
        if self._every("lost messages", 2 * self.control.limits.heartbeat_s):
            self._find_lost_messages()
        if self._every("beat", BEAT_S):
            self._beat()
        self._react()
        self.view.show(self.ledger, self.pool.alive, self._waiting_for(), self.watch.rate_limited)

    def _receive(self) -> None:
        """Take what has come. Whoever could not be heard is not silent: the roster is told when that was our own doing."""
        begun = time.monotonic()
        if begun - self._last.get("heard", begun) > ASLEEP_S:
            self.roster.deaf(begun)
        self._last["heard"] = begun
        with self._surviving("the event queue"):
            messages = self._events.receive(RECEIVE_MOST, RECEIVE_WAIT_S)
            for received in messages:
                self._take(received.body)
                self.stream.settle(received.receipt)
            if len(messages) < RECEIVE_MOST:
                return
        self.roster.deaf(time.monotonic())

    def _store(self, *, at_once: bool = False) -> None:
        if self.stream.due or at_once:
            with self._surviving("storage"):
                receipts = self.stream.store()
                self._events.delete(receipts)

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """An AWS error in the loop is said once, and the loop goes on after a pause."""
        try:
            yield
        except ServiceError as error:
            if error.credentials:
                raise Left(str(error)) from error
            sentence = f"{what}: {error}"
            if sentence not in self._troubles:
                self._troubles.add(sentence)
                self.view.note(f"{sentence}; going on")
            time.sleep(random.uniform(0.5, 1.5))  # noqa: S311

    def _insist(self, what: str, call: Callable[[], object]) -> None:
        """The same for what must be done before the controller ends: tried for a minute, then the error is raised."""
        end = time.monotonic() + INSIST_S
        while time.monotonic() < end:
            with self._surviving(what):
                call()
                return
        call()

    def _every(self, what: str, seconds: float) -> bool:
        due = time.monotonic() - self._last.get(what, float("-inf")) >= seconds
        if due:
            self._last[what] = time.monotonic()
        return due

    # Messages

    def _take(self, body: str) -> None:
        """Turn one message into events."""
        try:
            message = read_from_worker(body)
        except Unreadable as error:
            self._keep_aside(error)
            return
        if message.fleet_id != self.fleet_id:
            self._keep_foreign(message)
            return
        self._apply(message)

    def _keep_foreign(self, message: FromWorker) -> None:
        """A late message of the fleet that had this lane before: kept with that fleet, whose stream has ended."""
        if isinstance(message, SampleDone | AttemptDone):
            with self._surviving("storage"):
                self.storage.put(layout.late(message.fleet_id), message.to_bytes())
            self.stream.append(
                [
                    {
                        "type": "warning",
                        "text": f"a message of the fleet {message.fleet_id} came late and was kept with that fleet",
                    }
                ]
            )

    def _keep_aside(self, error: Unreadable) -> None:
        key = f"{self.fleet_id}/unreadable/{time.time_ns()}.txt"
        with self._surviving("storage"):
            self.storage.put(key, error.text.encode("utf-8", "backslashreplace"))
        self.stream.append([{"type": "warning", "text": f"a message could not be read ({error}); it is kept as {key}"}])

    def _apply(self, message: FromWorker) -> None:
        self.roster.heard(message.instance_id, time.monotonic())
        if not isinstance(message, Heartbeat | Warning_):
            self.watch.happened(time.monotonic())
        if isinstance(message, SampleDone):
            self._write(self.ledger.sample(message))
        elif isinstance(message, AttemptDone):
            self._write(self.ledger.attempt(message))
        elif isinstance(message, Heartbeat):
            self._tell(self.watch.heard(message))
            self.roster.beat(message)
            self.pool.online(message.instance_id)
        else:
            self._lifecycle(message)

    def _lifecycle(self, message: WorkerOnline | WorkerDraining | BootstrapFailed | Warning_) -> None:
        event: Event = {"type": message.type, "instance_id": message.instance_id}
        if isinstance(message, WorkerOnline):
            self.pool.online(message.instance_id)
            if not self.roster.online(message):
                return
            event |= {
                "bootstrap_s": message.bootstrap_s,
                "instance_type": message.instance_type,
                "lifecycle": message.lifecycle,
                "slots": message.slots,
            }
        elif isinstance(message, WorkerDraining):
            self._goodbye(message)
            event |= {"reason": message.reason, "handed_over": message.handed_over}
        elif isinstance(message, BootstrapFailed):
            if not self.roster.failed(message.instance_id):
                return
            event |= {"lines": message.lines}
        else:
            event |= {"text": message.text, "job_id": message.job_id}
            self.view.note(message.text)
        self.stream.append([event])

    def _goodbye(self, message: WorkerDraining) -> None:
        """A worker goes. One whose machine is taken from it is replaced before it is gone."""
        self.roster.left(message.instance_id)
        self.watch.gone(message.instance_id)
        self.pool.left(message.instance_id)
        if message.reason not in AS_IT_SHOULD and self.pool.stays and self._verdict is None and self.ledger.open_jobs:
            self._replace()

    def _write(self, outcome: Outcome) -> None:
        self.stream.append(outcome.events)
        if outcome.retry is not None:
            spread = random.uniform(1.0, 1.5)  # noqa: S311 - jobs that were refused together shall not come back together
            job = self.ledger.jobs[outcome.retry.job_id]
            self._schedule(job, outcome.retry.delay_s * spread)
        if outcome.compare is not None:
            self._conclude(outcome.compare)

    def _conclude(self, done: AttemptDone) -> None:
        """Compare the job's log with the stream and write the job's end."""
        missing: list[SampleDone] = []
        if done.log is not None and not self.ledger.matches(done, _digest_of):
            try:
                missing = self._read_samples(done)
            except Exception as error:  # a log that cannot be read must not keep the job from ending
                self.stream.append(
                    [
                        {
                            "type": "warning",
                            "job_id": done.job_id,
                            "text": f"the job's log could not be compared: {error}",
                        }
                    ]
                )
        self.stream.append(self.ledger.conclude(done, missing))

    def _read_samples(self, done: AttemptDone) -> list[SampleDone]:
        from evalworker.results import Origin, read_log, sample_done

        spec = self.ledger.jobs[done.job_id].spec
        origin = Origin(self.fleet_id, done.round, done.job_id, done.attempt, spec.name, spec.model, done.instance_id)
        assert done.log is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "job.eval")
            self.storage.download(done.log, path)
            return [sample_done(summary, origin) for summary in read_log(path).summaries]

    # Sending

    def send_open_jobs(self) -> None:
        """Send a message for each open job, or for the canaries alone: the start of a round. Raises what cannot be sent."""
        self.watch.hold(self.control)
        jobs = self.watch.canaries(self.control) or self.ledger.open_jobs
        self._jobs.send([self._message(job).to_json() for job in jobs])

    def _message(self, job: JobState) -> Job:
        return Job(
            fleet_id=self.fleet_id,
            round=self.ledger.round,
            job_id=job.spec.job_id,
            attempt=job.attempt,
            base=job.base,
            canary=job in self.watch.canaries(self.control),
            avoid=job.failed_on,
        )

    def _schedule(self, job: JobState, delay_s: float) -> None:
        self._due.append(Due(time.monotonic() + delay_s, self._message(job)))

    def _send_due(self) -> None:
        if self._stopping_since is not None:
            return
        for job in self.watch.release(self.control):
            self._schedule(job, 0)
        for due in [due for due in self._due if due.at <= time.monotonic()]:
            with self._surviving("the job queue"):
                self._jobs.send([due.message.to_json()])
                self._due.remove(due)
                self.watch.happened(time.monotonic())

    def _read_dead_letters(self) -> None:
        """A job whose message nobody could finish has failed: say so instead of waiting for it."""
        with self._surviving("the dead letters"):
            for received in self._dead.receive(10, 0):
                try:
                    job = self._open_job_of(Job.from_json(received.body))
                except Unreadable as error:
                    self._keep_aside(error)
                    job = None
                if job is not None:
                    self._end_job(
                        job, "failed", Category.CRASH, "its message was received 20 times and no attempt came to an end"
                    )
                self._dead.delete([received.receipt])

    def _open_job_of(self, message: Job) -> JobState | None:
        """The open job that hangs on this message; None for one of another fleet, an older round or an older attempt.

        The same job has the same id in every fleet, and an estate's lane has had others before.
        """
        job = self.ledger.jobs.get(message.job_id)
        if job is None or job.done is not None or message.attempt < job.attempt:
            return None
        return job if (message.fleet_id, message.round) == (self.fleet_id, self.ledger.round) else None

    def _find_lost_messages(self) -> None:
        """Send again what an earlier controller had decided on and not sent before it was killed."""
        if self._stopping_since is not None:
            return
        with self._surviving("the job queue"):
            lost = self._lost_messages.look(
                open_jobs=[job.spec.job_id for job in self.ledger.open_jobs],
                running=self.roster.running(time.monotonic()),
                scheduled={due.message.job_id for due in self._due} | self.watch.held(self.control),
                counts=self._jobs.counts(),
            )
            for job_id in lost:
                job = self.ledger.jobs[job_id]
                self.stream.append(
                    [{"type": "warning", "job_id": job_id, "text": "the job's message was lost and is sent again"}]
                )
                self._jobs.send([self._message(job).to_json()])

    def _end_job(self, job: JobState, status: Literal["failed", "cancelled"], category: Category, why: str) -> None:
        """End a job in the controller's name, unless a worker has ended it: the done document decides."""
        done = AttemptDone(
            fleet_id=self.fleet_id,
            instance_id="controller",
            ts=now(),
            round=self.ledger.round,
            job_id=job.spec.job_id,
            attempt=job.attempt,
            status=status,
            ended=True,
            failure_category=category,
            error_summary=why,
            duration_s=0.0,
            samples=_counts_of(job),
        )
        record = JobDone(
            fleet_id=self.fleet_id, job_id=job.spec.job_id, round=self.ledger.round, log=None, attempt_done=done
        )
        try:
            self.storage.create(layout.job_done(self.fleet_id, job.spec.job_id, self.ledger.round), record.to_bytes())
        except AlreadyExists:
            found = publish.find_done(self.storage, self.fleet_id, job.spec.job_id, self.ledger.round)
            if found is not None:
                publish.publish(self.storage, found)
                done = found.attempt_done
        self._conclude(done)

    # Workers

    def start_workers(self) -> None:
        """Launch as many workers as there is work for."""
        jobs = len(self.ledger.open_jobs)
        if self.pool.stays:  # those of other machines cost money: they come when there is something for them to do
            first = len(self.watch.canaries(self.control)) or jobs
            jobs = math.ceil(first / (self.control.limits.slots or 1))
        self._first = min(self.plan.workers, max(1, jobs))
        self._launch(self._first)

    def _launch(self, count: int) -> None:
        try:
            self.pool.start(count)
        except CannotLaunch as error:
            self._begin_stop(Verdict("stopped", str(error)))
        except ServiceError as error:  # the pool asks again by itself
            self.view.note(f"{error}; going on")

    def _look_after_workers(self) -> None:
        missing = 0
        with self._surviving("the workers"):
            try:
                missing += sum([self._lost(lost) for lost in self.pool.ended()])
            except CannotLaunch as error:
                self._begin_stop(Verdict("stopped", str(error)))
            for name in self.roster.silent(time.monotonic()):
                if (gone := self.pool.lose(name, "nothing was heard of it")) is not None:
                    missing += self._lost(gone)
        for _ in range(missing):
            if self._stopping_since is None:
                self._replace()
        if self._stopping_since is not None or self._verdict is not None or not self.ledger.open_jobs:
            return
        if self.pool.alive == 0:
            self._beat()  # the workers may have obeyed `ct fleet stop` before this controller has read it
            if self._stopping_since is None:
                self._replace()
        elif self.pool.alive < self.plan.workers and self.plan.replacements > 0 and self._every("growth", GROW_S):
            self._grow()

    def _grow(self) -> None:
        """Add workers while jobs wait, all workers are busy and none backs off."""
        with self._surviving("the job queue"):
            waiting = self._jobs.counts().visible
            if count := self.roster.more(alive=self.pool.alive, most=self.plan.workers, waiting=waiting):
                self._launch(count)

    def _lost(self, lost: Lost) -> bool:
        """Write that a worker has gone; whether it is to be replaced."""
        self.watch.gone(lost.instance_id)
        self.watch.happened(time.monotonic())
        fate = self.roster.lost(lost.instance_id, lost.reason)
        if fate == "done":
            return False
        if fate == "lost":
            self.stream.append([{"type": "worker_lost", "instance_id": lost.instance_id, "reason": lost.reason}])
        elif self.roster.failed(lost.instance_id):
            lines = lost.last_lines or [lost.reason]
            self.stream.append([{"type": "bootstrap_failed", "instance_id": lost.instance_id, "lines": lines}])
        self.view.note(f"lost the worker {lost.instance_id}: {lost.reason}")
        # While none has ever come online, others that still boot are waited for: when all fail, so would their replacements.
        return fate == "lost" or self.roster.any_online or self.pool.alive == 0

    def _replace(self) -> None:
        if self.roster.failed_boots >= self._first and not self.roster.any_online:
            self._begin_stop(Verdict("stopped", "no worker could start; see the bootstrap_failed events"))
        elif self.plan.replacements > 0:
            self.plan.replacements -= 1
            self._launch(1)
        elif self.pool.alive == 0:
            self._begin_stop(Verdict("stopped", "too many workers were lost"))

    # Ending

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the fleet cleanly; a second one ends its workers at once."""
        before = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupted(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        self.signal_number = number

    def _react(self) -> None:
        """Notice why the fleet should end: a signal, `stop`, a deadline, a guard; and drive what has begun to end."""
        if self._interrupts and self._verdict is None and self.pool.stays:
            self._stop_or_leave()
        elif self._interrupts and self._verdict is None:
            self.view.note("stopping: workers hand over what they have (again to end them at once)")
            self._begin_stop(Verdict("cancelled", "interrupted"))
        elif self._verdict is None and (guard := self._guard()) is not None:
            self.view.note(f"stopping: {guard.reason}")
            self._begin_stop(guard)
            self._send("is being stopped", guard.reason or "")
        if self._stopping_since is not None:
            self._drive_stop()

    def _stop_or_leave(self) -> None:
        """Workers of other machines go on without us: a first Ctrl-C leaves them, a second one soon after it stops them."""
        if self.signal_number == signal.SIGINT:
            self.view.note(f"leaving the fleet running (Ctrl-C again within {CHANGE_MIND_S:.0f} s stops it)")
            end = time.monotonic() + CHANGE_MIND_S
            while self._interrupts < 2 and time.monotonic() < end:
                time.sleep(0.05)
        if self._interrupts < 2:
            raise Left("interrupted")
        self.view.note("stopping: workers hand over what they have (again to end them at once)")
        self._begin_stop(Verdict("cancelled", "interrupted"))

    @property
    def _at_once(self) -> bool:
        """Whether who waits has lost patience with workers that hand over."""
        return self._interrupts > (2 if self.pool.stays else 1)

    def _leave(self, reason: str) -> Verdict:
        """Go: what was heard is stored if it can be, and whoever attaches need not wait for us to be forgotten."""
        try:
            self._events.delete(self.stream.store())
            control = self.control.model_copy(update={"controller": "", "beat": now()})
            self.storage.replace(layout.control(self.fleet_id), control.to_bytes(), self.control_etag)
        except (ServiceError, Changed, Fenced):
            pass  # what is not stored comes again from the queue
        self.view.end()
        self.stream.close()
        return Verdict("left", reason)

    def _send(self, what: str, text: str) -> None:
        """Tell whoever waits elsewhere."""
        if self.tell is not None:
            self.tell(f"fleet {self.fleet_id} {what}", text)

    def _guard(self) -> Verdict | None:
        """Ask the guards, and write what they have to tell."""
        at, waiting_for = time.monotonic(), self._waiting_for() or self.watch.waits or "a free worker"
        told = self.watch.marks(self.control)
        if (stalled := self.watch.stalled(self.control, at, waiting_for)) is not None:
            told.append(stalled)
            self._send("has stalled", guards.sentence(stalled))
        self._tell(told)
        return self.watch.verdict(self.control, now(), at, waiting_for)

    def _tell(self, events: list[Event]) -> None:
        """Write what a guard has to tell, and show it."""
        self.stream.append(events)
        for event in events:
            self.view.note(guards.sentence(event))

    def _begin_stop(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._stopping_since = time.monotonic()
        self._due.clear()
        self._beat(state="stopping")

    def _drive_stop(self) -> None:
        """Wait until the workers have handed over, then call what is open cancelled."""
        assert self._stopping_since is not None
        assert self._verdict is not None
        if self._at_once and not self._stopped_at_once:
            self._stopped_at_once = True
            with self._surviving("the workers"):
                self.pool.stop(now=True)
        waited = time.monotonic() - self._stopping_since
        handing_over = self.roster.any_online if self.pool.stays else self.pool.alive
        if handing_over and not self._at_once and waited < STOP_PATIENCE_S + FAR_S * self.pool.stays:
            return
        self._store(at_once=True)
        with self._surviving("the event queue"):
            if self._events.counts().total and waited < STOP_PATIENCE_S + EVENTS_RETURN_S:
                return  # what an earlier controller had received and not stored comes back first
        with self._surviving("storage"):
            for job in self.ledger.open_jobs:
                self._end_job(job, "cancelled", Category.CANCELLED, self._verdict.reason or "cancelled")

    def _finish(self) -> Verdict:
        """Summary, last segment, workers, lane: in an order in which being killed loses nothing."""
        every = self.ledger.count("completed") == len(self.ledger.jobs)
        if every and self._verdict is not None and self._verdict.ending == "stopped":
            self._verdict = None  # all had completed before it could be stopped: abandoned fleets end so
        verdict = self._verdict or Verdict("complete" if every else "failures")
        samples, cost = self.ledger.samples, {"tokens": self.ledger.token_cost, **self._machine_cost()}
        self.stream.append(
            [
                {
                    "type": "fleet_summary",
                    "outcome": verdict.ending,
                    "expected": len(self.ledger.jobs),
                    "completed": self.ledger.count("completed"),
                    "failed": self.ledger.count("failed"),
                    "cancelled": self.ledger.count("cancelled"),
                    "samples": samples.model_dump(),
                    "cost_usd": cost,
                    "elapsed_s": round(time.monotonic() - self.started, 3),
                    "reason": verdict.reason,
                    "round": self.ledger.round,
                }
            ]
        )
        self.view.show(self.ledger, self.pool.alive, force=True)
        self.view.end()
        self._insist("storage", lambda: self._events.delete(self.stream.store()))
        end = time.monotonic() + INSIST_S
        self._beat(state="ended")
        while self.control.state != "ended" and time.monotonic() < end:  # workers and queues wait for this word
            self._beat(state="ended")
        with self._surviving("the workers"):  # what does not end here sees the end in control.json, or is reaped
            self.pool.stop(now=self._at_once)
        self._empty_lane()
        for _ in range(RELEASE_TRIES):  # past the deadline it is anybody's
            with self._surviving("the lane"):
                lanes.release(self.storage, self.lane)
                break
        self.stream.close()
        self._send(f"has ended: {verdict.ending}", self._in_short(verdict))
        return verdict

    def _machine_cost(self) -> dict[str, Any]:
        """What the machines have cost, with what to know of the figure; None where it is not known."""
        with self._surviving("the prices"):
            usd, about = self.pool.cost()
            return {"machines": usd if usd is None else round(usd, 6)} | ({"note": about} if about else {})
        return {"machines": None}

    def _in_short(self, verdict: Verdict) -> str:
        """The end in one sentence."""
        samples = self.ledger.samples
        counts = f"{self.ledger.count('completed')} of {len(self.ledger.jobs)} jobs and {samples.completed} of {samples.total}"
        return f"{counts} samples completed" + (f"; {verdict.reason}" if verdict.reason else "")

    def close(self, reason: str) -> Verdict:
        """End a fleet that nobody drives any more: take what its workers have said, cancel what is open, write the summary."""
        self.roster.workers.clear()  # those of its stream are gone; who still lives says so
        self._begin_stop(Verdict("stopped", reason))
        return self.run()

    def go_on_stopping(self) -> None:
        """Take over a fleet that was being stopped when its controller went."""
        self._begin_stop(Verdict("stopped", "stopped by `ct fleet stop`"))

    def _empty_lane(self) -> None:
        """Leave nothing of this fleet in the queues of a lane that others will use; an embedded lane goes anyway."""
        if self.lane.endpoint is not None:
            return
        end = time.monotonic() + DRAIN_S
        for queue in (self._jobs, self._events, self._dead):
            with self._surviving(f"the queue {queue.name}"):
                while (received := queue.receive(10, 1)) and time.monotonic() < end:
                    queue.delete([message.receipt for message in received])

    def _beat(self, state: Literal["running", "draining", "stopping", "ended"] | None = None) -> None:
        """Write control.json; when someone else has written it (`stop`), obey what it says."""
        said = {
            "beat": now(),
            "state": state or (self.control.state if self._stopping_since is None else "stopping"),
            "rate_limited": self.watch.rate_limited,
            "waiting_for": self._waiting_for() or self.watch.waits or None,
        }
        control = self.control.model_copy(update=said)
        with self._surviving("storage"):
            try:
                self.control_etag = self.storage.replace(
                    layout.control(self.fleet_id), control.to_bytes(), self.control_etag
                )
                self.control = control
            except Changed:
                self._obey(state)

    def _obey(self, state: Literal["running", "draining", "stopping", "ended"] | None) -> None:
        stored = self.storage.get(layout.control(self.fleet_id))
        control = Control.from_json(stored.body)
        if control.controller != self.control.controller:
            raise Fenced(
                f"the fleet {self.fleet_id} is driven by {control.controller} now; this controller has stopped"
            )
        self.control, self.control_etag = control, stored.etag
        if state is not None:
            self._beat(state)
        elif self.control.state in ("stopping", "draining") and self._verdict is None:
            self._begin_stop(Verdict("stopped", "stopped by `ct fleet stop`"))

    def _waiting_for(self) -> str | None:
        """One phrase when nothing seems to happen."""
        if self._stopping_since is not None:
            return "stopping"
        if not self.roster.any_online:
            return self.pool.waiting_for or "waiting for the first worker"
        if self.watch.held(self.control):
            left = len(self.watch.canaries(self.control))
            return f"{left} canar{'y' if left == 1 else 'ies'} before all else"
        if self._due and all(
            job.spec.job_id in {due.message.job_id for due in self._due} for job in self.ledger.open_jobs
        ):
            return f"retrying in {max(0, round(min(due.at for due in self._due) - time.monotonic()))} s"
        return self.pool.waiting_for


def _digest_of(job: JobState) -> str:
    return digest_of_keys((key, said.uuid) for key, said in job.said.items())


def _counts_of(job: JobState) -> SampleCounts:
    errored = sum(said.errored for said in job.said.values())
    return SampleCounts(total=job.spec.samples, completed=len(job.said) - errored, errored=errored)


def launch_record(manifest: Manifest, events: Path, root: str, pid: int) -> str:
    """The one line that `--json` and `--detach` print when the fleet has started."""
    record: dict[str, Any] = {
        "type": "launch",
        "fleet_id": manifest.fleet_id,
        "run_id": manifest.fleet_id,
        "pid": pid,
        "root": root,
        "events": str(events),
        "logs": layout.working(manifest.fleet_id),
    }
    return dumps(record)
