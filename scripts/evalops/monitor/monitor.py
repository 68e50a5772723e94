"""Follows a run on Batch to its end: states, log lines, results as samples finish, a progress line; then says how it ended.

Called by `ies run aws --monitor` and `ies batch monitor-job`. No AWS error ends it: throttling and lost connections are waited out,
expired credentials are waited for, and whoever stops it leaves the job running.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError

from evalops import ui
from evalops.batch import logstream, names, states
from evalops.batch.follow import Follower
from evalops.batch.record import Target, places
from evalops.monitor.progress import ProgressLine
from evalops.monitor.results import LiveResults
from evalworker import aws
from evalworker.aws import Fault, ServiceError
from evalworker.contract.documents import Manifest
from evalworker.contract.wire import now
from evalworker.storage import Storage

EVERY_S = 2.0
RESULTS_EVERY_S = 5.0
SLOWEST_S = 30.0
"""Between two looks: at the states and the log, at the logs on S3, and at the most when there are very many jobs or errors."""

RESULTS_PAUSE = 5
"""The pause after a look at the logs, as a multiple of what the look took."""

RENEWAL_S = 900.0
"""How long expired credentials are waited for."""

SETTLED = timedelta(minutes=1)
"""After a job's end its last lines come a few seconds late; after so long none is expected."""

LATE_S = 15.0
"""For the stream of a job that has ended to appear."""

SHOWN = 5
"""Failed jobs of an array that are explained; the table names all."""

FollowEnd = Literal["ended", "forgotten", "stopped", "stuck"]


@dataclass(frozen=True)
class Outcome:
    """How following ended. `stopped`: the runnable timeout ended the job; `stuck`: it could never have started."""

    ending: FollowEnd
    jobs: list[states.Job]
    again: int

    @property
    def succeeded(self) -> bool:
        """Whether every job ended well."""
        return self.ending == "ended" and all(job.state == "SUCCEEDED" for job in self.jobs)

    @property
    def terminated(self) -> bool:
        """Whether somebody ended one of them."""
        return self.ending == "stopped" or any(job.why == "terminated" for job in self.jobs)


@dataclass(frozen=True)
class Where:
    """Where the jobs are: the region, and the log group where Batch does not say it."""

    region: str
    group: str


class Monitor:
    """One following of some jobs. `client` gives boto3's client of a service, anew after `aws.forget_clients`."""

    def __init__(
        self,
        target: Target,
        where: Where,
        results: LiveResults | None,
        *,
        runnable_timeout: timedelta | None = None,
        quiet: bool = False,
        client: Callable[[str], Any] | None = None,
        reopen: Callable[[], Storage] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._where = where
        self._results = results
        self._timeout = runnable_timeout
        self._client = client or (lambda service: aws.client(service, where.region))
        self._reopen = reopen
        self._sleep = sleep
        self._clock = clock
        self.follower = Follower(target.jobs)
        self.view = ProgressLine(quiet=quiet)
        self._streams: dict[str, logstream.LogStream] = {}
        self._logs_denied = False
        self._results_at = clock()
        self._first_results = True
        self._places: dict[str, int] | None = None
        self._waiting_since: float | None = None
        self._failures_shown = 0
        self._ended_at: float | None = None
        self.lines = 0
        self._stopped: FollowEnd | None = None
        self._errors = 0

    def run(self) -> Outcome:
        """Follow to the end. Raises Failure (exit 4) when it cannot go on; KeyboardInterrupt passes."""
        drained = 0
        while True:
            try:
                lines = self._cycle()
                self._errors, self._waiting_since = 0, None
                drained = drained + 1 if self.follower.ended and not lines else 0
            except (ClientError, BotoCoreError, ServiceError) as error:
                self._survive(error)
                continue
            over = self.follower.ended and (drained >= (1 if self._settled() else 2) or self._nothing_to_drain())
            if over and not self._may_yet_open():
                break
            self._sleep(self._pause())
        self._look_at_results(force=True)
        if self._results is not None:
            self._draw(force=True)
        self.view.end()
        jobs = self.follower.runs
        ending: FollowEnd = self._stopped or ("ended" if jobs else "forgotten")
        return Outcome(ending, jobs, self._results.again if self._results else 0)

    def _pause(self) -> float:
        count = len(self.follower.open)
        return min(SLOWEST_S, EVERY_S + count / 100)

    def _settled(self) -> bool:
        """Whether the jobs ended long ago, so that no line of theirs is still on its way."""
        return all(job.stopped is not None and (now() - job.stopped) > SETTLED for job in self.follower.runs)

    def _nothing_to_drain(self) -> bool:
        return not self._streams or all(stream.state != "open" for stream in self._streams.values())

    def _may_yet_open(self) -> bool:
        """Whether the job has just ended and its last stream is not there yet: a stream appears a few seconds after its first line."""
        if self._ended_at is None:
            self._ended_at = self._clock()
        late = self._clock() - self._ended_at >= LATE_S
        waiting = any(stream.state == "waiting" for stream in self._streams.values())
        started = any(job.why not in ("start", "image", "capacity", "misconfigured") for job in self.follower.runs)
        return waiting and started and not late and not self._logs_denied and not self._settled()

    def _cycle(self) -> int:
        """One look at everything; how many log lines came."""
        for job in self.follower.look(self._client("batch")):
            self._say_state(job)
        self._guard()
        lines = self._follow_log()
        self._look_at_results()
        self._draw()
        return lines

    def _say_state(self, job: states.Job) -> None:
        """A change of state on a line of its own; of an array's children only what failed."""
        single = len(self.follower.leaves) == 1
        shown = job.state == "FAILED" and job.children is None and self._failures_shown < SHOWN
        if not (single or job.children is not None or shown):
            return
        label = "" if single else f"{job.id.split('-')[0]}{':' + job.id.split(':')[1] if ':' in job.id else ''}  "
        self.view.note(f"state   {label}{states.words(job, now())}")
        if shown and not single:
            self._failures_shown += 1
            self._show_end(job)

    def _show_end(self, job: states.Job) -> None:
        """Of a failed child, whose log nobody follows: where its log is, and the end of it."""
        stream = job.attempts[-1].stream if job.attempts else None
        if stream is not None:
            self.view.note(f"log     {names.logs_link(self._where.region, job.group or self._where.group, stream)}")
        for line in last_lines(self._client, self._where, job):
            self.view.note(f"  | {line}")
            self.lines += 1

    def _guard(self) -> None:
        """End what can never start, and what has waited for longer than the user wants to."""
        if self._stopped is not None or self.follower.ended:
            return
        jobs = self.follower.runs
        waiting = [job for job in jobs if job.state == "RUNNABLE"]
        if any(job.state in ("STARTING", "RUNNING") for job in jobs):
            return  # the others have their turn when these have ended
        reason = ""
        ending: FollowEnd | None = None
        if stuck := next((job for job in waiting if job.stuck), None):
            reason, ending = f"{states.CANNOT_START}{stuck.reason}", "stuck"
        elif self._timeout is not None and self._waited_out(waiting, jobs, now() - self._timeout):
            reason, ending = (
                f"waited in RUNNABLE for longer than {ui.seconds_text(self._timeout.total_seconds())}",
                "stopped",
            )
        if ending is None:
            return
        what = "array" if any(each.size for each in self._target.jobs) else "job"
        self.view.note(f"ending  the {what} is terminated: {reason}")
        for each in self._target.jobs:
            self._client("batch").terminate_job(jobId=each.job_id, reason=reason[:1024])
        self._stopped = ending

    def _waited_out(self, waiting: list[states.Job], jobs: list[states.Job], since: datetime) -> bool:
        """Whether one has waited since before that time, and none of all has started or ended after it."""
        times = [job.stopped for job in jobs] + [
            at for job in jobs for attempt in job.attempts for at in (attempt.started, attempt.stopped)
        ]
        moved = any(at is not None and at > since for at in times)
        return not moved and any(job.since is not None and job.since < since for job in waiting)

    # Log lines

    def _follow_log(self) -> int:
        """Show new lines of a single job, attempt after attempt. An array's logs are too many to be read together."""
        if self._logs_denied or len(self.follower.leaves) != 1 or not self.follower.runs:
            return 0
        (job,) = self.follower.runs
        shown = 0
        for number, attempt in enumerate(job.attempts, 1):
            if attempt.stream is None or attempt.stream == self._passed(attempt.stream):
                continue
            if number > 1 and attempt.stream not in self._streams:
                before = job.attempts[number - 2]
                self.view.note(f"attempt {number}: the one before ended ({before.reason or 'no reason given'})")
            stream = self._streams.setdefault(
                attempt.stream, logstream.LogStream(job.group or self._where.group, attempt.stream)
            )
            shown += self._show_lines(stream)
        return shown

    def _passed(self, stream: str) -> str | None:
        """The stream itself when its lines have expired: nothing more comes from it."""
        known = self._streams.get(stream)
        return stream if known is not None and known.state == "gone" else None

    def _show_lines(self, stream: logstream.LogStream) -> int:
        before = stream.state
        try:
            lines = stream.poll(self._client("logs"))
        except ClientError as error:
            fault = aws.explain(error)
            if fault.credentials or fault.retryable:
                raise
            self._logs_denied = True
            self.view.note(f"warning: the job's log cannot be read (logs:GetLogEvents): {fault.text}")
            return 0
        if stream.state == "gone" and before != "gone":
            self.view.note(f"the log stream {stream.name} is gone: its lines have expired, or it was removed")
        if stream.state == "open" and before == "waiting":
            self.view.note(f"log     {names.logs_link(self._where.region, stream.group, stream.name)}")
        for line in lines:
            self.view.note(f"{line.at:%H:%M:%S} | {line.text.rstrip()}")
        self.lines += len(lines)
        return len(lines)

    # Results

    def _look_at_results(self, *, force: bool = False) -> None:
        if self._results is None or not (force or self._clock() >= self._results_at):
            return
        begun = self._clock()
        try:
            found = self._results.poll(None if force or self._first_results else self._running())
        except ServiceError as error:
            if error.credentials and not force:
                raise
            self.view.note(f"warning: the run's logs cannot be read now: {error}")
            return
        finally:  # a large run takes long to list: most of the time is for the states and the log
            self._results_at = self._clock() + max(RESULTS_EVERY_S, RESULTS_PAUSE * (self._clock() - begun))
        if self._first_results and len(found) > SHOWN:
            self.view.note(f"result  {len(found)} samples had ended before")
            found = []
        self._first_results = False
        for result in found:
            self.view.note(f"result  {result.line()}")

    def _running(self) -> list[str] | None:
        """The manifest's jobs that children run right now; None where that is not known."""
        if self._results is None or self._target.round is None:
            return None
        if self._places is None:
            self._places = places(self._target.round)
        running = [job.id for job in self.follower.runs if job.state in ("STARTING", "RUNNING")]
        return [self._results.jobs[self._places[child]] for child in running if child in self._places]

    def _draw(self, *, force: bool = False) -> None:
        """The progress line."""
        results, jobs = self._results, self.follower.runs
        counts = {state: sum(job.state == state for job in jobs) for state in {job.state for job in jobs}}
        if len(self.follower.leaves) == 1:
            text = states.words(jobs[0], now()) if jobs else "submitted"
        else:
            text = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items()))
        if results is not None:
            self.view.show(results.finished + results.errored, results.planned, results.errored, text, force=force)
        else:
            self.view.show(0, 0, 0, text)

    # Errors

    def _survive(self, error: Exception) -> None:
        fault = error.fault if isinstance(error, ServiceError) else aws.explain(error)
        if fault is not None and fault.credentials:
            self._await_renewal(fault)
            return
        if fault is None or not fault.retryable:
            raise ui.Failure(
                f"{error if isinstance(error, ServiceError) else fault.text if fault else error}; {self.leave()}",
                ui.EXIT_LEFT_RUNNING,
            )
        if self._errors == 0:
            self.view.note(f"warning: {fault.text}; trying again")
        self._errors += 1
        self._sleep(min(SLOWEST_S, EVERY_S * 2 ** min(self._errors, 5)))

    def _await_renewal(self, fault: Fault) -> None:
        """Try again with what the environment and the files say now, for a quarter of an hour."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()
            self.view.note(f"warning: {fault.text}. The job goes on, and so does this command when they are renewed.")
        elif self._clock() - self._waiting_since > RENEWAL_S:
            raise ui.Failure(f"{fault.text}; {self.leave()}", ui.EXIT_LEFT_RUNNING)
        self._sleep(10)
        aws.forget_clients()
        if self._reopen is not None and self._results is not None:
            try:
                self._results.storage = self._reopen()
            except ServiceError:
                return

    def leave(self) -> str:
        """What to type to come back."""
        name = self._target.run.fleet_id if self._target.run and self._target.whole else self._target.jobs[0].job_id
        return f"the job goes on without this command: ies batch monitor-job {name}, or ies batch terminate-job {name}"


def explain_failures(
    client: Callable[[str], Any], where: Where, jobs: Sequence[states.Job], *, followed: bool
) -> list[str]:
    """Lines that say why jobs failed, each with the end of its log unless that was shown already."""
    said = []
    failed = [job for job in jobs if job.state == "FAILED"]
    for job in failed[:SHOWN]:
        said.append(f"{job.name} ({job.id}) {states.words(job, now())}")
        if not followed:
            said += [f"  | {line}" for line in last_lines(client, where, job)] or [
                "  its container has printed nothing"
            ]
    if len(failed) > SHOWN:
        said.append(f"and {len(failed) - SHOWN} more failed")
    return said


def last_lines(client: Callable[[str], Any], where: Where, job: states.Job) -> list[str]:
    """The end of the log of a job's last attempt; why it cannot be read, when it cannot. Never raises botocore's errors."""
    stream = job.attempts[-1].stream if job.attempts else None
    if stream is None:
        return []
    try:
        return [line.text.rstrip() for line in logstream.tail(client("logs"), job.group or where.group, stream)]
    except (ClientError, BotoCoreError) as error:
        return [f"(its log cannot be read: {aws.explain(error).text})"]


def results_of(storage: Storage, target: Target, manifest: Manifest | None) -> LiveResults | None:
    """The live results of the run that the jobs belong to; None where no run is known."""
    if manifest is None or target.round is None:
        return None
    return LiveResults(storage, manifest, array=target.round.array)
