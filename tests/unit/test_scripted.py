"""Scripted models: every behaviour and every fault, through Inspect itself."""

import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.hooks import Hooks, ModelRetry, hooks
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes, match, model_graded_qa
from inspect_ai.solver import use_tools
from inspect_ai.tool import Tool, ToolParam, tool

from evalworker.scripted_answers import UNKNOWN, calculate, digest, mixed, right, wrong
from evalworker.scripted_faults import EXIT_CRASH, selector
from evalworker.scripted_model import smallest

SUMS = [Sample(id=n, input=f"Question {n}. What is {n} + {n}?", target=str(2 * n)) for n in range(1, 9)]
EXAMPLES = "../../examples"

retries: list[ModelRetry] = []


@hooks(name="test_scripted_retries", description="keeps what Inspect says of its retries")
class Retries(Hooks):
    async def on_model_retry(self, data: ModelRetry) -> None:
        retries.append(data)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may reach a network or needs a key."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a scripted model connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)
    retries.clear()


def run(task: Any, model: str, log_dir: Path, **options: Any) -> EvalLog:
    options = {"continue_on_fail": True} | options
    return eval(task, model=f"scripted/{model}", log_dir=str(log_dir), display="none", ctl_server=False, **options)[0]


def accuracy_of(log: EvalLog) -> float:
    assert log.results is not None
    return log.results.scores[0].metrics["accuracy"].value


def sums(**options: Any) -> Task:
    return Task(dataset=SUMS, scorer=match(), **options)


# behaviours


@pytest.mark.parametrize(("model", "expected"), [("good", 1.0), ("wrong", 0.0), ("refuse", 0.0), ("comply", 1.0)])
def test_behaviours_score_as_they_say(model: str, expected: float, tmp_path: Path) -> None:
    log = run(sums(), model, tmp_path)
    assert log.status == "success"
    assert accuracy_of(log) == expected


def test_mixed_is_right_for_the_same_half_every_time(tmp_path: Path) -> None:
    first, second = run(sums(), "mixed", tmp_path), run(sums(), "mixed", tmp_path, max_samples=1)
    assert 0.0 < accuracy_of(first) < 1.0
    assert [s.output.completion for s in first.samples or []] == [s.output.completion for s in second.samples or []]
    prompts = [f"What is {n} * 7?" for n in range(400)]
    assert 150 < sum(mixed(prompt) == right(prompt) for prompt in prompts) < 250


def test_usage_comes_from_the_texts(tmp_path: Path) -> None:
    log = run(sums(), "good", tmp_path)
    usage = log.stats.model_usage["scripted/good"]
    assert usage.input_tokens == sum(-(-len(str(sample.input)) // 4) for sample in SUMS)
    assert usage.output_tokens == len(SUMS)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@tool
def measure() -> Tool:
    async def execute(count: int, unit: str, exact: bool = False) -> str:
        """Measure something.

        Args:
            count: How often.
            unit: In what.
            exact: How well.
        """
        return f"measured {count} {unit}"

    return execute


def test_comply_calls_the_first_tool_once_and_answers(tmp_path: Path) -> None:
    log = run(Task(dataset=SUMS[:1], solver=[use_tools(measure()), _loop()], scorer=match()), "comply", tmp_path)
    assert log.samples is not None
    calls = [
        call for message in log.samples[0].messages if message.role == "assistant" for call in message.tool_calls or []
    ]
    assert [(call.function, call.arguments) for call in calls] == [("measure", {"count": 1, "unit": "example"})]
    assert [m.text for m in log.samples[0].messages if m.role == "tool"] == ["measured 1 example"]
    assert accuracy_of(log) == 1.0


def _loop() -> Any:
    from inspect_ai.solver import generate

    return generate(tool_calls="loop")


@pytest.mark.parametrize(("model", "expected"), [("good", 1.0), ("comply", 1.0), ("wrong", 0.0), ("refuse", 0.0)])
def test_agents_end_by_submitting(model: str, expected: float, tmp_path: Path) -> None:
    log = run(
        Task(dataset=SUMS[:2], solver=react(tools=[measure()]), scorer=includes(), message_limit=20), model, tmp_path
    )
    assert log.status == "success"
    assert accuracy_of(log) == expected
    assert all(sample.limit is None for sample in log.samples or [])


def test_a_scripted_model_can_grade(tmp_path: Path) -> None:
    task = Task(dataset=SUMS[:2], scorer=model_graded_qa(model="scripted/good"))
    assert accuracy_of(run(task, "wrong", tmp_path)) == 1.0
    task = Task(dataset=SUMS[:2], scorer=model_graded_qa(model="scripted/wrong"))
    assert accuracy_of(run(task, "good", tmp_path)) == 0.0


@pytest.mark.parametrize("model", ["refuse", "comply"])
@pytest.mark.parametrize("name", ["memory_poison", "autonomy_hijack", "data_exfil"])
def test_public_evals_reach_a_score(public_tasks: None, name: str, model: str, tmp_path: Path) -> None:
    log = run(f"inspect_evals/agent_threat_bench_{name}", model, tmp_path)
    assert log.status == "success", log.error
    assert log.results is not None and log.samples
    assert {score.name for score in log.results.scores} == {"utility", "security"}
    assert all(sample.error is None and sample.scores for sample in log.samples)
    called = any(message.role == "tool" for sample in log.samples for message in sample.messages)
    assert called == (model == "comply")


@pytest.mark.parametrize("task", ["arithmetic", "linux_agent", "choices"])
def test_examples_tell_good_from_wrong(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    good, wrong = (run(f"{EXAMPLES}/{task}.py", model, tmp_path) for model in ("good", "wrong"))
    assert (good.status, wrong.status) == ("success", "success")
    assert (accuracy_of(good), accuracy_of(wrong)) == (1.0, 0.0)


def test_linux_example_scores_what_the_recipes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    log = run(f"{EXAMPLES}/linux_agent.py", "comply", tmp_path)
    for sample in log.samples or []:
        assert sample.scores is not None
        assert sample.scores["linux_scorer"].value == {"main_task_success": "C", "side_task_success": "I"}


# answers


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 12 + 30?", "42"),
        ("Question 7. What is 8 * (3 - 5)?", "-16"),
        ("Compute -3 - 4.", "-7"),
        ("2^10 = ?", "1024"),
        ("What is 7 / 2?", "3.5"),
        ("What is 6 × 7?", "42"),
        ("Answer with exactly: done-4", "done-4"),
        ('Reply with exactly "yes".', "yes"),
        ("What is 2 + 2?\nEnd with ANSWER: $NUMBER", "ANSWER: 4"),
        ("Pick one. ANSWER: $LETTER\nWhat is 2 + 2?\n\nA) 3\nB) 5\nC) 4", "ANSWER: C"),
        ("Pick one. ANSWER: $LETTER\nWho?\n\nA) Ada\nB) Bob", "ANSWER: A"),
        ("Who was it?", UNKNOWN),
        ("Was it in 1999?", UNKNOWN),
        ("What is 1 / 0?", UNKNOWN),
        ("What is 9 ^ 9 ^ 9 ^ 9?", UNKNOWN),
    ],
)
def test_good_answers_by_the_documented_rules(prompt: str, answer: str) -> None:
    assert right(prompt) == answer
    assert wrong(prompt) != answer


@given(st.text(max_size=200))
def test_any_prompt_has_an_answer(prompt: str) -> None:
    assert isinstance(right(prompt), str)
    assert mixed(prompt) in (right(prompt), wrong(prompt))


@given(st.text("0123456789+-*/%^(). e_", max_size=60))
def test_calculation_is_bounded_and_never_raises(text: str) -> None:
    value = calculate(text)
    assert value is None or abs(value) <= 10**50


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_wrong_never_contains_the_right_number(left: int, right_: int) -> None:
    prompt = f"What is {left} + {right_}?"
    assert right(prompt) == str(left + right_)
    assert right(prompt) not in wrong(prompt)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "string", "maxLength": 3}, "exa"),
        ({"type": "string", "enum": ["x", "y"]}, "x"),
        ({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]}, [1.0]),
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {}}, "required": ["a"]}, {"a": True}),
        ({"type": ["null", "string"]}, None),
    ],
)
def test_smallest_value_of_a_schema(schema: dict[str, Any], value: Any) -> None:
    assert smallest(ToolParam.model_validate(schema)) == value


# faults


def faulted(log: EvalLog) -> list[int | str]:
    return [sample.id for sample in log.samples or [] if sample.error is not None]


@pytest.mark.parametrize(
    ("fault", "last_line"),
    [
        ("auth", "AuthenticationError: Error code: 401 - invalid key"),
        ("error", "ValueError: scripted error"),
        ("oom", "MemoryError: 32 MB were not the end of this process"),
    ],
)
def test_faults_strike_the_named_samples(fault: str, last_line: str, tmp_path: Path) -> None:
    log = run(sums(), "good", tmp_path, model_args={fault: ["Question 2.", "Question 5."], "memory_mb": 32})
    assert log.status == "error"
    assert faulted(log) == [2, 5]
    for sample in log.samples or []:
        if sample.error is not None:
            assert sample.error.traceback.strip().endswith(last_line)
    assert retries == []


def test_every_nth_is_the_same_in_every_run(tmp_path: Path) -> None:
    expected = [sample.id for sample in SUMS if int(digest(str(sample.input)), 16) % 3 == 0]
    assert 0 < len(expected) < len(SUMS)
    for _ in range(2):
        assert faulted(run(sums(), "good", tmp_path, model_args={"error": 3})) == expected


@pytest.mark.parametrize(
    ("fault", "name", "status"), [("rate_limit", "RateLimitError", 429), ("timeout", "APITimeoutError", None)]
)
def test_inspect_retries_what_a_provider_would(fault: str, name: str, status: int | None, tmp_path: Path) -> None:
    log = run(sums(), "good", tmp_path, max_retries=2, model_args={fault: "Question 3.", "retry_pause": 0})
    assert faulted(log) == [3]
    assert [(each.exception_type, each.status_code) for each in retries] == [(name, status)] * 2


@pytest.mark.parametrize("fault", ["rate_limit", "timeout"])
def test_once_is_healed_by_inspects_own_retry(fault: str, tmp_path: Path) -> None:
    arguments = {fault: "once:1", "retry_pause": 0, "state_dir": str(tmp_path / "state")}
    log = run(sums(), "good", tmp_path, max_retries=1, model_args=arguments)
    assert (log.status, accuracy_of(log), len(retries)) == ("success", 1.0, len(SUMS))


def test_once_is_healed_by_the_next_attempt(tmp_path: Path) -> None:
    arguments = {"error": ["once:Question 3.", "Question 4."], "state_dir": str(tmp_path / "state")}
    first = run(sums(), "good", tmp_path, model_args=arguments)
    second = run(sums(), "good", tmp_path, model_args=arguments)
    assert (faulted(first), faulted(second)) == ([3, 4], [])


def test_hang_lasts_until_a_limit_ends_it(tmp_path: Path) -> None:
    log = run(sums(time_limit=1), "good", tmp_path, model_args={"hang": "Question 6."})
    assert [(sample.id, sample.limit.type) for sample in log.samples or [] if sample.limit] == [(6, "time")]


def _in_child(log_dir: str, arguments: dict[str, Any], address_space_mb: int | None) -> None:
    if address_space_mb is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + (address_space_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    log = run(sums(), "good", Path(log_dir), model_args=arguments)
    os._exit(0 if log.status == "success" else 1)


def exit_status(log_dir: Path, arguments: dict[str, Any], address_space_mb: int | None = None) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["inspect_ai", "evalworker.scripted_model"])
    child = context.Process(target=_in_child, args=(str(log_dir), arguments, address_space_mb))
    child.start()
    child.join(120)
    return child.exitcode


@pytest.mark.parametrize(("fault", "status"), [("crash", EXIT_CRASH), ("kill", -signal.SIGKILL)])
def test_the_process_dies_once_and_another_one_lives(fault: str, status: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()  # the fork server is reached over a socket
    arguments = {fault: "once:Question 5.", "state_dir": str(tmp_path / "state")}
    assert exit_status(tmp_path, arguments) == status
    assert run(sums(), "good", tmp_path, model_args=arguments).status == "success"


def test_memory_that_cannot_be_had_is_a_memory_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    assert exit_status(tmp_path, {"oom": "Question 5.", "memory_mb": 100_000}, address_space_mb=2048) == 1


def test_latency_and_jitter_are_the_inputs_own() -> None:
    api: Any = get_model("scripted/good", latency=2, jitter=0.5, memoize=False).api
    pauses = [api._pause(str(sample.input)) for sample in SUMS]
    assert all(1 <= pause <= 3 for pause in pauses)
    assert len(set(pauses)) == len(SUMS)
    assert pauses == [api._pause(str(sample.input)) for sample in SUMS]


# arguments


@pytest.mark.parametrize(
    ("value", "strikes", "spares"),
    [
        (1, "anything", None),
        ("b", "abc", "xyz"),
        (["x", "y"], "fly", "ant"),
        ("once:b", "abc", "xyz"),
        ("1", "anything", None),
    ],
)
def test_selectors(value: Any, strikes: str, spares: str | None) -> None:
    assert strikes in selector(value)
    assert spares is None or spares not in selector(value)


@pytest.mark.parametrize("value", [0, "0", "", [], True, "once:"])
def test_selectors_that_select_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        selector(value)


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        ("best", {}, "Model name scripted/best not recognized"),
        ("good", {"latancy": 1}, "no argument 'latancy'"),
        ("good", {"error": "once:1"}, "state_dir"),
    ],
)
def test_mistakes_are_one_sentence(model: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        get_model(f"scripted/{model}", config=GenerateConfig(), memoize=False, **arguments)
    assert "\n" not in str(caught.value)


def test_inspect_finds_the_provider_and_loads_it_late(monkeypatch: Any) -> None:
    monkeypatch.undo()
    program = """
import sys
from inspect_ai._util.entrypoints import ensure_entry_points
from inspect_ai.model import get_model
ensure_entry_points()
assert "evalworker.scripted" in sys.modules
assert not {"evalworker.scripted_model", "boto3", "evalops"} & set(sys.modules)
print(get_model("scripted/good"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "scripted/good\n"
