"""Looks once a second at what a job's running samples are in, tells the agent, and ends hung samples where the user wants that.

A thread of the job process, started and stopped by `evalworker.job`. It only reads Inspect's live samples (through `inspect_internals`);
what it changes it changes in the event loop's thread. It must not raise: a job without a lookout still runs.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evalworker import inspect_internals
from evalworker.contract.jsonio import portable
from evalworker.contract.messages import Hung
from evalworker.inspect_internals import LiveSample
from evalworker.job import JobLook

if TYPE_CHECKING:
    from evalworker.streamer import Streaming

LOOK_S = 1.0
"""Between two looks."""

MOST_HUNG = 10
"""Hung samples that are named; there may be more."""

TEXT_LIMIT = 120
"""Characters of an id or of what a sample is in: they go into every heartbeat."""


@dataclass
class Quiet:
    """How long nothing has happened in one sample. Times are seconds in which the event loop answered."""

    seen: tuple[int, ...]
    since: float
    ended: bool = False


class QuietSamples:
    """Remembers, from look to look, since when nothing has happened in each sample. Pure."""

    def __init__(self, job_id: str, attempt: int, hung_after_s: float) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._hung_after_s = hung_after_s
        self._quiet: dict[str, Quiet] = {}

    def look(self, samples: list[LiveSample], at: float) -> list[tuple[LiveSample, Quiet]]:
        """The hung samples, the longest quiet first."""
        self._quiet = {sample.key: self._of(sample, at) for sample in samples}
        hung = [(sample, self._quiet[sample.key]) for sample in samples]
        hung = [(sample, quiet) for sample, quiet in hung if at - quiet.since >= self._hung_after_s]
        return sorted(hung, key=lambda pair: pair[1].since)

    def _of(self, sample: LiveSample, at: float) -> Quiet:
        known = self._quiet.get(sample.key)
        return known if known is not None and known.seen == sample.progress else Quiet(sample.progress, at)

    def message(self, sample: LiveSample, quiet: Quiet, at: float) -> Hung:
        """What the agent is told of a hung sample."""
        return Hung(
            job_id=self._job_id,
            attempt=self._attempt,
            sample_id=shown_id(sample.id),
            epoch=sample.epoch,
            quiet_s=round(at - quiet.since, 1),
            activity=sample.activity[:TEXT_LIMIT],
            ended=quiet.ended,
        )


def shown_id(sample_id: int | str) -> int | str:
    """A sample's id, cut where it is a whole text."""
    return sample_id if isinstance(sample_id, int) else str(portable(sample_id))[:TEXT_LIMIT]


def phrase(samples: list[LiveSample], now: float) -> str:
    """What a job waits for. `now`: seconds since the epoch, as the samples' starts."""
    if not samples:
        return ""
    oldest = min(samples, key=lambda sample: sample.started or now)
    age = max(0.0, now - (oldest.started or now))
    count = f"{len(samples)} sample{'s' * (len(samples) != 1)} in flight"
    return f"{count}, the oldest, {shown_id(oldest.id)!r}, for {age:.0f} s, in {oldest.activity[:TEXT_LIMIT]}"


class Pulse:
    """Whether the event loop answers. A solver that blocks it makes all samples quiet, and none of them is to blame for that.

    Attributes:
        awake_s: seconds in which it did: the clock by which samples are hung.
    """

    def __init__(self, at: float) -> None:
        self.awake_s = 0.0
        self._at = at
        self._answered = threading.Event()
        self._answered.set()

    def answer(self) -> None:
        """The loop answers, or another one has taken its place."""
        self._answered.set()

    def feel(self, at: float, ask: Callable[[Callable[[], None]], object]) -> bool:
        """Whether the last question was answered; asks the next one. `ask` calls back from the loop."""
        answered, elapsed, self._at = self._answered.is_set(), at - self._at, at
        if answered:
            self.awake_s += elapsed
            self._answered.clear()
            ask(self.answer)
        return answered


class Lookout:
    """The thread. Use as a context manager around the eval."""

    def __init__(
        self,
        streaming: "Streaming",
        send: Callable[[JobLook], None],
        hung_after_s: float,
        on_hung: Literal["wait", "error"],
    ) -> None:
        self._streaming = streaming
        self._send = send
        self._on_hung = on_hung
        self._quiet = QuietSamples(streaming.origin.job_id, streaming.origin.attempt, hung_after_s)
        self._over = threading.Event()
        self._pulse = Pulse(time.monotonic())
        self._loop = streaming.loop
        self._said = JobLook()
        self._work: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> "Lookout":
        threading.Thread(target=self._run, daemon=True, name="lookout").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # Inspect's samples change under our eyes; the next look comes soon
                self._look()

    def _look(self) -> None:
        if self._streaming.loop is not self._loop:
            self._loop = self._streaming.loop
            self._pulse.answer()
        answers = self._pulse.feel(time.monotonic(), self._in_loop)
        samples, at = inspect_internals.live_samples(), self._pulse.awake_s
        hung = self._quiet.look(samples, at)
        if self._on_hung == "error":
            for sample, quiet in hung:
                self._end(sample, quiet)
        before, self._work = self._work, {sample.key: sample.work for sample in samples}
        look = JobLook(
            rate_limited=self._streaming.rate_limited,
            wait=phrase(samples, time.time()) + ("" if answers else "; its event loop is blocked"),
            moved=bool(self._work.items() - before.items()),
            hung=[self._quiet.message(sample, quiet, at) for sample, quiet in hung[:MOST_HUNG]],
        )
        if (look.moved or look != self._said) and not self._over.is_set():
            self._said = look
            self._send(look)

    def _end(self, sample: LiveSample, quiet: Quiet) -> None:
        """Let Inspect end the sample with an error, once; its own rules for errors then apply."""
        if self._loop is not None and not quiet.ended:
            self._in_loop(lambda: inspect_internals.end_sample(sample.key))
            quiet.ended = True

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Call something in the event loop's thread; at once where there is no loop yet."""
        if self._loop is None or self._loop.is_closed():
            call()
        else:
            self._loop.call_soon_threadsafe(call)
