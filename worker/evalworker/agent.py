"""The agent: takes jobs from the lane's queue while slots are free, keeps the fleet informed, and ends itself.

Imports boto3 and never Inspect: it must start fast, and survive whatever a job does to its own process. Threads: the main thread waits
for signals and for a reason to leave; one receives; one a slot; one each for posting, visibility, duties, partial logs, left sandboxes.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from evalworker import aws, boot, code, containers, credentials, notice, redact
from evalworker.attempt import Attempt
from evalworker.contract import layout
from evalworker.contract.documents import Control, Lane, Limits, Manifest
from evalworker.contract.failures import Category
from evalworker.contract.messages import FromWorker, Heartbeat, Job, WorkerDraining, WorkerOnline, fit
from evalworker.contract.wire import Unreadable, now
from evalworker.poster import Poster
from evalworker.process import Launcher
from evalworker.processes import adopt_orphans, memory_free
from evalworker.queues import Queue, QueueError, Received
from evalworker.storage import Missing, StorageError, open_storage
from evalworker.visibility import VisibilityKeeper
from evalworker.worker import Config, Log, Worker

LEAVE_WITHIN_S = 50.0
"""From a spot notice or SIGTERM to the end: jobs flush, partial logs go up, messages go back."""

AFTER_KILL_S = 5.0
"""For the attempts of killed jobs to give their messages back."""

AFTER_END_S = 2.0
"""For what is still to be posted when the fleet has ended, or when nothing of `LEAVE_WITHIN_S` is left."""

PARTIAL_LOOK_S = 2.0
"""Between two looks whether a job's partial log has grown."""

MOST_HUNG = 20
"""Hung samples that a heartbeat names."""

LOG_S = 300.0
"""Between two uploads of the worker's log."""

RECEIVE_WAIT_S = 10
"""One long poll."""

ELSEWHERE_S = 3
"""How long a job that failed on this machine is left to others, at each of the first `ELSEWHERE_TRIES` times that it comes."""

ELSEWHERE_TRIES = 2

SANDBOXES_S = 2.0
"""Between two looks for what ended jobs have left of sandboxes, and for an engine that may be away."""

ENGINE_AWAY_S = 180.0
"""How long a worker waits for a Docker engine that a job has missed, before it makes room for another one."""

EXPIRED_S = 60.0
"""How long a worker may be without usable credentials: it can keep nothing of what it does."""


class Agent:
    """One worker's life. `run` is the main thread's."""

    def __init__(self, config: Config) -> None:
        self.config = config
        config.work.mkdir(parents=True, exist_ok=True)
        (config.work / "agent.pid").write_text(str(os.getpid()))
        self._log = Log(config.work / "worker.log")
        storage = open_storage(config.root)
        lane = Lane.from_json(storage.get(layout.lane(config.lane)).body)
        control = storage.get(layout.control(config.fleet_id))
        self._control_etag = control.etag
        self.manifest = Manifest.from_json(storage.get(layout.manifest(config.fleet_id)).body)
        limits = Control.from_json(control.body).limits
        sqs = aws.sqs(lane)
        jobs = Queue(sqs, lane.jobs)
        path = code.import_path(self.manifest, code.root_of(storage, self.manifest, config.work))
        environment = self.manifest.environment | credentials.of_run(self.manifest)
        redact.learn_environment(self.manifest.secrets)
        redact.learn(redact.secrets_of(environment, self.manifest.secrets))
        self.slots = config.slots or limits.slots or os.cpu_count() or 1
        self.worker = Worker(
            config=config,
            storage=storage,
            jobs=jobs,
            poster=Poster(Queue(sqs, lane.events), config.work / "spool.jsonl", self._log.line),
            keeper=VisibilityKeeper(jobs, limits.visibility_s, self._log.line),
            launcher=Launcher(
                config.work,
                path,
                sorted({job.task for job in self.manifest.jobs}),
                environment,
                self.manifest.secrets,
            ),
            control=Control.from_json(control.body),
            path=path,
            environment=environment,
            log_file=self._log,
        )
        self._specs = {spec.job_id: spec for spec in self.manifest.jobs}
        self._running: dict[str, Attempt] = {}
        self._changed = threading.Condition()
        self._leaving: str | None = None
        self._in_flight: int | None = None
        self._refused = 0
        self._disk_warned = False
        self._refused_since: float | None = None
        self._idle_since = time.monotonic()
        self._engine_missed: float | None = None

    @property
    def limits(self) -> Limits:
        """The fleet's limits as last read."""
        return self.worker.control.limits

    # Life

    def run(self) -> None:
        """From the first line in the log to the last. Returns when nothing of this worker is left running."""
        signal.signal(signal.SIGTERM, lambda *_: self.leave("sigterm"))
        signal.signal(signal.SIGINT, lambda *_: self.leave("sigint"))
        adopt_orphans()
        self.worker.launcher.warm()
        containers.inherit(self.worker.work)
        self._post(self._online())
        (self.config.work / "online").touch()  # boot.sh asks: has this worker ever come up?
        if self.config.imds or self.config.lifecycle == "spot":
            notice.watch(self.leave, self._log.line)
        self._compare_versions()
        for target in (self._receive, self._duties, self._partials, self._sandboxes):
            threading.Thread(target=self._guarded, args=(target,), daemon=True, name=target.__name__).start()
        while self._leaving is None:
            time.sleep(0.2)  # signals are handled here; waiting on a lock would hold them up
        self._end(self._leaving)

    def _guarded(self, target: Callable[[], None]) -> None:
        """A thread of this worker: without one of them it would be of no use and cost money, so it leaves when one breaks."""
        try:
            target()
        except Exception:
            self.worker.log_exception(target.__name__)
            self.leave("failed")

    def leave(self, reason: str) -> None:
        """Begin to end, for the first reason given. Safe in a signal handler."""
        self._leaving = self._leaving or reason

    def _end(self, reason: str) -> None:
        """Interrupt what runs, hand it over, say goodbye."""
        self.worker.log(f"leaving: {reason}")
        with self._changed:
            running = list(self._running.values())
        why = Category.CANCELLED if reason == "stopped" else Category.SPOT
        for attempt in running:
            attempt.interrupt(why)
            if self.worker.control.at_once and attempt.process is not None:
                attempt.process.kill()
        with contextlib.suppress(OSError):  # of the figures in it: to go matters more than to say so
            self._post(self._heartbeat(reason), urgent=True)
        end = time.monotonic() + LEAVE_WITHIN_S
        with self._changed:
            self._changed.wait_for(lambda: not self._running, LEAVE_WITHIN_S)
            left = list(self._running.values())
        for attempt in left:
            if attempt.process is not None:
                attempt.process.kill()
            attempt.save_partial()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, AFTER_KILL_S)
        self.worker.launcher.close()
        last = threading.Thread(target=containers.clean_up_after, args=(self.worker.work, self._log.line), daemon=True)
        last.start()
        last.join(max(2.0, end - time.monotonic()))  # an engine may hang
        self.worker.keeper.stop()
        self._read_control()
        over = self.worker.control.state == "ended"
        if not over:
            identity = {"fleet_id": self.config.fleet_id, "instance_id": self.config.instance_id, "ts": now()}
            self._post(WorkerDraining(**identity, reason=reason, handed_over=self.worker.handed_over), urgent=True)
        # after the fleet's end nobody reads what is posted, and an embedded queue may have gone already
        self.worker.poster.close(AFTER_END_S if over else max(AFTER_END_S, end - time.monotonic()))
        self._upload_log()

    def _upload_log(self) -> None:
        with contextlib.suppress(StorageError):
            self.worker.storage.upload(self._log.path, layout.worker_log(self.config.fleet_id, self.config.instance_id))

    # Taking jobs

    def _receive(self) -> None:
        """Take a job whenever a slot is free."""
        while self._leaving is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._leaving or (len(self._running) < self.slots and self._may_take()), 1.0
                )
                if self._leaving or len(self._running) >= self.slots or not self._may_take():
                    continue
            try:
                for received in self.worker.jobs.receive(1, RECEIVE_WAIT_S):
                    self._begin(received)
            except QueueError as error:
                self.worker.log(f"receiving: {error}")
                time.sleep(2.0)

    def _may_take(self) -> bool:
        control = self.worker.control
        if self._engine_missed is not None or control.state != "running" or now() >= control.deadline:
            return False
        silent = now() - control.beat > timedelta(seconds=control.limits.controller_silent_s)
        return not (control.budgeted and silent) and self._has_disk()

    def _has_disk(self) -> bool:
        """Whether a job's log would have room; without, it is said once."""
        free = shutil.disk_usage(self.config.work).free
        if free >= self.limits.disk_free_min:
            return True
        if not self._disk_warned:
            self._disk_warned = True
            self.worker.warn(
                f"{self.config.instance_id} takes no more jobs: {free / 1e9:.2f} GB are free on its disk, "
                f"less than {self.limits.disk_free_min / 1e9:.2f} GB"
            )
        return False

    def _begin(self, received: Received) -> None:
        """Start an attempt for a message, or say why it is none of ours."""
        try:
            message = Job.from_json(received.body)
        except Unreadable as error:
            # Kept for whoever looks into it: redelivery ends in the dead letters, which the controller reports.
            self.worker.warn(f"a job message could not be read ({error}): {error.text[:200]}")
            return
        if message.fleet_id == self.config.fleet_id and message.round > self.worker.control.round:
            self._read_control()  # a new round may have brought new jobs
        if message.fleet_id != self.config.fleet_id and not self._may_judge(received):
            return
        spec = self._specs.get(message.job_id)
        if message.fleet_id != self.config.fleet_id or message.round < self.worker.control.round or spec is None:
            self.worker.log(
                f"deleted a message of fleet {message.fleet_id}, round {message.round}, job {message.job_id}"
            )
            with contextlib.suppress(QueueError):
                self.worker.jobs.delete([received.receipt])
            return
        if for_others(message, self.config.instance_id, self.manifest.backend, received.receive_count):
            with contextlib.suppress(QueueError):
                self.worker.jobs.extend([received.receipt], ELSEWHERE_S)
            return
        with self._changed:
            twin = next((attempt for attempt in self._running.values() if attempt.message == message), None)
        if twin is not None and twin.adopt(received):  # it had become visible again, after a suspend for example
            self.worker.log(f"job {message.job_id}: the message of a running attempt came again; it goes on")
            return
        attempt = Attempt(self.worker, received, message, spec, self.manifest)
        with self._changed:
            refused = self._leaving is not None or not self._may_take()
            if not refused:
                self._running[received.receipt] = attempt
                self._share_out()
                self._jobs_changed()
        if refused:  # it came with the last long poll: another worker shall have it at once
            with contextlib.suppress(QueueError):
                self.worker.jobs.extend([received.receipt], 0)
            return
        threading.Thread(
            target=self._slot, args=(received.receipt, attempt), daemon=True, name=f"slot-{spec.job_id}"
        ).start()

    def _may_judge(self, foreign: Received) -> bool:
        """Whether the lane is still this fleet's, so that another's message is a left-over.

        If it is not, the message is that of the lane's new fleet: it goes back, and this worker goes.
        """
        self._read_control()
        try:
            lane = Lane.from_json(self.worker.storage.get(layout.lane(self.config.lane)).body)
        except Missing:
            lane = None
        except (StorageError, Unreadable) as error:
            self.worker.log(f"reading the lane: {error}")
            return False  # the message comes again by itself
        ours = lane is not None and lane.fleet_id in (None, self.config.fleet_id)
        if ours and self.worker.control.state != "ended":
            return True
        self.leave("over")
        with contextlib.suppress(QueueError):
            self.worker.jobs.extend([foreign.receipt], 0)
        return False

    def _slot(self, receipt: str, attempt: Attempt) -> None:
        try:
            attempt.run()
        finally:
            with self._changed:
                del self._running[receipt]
                self._refused += attempt.heard.look.rate_limited
                if attempt.category is Category.SANDBOX and self._engine_missed is None:
                    self._engine_missed = time.monotonic()
                self._idle_since = time.monotonic()
                if attempt.has_run:  # what was only published, or refused by storage, says nothing of the load
                    self._adapt(attempt.category)
                self._share_out()
                self._jobs_changed()
                self._changed.notify_all()

    def _share_out(self) -> None:
        """Divide the samples in flight among the running jobs: a job alone gets all of them, none gets less than one.

        A merge runs none, so it takes nothing from its neighbours.
        """
        running = [attempt for attempt in self._running.values() if not attempt.spec.merges]
        total = in_flight_of(self._in_flight, self.limits.concurrency_per_worker)
        connections = self._connections()
        for index, attempt in enumerate(running):
            share = max(1, share_of(total, len(running), index))
            attempt.set_share(share, connections and max(1, share_of(connections, len(running), index)))

    def _connections(self) -> int | None:
        """This worker's part of the fleet's model connections, one while it has not been told; None without `--fleet-connections`."""
        if self.limits.fleet_connections is None:
            return None
        return self.worker.control.connections.get(self.config.instance_id, 1)

    def _jobs_changed(self) -> None:
        """Tell at once what runs here, where shares depend on it."""
        if self.limits.fleet_connections is not None:
            self.worker.news.set()

    def _adapt(self, ended_with: Category | None) -> None:
        """Fewer samples in flight after a rate limit, one more after each attempt that completed."""
        most = self.limits.concurrency_per_worker
        before = in_flight_of(self._in_flight, most)
        self._in_flight = adapted(before, most, ended_with)
        if self._in_flight != before:
            self.worker.log(f"samples in flight: {self._in_flight} instead of {before} ({ended_with or 'completed'})")

    # Duties

    def _duties(self) -> None:
        """Read control, send heartbeats, notice that there is nothing left to do."""
        last_beat = 0.0
        while self._leaving is None:
            self._read_control()
            control = self.worker.control
            if control.state == "ended":
                self.leave("over")
            elif control.state == "stopping":
                self.leave("stopped")
            elif now() >= control.deadline:
                self.leave("deadline")
            elif not self._running:
                if control.state == "draining":
                    self.leave("drained")
                elif time.monotonic() - self._idle_since > self.limits.idle_s:
                    self.leave("idle")
            if self.worker.news.is_set() or time.monotonic() - last_beat >= self.limits.heartbeat_s:
                self.worker.news.clear()
                last_beat = time.monotonic()
                self._post(self._heartbeat())
            self.worker.news.wait(self.limits.control_s)

    def _read_control(self) -> None:
        try:
            found = self.worker.storage.get_if_changed(layout.control(self.config.fleet_id), self._control_etag)
            self._refused_since = None
            if found is not None:
                control = Control.from_json(found.body)
                if control.round > self.worker.control.round:
                    before = self.manifest
                    self._read_manifest()
                    if built_from(before) != built_from(self.manifest):
                        self.leave("outdated")
                self._control_etag = found.etag
                self.worker.control = control
                with self._changed:
                    if control.limits.fleet_connections is not None:
                        self._share_out()
                    self._changed.notify_all()
        except (StorageError, Unreadable) as error:
            self.worker.log(f"reading control: {error}")
            if isinstance(error, StorageError) and error.credentials:
                if self._refused_since is None:
                    self._refused_since = time.monotonic()
                elif time.monotonic() - self._refused_since > EXPIRED_S:
                    self.leave("credentials")

    def _read_manifest(self) -> None:
        self.manifest = Manifest.from_json(self.worker.storage.get(layout.manifest(self.config.fleet_id)).body)
        self._specs = {spec.job_id: spec for spec in self.manifest.jobs}

    def _partials(self) -> None:
        """Keep the partial logs of what runs, and this worker's own log: a machine that is lost shall not take it along."""
        uploaded = time.monotonic()
        while self._leaving is None:
            if time.monotonic() - uploaded >= LOG_S:
                uploaded = time.monotonic()
                self._upload_log()
            time.sleep(min(PARTIAL_LOOK_S, self.limits.partial_s))
            with self._changed:
                running = list(self._running.values())
            for attempt in running:
                if attempt.partial_due():
                    attempt.save_partial()

    def _sandboxes(self) -> None:
        """Remove what ended attempts have left; after a sandbox's failure, wait for the engine before the next job is taken."""
        said: set[str] = set()

        def once(text: str) -> None:
            if text not in said:
                said.add(text)
                self.worker.log(text)

        while self._leaving is None:
            time.sleep(SANDBOXES_S)
            containers.clean_up_after(self.worker.work, once)
            if (missed := self._engine_missed) is None:
                continue
            if containers.engine_answers():
                self._engine_missed = None
            elif time.monotonic() - missed > ENGINE_AWAY_S:
                self.leave("docker")
            else:
                once("the Docker engine does not answer: no job is taken until it does")

    # Messages

    def _post(self, message: FromWorker, *, urgent: bool = False) -> None:
        self.worker.poster.post(fit(message), urgent=urgent)

    def _online(self) -> WorkerOnline:
        return WorkerOnline(
            fleet_id=self.config.fleet_id,
            instance_id=self.config.instance_id,
            ts=now(),
            bootstrap_s=round(max(0.0, time.time() - self.config.launched), 2),
            instance_type=self.config.instance_type,
            lifecycle=self.config.lifecycle,
            slots=self.slots,
            versions=boot.versions(),
        )

    def _compare_versions(self) -> None:
        """Say it when the samples will run under another Inspect than the run was planned with."""
        planned, here = self.manifest.versions.get("inspect-ai"), boot.versions().get("inspect-ai")
        if planned != here and planned is not None and self.manifest.lock is None:
            self.worker.warn(f"{self.config.instance_id} runs Inspect {here}, the run was planned with {planned}")

    def _heartbeat(self, leaving: str | None = None) -> Heartbeat:
        with self._changed:
            running = list(self._running.values())
            limited = sum(attempt.heard.look.rate_limited for attempt in running)
            refused = self._refused + limited
        hung, moved = self.worker.hung, self.worker.moved.is_set()
        self.worker.moved.clear()
        return Heartbeat(
            fleet_id=self.config.fleet_id,
            instance_id=self.config.instance_id,
            ts=now(),
            running=[attempt.spec.job_id for attempt in running],
            load=round(os.getloadavg()[0], 2),
            disk_free=shutil.disk_usage(self.config.work).free,
            memory_free=memory_free(),
            rate_limited=limited,
            refused=refused,
            waits={attempt.spec.job_id: attempt.waiting_for for attempt in running},
            moved=moved,
            hung=[hung.popleft() for _ in range(min(MOST_HUNG, len(hung)))],
            leaving=leaving,
        )


def for_others(message: Job, instance_id: str, backend: str, receive_count: int) -> bool:
    """Whether another machine should take this job, because its last attempt failed on this one; if none does, this one will."""
    return backend != "local" and message.avoid == instance_id and receive_count <= ELSEWHERE_TRIES


def built_from(manifest: Manifest) -> tuple[object, ...]:
    """What a worker is made of: one that stays for a round in which this differs would run old code."""
    return (
        manifest.code,
        manifest.code_root,
        manifest.python_path,
        manifest.worker,
        manifest.lock,
        manifest.requirements,
        manifest.environment,
        manifest.secrets,
    )


def in_flight_of(reduced: int | None, most: int) -> int:
    """Samples in flight on this worker: `most`, unless a rate limit has reduced them."""
    return most if reduced is None else min(reduced, most)


def adapted(in_flight: int, most: int, ended_with: Category | None) -> int:
    """Samples in flight after an attempt: half as many after a rate limit, one more after a completed one."""
    if ended_with is Category.RATE_LIMIT:
        return max(1, in_flight // 2)
    return min(most, in_flight + 1) if ended_with is None else in_flight


def share_of(total: int, jobs: int, index: int) -> int:
    """The share of job `index` when `total` samples in flight are divided among `jobs`: the first ones take the remainder."""
    return total // jobs + (1 if index < total % jobs else 0)
