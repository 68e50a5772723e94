"""Streams each sample's score the moment it exists: an Inspect hook that lives in every job process.

The job switches it on with a sink and reads from it afterwards what was said. It must never raise (Inspect would swallow that as
a warning and the stream would stop in silence): a failure is counted, and the comparison with the stored log sends what is
missing.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inspect_ai.hooks import Hooks, ModelRetry, RunStart, SampleAttemptEnd, SampleEnd, SampleInit, TaskStart, hooks
from inspect_ai.log import EvalSample

from evalworker import inspect_internals, redact
from evalworker.contract.failures import Category, classify_exception, exception_type
from evalworker.contract.ids import SampleId, sample_key
from evalworker.contract.jsonio import canonical
from evalworker.contract.messages import SampleDone
from evalworker.results import Origin, sample_done

_CANCELLED = ("CancelledError(", "Cancelled(")
"""How Inspect records a sample that was cut off with its eval: no end of its own, it runs again."""

RATE_LIMIT_STATUS = (429, 503, 529)

SampleError = tuple[str, str, int | None]
"""Class, message and HTTP status of what a sample ended with."""


@dataclass
class Streaming:
    """One job's stream: where samples go, and what has been said.

    Attributes:
        origin: the job.
        sink: takes each message; must not block for long.
        last_try: the try of the task (counted from 1) whose errored samples are results; None if every one is.
        said: uuid of the last result of each sample.
        errors: what each errored sample of the current try ended with.
        refusals: by execution uuid, class and HTTP status of the last refused model call.
        broken: samples that the hook could not report.
        rate_limited: model calls that were answered with a rate limit.
        on_task: called in the event loop's thread when a task starts.
        on_sample: called in that thread when a sample begins and when one ends.
        selection: the ids of the samples that the task must run, None for all that it has.
        wrong_selection: how those that it would have run differ; the job has ended itself for it.
        canary: whether the job ends with its first sample.
        cut_short: whether it has, before its eval was finished.
    """

    origin: Origin
    sink: Callable[[SampleDone], None]
    last_try: int | None
    tries: int = 0
    said: dict[tuple[str, int], str | None] = field(default_factory=dict)
    errors: dict[tuple[str, int], SampleError] = field(default_factory=dict)
    refusals: dict[str, tuple[str, int]] = field(default_factory=dict)
    broken: int = 0
    rate_limited: int = 0
    refused_key: SampleError | None = None
    loop: asyncio.AbstractEventLoop | None = None
    on_task: Callable[[], None] | None = None
    on_sample: Callable[[], None] | None = None
    selection: list[SampleId] | None = None
    wrong_selection: str = ""
    canary: bool = False
    cut_short: bool = False
    _ends: int = 0

    def end(self, sample: EvalSample) -> None:
        """Report a sample that ended; raises what a strange sample makes it raise."""
        key = sample_key(sample.id, sample.epoch)
        error = sample.error
        if error is not None and error.message.startswith(_CANCELLED):
            return
        will_retry = error is not None and self.last_try is not None and self.tries < self.last_try
        if error is None:
            self.errors.pop(key, None)
        else:
            name = exception_type(error.traceback, error.message)
            refused, status = self.refusals.get(sample.uuid or "", ("", None))
            # A status that was healed by a retry must not colour what the sample failed of afterwards.
            found = (name, redact.text(error.message)[:1024], status if refused == name else None)
            self.errors[key] = found
            if classify_exception(*found) is Category.AUTH:
                self._refuse(found)
                will_retry = False
        self.refusals.pop(sample.uuid or "", None)
        self._ends += 1
        self.sink(sample_done(sample, self.origin, will_retry=will_retry))
        if not will_retry:
            self.said[key] = sample.uuid

    def retry(self, data: SampleAttemptEnd) -> None:
        """Report a try of a sample after which Inspect tries it again by itself (`--retry-on-error`): it was paid for too."""
        error = data.error.message if data.error else ""
        tried = {
            "uuid": f"{data.sample_id}/{data.attempt}",  # the sample's own stays the same for its next try
            "error": error,
            "model_usage": inspect_internals.usage_so_far(),
        }
        self.sink(sample_done(data.summary.model_copy(update=tried), self.origin, will_retry=True))

    def _refuse(self, error: SampleError) -> None:
        """A refused key ends the job at its first occurrence: every further call would be refused, and may be counted."""
        if self.refused_key is None:
            self.refused_key = error
            _interrupt()

    def check(self, selected: list[Any]) -> None:
        """A shard runs exactly its own samples, or nothing: Inspect takes ids for patterns, and a dataset may have changed."""
        if self.selection is None or sorted(map(canonical, selected)) == sorted(map(canonical, self.selection)):
            return
        there, wanted = set(map(canonical, selected)), set(map(canonical, self.selection))
        missing = [each for each in self.selection if canonical(each) not in there]
        strange = [each for each in selected if canonical(each) not in wanted]
        named = f"{missing[:3]} are not there" if missing else f"{strange[:3]} are not of it"
        self.wrong_selection = (
            f"the task's dataset is not what it was when the run was planned: of the {len(self.selection)} samples of this "
            f"shard {len(missing)} are missing and {len(strange)} are too many ({named})"
        )
        _interrupt()

    def begin(self) -> None:
        """A sample begins: a canary's second one does not, and by then its first one is in the log."""
        if self.canary and self._ends and not self.cut_short:
            self.cut_short = True
            _interrupt()


def _interrupt() -> None:
    """End the eval as Ctrl-C does."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


_streaming: Streaming | None = None


def start(streaming: Streaming | None) -> None:
    """Switch the hook on for this process's job, or off with None."""
    global _streaming
    _streaming = streaming


@hooks(name="inspect_fleet_streamer", description="Streams each sample's score to the fleet.")
class FleetSampleStreamer(Hooks):
    """The hook itself; one instance lives as long as the process and holds no state of its own."""

    def enabled(self) -> bool:
        """Whether a job is running in this process."""
        return _streaming is not None

    async def on_run_start(self, data: RunStart) -> None:
        """Remember the event loop: limits are changed in its thread."""
        if _streaming is not None:
            try:
                _streaming.loop = asyncio.get_running_loop()
            except RuntimeError:  # trio has no asyncio loop; limits then stay as they were at the start
                _streaming.loop = None

    async def on_task_start(self, data: TaskStart) -> None:
        """Count the tries of the task: `eval_set` retries it without saying so."""
        if _streaming is not None:
            _streaming.tries += 1
            _streaming.errors.clear()
            _streaming.check(data.spec.dataset.sample_ids or [])
            if _streaming.on_task is not None:
                _streaming.on_task()

    async def on_sample_init(self, data: SampleInit) -> None:
        """Before a sample's sandbox is made."""
        if _streaming is not None:
            _streaming.begin()
            if _streaming.on_sample is not None:
                _streaming.on_sample()

    async def on_sample_attempt_end(self, data: SampleAttemptEnd) -> None:
        """Send a try after which another one follows; a failure is counted, never raised."""
        if _streaming is None or not data.will_retry:
            return
        try:
            _streaming.retry(data)
        except Exception:
            _streaming.broken += 1

    async def on_sample_end(self, data: SampleEnd) -> None:
        """Send the sample; a failure is counted, never raised."""
        if _streaming is None:
            return
        try:
            _streaming.end(data.sample)
        except Exception:  # whatever a scorer put into the sample
            _streaming.broken += 1
        if _streaming.on_sample is not None:
            _streaming.on_sample()

    async def on_model_retry(self, data: ModelRetry) -> None:
        """Keep how the sample's last call was refused, and count rate limits."""
        if _streaming is None:
            return
        if data.sample_id and data.status_code:
            _streaming.refusals[data.sample_id] = (data.exception_type or "", data.status_code)
        if data.status_code in RATE_LIMIT_STATUS:
            _streaming.rate_limited += 1
