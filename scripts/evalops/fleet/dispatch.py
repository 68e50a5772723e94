"""Job messages on their way out: the first of a round, retries when they are due, those that were lost; and what comes back dead.

Who re-queues what is said in design, section 5.
"""

import time
from collections.abc import Iterable

from evalops.fleet import job_ends, placement
from evalops.fleet.fleet import Due, Fleet
from evalops.fleet.inbox import Inbox
from evalops.fleet.ledger import JobState
from evalops.fleet.merges import Merges
from evalops.fleet.recovery import LostMessages
from evalworker.contract.failures import Category
from evalworker.contract.messages import Job
from evalworker.contract.wire import Unreadable
from evalworker.queues import SendFailed

SEND_AT_ONCE = 500
"""Messages that are sent in one turn of the controller's loop, in calls of ten: it has other duties."""

DEAD_LETTERS_S = 10.0
"""Between two looks into the dead letters."""


class Dispatch:
    """The jobs queue of one fleet, and its dead letters; `inbox` keeps aside what cannot be read."""

    def __init__(self, fleet: Fleet, inbox: Inbox) -> None:
        self._fleet = fleet
        self._inbox = inbox
        self._lost_messages = LostMessages()
        self._merges = Merges(fleet.ledger)
        self._read: list[tuple[int, str]] = []

    def send_open_jobs(self) -> None:
        """Send a message for each open job, or for the canaries alone: the start of a round. Raises what cannot be sent."""
        fleet = self._fleet
        fleet.watch.hold(fleet.control)
        jobs = fleet.watch.canaries(fleet.control) or fleet.ledger.open_jobs
        self._send(self._placed([job for job in jobs if self._merges.ready(job)]))

    def _send(self, jobs: list[JobState]) -> None:
        self._fleet.jobs.send([self._message(job).to_json() for job in jobs])

    def _placed(self, jobs: list[JobState]) -> list[JobState]:
        """The longest first; one worker takes them as they were named, for there is nobody who could finish before it."""
        if self._fleet.plan.workers == 1 or len(jobs) < 2:
            return jobs
        return placement.longest_first(jobs, placement.read(self._fleet.storage, jobs))

    def schedule(self, job: JobState, delay_s: float) -> None:
        """Send a message for this job's attempt later."""
        self._fleet.due.append(Due(time.monotonic() + delay_s, self._message(job)))

    def cycle(self) -> None:
        """What is due now."""
        fleet = self._fleet
        if not fleet.stopping:
            self._send_due()
        if fleet.every("dead letters", DEAD_LETTERS_S):
            self.read_dead_letters()
        if fleet.every("lost messages", 2 * fleet.control.limits.heartbeat_s) and not fleet.stopping:
            self._find_lost_messages()

    def _message(self, job: JobState) -> Job:
        fleet = self._fleet
        return Job(
            fleet_id=fleet.fleet_id,
            round=fleet.ledger.round,
            job_id=job.spec.job_id,
            attempt=job.attempt,
            base=job.base,
            canary=job in fleet.watch.canaries(fleet.control),
            avoid=job.failed_on,
        )

    def _send_due(self) -> None:
        fleet = self._fleet
        for job in self._placed([job for job in fleet.watch.release(fleet.control) if self._merges.ready(job)]):
            self.schedule(job, 0)
        for job in self._merges.release():
            self._begin_merge(job)
        due = {each.message.to_json(): each for each in fleet.due if each.at <= time.monotonic()}
        bodies = list(due)[:SEND_AT_ONCE]
        if not bodies:
            return
        with fleet.surviving("the job queue"):
            try:
                fleet.jobs.send(bodies)
            except SendFailed as error:
                self._have_been_sent(due[body] for body in set(bodies) - set(error.unsent))
                raise
            self._have_been_sent(due[body] for body in bodies)

    def _have_been_sent(self, sent: Iterable[Due]) -> None:
        gone = {id(each) for each in sent}
        if gone:
            self._fleet.due[:] = [each for each in self._fleet.due if id(each) not in gone]
            self._fleet.watch.happened(time.monotonic())

    def _begin_merge(self, job: JobState) -> None:
        """Send a merge; without a single log to merge it fails as its shards did."""
        if (shard := self._merges.hopeless(job)) is None:
            self.schedule(job, 0)
            return
        assert shard.done is not None
        category = Category(shard.done.failure_category or Category.TASK_ERROR)
        why = f"none of its {len(job.spec.merges)} shards has left a log: {shard.done.error_summary}"
        with self._fleet.surviving("storage"):
            job_ends.end_job(self._fleet, job, "failed", category, why)

    def read_dead_letters(self) -> None:
        """A job whose message nobody could finish has failed: say so instead of waiting for it."""
        fleet = self._fleet
        with fleet.surviving("the dead letters"):
            for received in fleet.dead.receive(10, 0):
                try:
                    job = self._open_job_of(Job.from_json(received.body))
                except Unreadable as error:
                    if not self._inbox.keep_aside(error):
                        continue
                    job = None
                if job is not None:
                    why = "its message was received 20 times and no attempt came to an end"
                    job_ends.end_job(fleet, job, "failed", Category.CRASH, why)
                self._read.append((fleet.stream.seq, received.receipt))
            self.delete_dead_letters()

    def delete_dead_letters(self) -> None:
        """Delete those that have been read, once the segment is stored that tells what they led to. Raises ServiceError."""
        told = [receipt for seq, receipt in self._read if seq <= self._fleet.stream.stored]
        if told:
            self._fleet.dead.delete(told)
            self._read = self._read[len(told) :]

    def _open_job_of(self, message: Job) -> JobState | None:
        """The open job that hangs on this message; None for one of another fleet, an older round or an older attempt.

        The same job has the same id in every fleet, and an estate's lane has had others before.
        """
        ledger = self._fleet.ledger
        job = ledger.jobs.get(message.job_id)
        if job is None or job.done is not None or message.attempt < job.attempt:
            return None
        return job if (message.fleet_id, message.round) == (self._fleet.fleet_id, ledger.round) else None

    def _find_lost_messages(self) -> None:
        """Send again what an earlier controller had decided on and not sent before it was killed."""
        fleet = self._fleet
        with fleet.surviving("the job queue"):
            lost = self._lost_messages.look(
                open_jobs=[job.spec.job_id for job in fleet.ledger.open_jobs],
                running=fleet.roster.running(time.monotonic()),
                scheduled={due.message.job_id for due in fleet.due}
                | fleet.watch.held(fleet.control)
                | self._merges.held(),
                counts=fleet.jobs.counts(),
            )
            for job_id in lost:
                fleet.warn("the job's message was lost and is sent again", job_id=job_id)
                fleet.jobs.send([self._message(fleet.ledger.jobs[job_id]).to_json()])
