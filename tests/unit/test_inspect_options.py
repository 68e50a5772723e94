"""Our commands read Inspect's options as Inspect does, refuse what a fleet cannot honour, and take none of its names."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from evalops import inspect_options
from evalops.inspect_options import InspectCommand, TypedArguments, changes_results, typed_arguments
from evalops.option_classes import ARGUMENT_OF, CLASSES, FLEET_DEFAULTS, RESULT_ARGUMENTS, Own, Refused, Result, Run
from evalworker import inspect_internals
from evalworker.arguments import decode, encode


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("INSPECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def command(**attributes: Any) -> tuple[click.Command, list[TypedArguments]]:
    seen: list[TypedArguments] = []

    @click.command(cls=InspectCommand, **attributes)
    @click.option("--budget", type=float)
    @click.pass_context
    def run(ctx: click.Context, budget: float | None) -> None:
        seen.append(typed_arguments(ctx))

    return run, seen


def ours(*args: str, **attributes: Any) -> TypedArguments:
    run, seen = command(**attributes)
    result = CliRunner().invoke(run, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def refused(*args: str, **attributes: Any) -> str:
    run, _ = command(**attributes)
    result = CliRunner().invoke(run, list(args), catch_exceptions=False)
    assert result.exit_code == 2
    return result.output.partition("Error: ")[2].strip()


def inspects(monkeypatch: pytest.MonkeyPatch, *args: str) -> dict[str, Any]:
    """What Inspect's own command line passes to eval_set."""
    from inspect_ai._cli import eval as cli

    captured: dict[str, Any] = {}

    def take(**arguments: Any) -> tuple[bool, list[Any]]:
        captured.update(arguments)
        return True, []

    with monkeypatch.context() as patch:
        patch.setattr(cli, "eval_set", take)
        patch.setattr(cli, "process_common_options", lambda _: None)
        cli.eval_set_command.main(list(args), standalone_mode=False, auto_envvar_prefix="INSPECT_EVAL_SET")
    return captured


LINES: list[list[str]] = [
    [],
    ["-T", "a=1,2", "-T", "b=x", "-T", "long-name=true"],
    ["-T", "n=3", "-T", "f=0.5", "-T", "none=null", "-T", "day=2024-01-01"],
    ["-T", "items=[1, two, {three: 3}]", "-T", 'map={"a": {"b": [1]}}'],
    ["-T", "text='a,b'", "-T", "url=http://x/y?z=1"],
    ["--task-config", "config.yaml", "-T", "b=override"],
    ["-M", "location=us-east5", "-M", "n=3"],
    ["--model-config", "config.yaml"],
    ["--model-base-url", "http://127.0.0.1:8000/v1"],
    ["--solver", "generate", "-S", "tool_calls=none", "-S", "cache=true"],
    ["--solver", "solvers.py@mine", "--solver-config", "config.yaml"],
    ["--limit", "10"],
    ["--limit", "5-10"],
    ["--sample-id", "1,2"],
    ["--sample-id", "a:one, b"],
    ["--sample-shuffle"],
    ["--sample-shuffle", "42"],
    ["--epochs", "3", "--epochs-reducer", "mean,max"],
    ["--epochs", "5", "--epochs-reducer", "at_least_2"],
    ["--epochs", "2", "--no-epochs-reducer"],
    ["--token-limit", "500k"],
    ["--token-limit", "output:1m", "--message-limit", "7", "--turn-limit", "3"],
    ["--time-limit", "60", "--working-limit", "30", "--cost-limit", "0.5", "--model-cost-config", "prices.yaml"],
    ["--model-role", "grader=mockllm/model", "--model-role", "critic=mockllm/a,mockllm/b"],
    ["--model-role", "grader={model: mockllm/model, temperature: 0.5}"],
    [
        "--model-spec",
        "{model: mockllm/model, temperature: 0}",
        "--model-spec",
        "{model: mockllm/model, temperature: 1}",
    ],
    ["--generate-config", "generate.yaml", "--max-tokens", "9"],
    ["--no-fail-on-error"],
    ["--fail-on-error", "0.2"],
    ["--fail-on-error", "0"],
    ["--continue-on-fail", "--retry-on-error", "3", "--score-on-error"],
    ["--retry-on-error"],
    ["--retry-attempts", "3", "--no-retry-immediate", "--retry-wait", "5", "--retry-connections", "0.5"],
    ["--temperature", "0.0", "--top-p", "0.9", "--seed", "1", "--stop-seqs", "a,b", "--logit-bias", "42=10,43=-10"],
    ["--cache", "--cache-prompt", "false", "--batch", "100"],
    ["--cache", "3h", "--batch"],
    ["--adaptive-connections", "4-20-80", "--max-retries", "2", "--timeout", "30", "--attempt-timeout", "10"],
    ["--adaptive-connections", "false", "--max-connections", "7"],
    ["--response-schema", '{"name": "x", "json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}'],
    ["--extra-headers", "{X-Trace-Id: abc}", "--extra-body", '{"chat": {"think": true}}', "--modalities", "image"],
    [
        "--no-parallel-tool-calls",
        "--no-internal-tools",
        "--logprobs",
        "--top-logprobs",
        "3",
        "--reasoning-effort",
        "low",
    ],
    ["--sandbox", "docker:compose.yaml", "--sandbox-prebuilt", "--max-sandboxes", "3", "--max-subprocesses", "2"],
    ["--checkpoint", "token:500k"],
    ["--checkpoint"],
    ["--tags", "a,b", "--metadata", "who=me", "--metadata", "n=1"],
    ["--approval", "approval.yaml", "--no-score", "--no-score-display"],
    [
        "--log-level",
        "info",
        "--log-level-transcript",
        "debug",
        "--no-log-images",
        "--log-model-api",
        "--log-buffer",
        "5",
    ],
    ["--log-shared", "20", "--no-log-realtime", "--max-samples", "4", "--max-dataset-memory", "100"],
    ["--incomplete-action", "error", "--incomplete-max", "0.5"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line)[:60] or "nothing")
def test_arguments_equal_those_of_inspects_own_command(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text("a: 1\nb: [x, y]\n")
    Path("generate.yaml").write_text("temperature: 0.3\nmax_connections: 5\nmax_tokens: 4\n")
    line = [*line, *([] if "--model-spec" in line else ["--model", "mockllm/a,mockllm/b"])]
    got = ours("one.py", "two.py@x", *line)
    expected = inspects(monkeypatch, "one.py", "two.py@x", *line)

    assert got.tasks == expected.pop("tasks")
    model = expected.pop("model")
    models = model if isinstance(model, list) else model.split(",")
    assert encode({"models": got.models}) == encode({"models": models})
    unset = {"debug_errors", "log_dir_allow_dirty"}  # refused here; Inspect passes its flags' False on
    kept = {name: value for name, value in inspect_options._compact(expected).items() if name not in unset}
    for name, value in FLEET_DEFAULTS.items():
        if name not in kept or (name == "log_shared" and kept[name] == 0) or name == "retry_cleanup":
            kept[name] = value
    assert encode(got.arguments) == encode(kept)
    assert encode(decode(json.loads(json.dumps(encode(got.arguments))))) == encode(got.arguments)


def test_every_option_of_inspects_is_classed() -> None:
    unclassed = {param.name for param in inspect_internals.eval_set_params()} - CLASSES.keys()
    assert not unclassed, (
        f"Inspect has new options: say in evalops.option_classes whether they change results: {unclassed}"
    )


def test_no_class_for_an_option_that_inspect_has_no_more() -> None:
    assert not CLASSES.keys() - {param.name for param in inspect_internals.eval_set_params()}


def test_every_argument_of_a_class_is_one_of_eval_sets() -> None:
    import inspect

    from inspect_ai import eval_set

    known = inspect.signature(eval_set).parameters.keys() | inspect_internals.generate_fields()
    beside = {
        "env",
        "no_ansi",
        "traceback_locals",
        "generate_config",
    }  # reach eval_set through the environment or apart
    arguments = {ARGUMENT_OF.get(n, n) for n, kind in CLASSES.items() if isinstance(kind, Result | Run)}
    assert arguments - known - beside == set()


def test_generate_config_is_classed_as_inspect_classes_it() -> None:
    transport, fields = inspect_internals.transport_fields(), inspect_internals.generate_fields()
    assert not RESULT_ARGUMENTS & transport
    assert {name for name in fields if not changes_results(name)} == transport & fields


@pytest.mark.parametrize("name", [name for name, kind in CLASSES.items() if isinstance(kind, Refused)])
def test_refused_options_are_refused_with_their_reason(name: str) -> None:
    option = next(param for param in inspect_options.inspect_params() if param.name == name)
    assert isinstance(option, click.Option)
    kind = CLASSES[name]
    assert isinstance(kind, Refused)
    value = {"log_format": "json", "debug_port": "1", "max_tasks": "3", "display": "full", "scan_metadata": "a=b"}.get(
        name, "x"
    )
    args = [option.opts[-1]] if option.is_flag else [f"{option.opts[-1]}={value}"]
    if name == "ctl_server":
        args = ["--ctl-server=keep"]
    if len(option.opts[-1]) == 2:
        args = [option.opts[-1], "x"]
    assert refused("t.py", "--model", "mockllm/m", *args) == f"{option.opts[-1]} cannot be used here: {kind.reason}"


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--display", "plain"], "display", "plain"),
        (["--log-format", "eval"], "log_format", "eval"),
        (["--ctl-server", "false"], "ctl_server", False),
    ],
)
def test_values_that_can_be_honoured_are(args: list[str], name: str, value: object) -> None:
    assert ours("t.py", "--model", "mockllm/m", *args).arguments[name] == value


def test_refused_settings_of_the_environment_are_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LOG_DIR", "elsewhere")
    monkeypatch.setenv("INSPECT_EVAL_MAX_TASKS", "3")
    monkeypatch.setenv("INSPECT_EVAL_TRACE", "false")
    run, seen = command()
    result = CliRunner().invoke(run, ["t.py", "--model", "mockllm/m"], catch_exceptions=False)
    assert result.stderr.splitlines() == [
        f"warning: {option}, set in the environment, is ignored here: {CLASSES[name].reason}"  # type: ignore[union-attr]
        for option, name in (("--max-tasks", "max_tasks"), ("--log-dir", "log_dir"))
    ]
    assert seen[0].arguments == FLEET_DEFAULTS | {
        "log_level": "warning",
        "log_level_transcript": "info",
        "log_refusals": False,
    }


def test_in_this_process_more_can_be_honoured() -> None:
    got = ours("t.py", "--model", "mockllm/m", "--max-tasks", "3", "--display", "rich", in_process=True)
    assert got.arguments["max_tasks"] == 3
    assert got.arguments["display"] == "rich"
    assert "continue_on_fail" not in got.arguments
    assert refused("t.py", "--model", "m/m", "--log-dir", "x", in_process=True).startswith("--log-dir cannot be used")


def test_models_by_repetition_commas_alias_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ours("--model", "a/1, a/2", "--models", "a/3", "--model", "a/1").models == ["a/1", "a/2", "a/3"]
    monkeypatch.setenv("INSPECT_EVAL_MODEL", "a/4,a/5")
    assert ours("t.py").models == ["a/4", "a/5"]
    assert ours("t.py", "--model", "a/6").models == ["a/6"]


def test_what_the_shell_is_set_to_is_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is named by its id alone has its own models, for every command."""
    monkeypatch.setenv("INSPECT_EVAL_MODEL", "a/4")
    run, _ = command()
    assert inspect_options.typed_names(run.make_context("run", ["t.py"])) == (["t.py"], [])
    assert inspect_options.typed_names(run.make_context("run", ["--model", "a/1,a/2"])) == ([], ["a/1", "a/2"])


def test_tasks_by_argument_option_and_comma() -> None:
    got = ours("a.py", "odd,name.py", "--tasks", "b.py,c.py@x", "--task", "d", "--model", "m/m")
    assert got.tasks == ["a.py", "odd,name.py", "b.py", "c.py@x", "d"]
    assert ours("--model", "m/m").tasks == []


def test_task_options_serve_a_command_without_inspects_options() -> None:
    @click.command()
    @inspect_options.task_options
    @click.option("--own")
    def show(tasks: tuple[str, ...], task_names: tuple[str, ...], own: str | None) -> None:
        click.echo(inspect_options.collect_tasks(tasks, task_names))

    assert CliRunner().invoke(show, ["a", "--task", "b,c", "--own", "x"]).output == "['a', 'b', 'c']\n"


def test_no_model_is_one_sentence() -> None:
    assert refused("t.py") == (
        "no model was given: use --model, or set INSPECT_EVAL_MODEL (`--model none` for none at all)"
    )


def test_environment_variables_of_inspects_own_command_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_EVAL_LIMIT", "3")
    monkeypatch.setenv("INSPECT_EVAL_SET_MODEL_BASE_URL", "http://here")
    monkeypatch.setenv("INSPECT_EVAL_LOG_SHARED", "30")
    got = ours("t.py", "--model", "m/m")
    assert (got.arguments["limit"], got.arguments["model_base_url"], got.arguments["log_shared"]) == (
        3,
        "http://here",
        30,
    )


def test_result_arguments_are_those_that_change_results() -> None:
    plain = ours("t.py", "--model", "m/m")
    assert plain.result_arguments == {}
    run = ours("t.py", "--model", "m/m", "--timeout", "3", "--tags", "x", "--max-samples", "2", "--retry-attempts", "1")
    assert run.result_arguments == {}
    got = ours("t.py", "--model", "m/m", "--limit", "1-2", "--temperature", "0", "-T", "a=1", "--env", "MODE=hard")
    assert got.result_arguments == {
        "limit": {"$type": "tuple", "items": [0, 2]},
        "temperature": 0.0,
        "env": {"MODE": "hard"},
    }
    json.dumps(got.result_arguments)


def test_where_a_role_is_served_does_not_change_results() -> None:
    role = ours("t.py", "--model", "m/m", "--model-role", "g={model: mockllm/x, temperature: 1}").result_arguments
    assert role["model_roles"]["g"] == {
        "$type": "Model",
        "model": "mockllm/x",
        "config": {"$type": "GenerateConfig", "value": {"temperature": 1.0}},
        "args": {},
    }


def test_environment_option() -> None:
    got = ours("t.py", "--model", "m/m", "--env", "A=1", "--env", "B=x y", "--traceback-locals")
    assert got.environment == {"A": "1", "B": "x y", "INSPECT_TRACEBACK_LOCALS": "1"}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--env", "OPENAI_API_KEY=marker"], "--env OPENAI_API_KEY: this looks like a credential"),
        (["--env", "DEPLOY_KEY=marker"], "--env DEPLOY_KEY: this looks like a credential"),
        (["-M", "api_key=marker"], "-M: 'api_key' looks like a credential"),
        (["--extra-headers", "{Authorization: marker}"], "--extra-headers: 'Authorization' looks like a credential"),
        (["--env", "HTTP_PROXY=http://me:marker@host"], "--env: the URL holds a password"),
    ],
)
def test_credentials_are_refused(args: list[str], text: str) -> None:
    said = refused("t.py", "--model", "m/m", *args)
    assert said.startswith(text)
    assert "marker" not in said


@pytest.mark.parametrize(
    ("args", "kept", "warned"),
    [
        ([], 60, False),
        (["--log-shared"], 10, False),
        (["--log-shared", "60"], 60, False),
        (["--log-shared", "300"], 60, True),
        (["--log-shared", "false"], 60, True),
    ],
)
def test_logs_are_synced_at_least_every_minute(args: list[str], kept: int, warned: bool) -> None:
    run, seen = command()
    result = CliRunner().invoke(run, ["t.py", "--model", "m/m", *args], catch_exceptions=False)
    assert seen[0].arguments["log_shared"] == kept
    assert ("--log-shared is set to 60" in result.stderr) == warned


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--no-such-option"], "No such option"),
        (["--limit", "many"], "Inspect cannot read --limit"),
        (["--epochs", "x"], "Invalid value for '--epochs'"),
        (["--token-limit", "x"], "Invalid value"),
    ],
)
def test_wrong_options_are_refused_at_once(args: list[str], text: str) -> None:
    assert text in refused("t.py", "--model", "m/m", *args)


def test_help_shows_what_can_be_used() -> None:
    run, _ = command()
    text = CliRunner().invoke(run, ["--help"]).output
    own, _, inspects_part = text.partition("Inspect's options")
    assert "--budget" in own
    assert "--task, --tasks" in own
    assert "--limit" in inspects_part
    assert "--model, --models" in inspects_part
    for name in ("--log-dir", "--bundle-dir", "--scanner ", "--max-tasks"):
        assert name not in text


def test_json_and_detach_are_left_to_the_command() -> None:
    assert {name for name, kind in CLASSES.items() if isinstance(kind, Own)} == {"json_output", "detach"}
    assert not {"json_output", "detach"} & {param.name for param in inspect_options.inspect_params()}


def commands_with_inspects_options(command: click.Command | None) -> list[InspectCommand]:
    if isinstance(command, InspectCommand):
        return [command]
    if not isinstance(command, click.Group):
        return []
    ctx = click.Context(command)
    below = (command.get_command(ctx, name) for name in command.list_commands(ctx))
    return [found for child in below for found in commands_with_inspects_options(child)]


def option_names(params: list[click.Parameter]) -> set[str]:
    return {
        name for param in params if isinstance(param, click.Option) for name in [*param.opts, *param.secondary_opts]
    }


def test_own_names_never_collide_with_inspects() -> None:
    """Or scripts written for Inspect would change their meaning; these two mean the same in both."""
    from evalops.cli import ct, ies

    taken = option_names(inspect_internals.eval_set_params())
    commands = [command for root in (ct, ies) for command in commands_with_inspects_options(root)]
    own = [option_names([*command.params, *inspect_options.task_params()]) for command in commands]
    assert {"--max-workers", "--task"} <= set().union(*own)
    assert set().union(*own) & taken == {"--json", "--detach"}
