"""The only module that touches what Inspect does not promise to keep: its command's callback, capture mode, running limits.

Called by the planner and the option parser of the operator's machine, and by job processes; the agent never imports it. Every
internal goes through `_internal`, so that a release of Inspect which moved one ends in one sentence instead of a traceback.
"""

import contextlib
import glob
import importlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalworker.contract.labels import marked

if TYPE_CHECKING:
    import click
    from click.core import ParameterSource
    from inspect_ai.model import ModelInfo

OLDEST = (0, 3, 285)
BEFORE = (0, 4, 0)
"""The versions of Inspect that this module was tried with: from OLDEST on, up to but not including BEFORE."""

_CLI = "inspect_ai._cli.eval"
_CAPTURE = "inspect_ai._eval.eval_set_manifest"

INTERNALS: dict[str, tuple[str, ...]] = {
    _CLI: ("eval_set_command", "eval_set", "process_common_options"),
    _CAPTURE: ("INSPECT_EVAL_SET_CAPTURE", "EVAL_SET_CAPTURE_VERSION", "sample_id_filter"),
    "inspect_ai._control.state": ("_sample_activity",),
    "inspect_ai._eval.eval_set_overrides": ("INSPECT_EVAL_SET_OVERRIDES", "EvalSetOverrides"),
    "inspect_ai._eval.eval_set_selection": ("INSPECT_EVAL_SET_SELECTION",),
    "inspect_ai._eval.evalset": ("GENERATE_CONFIG_FIELDS_TO_EXCLUDE", "build_eval_set_capture"),
    "inspect_ai._eval.loader": ("load_file_tasks", "load_tasks"),
    "inspect_ai._eval.score": ("reducers_from_log_header",),
    "inspect_ai._eval.task.error": ("_should_eval_fail",),
    "inspect_ai._eval.task.results": ("eval_results",),
    "inspect_ai._eval.task.util": (
        "resolve_task_sample_ids",
        "SampleIdMatcher",
        "sample_id_filter",
        "slice_dataset",
        "task_run_dir",
    ),
    "inspect_ai._sentinel._config": ("SentinelConfig",),
    "inspect_ai._util.config": ("parse_cli_args", "resolve_args"),
    "inspect_ai._util.error": ("PrerequisiteError",),
    "inspect_ai._util.json": ("to_json_safe",),
    "inspect_ai._util.registry": ("registry_lookup",),
    "inspect_ai.dataset._util": ("normalise_sample_id",),
    "inspect_ai.log._recorders.eval": ("LogStart", "_sample_filename"),
    "inspect_ai.log._samples": ("active_samples",),
    "inspect_ai.approval._policy": ("ApprovalPolicyConfig",),
    "inspect_ai.model._generate_config": ("GenerateConfigArgs",),
    "inspect_ai.model._model": ("sample_model_usage",),
    "inspect_ai.model._model_info": ("_get_model_info_direct",),
    "inspect_ai.review._policy": ("ReviewPolicyConfig",),
    "inspect_ai.scorer._reducer": ("reducer_log_name",),
    "inspect_ai.scorer._scorer": ("unique_scorer_name",),
    "inspect_ai.util._concurrency": (
        "DynamicSampleLimiter",
        "ResizableLimiter",
        "_concurrency_registry",
        "_task_sample_semaphores",
    ),
    "inspect_ai.util._display": ("init_display_type",),
    "inspect_ai.util._sandbox.docker.docker": ("task_project_name",),
}
"""All that is used here, by module: what a test looks at when Inspect is upgraded."""

CAPTURE_VERSION = 3
"""The version of Inspect's capture manifest that `capture` reads."""


class UnsupportedInspect(RuntimeError):
    """The installed Inspect is not one that this module knows; the text is one sentence."""


class InspectRefused(ValueError):
    """Inspect does not accept the options, the tasks or the models; the text is Inspect's own sentence, without markup."""


class TaskExited(RuntimeError):
    """A task's code ended the process (`sys.exit`) while its tasks were being loaded. `code` is what it gave."""

    def __init__(self, code: object) -> None:
        super().__init__(f"the code of a task called sys.exit({code!r}) while it was being loaded")
        self.code = code


@dataclass(frozen=True)
class CapturedTask:
    """One resolved task with one model, as Inspect's capture mode reports it.

    Attributes:
        name: the task's own name, which may differ from its function's.
        registry_name: the function's registered name, None for a task that no `@task` function made.
        file: where it was loaded from, relative to the working directory; None for a task of a package.
        args: its arguments as passed; `args_full` adds the defaults.
        samples: how many samples the limits select; `epochs` how often each runs.
        sequence: its place among the tasks of one model, from 0; Inspect lists the models one after the other.
        ids: the ids of the selected samples in the dataset's order, where `capture` was asked for them.
        whole: why this task cannot be run in slices, empty if it can; the end of a sentence.
        boxed: whether every sample runs in a Docker sandbox.
    """

    name: str
    model: str
    samples: int
    epochs: int
    identifier: str
    sequence: int = 0
    registry_name: str | None = None
    file: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    args_full: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    ids: list[int | str] = field(default_factory=list)
    whole: str = ""
    boxed: bool = False


@dataclass(frozen=True)
class LiveTask:
    """What the results of a task are computed with: its own scorers and metrics as they are after its code has run."""

    scorers: list[Any] | None
    metrics: Any
    headline_metric: Any


@dataclass(frozen=True)
class ScoredSample:
    """As much of a logged sample as its results need. `scores` is empty for one that was not scored."""

    id: int | str
    epoch: int
    scores: dict[str, Any]
    metadata: dict[str, Any]
    errored: bool


def check_version() -> None:
    """Raise UnsupportedInspect unless the installed Inspect is in the known range."""
    text = importlib.metadata.version("inspect-ai")
    found = tuple(int(number) for number in re.findall(r"\d+", text)[:3])
    if not OLDEST <= found < BEFORE:
        oldest, before = (".".join(map(str, version)) for version in (OLDEST, BEFORE))
        raise UnsupportedInspect(
            f"inspect-ai {text} is installed, but Inspect Fleet works with {oldest} or later, before {before}: install one of these"
        )


def _internal(module: str, name: str) -> Any:
    """One internal of Inspect; raises UnsupportedInspect where a release has moved it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        text = importlib.metadata.version("inspect-ai")
        raise UnsupportedInspect(
            f"inspect-ai {text} has no {module}.{name} any more, which Inspect Fleet needs: install an earlier version of it"
        ) from error


def plain(message: Any) -> str:
    """Inspect's message as one line of plain text: rich markup and line feeds removed."""
    from rich.console import Console
    from rich.errors import MarkupError
    from rich.text import Text

    if isinstance(message, str):
        try:
            text = Text.from_markup(message).plain
        except MarkupError:
            text = message
    else:
        console = Console(width=10_000, color_system=None)
        with console.capture() as captured:
            console.print(message)
        text = captured.get()
    return re.sub(r"^(ERROR|Error): ", "", re.sub(r"\s+", " ", text).strip())


@contextlib.contextmanager
def _inspect_sentences() -> Iterator[None]:
    """Turn Inspect's PrerequisiteError into ours."""
    prerequisite = _internal("inspect_ai._util.error", "PrerequisiteError")
    try:
        yield
    except prerequisite as error:
        raise InspectRefused(plain(error.message)) from error


@contextlib.contextmanager
def _replaced(module: str, **replacements: Any) -> Iterator[None]:
    """Give attributes of a module other values for a while. Not for use from two threads at once."""
    loaded = importlib.import_module(module)
    before = {name: _internal(module, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(loaded, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(loaded, name, value)


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables for a while; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def eval_set_params() -> "list[click.Parameter]":
    """The parameters of Inspect's own `eval-set` command. They belong to Inspect: copy one before changing it."""
    check_version()
    return list(_internal(_CLI, "eval_set_command").params)


def transport_fields() -> frozenset[str]:
    """The generate-config fields that, by Inspect's own rule, do not change what a task's results are."""
    return frozenset(_internal("inspect_ai._eval.evalset", "GENERATE_CONFIG_FIELDS_TO_EXCLUDE"))


def generate_fields() -> frozenset[str]:
    """The names of all generate-config fields, which `eval_set` takes as keyword arguments."""
    return frozenset(_internal("inspect_ai.model._generate_config", "GenerateConfigArgs").__annotations__)


def eval_set_arguments(
    params: dict[str, Any], tasks: list[str], sources: "dict[str, ParameterSource] | None" = None
) -> dict[str, Any]:
    """What Inspect's own command would pass to `eval_set`.

    Inspect's callback runs with a stand-in for `eval_set`, so the reading of `-T`, `--limit`, `--epochs-reducer` and all
    others is Inspect's. What the command does to its process beside (display, `--env`, debugger) is left out. `--json` and
    `--detach` are never passed on. Not for use from two threads at once.

    Args:
        params: values by Click's parameter names, as Click parsed them; one for each of `eval_set_params()` but `tasks`.
        tasks: the task specs.
        sources: where each value came from, by parameter name: Inspect asks where options exclude each other.

    Raises:
        InspectRefused: a value that Inspect does not accept.
        click.UsageError: the same where Inspect itself words it for Click.
    """
    check_version()
    import click

    command = _internal(_CLI, "eval_set_command")
    captured: dict[str, Any] = {}

    def take(**arguments: Any) -> tuple[bool, list[Any]]:
        captured.update(arguments)
        return True, []

    context = click.Context(command, info_name="inspect eval-set")
    for name, source in (sources or {}).items():
        context.set_parameter_source(name, source)
    given = params | {"tasks": tuple(tasks), "json_output": False, "detach": False}
    with _replaced(_CLI, eval_set=take, process_common_options=lambda _: None), _inspect_sentences(), context:
        try:
            command.callback(**given)
        except click.exceptions.Exit:
            pass
        except (ValueError, TypeError, OSError) as error:
            named = [name for name, value in params.items() if isinstance(value, str) and repr(value) in str(error)]
            option = f"--{named[0].replace('_', '-')}" if named else "an option"
            raise InspectRefused(f"Inspect cannot read {option}: {plain(str(error))}") from error
    if not captured:
        raise UnsupportedInspect("Inspect's eval-set command no longer calls eval_set as Inspect Fleet expects")
    return captured


def parse_environment(values: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`--env NAME=VALUE` as Inspect reads it."""
    parsed = _internal("inspect_ai._util.config", "parse_cli_args")(values, preserve_quoted_commas=True)
    return {name: str(value) for name, value in parsed.items()}


def parse_task_args(values: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """`-T NAME=VALUE` as Inspect reads it."""
    return dict(_internal("inspect_ai._util.config", "parse_cli_args")(values))


def read_config(file: str) -> Any:
    """What a YAML or JSON file that Inspect takes as an option's value holds; raises whatever reading it raises."""
    return _internal("inspect_ai._util.config", "resolve_args")(file)


def known_model(name: str) -> "ModelInfo | None":
    """What Inspect's own data says of a model, by its full name and without loading its provider; None if it has none."""
    found: ModelInfo | None = _internal("inspect_ai.model._model_info", "_get_model_info_direct")(name)
    return found


def apply_common_options(options: dict[str, Any]) -> None:
    """Set display, `--env` and debugger of this process as Inspect's command does, which `eval_set_arguments` leaves out."""
    _internal(_CLI, "process_common_options")(options)


def capture(arguments: dict[str, Any], *, ids: bool = False) -> list[CapturedTask]:
    """Let Inspect resolve the tasks and models of `eval_set(**arguments)` without running anything.

    Loads user code, and sets the display of this process to none: call it in a process that may be thrown away. With `ids`, the
    tasks come with the ids of their samples.

    Raises:
        InspectRefused: Inspect's own refusal (no such task, missing key, …).
        TaskExited: a task's code called `sys.exit`.
        Exception: whatever the user's code raises.
    """
    manifest, resolved = _resolve(arguments)
    tasks = [replace(task, boxed=_boxed(each)) for task, each in zip(_captured(manifest), resolved, strict=True)]
    if not ids:
        return tasks
    names = [each.task.name for each in resolved]
    return [
        replace(task, **_selection(each.task, arguments, names)) for task, each in zip(tasks, resolved, strict=True)
    ]


def live_task(arguments: dict[str, Any]) -> LiveTask:
    """The one task of `eval_set(**arguments)` with its scorers and metrics. Raises what `capture` raises."""
    _, [resolved] = _resolve(arguments)
    task = resolved.task
    scored = arguments.get("score") is not False and task.scorer
    return LiveTask(task.scorer if scored else None, task.metrics, task.headline_metric)


def _resolve(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Inspect's capture manifest, and the resolved tasks that it was made of."""
    check_version()
    from inspect_ai import eval_set

    _internal("inspect_ai.util._display", "init_display_type")("none")
    module, name = "inspect_ai._eval.evalset", "build_eval_set_capture"
    build, resolved = _internal(module, name), []

    def keep(tasks: list[Any], *rest: Any, **more: Any) -> Any:
        resolved.extend(tasks)
        return build(tasks, *rest, **more)

    with tempfile.TemporaryDirectory(prefix="inspect-fleet-") as folder:
        manifest = Path(folder) / "capture.json"
        modes = {
            _internal(_CAPTURE, "INSPECT_EVAL_SET_CAPTURE"): str(manifest),
            _internal("inspect_ai._eval.eval_set_selection", "INSPECT_EVAL_SET_SELECTION"): None,
            _internal("inspect_ai._eval.eval_set_overrides", "INSPECT_EVAL_SET_OVERRIDES"): None,
        }
        with _environment(modes), _replaced(module, **{name: keep}), _inspect_sentences():
            try:
                eval_set(**(arguments | {"log_dir": str(Path(folder) / "logs"), "display": "none"}))
            except SystemExit as end:
                if not manifest.exists():
                    raise TaskExited(end.code) from end
        if not manifest.exists():
            raise UnsupportedInspect("Inspect's eval_set no longer writes a capture manifest as Inspect Fleet expects")
        return json.loads(manifest.read_bytes()), resolved


def _boxed(resolved: Any) -> bool:
    """Whether every sample of a resolved task runs in a Docker sandbox. The task's own type stands above its samples'."""
    if resolved.sandbox is not None:
        return bool(resolved.sandbox.type == "docker")
    kinds = {sample.sandbox.type if sample.sandbox else None for sample in resolved.task.dataset}
    return kinds == {"docker"}


def _selection(task: Any, arguments: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The ids that `eval_set` would run of a task, numbered and selected as it does it, and why it cannot run a part of them."""
    util = "inspect_ai._eval.task.util"
    numbered = any(sample.id is None for sample in task.dataset)
    whole = ""
    if task.sample_source is not None:
        whole = "its samples are made while it runs"
    elif task.early_stopping is not None:
        whole = "it decides by the samples that have run which ones still run"
    elif numbered and (task.dataset.shuffled or arguments.get("sample_shuffle")):
        whole = "its samples have no ids and are shuffled, so no other process knows which is which"
    for number, sample in enumerate(task.dataset, start=1):
        if sample.id is None:
            sample.id = number
    chosen = _internal(util, "resolve_task_sample_ids")(task.name, arguments.get("sample_id"), names)
    dataset = _internal(util, "slice_dataset")(task.dataset, arguments.get("limit"), chosen)
    return {"ids": [sample.id for sample in dataset], "whole": whole}


def same_to_inspect(sample_id: int | str) -> str:
    """What two sample ids have in common when Inspect cannot select the one without the other: 1 and "01" for example."""
    return str(_internal("inspect_ai.dataset._util", "normalise_sample_id")(sample_id))


def exact_selection(ids: list[int | str]) -> list[int | str]:
    """The `sample_id` argument that selects these samples: to Inspect ids are patterns, and `name:` in front means a task."""
    return [each if isinstance(each, int) else glob.escape(each).replace(":", "[:]") for each in ids]


def select_fast(ids: list[int | str]) -> None:
    """Let this process select the samples of `exact_selection(ids)` by looking them up.

    Inspect matches every sample with every pattern, which takes seconds for thousands of either and hours for a hundred thousand. Any
    other selection is left to it. For a job process: the change lasts as long as the process.
    """
    util, manifest = "inspect_ai._eval.task.util", "inspect_ai._eval.eval_set_manifest"
    original, matcher = _internal(util, "sample_id_filter"), _internal(util, "SampleIdMatcher")
    selection, wanted = exact_selection(ids), {same_to_inspect(each) for each in ids}

    def sample_id_filter(sample_id: Any) -> Any:
        if sample_id != selection:
            return original(sample_id)
        return matcher(lambda sample_id: same_to_inspect(sample_id) in wanted, [])

    for module in (util, manifest):
        _internal(module, "sample_id_filter")
        importlib.import_module(module).sample_id_filter = sample_id_filter  # type: ignore[attr-defined]


def member_name(sample_id: int | str, epoch: int) -> str:
    """The name of a sample's member in a log."""
    return str(_internal("inspect_ai.log._recorders.eval", "_sample_filename")(sample_id, epoch))


def log_json(value: Any) -> bytes:
    """JSON as Inspect writes it into a log."""
    return bytes(_internal("inspect_ai._util.json", "to_json_safe")(value))


def log_start(header: Any) -> Any:
    """What a log begins with."""
    start = _internal("inspect_ai.log._recorders.eval", "LogStart")
    return start(version=header.version, eval=header.eval, plan=header.plan)


def too_many_errors(errors: int, total: int, fail_on_error: bool | float | None) -> bool:
    """Whether Inspect calls an eval of `total` samples failed for its errored ones."""
    return bool(_internal("inspect_ai._eval.task.error", "_should_eval_fail")(errors, total, fail_on_error))


def results_of(
    header: Any, task: LiveTask, samples: list[ScoredSample], total: int, early_stopping: Any = None
) -> tuple[Any, Any]:
    """`EvalResults` and reductions of a whole task by Inspect's own functions, as at the end of a run; (None, None) without scores.

    Args:
        header: a log's header, for the reducers. samples: by epoch, then in the dataset's order. total: samples × epochs as planned.
    """
    from inspect_ai.scorer import SampleScore

    unique = _internal("inspect_ai.scorer._scorer", "unique_scorer_name")
    names: list[str] = []
    for scorer in task.scorers or []:
        names.append(unique(scorer, names))
    scores = [
        {
            name: SampleScore(
                score=score,
                sample_id=sample.id,
                sample_metadata=sample.metadata,
                scorer=name if name in names else None,
            )
            for name, score in sample.scores.items()
        }
        for sample in samples
        if sample.scores or not sample.errored
    ]
    if not scores:
        return None, None
    results, reductions = _internal("inspect_ai._eval.task.results", "eval_results")(
        samples=total,
        scores=scores,
        reducers=_internal("inspect_ai._eval.score", "reducers_from_log_header")(header),
        scorers=task.scorers,
        metrics=task.metrics,
        scorer_names=names if task.scorers else None,
        early_stopping=early_stopping,
        completed_samples=sum(not sample.errored for sample in samples),
        headline_metric=task.headline_metric,
    )
    return results, reductions


def _captured(manifest: dict[str, Any]) -> list[CapturedTask]:
    if manifest["version"] != CAPTURE_VERSION:
        raise UnsupportedInspect(
            f"Inspect writes version {manifest['version']} of its capture manifest, Inspect Fleet reads {CAPTURE_VERSION}"
        )
    known = CapturedTask.__dataclass_fields__
    return [
        CapturedTask(**{key: value for key, value in task.items() if key in known and value is not None})
        for task in manifest["tasks"]
    ]


def task_registered(name: str) -> bool:
    """Whether an installed package (or code loaded before) has a task of this name."""
    return _internal("inspect_ai._util.registry", "registry_lookup")("task", name) is not None


def import_task_module(spec: str) -> None:
    """Import what a task spec (without `@name`) names: a package's entry point, or the module of a file. Runs user code."""
    if not task_registered(spec) and (path := Path(spec)).suffix == ".py":
        _internal("inspect_ai._eval.loader", "load_file_tasks")(path.absolute())


def set_sample_limit(n: int) -> int:
    """Change how many samples the running tasks of this process have in flight; lowering never interrupts a sample.

    Must be called in the thread of the event loop that runs the eval (`loop.call_soon_threadsafe`), because the limiters
    belong to the loop. Returns the number of tasks changed: 0 before the task has started, so call again then; a task's own
    retries keep the limit. Raises ValueError below 1.
    """
    if n < 1:
        raise ValueError(f"a limit on samples in flight must be at least 1, not {n}")
    module = "inspect_ai.util._concurrency"
    limiters = _internal(module, "_task_sample_semaphores").values()
    dynamic = _internal(module, "DynamicSampleLimiter")
    for limiter in limiters:
        if isinstance(limiter, dynamic):
            limiter.set_override(n)
        else:
            limiter.limit = n
    return len(limiters)


def set_connection_limit(n: int) -> int:
    """Change how many calls of each model of this process may be under way; lowering never interrupts a call.

    For evals with `max_connections` set. Must be called in the thread of the event loop that runs the eval. Returns the number of
    models changed: one whose first call is still to come is not among them. Raises ValueError below 1.
    """
    if n < 1:
        raise ValueError(f"a limit on connections must be at least 1, not {n}")
    registry = _internal("inspect_ai.util._concurrency", "_concurrency_registry")
    changed = 0
    for key, limiter in list(registry._semaphores.items()):
        if key.startswith("Model") and key.endswith("#static"):
            limiter.concurrency = n
            changed += 1
    return changed


def usage_so_far() -> dict[str, Any]:
    """The running sample's `ModelUsage` by model, of this try of it alone. For hooks that run inside of a sample."""
    return dict(_internal("inspect_ai.model._model", "sample_model_usage")())


@dataclass(frozen=True)
class LiveSample:
    """A sample that runs in this process.

    Attributes:
        key: Inspect's id of this execution.
        started: seconds since the epoch, None while it is being set up.
        progress: numbers that change whenever something happens in it (events, messages, tokens).
        work: the same without the tries of a model call, which may be refused again and again: they change when it gets on.
        activity: what it is in, as the end of a sentence.
    """

    key: str
    id: int | str
    epoch: int
    started: float | None
    progress: tuple[int, ...]
    work: tuple[int, ...]
    activity: str


def live_samples() -> list[LiveSample]:
    """The samples that run in this process. Safe in any thread; raises what reading a changing object may raise."""
    activity_of = _internal("inspect_ai._control.state", "_sample_activity")
    found = []
    for sample in list(_internal("inspect_ai.log._samples", "active_samples")()):
        activity = activity_of(sample)
        history = sample.transcript.history
        last = history.last_event
        written = (sample.total_messages, sample.total_tokens, int((activity or {}).get("tokens") or 0))
        found.append(
            LiveSample(
                key=sample.id,
                id=sample.sample.id,
                epoch=sample.epoch,
                started=sample.started,
                progress=(history.event_count, *written),
                work=(0 if last is not None and last.event == "model" else history.event_count, *written),
                activity=_activity_text(activity, started=sample.started is not None),
            )
        )
    return found


def _activity_text(activity: dict[str, Any] | None, *, started: bool) -> str:
    if activity is None:
        return "its solver or scorer" if started else "its setup (sandbox)"
    detail = activity["detail"]
    match activity["type"]:
        case "model":
            return f"a call of {detail}"
        case "tool":
            return f"the tool {detail}"
        case "retry_wait":
            return f"the pause after attempt {activity['count']} to call {detail}"
        case "approval" | "question":
            return "waiting for a person"
    return str(activity["type"])


def end_sample(key: str) -> None:
    """End a running sample with an error, as an operator does; one that has ended meanwhile is left alone.

    Must be called in the thread of the event loop that runs the eval.
    """
    for sample in list(_internal("inspect_ai.log._samples", "active_samples")()):
        if sample.id == key and not sample.terminal:
            sample.interrupt("error")


def reducer_names(epochs: Any) -> list[str] | None:
    """The names of an `Epochs`' reducers, from which Inspect makes the same ones again; None for the default."""
    if epochs.reducer is None:
        return None
    name = _internal("inspect_ai.scorer._reducer", "reducer_log_name")
    return [name(reducer) for reducer in epochs.reducer]


def checkpoint_to_json(config: Any) -> dict[str, Any]:
    """A CheckpointConfig in the wire form that Inspect gives to external runners."""
    overrides = _internal("inspect_ai._eval.eval_set_overrides", "EvalSetOverrides")(checkpoint=config)
    return dict(overrides.model_dump(mode="json", exclude_none=True)["checkpoint"])


def checkpoint_from_json(value: dict[str, Any]) -> Any:
    """The CheckpointConfig that `checkpoint_to_json` wrote."""
    return (
        _internal("inspect_ai._eval.eval_set_overrides", "EvalSetOverrides")
        .model_validate({"checkpoint": value})
        .checkpoint
    )


def config_class(name: str) -> Any:
    """A pydantic class of Inspect that has no public name: ApprovalPolicyConfig, ReviewPolicyConfig or SentinelConfig."""
    module = next(module for module, names in INTERNALS.items() if name in names)
    return _internal(module, name)


@dataclass(frozen=True)
class SandboxOf:
    """A sandbox that a task or one of its samples asks for. `folder` is the task's own, which relative files are in."""

    task: str
    type: str
    config: Any
    folder: str


def task_sandboxes(specs: list[str], task_args: dict[str, Any]) -> list[SandboxOf]:
    """The sandboxes of tasks, those of single samples among them. Runs user code, which may raise anything."""
    check_version()
    load, run_dir = (
        _internal("inspect_ai._eval.loader", "load_tasks"),
        _internal("inspect_ai._eval.task.util", "task_run_dir"),
    )
    found: list[SandboxOf] = []
    with _inspect_sentences():
        for task in load(specs, task_args):
            wanted = [task.sandbox, *(sample.sandbox for sample in task.dataset)]
            found += [SandboxOf(task.name, one.type, one.config, run_dir(task)) for one in wanted if one is not None]
    return found


def name_sandbox_projects(mark: str, record: Path) -> None:
    """Give this process's Compose projects names that hold the job's mark, and write each name to `record` before it is used.

    Compose labels all containers, networks and volumes with the project's name. The names keep Inspect's own pattern, so that
    Inspect's own clean-up goes on finding them. For a job process: the change lasts as long as the process.
    """
    module = "inspect_ai.util._sandbox.docker.docker"
    original = _internal(module, "task_project_name")

    def task_project_name(task: str) -> str:
        name = marked(original(task), mark)
        with record.open("a") as file:
            file.write(f"{name}\n")
        return name

    importlib.import_module(module).task_project_name = task_project_name  # type: ignore[attr-defined]
