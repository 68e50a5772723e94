"""What a job says of its running samples, and how it ends hung ones: rules on values, and one real eval."""

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import inspect_ai
import pytest
from inspect_ai.dataset import Sample
from inspect_ai.log import transcript
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from evalworker import inspect_internals, lookout, streamer
from evalworker.contract.messages import SampleDone
from evalworker.inspect_internals import LiveSample
from evalworker.job import JobLook
from evalworker.lookout import Lookout, Pulse, QuietSamples, phrase
from evalworker.results import Origin

JOB = "0123456789abcdef"


def live(key: str, *progress: int, started: float | None = 0.0, id_: int | str = 1) -> LiveSample:
    return LiveSample(key, id_, 1, started, progress, progress, "a call of m")


def test_a_sample_is_hung_when_nothing_has_happened_in_it_for_long() -> None:
    quiet = QuietSamples(JOB, 1, 10.0)
    assert quiet.look([live("a", 1), live("b", 1)], 0.0) == []
    assert quiet.look([live("a", 1), live("b", 2)], 6.0) == []
    assert [sample.key for sample, _ in quiet.look([live("a", 1), live("b", 2)], 10.0)] == ["a"]
    assert [sample.key for sample, _ in quiet.look([live("b", 2), live("a", 1)], 16.0)] == ["a", "b"]
    assert quiet.look([live("a", 2)], 17.0) == []
    assert quiet.look([live("b", 2)], 18.0) == []  # another execution under a key that had gone


def test_the_clock_of_hung_samples_stands_still_while_the_event_loop_is_blocked() -> None:
    asked: list[Callable[[], None]] = []
    pulse = Pulse(0.0)
    assert pulse.feel(1.0, asked.append)
    assert not pulse.feel(100.0, asked.append)
    assert pulse.awake_s == 1.0
    asked.pop()()
    assert pulse.feel(101.0, asked.append)
    assert pulse.awake_s == 2.0
    assert len(asked) == 1


def test_what_the_agent_is_told_of_it() -> None:
    quiet = QuietSamples(JOB, 3, 10.0)
    quiet.look([live("a", 1, id_="x" * 5000)], 0.0)
    ((sample, since),) = quiet.look([live("a", 1, id_="x" * 5000)], 12.0)
    told = quiet.message(sample, since, 12.0)
    assert (told.job_id, told.attempt, told.quiet_s, told.ended) == (JOB, 3, 12.0, False)
    assert told.sample_id == "x" * lookout.TEXT_LIMIT


def test_the_phrase_names_the_oldest_sample() -> None:
    samples = [live("a", started=90.0, id_="new"), live("b", started=60.0, id_=7), live("c", started=None, id_="setup")]
    assert phrase(samples, 100.0) == "3 samples in flight, the oldest, 7, for 40 s, in a call of m"
    assert phrase([], 100.0) == ""


@pytest.mark.parametrize(
    ("activity", "started", "text"),
    [
        (None, False, "its setup (sandbox)"),
        (None, True, "its solver or scorer"),
        ({"type": "model", "detail": "gpt", "count": 1}, True, "a call of gpt"),
        ({"type": "tool", "detail": "bash", "count": 1}, True, "the tool bash"),
        ({"type": "retry_wait", "detail": "gpt", "count": 4}, True, "the pause after attempt 4 to call gpt"),
        ({"type": "approval", "detail": "bash", "count": 1}, True, "waiting for a person"),
        ({"type": "new kind", "detail": "", "count": 1}, True, "new kind"),
    ],
)
def test_what_a_sample_is_in(activity: dict[str, object] | None, started: bool, text: str) -> None:
    assert inspect_internals._activity_text(activity, started=started) == text


def watched(
    streaming: streamer.Streaming, look: Lookout, task: inspect_ai.Task, log_dir: Path, **model_args: object
) -> None:
    """Run a task under a lookout."""
    streamer.start(streaming)
    try:
        with look:
            inspect_ai.eval(
                task,
                model="scripted/good",
                model_args=model_args,
                log_dir=str(log_dir),
                display="none",
                fail_on_error=False,
                ctl_server=False,
            )
    finally:
        streamer.start(None)


def test_a_hung_sample_is_told_and_ended_and_the_others_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "LOOK_S", 0.05)
    origin = Origin("2026-11-29-14-05-33-1a2b3c4d", 1, JOB, 1, "t", "scripted/good", "i-1")
    ends: dict[object, str | None] = {}
    streaming = streamer.Streaming(origin, lambda done: ends.update({done.sample_id: done.error}), None)
    looks: list[JobLook] = []
    task = inspect_ai.Task(
        dataset=[Sample(id=name, input=f"Question {name}. What is 1 + 1?", target="2") for name in ("one", "two")],
        scorer=includes(),
    )
    watched(streaming, Lookout(streaming, looks.append, 1.0, "error"), task, tmp_path, hang="Question two.")
    assert ends["one"] is None
    assert "interrupted by operator" in str(ends["two"])
    hung = [hung for look in looks for hung in look.hung]
    assert {(each.sample_id, each.ended) for each in hung} == {("two", True)}
    assert hung[0].activity == "a call of scripted/good"
    assert any("1 sample in flight, the oldest, 'two', for" in look.wait for look in looks)


def test_a_try_that_inspect_repeats_by_itself_is_told_with_what_it_cost(tmp_path: Path) -> None:
    origin = Origin("2026-11-29-14-05-33-1a2b3c4d", 1, JOB, 1, "t", "scripted/good", "i-1")
    told: list[SampleDone] = []

    @solver
    def fails_once() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state = await generate(state)
            if not told:
                raise ValueError("once")
            return state

        return solve

    streamer.start(streamer.Streaming(origin, told.append, None))
    try:
        inspect_ai.eval(
            inspect_ai.Task(
                dataset=[Sample(input="What is 1 + 1?", target="2")], solver=fails_once(), scorer=includes()
            ),
            model="scripted/good",
            log_dir=str(tmp_path),
            display="none",
            retry_on_error=1,
            ctl_server=False,
        )
    finally:
        streamer.start(None)
    first, second = told
    assert (first.will_retry, first.status, second.will_retry, second.status) == (True, "errored", False, "completed")
    assert first.model_usage == second.model_usage != {}
    assert first.uuid != second.uuid


@solver
def works(stopped: threading.Event) -> Solver:
    """Writes an event now and then until it is told to end; calls no model."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        while not stopped.is_set():
            transcript().info("a step")
            await anyio.sleep(0.01)
        return state

    return solve


@pytest.mark.parametrize("kind", ["a refused call", "steps"])
def test_a_sample_that_works_moves_and_a_call_that_is_refused_again_and_again_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(lookout, "LOOK_S", 0.02)
    origin = Origin("2026-11-29-14-05-33-1a2b3c4d", 1, JOB, 1, "t", "scripted/good", "i-1")
    streaming = streamer.Streaming(origin, lambda done: None, None)
    looks: list[JobLook] = []
    over = threading.Event()

    def heard(look: JobLook) -> None:
        looks.append(look)
        if len(looks) >= 20 and not over.is_set():
            over.set()
            if kind == "a refused call":
                (running,) = inspect_internals.live_samples()
                streaming.loop.call_soon_threadsafe(inspect_internals.end_sample, running.key)

    solvers = {"a refused call": generate(), "steps": works(over)}
    task = inspect_ai.Task(dataset=[Sample(input="What is 1 + 1?", target="2")], solver=solvers[kind])
    watched(streaming, Lookout(streaming, heard, 1.0, "wait"), task, tmp_path, rate_limit=1, retry_pause=0.05)
    assert over.is_set()
    assert any(look.moved for look in looks), "a sample that begins has moved"
    if kind == "steps":
        assert sum(look.moved for look in looks) >= 10
    else:
        refused = [look for look in looks[:20] if look.rate_limited > 1]
        assert refused
        assert not any(look.moved for look in refused)


def test_a_lookout_without_samples_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(lookout, "LOOK_S", 0.01)
    monkeypatch.setattr(inspect_internals, "live_samples", lambda: looked.set() or [])
    origin = Origin("2026-11-29-14-05-33-1a2b3c4d", 1, JOB, 1, "t", "scripted/good", "i-1")
    told: list[JobLook] = []
    with Lookout(streamer.Streaming(origin, lambda done: None, None), told.append, 1.0, "wait"):
        assert looked.wait(30)
    assert told == []
