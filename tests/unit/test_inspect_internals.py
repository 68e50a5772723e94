"""What Inspect does not promise to keep: these tests say which of it moved when Inspect is upgraded."""

import asyncio
import importlib
import importlib.metadata
import json
import os

import click
import pytest
from click.core import ParameterSource
from rich.panel import Panel

from evalworker import inspect_internals as internals

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

@task
def first(n: int = 3, tone="dry"):
    return Task(dataset=[Sample(input="hi", target="hi")] * n, name="renamed", epochs=2)

@task
def second():
    return Task(dataset=[Sample(input="hi", target="hi")] * 5)
"""


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in internals.INTERNALS.items() for name in names]
)
def test_each_internal_is_where_it_is_expected(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"Inspect has moved {module}.{name}: see inspect_internals"


def test_the_installed_version_is_in_the_known_range() -> None:
    internals.check_version()


@pytest.mark.parametrize("version", ["0.3.284", "0.2.999", "0.4.0", "1.0.0"])
def test_another_version_is_refused_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(internals.UnsupportedInspect, match=rf"inspect-ai {version} is installed.*0\.3\.285 or later"):
        internals.eval_set_params()


@pytest.mark.parametrize("version", ["0.3.285", "0.3.300", "0.3.286.dev4+g12ab"])
def test_versions_in_the_range_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    internals.check_version()


def test_a_moved_internal_is_named() -> None:
    with pytest.raises(internals.UnsupportedInspect, match=r"has no inspect_ai\._cli\.eval\.gone any more"):
        internals._internal("inspect_ai._cli.eval", "gone")


def test_parameters_are_inspects() -> None:
    by_name = {param.name: param for param in internals.eval_set_params()}
    assert {"tasks", "limit", "t", "m", "s", "retry_attempts", "json_output", "detach"} <= by_name.keys()
    assert all(isinstance(param, click.Parameter) for param in by_name.values())


def test_fields_of_generate_config() -> None:
    assert {"max_connections", "timeout", "cache"} <= internals.transport_fields()
    assert {"temperature", "max_tokens"} <= internals.generate_fields() - internals.transport_fields()


def test_plain_takes_markup_and_line_feeds_away() -> None:
    assert internals.plain("[bold]ERROR[/bold]: no key.\n\n[bold]pip install x[/bold]") == "no key. pip install x"
    assert internals.plain("an odd [/tag]") == "an odd [/tag]"
    assert "inside" in internals.plain(Panel("inside"))


def parsed(*args: str) -> tuple[dict[str, object], dict[str, ParameterSource]]:
    command = click.Command("probe", params=[p for p in internals.eval_set_params() if p.name != "tasks"])
    with command.make_context("probe", list(args)) as ctx:
        return ctx.params, {name: ctx.get_parameter_source(name) for name in ctx.params}  # type: ignore[misc]


def test_arguments_are_read_by_inspect_and_the_process_stays_as_it_was() -> None:
    from inspect_ai.util import _display

    display = _display._display_type
    params, sources = parsed(
        "--limit", "5-10", "-T", "a=1,2", "--env", "FROM_ENV_OPTION=1", "--display", "plain", "--json"
    )
    arguments = internals.eval_set_arguments(params, ["x.py"], sources)
    assert arguments["tasks"] == ["x.py"]
    assert arguments["limit"] == (4, 10)
    assert arguments["task_args"] == {"a": ["1", "2"]}
    assert not {"json_output", "detach"} & arguments.keys()
    assert "FROM_ENV_OPTION" not in os.environ
    assert _display._display_type == display
    from inspect_ai import eval_set
    from inspect_ai._cli import eval as cli

    assert cli.eval_set is eval_set


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--limit", "many"], "cannot read --limit.*many"),
        (["--generate-config", "no-such-file.yaml"], "config file no-such-file.yaml does not exist"),
        (["--run-config", "x.yaml"], "--run-config is only supported by inspect eval"),
        (["--model-spec", "{temperature: 1}"], "needs a 'model' name"),
        (
            ["--model-spec", "{model: mockllm/model}", "--model", "mockllm/other"],
            "--model-spec cannot be used with --model",
        ),
        (["--checkpoint", "turn:0"], "must be > 0"),
    ],
)
def test_what_inspect_refuses_is_one_plain_sentence(args: list[str], text: str) -> None:
    params, sources = parsed(*args)
    with pytest.raises(internals.InspectRefused, match=text) as refused:
        internals.eval_set_arguments(params, [], sources)
    assert "\n" not in str(refused.value)


def test_environment_option_is_read_as_inspect_reads_it() -> None:
    assert internals.parse_environment(["A=1", "B=x y", 'C="a,b"']) == {"A": "1", "B": "x y", "C": "a,b"}


def test_capture_resolves_tasks_and_models(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASKS)
    before = dict(os.environ)
    captured = internals.capture(
        {"tasks": ["tasks.py"], "model": ["mockllm/a", "mockllm/b"], "task_args": {"n": 4}, "limit": 3}
    )
    assert [(t.model, t.sequence, t.name, t.registry_name, t.file) for t in captured] == [
        ("mockllm/a", 0, "renamed", "first", "tasks.py"),
        ("mockllm/a", 1, "second", "second", "tasks.py"),
        ("mockllm/b", 0, "renamed", "first", "tasks.py"),
        ("mockllm/b", 1, "second", "second", "tasks.py"),
    ]
    assert captured[0].args == {"n": 4}
    assert captured[0].args_full == {"n": 4, "tone": "dry"}
    assert (captured[0].samples, captured[0].epochs) == (3, 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["tasks.py"]
    assert "INSPECT_EVAL_SET_CAPTURE" not in os.environ
    assert {k: v for k, v in os.environ.items() if before.get(k) != v} == {}


def test_capture_tells_an_exit_of_the_users_from_its_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text("import sys\nsys.exit(0)\n" + TASKS)
    with pytest.raises(internals.TaskExited) as exited:
        internals.capture({"tasks": ["tasks.py"], "model": "mockllm/a"})
    assert exited.value.code == 0


def test_capture_refuses_another_manifest_version() -> None:
    with pytest.raises(internals.UnsupportedInspect, match="version 4"):
        internals._captured({"version": 4, "tasks": []})


def test_import_task_module_runs_the_file_or_the_package(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imported.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n" + TASKS)
    internals.import_task_module("imported.py")
    assert (tmp_path / "ran").exists()
    internals.import_task_module("no_such_package/task")


def test_sample_limit_reaches_a_running_task(tmp_path) -> None:
    """Two samples may run at once until the limit is raised from within the eval's own loop."""
    from inspect_ai import Task, eval_set
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import Generate, TaskState, solver

    running, peaks = 0, {"before": 0, "after": 0}
    raised = asyncio.Event()

    @solver
    def count():  # type: ignore[no-untyped-def]
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            nonlocal running
            running += 1
            phase = "after" if raised.is_set() else "before"
            peaks[phase] = max(peaks[phase], running)
            if running == 2 and not raised.is_set():
                raised.set()
                assert internals.set_sample_limit(5) == 1
            if raised.is_set() and peaks["after"] < 5:
                for _ in range(200):
                    await asyncio.sleep(0.01)
                    if peaks["after"] >= 5:
                        break
            else:
                await raised.wait()
            running -= 1
            return state

        return solve

    ok, _ = eval_set(
        Task(dataset=[Sample(input=str(i), target="x") for i in range(12)], solver=count(), name="limited"),
        model="mockllm/model",
        log_dir=str(tmp_path),
        max_samples=2,
        display="none",
        ctl_server=False,
    )
    assert ok
    assert peaks == {"before": 2, "after": 5}


def test_sample_limit_pins_an_adaptive_task() -> None:
    from inspect_ai.util import AdaptiveConcurrency
    from inspect_ai.util import _concurrency as concurrency

    async def pin() -> tuple[int, int]:
        concurrency._task_sample_semaphores.clear()
        limiter = concurrency.DynamicSampleLimiter(AdaptiveConcurrency(), "no-model")
        concurrency.register_task_sample_semaphore("t", limiter)
        changed = internals.set_sample_limit(3)
        return changed, int(limiter._limiter.total_tokens)

    try:
        assert asyncio.run(pin()) == (1, 3)
    finally:
        concurrency._task_sample_semaphores.clear()


def test_sample_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        internals.set_sample_limit(0)


def test_captured_task_is_json() -> None:
    from dataclasses import asdict

    task = internals.CapturedTask(name="a", model="m/n", samples=1, epochs=1, identifier="i", args={"x": [1, None]})
    assert internals.CapturedTask(**json.loads(json.dumps(asdict(task)))) == task
