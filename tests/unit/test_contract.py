"""The contract's promises, on hostile values: messages fit and come back, ids differ, keys are safe, JSON is strict."""

import json
import math
import re
import shutil
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from evalworker.contract import events, layout
from evalworker.contract.documents import Control, JobDone, JobSpec, Lane, Limits, Manifest
from evalworker.contract.failures import Category
from evalworker.contract.ids import BadId, check_job_id, check_run_id, job_id, new_run_id, sample_key, slug
from evalworker.contract.jsonio import canonical, dump_bytes, dumps, finite
from evalworker.contract.messages import (
    MAX_MESSAGE_BYTES,
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
    fit,
    read_from_worker,
)
from evalworker.contract.wire import Unreadable, stamp

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
JOB = "0123456789abcdef"

text = st.text(st.characters(codec="utf-8"), max_size=200)
"""Any text that UTF-8 can hold."""

broken_text = st.text(max_size=60) | st.text(st.characters(categories=["Cs"]), max_size=4) | text
"""Lone surrogates too: what a model may put out."""

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=True) | broken_text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)
large = st.integers(0, 120_000).flatmap(
    lambda size: st.sampled_from(["x", "é", "🙂", "\0", '"']).map(lambda c: c * size)
)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
sample_ids = st.integers(-(2**53), 2**53) | st.sampled_from(["a:b", "001", "1", "../../x", "", " "]) | text

scores = st.dictionaries(
    text.filter(bool),
    st.fixed_dictionaries({"value": values | large}, optional={"answer": text | large, "explanation": text | large}),
    max_size=4,
)


@st.composite
def samples(draw: st.DrawFn) -> SampleDone:
    return SampleDone(
        fleet_id=FLEET,
        instance_id=draw(text),
        ts=draw(moments),
        round=draw(st.integers(1, 99)),
        job_id=JOB,
        attempt=draw(st.integers(1, 99)),
        task=draw(text),
        model=draw(text),
        sample_id=draw(sample_ids),
        epoch=draw(st.integers(1, 99)),
        uuid=draw(st.none() | st.just("abcDEF123")),
        status=draw(st.sampled_from(["completed", "errored"])),
        scores=draw(scores),
        error=draw(st.none() | text | large),
        limit=draw(st.none() | st.just("time")),
        duration_s=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False, min_value=0)),
        model_usage={"scripted/good": {"total_tokens": draw(st.integers(0, 10**9))}},
        cost_usd=draw(st.none() | st.just(0.0)),
        will_retry=draw(st.booleans()),
    )


@st.composite
def others(draw: st.DrawFn) -> FromWorker:
    head: dict[str, Any] = {"fleet_id": FLEET, "instance_id": draw(text), "ts": draw(moments)}
    kind = draw(st.sampled_from(["online", "heartbeat", "draining", "bootstrap", "attempt", "warning"]))
    if kind == "online":
        return WorkerOnline(**head, bootstrap_s=64.8, instance_type="m7i.large", lifecycle="spot", slots=2)
    if kind == "heartbeat":
        return Heartbeat(**head, running=[JOB] * draw(st.integers(0, 50)), load=0.0, disk_free=0, memory_free=0)
    if kind == "draining":
        return WorkerDraining(**head, reason=draw(text), handed_over=[JOB])
    if kind == "bootstrap":
        return BootstrapFailed(**head, lines=draw(st.lists(text | large, max_size=20)))
    if kind == "warning":
        return Warning_(**head, text=draw(text | large), job_id=JOB)
    return AttemptDone(
        **head,
        round=1,
        job_id=JOB,
        attempt=1,
        status="failed",
        ended=False,
        failure_category=draw(st.sampled_from(Category)),
        error_summary=draw(st.none() | text | large),
        duration_s=1.5,
        samples=SampleCounts(total=3, completed=2, errored=1),
    )


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict(line: str | bytes) -> Any:
    return json.loads(line, parse_constant=refuse_constant)


# messages

_UNCUT = set(SampleDone.model_fields) | set(AttemptDone.model_fields)
_UNCUT -= {"scores", "error", "error_summary", "text", "lines", "model_usage", "truncated"}


@given(samples() | others())
@settings(max_examples=150, deadline=None)
def test_fitted_messages_are_small_strict_and_keep_what_identifies_them(message: FromWorker) -> None:
    line = fit(message)
    assert len(line.encode("ascii")) <= MAX_MESSAGE_BYTES
    body = strict(line)
    back = read_from_worker(line)
    assert type(back) is type(message)
    for name in _UNCUT & set(type(message).model_fields):
        assert getattr(back, name) == getattr(message, name), name
    assert body["schema"] == 1
    if len(message.to_json()) <= MAX_MESSAGE_BYTES:
        assert line == message.to_json()
        assert back.truncated is False
    else:
        assert back.truncated is True


@given(samples())
@settings(deadline=None)
def test_small_scores_survive_the_cut(message: SampleDone) -> None:
    """A verdict that a `jq` recipe reads is there whatever the explanation weighs."""
    verdict = {"linux_scorer": {"value": {"main_task_success": "C"}, "explanation": "because " * 50_000}}
    back = read_from_worker(fit(message.model_copy(update={"scores": verdict})))
    assert isinstance(back, SampleDone)
    assert back.scores["linux_scorer"]["value"] == {"main_task_success": "C"}
    assert back.truncated is True


@pytest.mark.parametrize("count", [1, 50, 500, 3000])
def test_many_scorers_and_deep_values_still_fit(count: int) -> None:
    message = SampleDone(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=datetime(2026, 1, 1, tzinfo=UTC),
        round=1,
        job_id=JOB,
        attempt=1,
        task="t",
        model="m",
        sample_id="../../x",
        epoch=1,
        uuid="u",
        status="completed",
        scores={
            f"scorer-{n}": {
                "value": {"a" * 300: list(range(min(300, 60_000 // count)))},
                "explanation": "🙂" * min(3000, 300_000 // count),
            }
            for n in range(count)
        },
        model_usage={f"model-{n}": {"total_tokens": n} for n in range(count)},
    )
    line = fit(message)
    assert len(line) <= MAX_MESSAGE_BYTES
    assert strict(line)["sample_id"] == "../../x"


@pytest.mark.parametrize("half", ["\ud83d", "yes \udc00 no", "\ud83d\ud83d"])
def test_half_a_surrogate_pair_comes_through(half: str) -> None:
    message = SampleDone(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=datetime(2026, 1, 1, tzinfo=UTC),
        round=1,
        job_id=JOB,
        attempt=1,
        task="t",
        model="m",
        sample_id=1,
        epoch=1,
        uuid="u",
        status="completed",
        scores={"s": {"value": "C", "answer": half}},
    )
    assert isinstance(read_from_worker(fit(message)), SampleDone)


@pytest.mark.parametrize(
    "bad", ["", "{", "[]", "null", '{"type":"job"}', '{"type":"heartbeat"}', '{"schema":2,"type":"warning"}']
)
def test_unreadable_messages_say_so_and_keep_their_text(bad: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_from_worker(bad)
    assert caught.value.text == bad
    assert "\n" not in str(caught.value)


def test_unknown_fields_of_the_same_schema_are_ignored() -> None:
    job = Job(fleet_id=FLEET, round=1, job_id=JOB, attempt=1)
    assert Job.from_json(dumps(job.to_dict() | {"new": [1]})) == job
    with pytest.raises(Unreadable):
        Job.from_json(dumps(job.to_dict() | {"schema": 2}))


@given(moments, text, st.dictionaries(text, values, max_size=3))
def test_documents_come_back(moment: datetime, name: str, arguments: dict[str, Any]) -> None:
    spec = JobSpec(job_id=JOB, task=f"{name}.py@x", name="x", model="m", samples=0, task_args=finite_text(arguments))
    manifest = Manifest(
        fleet_id=FLEET,
        created=moment,
        backend="local",
        jobs=[spec],
        arguments=finite_text(arguments),
        models=["m"],
        submit_dir=".",
    )
    assert Manifest.from_json(manifest.to_bytes()) == manifest
    control = Control(fleet_id=FLEET, round=1, state="running", deadline=moment, beat=moment, limits=Limits(slots=1))
    assert Control.from_json(control.to_json()) == control
    lane = Lane(name="lane-01", jobs="a", events="b", dead="c", until=moment)
    assert Lane.from_json(lane.to_json()) == lane
    done = AttemptDone(
        fleet_id=FLEET,
        instance_id=name,
        ts=moment,
        round=1,
        job_id=JOB,
        attempt=1,
        status="completed",
        ended=True,
        duration_s=0,
        samples=SampleCounts(),
    )
    ended = JobDone(fleet_id=FLEET, job_id=JOB, round=1, log=None, attempt_done=done)
    assert JobDone.from_json(ended.to_bytes()) == ended


def finite_text(value: Any) -> Any:
    """The value as JSON gives it back: without NaN, the infinities and lone surrogates."""
    return json.loads(dumps(value))


# ids


@given(st.dictionaries(text, values, min_size=2, max_size=5), st.randoms())
def test_job_ids_do_not_depend_on_the_order_of_keys(arguments: dict[str, Any], random: Any) -> None:
    items = list(arguments.items())
    random.shuffle(items)
    given_id = job_id(task="t", task_args=arguments, model="m", arguments={"a": arguments})
    assert given_id == job_id(task="t", task_args=dict(items), model="m", arguments={"a": dict(items)})
    assert check_job_id(given_id) == given_id


@given(values, values)
def test_job_ids_differ_where_values_do(left: Any, right: Any) -> None:
    same = canonical(left) == canonical(right)
    ids = [job_id(task="t", task_args={"x": value}, model="m") for value in (left, right)]
    assert (ids[0] == ids[1]) == same


@pytest.mark.parametrize(
    "pair", [(1, "1"), (None, "None"), (True, 1), (False, 0), ([1], "[1]"), ("", None), ("a,b", ["a", "b"])]
)
def test_job_ids_keep_types_apart(pair: tuple[Any, Any]) -> None:
    left, right = (job_id(task="t", task_args={"x": value}, model="m") for value in pair)
    assert left != right
    assert job_id(task="t", task_args={}, model="m", shard=pair[0]) != job_id(
        task="t", task_args={}, model="m", shard=pair[1]
    )


def test_job_ids_depend_on_each_part() -> None:
    base: dict[str, Any] = {"task": "t", "task_args": {}, "model": "m", "shard": None, "arguments": {}}
    changes: list[dict[str, Any]] = [
        {},
        {"task": "u"},
        {"task_args": {"a": 1}},
        {"model": "n"},
        {"shard": 0},
        {"arguments": {"limit": 1}},
    ]
    assert len({job_id(**(base | change)) for change in changes}) == len(changes)


@given(sample_ids, sample_ids, st.integers(1, 5), st.integers(1, 5))
def test_sample_keys_are_equal_only_for_the_same_sample(left: Any, right: Any, one: int, two: int) -> None:
    same = type(left) is type(right) and left == right and one == two
    assert (sample_key(left, one) == sample_key(right, two)) == same


@given(moments)
def test_new_run_ids_are_run_ids(moment: datetime) -> None:
    fresh = new_run_id(moment)
    assert check_run_id(fresh) == fresh
    assert fresh.startswith(f"{moment:%Y-%m-%d-%H-%M-%S}-")
    assert fresh != new_run_id(moment)


@pytest.mark.parametrize("good", ["2023-07-05-10-55-42", "2025-02-26T05-43-33+00-00-f8ea", FLEET])
def test_historic_run_ids_are_read(good: str) -> None:
    assert check_run_id(good) == good


@given(st.text(max_size=40) | st.sampled_from([f"{FLEET}\n", f"../{FLEET}", f"{FLEET}/x", "", "٢٠٢٣-07-05-10-55-42"]))
def test_other_run_and_job_ids_are_refused(bad: str) -> None:
    assume(not re.fullmatch(r"[0-9a-f]{16}|[0-9T:+a-f-]{19,40}", bad, re.ASCII))
    with pytest.raises(BadId):
        check_run_id(bad)
    with pytest.raises(BadId):
        check_job_id(bad)


@given(st.text(max_size=300))
def test_slugs_are_safe_names(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", slug(name), re.ASCII)


# layout

_KEY = re.compile(r"[A-Za-z0-9_.+/-]+", re.ASCII)


@given(
    st.text(max_size=300) | st.sampled_from(["..", "../..", "/", "a/b", "a\0b", ".", "\n", "🙂"]), st.integers(1, 10**7)
)
def test_no_key_leaves_its_place_whatever_the_names(name: str, number: int) -> None:
    keys = [
        layout.manifest(FLEET),
        layout.control(FLEET),
        layout.segment(FLEET, number),
        layout.attempt_log(FLEET, JOB, number, name),
        layout.attempt_end(FLEET, JOB, number),
        layout.job_log(FLEET, JOB),
        layout.job_done(FLEET, JOB, number),
        layout.worker_log(FLEET, name),
        layout.report(FLEET),
        layout.partial(FLEET, JOB),
        layout.lane(name),
        layout.code(name),
        layout.wheel(name),
        layout.working(FLEET),
    ]
    for key in keys:
        assert _KEY.fullmatch(key), key
        assert not key.startswith("/") and "//" not in key
        assert not {".", ".."} & set(key.split("/"))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("bad", ["..", "", "a/b", "../2023-07-05-10-55-42", JOB.upper(), f"{JOB}\n"])
def test_ids_that_are_none_never_become_a_key(bad: str) -> None:
    for build in (layout.manifest, layout.control, layout.segments, layout.report, layout.working):
        with pytest.raises(BadId):
            build(bad)
    for build in (layout.job_log, layout.partial):
        with pytest.raises(BadId):
            build(FLEET, bad)  # type: ignore[call-arg]


@given(st.integers(1, 999_998))
def test_segments_sort_in_the_order_of_their_numbers(number: int) -> None:
    assert layout.segment(FLEET, number) < layout.segment(FLEET, number + 1)
    assert layout.segment(FLEET, number).startswith(layout.segments(FLEET))


# JSON


@given(values)
def test_json_is_strict_ascii_on_one_line(value: Any) -> None:
    line = dumps(value)
    assert line.isascii() and "\n" not in line and "NaN" not in re.sub(r'"[^"]*"', "", line)
    assert dump_bytes(value) == line.encode("ascii")
    assert TypeAdapter(Any).validate_json(line) == strict(line)
    if not any("\ud800" <= character <= "\udfff" for text in _texts(value) for character in text):
        assert strict(line) == json.loads(json.dumps(finite(value)))


@given(values)
def test_finite_changes_nothing_but_numbers_that_are_none(value: Any) -> None:
    assert "NaN" not in repr(finite([value])) or "NaN" in repr(_texts(value))
    if isinstance(value, float):
        assert finite(value) == (value if math.isfinite(value) else None)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("hostile", ["\ud83d", "\\ud83d", "\\\ud83d", "🙂\ude42\ud83d", "\0\n\x7f\u2028", "\\"])
def test_jq_reads_whatever_a_model_put_out(hostile: str) -> None:
    line = dumps({"text": hostile, hostile: math.nan})
    read = subprocess.run(["jq", "-r", "-j", ".text"], input=line, capture_output=True, text=True, check=True).stdout
    assert read == hostile.encode("utf-8", "backslashreplace").decode()


def test_zero_is_a_value_and_nan_is_none() -> None:
    assert (
        dumps({"a": 0, "b": 0.0, "c": False, "d": math.nan, "e": [math.inf]})
        == '{"a":0,"b":0.0,"c":false,"d":null,"e":[null]}'
    )


# events


def _event(message: SampleDone, seq: int) -> str:
    moment = datetime(2026, 11, 29, 14, 5, 33, tzinfo=UTC)
    return _line(events.of_sample(message), seq, moment)


def _line(event: events.Event, seq: int, moment: datetime) -> str:
    return events.line(events.written(event, seq=seq, fleet_id=FLEET, ts=moment))


@given(samples(), st.integers(1, 10**9), moments)
@settings(deadline=None)
def test_event_lines_begin_alike_and_are_one_line(message: SampleDone, seq: int, moment: datetime) -> None:
    line = _line(events.of_sample(message), seq, moment)
    assert line.endswith("\n") and line.count("\n") == 1
    event = strict(line)
    assert list(event)[:4] == ["ts", "seq", "type", "fleet_id"]
    assert list(event)[4:12] == ["job_id", "task", "model", "scores", "error", "duration_s", "instance_id", "status"]
    assert (event["ts"], event["seq"], event["fleet_id"]) == (stamp(moment), seq, FLEET)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["ts"])
    assert event["type"] == ("sample_retry" if message.will_retry else "result")
    assert (event["sample_id"], type(event["sample_id"])) == (message.sample_id, type(message.sample_id))
    assert event["error"] == message.error


def test_an_event_cannot_replace_its_own_head() -> None:
    line = _line({"type": "warning", "text": "x"}, 1, datetime(2026, 1, 1, tzinfo=UTC))
    assert strict(line) == {
        "ts": "2026-01-01T00:00:00.000Z",
        "seq": 1,
        "type": "warning",
        "fleet_id": FLEET,
        "text": "x",
    }
    with pytest.raises(AssertionError):
        _line({"type": "nonsense"}, 1, datetime(2026, 1, 1, tzinfo=UTC))


def test_replaced_and_truncated_results_say_so(sample: SampleDone) -> None:
    assert "replaces" not in events.of_sample(sample) and "truncated" not in events.of_sample(sample)
    event = events.of_sample(sample.model_copy(update={"truncated": True}), replaces="old")
    assert (event["replaces"], event["truncated"]) == ("old", True)


@pytest.fixture
def sample() -> SampleDone:
    scores = {
        "linux_scorer": {"value": {"main_task_success": "C", "side_task_success": math.nan}, "answer": "\ud83d 🙂"}
    }
    return SampleDone(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=datetime(2026, 1, 1, tzinfo=UTC),
        round=1,
        job_id=JOB,
        attempt=1,
        task="linux_agent",
        model="scripted/good",
        sample_id="naïve\n🙂",
        epoch=1,
        uuid="u",
        status="completed",
        scores=scores,
    )


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_recipes_of_the_docs_read_the_stream(sample: SampleDone) -> None:
    failed = sample.model_copy(update={"scores": {"linux_scorer": {"value": {"main_task_success": "I"}}}})
    retried = sample.model_copy(update={"will_retry": True})
    stream = "".join(_event(message, seq) for seq, message in enumerate([sample, failed, retried], 1))
    recipe = (
        '[.[] | select(.type=="result")] | {n: length, passed: '
        '([.[] | select(.scores.linux_scorer.value.main_task_success=="C")] | length)}'
    )
    done = subprocess.run(["jq", "-cs", recipe], input=stream, capture_output=True, text=True, check=True)
    assert strict(done.stdout) == {"n": 2, "passed": 1}


def test_a_heartbeat_of_a_version_that_does_not_say_whether_samples_move_can_be_read() -> None:
    beat = Heartbeat(
        fleet_id=FLEET,
        instance_id="i-1",
        ts=datetime.now(UTC),
        running=[JOB],
        load=0.0,
        disk_free=0,
        memory_free=0,
        moved=True,
    )
    older = beat.to_dict()
    del older["moved"]
    assert read_from_worker(dumps(older)) == beat.model_copy(update={"moved": False})
