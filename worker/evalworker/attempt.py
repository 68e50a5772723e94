"""One attempt of one job, from the received message to its deletion: the thread that owns a slot.

It prepares the log directory, starts the job process, passes on what the job says, ends it when it must, judges the end, records and
publishes it, and only then deletes the message. Killed anywhere, the redelivered message finds what was recorded and goes on there.
"""

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from evalworker import containers, job, partials, publish, redact
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec, Manifest, with_ids
from evalworker.contract.failures import Category, retry_delay
from evalworker.contract.messages import AttemptDone, Job, fit
from evalworker.contract.wire import now
from evalworker.process import JobProcess, LauncherClosed
from evalworker.processes import oom_kills
from evalworker.queues import QueueError, Received
from evalworker.storage import StorageError
from evalworker.verdict import ProcessEnd, category_of, summary_of
from evalworker.worker import Worker

OUTPUT_LIMIT = 256 * 1024
"""Bytes of a job's output that go to the worker log; the rest is counted."""

CONFIRM_S = 60.0
"""How long the end of an attempt waits for SQS to take its `attempt_done`; after that redelivery finds the recorded end."""

STORE_TRIES = 7
"""Tries to record an attempt's end, with pauses of 1, 2, 4 … 30 s, a minute in all; clients retry single calls below this."""

REFUSED_TRIES = 3
"""Tries when storage says no (403 and its like), which seldom changes within a minute."""

HAND_OVER = frozenset({Category.SPOT, Category.CANCELLED})
"""Why a job is interrupted without having ended: its partial log is kept and its message given back."""


@dataclass
class _Heard:
    """What the job process has said so far."""

    end: job.JobEnd | None = None
    printed: int = 0
    look: job.JobLook = field(default_factory=job.JobLook)
    hung: set[tuple[str, int, bool]] = field(default_factory=set)


class Attempt:
    """See the module. `run` is the slot's thread; the other methods are called from the agent's threads."""

    def __init__(self, worker: Worker, received: Received, message: Job, spec: JobSpec, manifest: Manifest) -> None:
        self.worker = worker
        self.received = received
        self.message = message
        self.spec = spec
        self.manifest = manifest
        self.process: JobProcess | None = None
        self.heard = _Heard()
        self.share = 1
        self.connections: int | None = None
        self.category: Category | None = None
        self.has_run = False
        self._ended_itself = False
        self._killed_for: Category | None = None
        self._tail: deque[bytes] = deque(maxlen=20)
        self._output = redact.stream()
        self._dir = worker.work / f"{spec.job_id}-{message.round}-{message.attempt}-{time.monotonic_ns()}"
        self._partial = partials.PartialKeeper(worker.storage, message.fleet_id, spec.job_id, self._dir / "logs")
        self._saving = threading.Lock()
        self._receiving = threading.Lock()
        self._over = False
        self._saved_at = time.monotonic()

    # From other threads

    def set_share(self, share: int, connections: int | None = None) -> None:
        """Change how many samples of this job may run at once (a canary runs one), and how many model connections it may have.

        Without a number of connections Inspect's own limits hold.
        """
        if self.message.canary:
            share = 1
        if (share, connections) != (self.share, self.connections):
            self.share, self.connections = share, connections
            if self.process is not None:
                self.process.tell(share=share, connections=connections)

    def adopt(self, received: Received) -> bool:
        """Go on under a new receipt when the queue has given this worker the same message again; False when it is over here."""
        with self._receiving:
            if not self._over:
                before, self.received = self.received, received
                self.worker.keeper.hold(received.receipt, lambda: self.interrupt(Category.SPOT))
                self.worker.keeper.release(before.receipt)
            return not self._over

    def interrupt(self, why: Category) -> None:
        """End the job as after Ctrl-C: `spot` and `cancelled` hand it over, `timeout` ends the attempt."""
        if self._killed_for is None:
            self._killed_for = why
        if self.process is not None:
            self.process.stop()

    @property
    def waiting_for(self) -> str:
        """What this attempt is in, as a phrase for people."""
        if self.process is None:
            return f"{self.spec.name} with {self.spec.model}: its process to start"
        return f"{self.spec.name} with {self.spec.model}: {self.heard.look.wait or 'its task to load, or its log to be written'}"

    def save_partial(self) -> None:
        """Keep what there is of the log; a failure is logged, the next round tries again."""
        with self._saving:
            try:
                self._partial.save()
            except StorageError as error:
                self.worker.log(f"job {self.spec.job_id}: the partial log was not kept: {error}")

    def partial_due(self) -> bool:
        """Whether there is something new to keep: at once when Inspect has copied its buffer, else every interval."""
        every_s = self.worker.control.limits.partial_s
        due = self._partial.synced or time.monotonic() - self._saved_at >= every_s
        if due:
            self._saved_at = time.monotonic()
        return due

    # The slot's thread

    def run(self) -> None:
        """The whole attempt. Never raises: what goes wrong here is logged, and the queue gives the job to another worker."""
        self.worker.keeper.hold(self.received.receipt, lambda: self.interrupt(Category.SPOT))
        try:
            if not self._already_ended():
                self._try_once()
        except StorageError as error:
            self.worker.log(f"job {self.spec.job_id}: {error}")
            if error.credentials:  # this worker's have expired: no fault of the job, and another worker has others
                self._give_back(delay_s=15)
            else:
                self._fail_unrecorded(error)
        except LauncherClosed:
            self._hand_over()
        except Exception as error:  # a bug of ours must not take the worker's other jobs with it
            self.worker.log_exception(f"job {self.spec.job_id}")
            self.worker.warn(f"{self.spec.name}: the worker failed: {type(error).__name__}: {error}", self.spec.job_id)
            self._give_back(delay_s=15)
        finally:
            with self._receiving:
                self._over = True
                self.worker.keeper.release(self.received.receipt)
            self._tidy()

    def _tidy(self) -> None:
        """Remove the attempt's sandboxes and its directory; sandboxes that are not surely gone are looked at again."""
        gone = containers.clean_up(self._dir, self.worker.log)
        if not gone or not self._ended_itself:
            try:
                containers.set_aside(self._dir)
            except OSError as error:  # a full disk: the directory stays, and the next worker in it sees to it
                self.worker.log(f"job {self.spec.job_id}: its sandboxes could not be noted: {error}")
                return
        shutil.rmtree(self._dir, ignore_errors=True)

    def _fail_unrecorded(self, error: StorageError) -> None:
        """Storage has refused this attempt for good: its end cannot be recorded, so it is only told.

        Where the end was recorded and what follows was refused, or its answer lost, the controller finds it and finishes the rest.
        Another attempt may find another answer (a policy that is mended, a clock that is set); the last one ends the job, or its
        message would go round until it is a dead letter.
        """
        self._post_and_delete(self._attempt_done(ProcessEnd(None, None), error.category, 0.0, str(error)))

    def _already_ended(self) -> bool:
        """Whether the job, or this attempt, ended before: then what is recorded is published, posted again and deleted."""
        message = self.message
        record = publish.find_done(self.worker.storage, message.fleet_id, message.job_id, message.round)
        if record is not None:
            publish.publish(self.worker.storage, record)
            self._keep_what_was_recorded(record.attempt_done)
            if record.attempt_done.status == "completed":  # whoever was to do it may have been killed
                publish.clear_partial(self.worker.storage, message.fleet_id, message.job_id)
            self._post_and_delete(record.attempt_done)
            return True
        end = publish.find_end(self.worker.storage, message.fleet_id, message.job_id, message.attempt)
        if end is None or end.round != message.round:
            return False
        self._post_and_delete(publish.conclude(self.worker.storage, end))
        return True

    def _keep_what_was_recorded(self, stands: AttemptDone) -> None:
        """A worker may have been killed after it had recorded this attempt's end, and before it could keep what another end left out."""
        with contextlib.suppress(ValueError):  # an end that cannot be read
            end = publish.find_end(self.worker.storage, stands.fleet_id, stands.job_id, self.message.attempt)
            if end is not None:
                publish.keep_unrecorded(self.worker.storage, end, stands)

    def _try_once(self) -> None:
        log_dir = self._dir / "logs"
        log_dir.mkdir(parents=True)
        self._fetch()
        started = time.monotonic()
        kills = oom_kills()
        self.process = process = self.worker.launcher.start(self._order(log_dir))
        process.tell(share=self.share, connections=self.connections)
        if self._killed_for is not None:
            process.stop()
        try:
            try:
                self._follow(process)
            finally:  # whatever went wrong here, no job runs on unseen
                status = self.worker.launcher.finish(process)
                self._ended_itself = status is not None and status >= 0
            self._drain(process)
            self._read_end_file()
        finally:
            process.close()
        if status == job.EXIT_UNSAFE_FORK:
            self.worker.log(
                "the run's code starts threads when it is imported: its jobs are started without it in memory"
            )
            self._try_again()
            return
        # A job that had finished before the interruption reached it has finished.
        finished = self.heard.end is not None and self.heard.end.log_status == "success"
        killed_for = None if finished else self._killed_for
        output = b"".join(self._tail).decode("utf-8", "replace")
        ending = ProcessEnd(self.heard.end, status, oom_kills() > kills, killed_for, output)
        self.category = category = category_of(ending)
        self.has_run = True
        if category is not None and category == killed_for and category in HAND_OVER:
            self._hand_over()
        else:
            self._conclude(ending, category, time.monotonic() - started)

    def _fetch(self) -> None:
        """Bring what the job starts from: an earlier attempt's log, or the logs that it merges."""
        if self.spec.merges:
            shards = self._dir / job.SHARDS
            partials.fetch_shards(self.worker.storage, self.message.fleet_id, self.spec.merges, shards)
        else:
            self._partial.fetch(self.spec, self._published_name(), self._warn)

    def _warn(self, text: str) -> None:
        self.worker.log(f"job {self.spec.job_id}: {text}")
        self.worker.warn(text, self.spec.job_id)

    def _try_again(self) -> None:
        self.heard = _Heard()
        self._tidy()
        self._try_once()

    def _earlier_ends(self) -> Iterator[AttemptDone]:
        """How this job ended in earlier rounds, the last one first."""
        for round_ in range(self.message.round - 1, 0, -1):
            record = publish.find_done(self.worker.storage, self.message.fleet_id, self.spec.job_id, round_)
            if record is not None:
                yield record.attempt_done

    def _published_name(self) -> str | None:
        """The name of the log that this job published in the last round in which it left one."""
        return next((end.log_name for end in self._earlier_ends() if end.log_name), None)

    def _reopened(self) -> bool:
        """Whether this is a shard that had completed before its merge found too many errors."""
        return self.spec.shard is not None and any(end.status == "completed" for end in self._earlier_ends())

    def _order(self, log_dir: Path) -> job.Order:
        return job.Order(
            fleet_id=self.message.fleet_id,
            round=self.message.round,
            spec=with_ids(self.spec, self.manifest.jobs),
            attempt=self.message.attempt,
            instance_id=self.worker.config.instance_id,
            arguments=self.manifest.arguments,
            model=self.manifest.models[self.spec.model_index],
            path=self.worker.path,
            log_dir=str(log_dir),
            share=self.share,
            connections=self.connections,
            canary=self.message.canary,
            reopened=self._reopened(),
            hung_after_s=self.worker.control.limits.hung_after_s,
            on_hung=self.worker.control.limits.on_hung,
            environment=self.worker.environment,
            secrets=tuple(self.manifest.secrets),
        )

    def _follow(self, process: JobProcess) -> None:
        """Pass on what the job says until its process is gone. What it took to start one is not of the job's time."""
        timeout = self.worker.control.limits.job_timeout_s
        started = time.monotonic()
        open_: list[Any] = [process.pipe, process.output]
        while True:
            ready = wait([*open_, process.sentinel], timeout=1.0)
            for source in list(open_):
                if source in ready and not self._take(process, source):
                    open_.remove(source)
            if process.sentinel in ready:
                return
            if timeout is not None and time.monotonic() - started > timeout:
                self.interrupt(Category.TIMEOUT)
            if process.overdue:
                process.kill()

    def _take(self, process: JobProcess, source: Any) -> bool:
        """Take one message or a piece of output; whether the source is still open."""
        if source is process.output:
            return self._take_output(process)
        try:
            body = source.recv_bytes()
        except (EOFError, OSError):
            return False
        kind, rest = body[:1], body[1:]
        if kind == job.SAMPLE:
            self.worker.poster.post(rest.decode("ascii"))
        elif kind == job.END:
            self.heard.end = job.JobEnd.model_validate_json(rest)
        elif kind == job.LOOK:
            self._looked(job.JobLook.model_validate_json(rest))
        return True

    def _looked(self, look: job.JobLook) -> None:
        """Keep what the job is in; a sample that is newly hung, or newly ended for it, is told at once."""
        self.heard.look = look
        if look.moved:
            self.worker.moved.set()
        for hung in look.hung:
            identity = (repr(hung.sample_id), hung.epoch, hung.ended)
            if identity not in self.heard.hung:
                self.heard.hung.add(identity)
                self.worker.hung.append(hung)
                self.worker.news.set()

    def _take_output(self, process: JobProcess) -> bool:
        try:
            piece = os.read(process.output.fileno(), 65536)
        except OSError:
            return False
        if not piece:
            return False
        self._print(self._output.feed(piece))
        return True

    def _print(self, piece: bytes) -> None:
        """Keep what the job printed: the beginning in the worker's log, the end for the sentence about its failure."""
        before, self.heard.printed = self.heard.printed, self.heard.printed + len(piece)
        if before < OUTPUT_LIMIT:
            self.worker.log_raw(piece[: OUTPUT_LIMIT - before])
        self._tail.append(piece[-4096:])

    def _drain(self, process: JobProcess) -> None:
        """What was still in the pipes when the process ended."""
        for source in (process.pipe, process.output):
            while wait([source], timeout=0) and self._take(process, source):
                pass
        self._print(self._output.end())
        if self.heard.printed > OUTPUT_LIMIT:
            left_out = self.heard.printed - OUTPUT_LIMIT
            self.worker.log(f"job {self.spec.job_id}: {left_out} more bytes of output were left out")

    def _read_end_file(self) -> None:
        """The last word of a job whose code had closed the pipe."""
        if self.heard.end is None:
            with contextlib.suppress(OSError, ValueError):
                self.heard.end = job.JobEnd.model_validate_json((self._dir / job.END_FILE).read_bytes())

    # The end

    def _hand_over(self) -> None:
        self.save_partial()
        self.worker.handed_over.append(self.spec.job_id)
        self._give_back()

    def _give_back(self, delay_s: int = 0) -> None:
        """Make the message visible to other workers again."""
        self.worker.keeper.release(self.received.receipt)
        with contextlib.suppress(QueueError):
            self.worker.jobs.extend([self.received.receipt], delay_s)

    def _conclude(self, ending: ProcessEnd, category: Category | None, duration_s: float) -> None:
        """Judge, record, publish, post, delete."""
        done = self._attempt_done(ending, category, duration_s)
        log = Path(ending.said.log_path) if ending.said and ending.said.log_path else None
        if done.status == "failed" or not done.ended:
            self.save_partial()
        if ending.said is not None and ending.said.broken:
            self.worker.warn(
                f"{self.spec.name}: {ending.said.broken} samples were reported only after the job", self.spec.job_id
            )
        recorded = self._store(done, log)
        if recorded.status == "completed" and recorded.ended:
            publish.clear_partial(self.worker.storage, done.fleet_id, done.job_id)
        self._post_and_delete(recorded)

    def _store(self, done: AttemptDone, log: Path | None) -> AttemptDone:
        """Record and conclude, with patience: what was computed is paid for. Raises StorageError in the end."""
        for turn in range(STORE_TRIES):
            try:
                recorded = publish.conclude(self.worker.storage, publish.record_end(self.worker.storage, done, log))
                publish.keep_unrecorded(self.worker.storage, done, recorded)
                return recorded
            except StorageError as error:
                if turn == STORE_TRIES - 1 or (turn == REFUSED_TRIES - 1 and not error.retryable):
                    raise
                self.worker.log(f"job {self.spec.job_id}: {error}; trying again")
                time.sleep(min(2.0**turn, 30.0))
        raise AssertionError("unreachable")

    def _attempt_done(
        self, ending: ProcessEnd, category: Category | None, duration_s: float, why: str | None = None
    ) -> AttemptDone:
        said = ending.said or job.JobEnd()
        retry_after = None if category is None else retry_delay(category, self.message.attempt - self.message.base)
        log_key = layout.attempt_log(
            self.message.fleet_id, self.spec.job_id, self.message.attempt, self.worker.config.instance_id
        )
        return AttemptDone(
            fleet_id=self.message.fleet_id,
            instance_id=self.worker.config.instance_id,
            ts=now(),
            round=self.message.round,
            job_id=self.spec.job_id,
            attempt=self.message.attempt,
            status="completed" if category is None else "failed",
            ended=retry_after is None and not (category is None and said.cut_short),
            failure_category=category,
            error_summary=why or (None if category is None else summary_of(ending, category)),
            retry_after_s=retry_after,
            duration_s=round(duration_s, 3),
            samples=said.samples
            if said.samples.total
            else said.samples.model_copy(update={"total": self.spec.samples}),
            kept=said.kept,
            metrics=said.metrics,
            log=log_key if said.log_path else None,
            log_name=Path(said.log_path).name if said.log_path else None,
            digest=said.digest,
            canary=self.message.canary,
            shard=self.spec.shard is not None,
        )

    def _post_and_delete(self, done: AttemptDone) -> None:
        posted = self.worker.poster.post(fit(done), urgent=True)
        if not posted.wait(CONFIRM_S):
            self.worker.log(
                f"job {self.spec.job_id}: its end is recorded but not posted yet; its message stays in the queue"
            )
            return
        self.worker.keeper.release(self.received.receipt)
        try:
            if self.worker.jobs.delete([self.received.receipt]):
                self.worker.log(f"job {self.spec.job_id}: its message belongs to another worker by now; its end stands")
        except QueueError as error:
            self.worker.log(
                f"job {self.spec.job_id}: its message could not be deleted ({error}); redelivery finds its end"
            )
