"""Every option of `inspect eval-set`, under its own name and with its own meaning, on the commands of ours that run tasks.

A command takes them by `cls=InspectCommand`; its function sees only its own parameters and calls `typed_arguments(ctx)`. The
parameters are Inspect's own Click objects, fetched when the command is used: other commands never import Inspect.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from evalops.option_classes import (
    ARGUMENT_OF,
    CLASSES,
    FLEET_DEFAULTS,
    IN_PROCESS_DEFAULTS,
    LONGEST_LOG_SHARED_S,
    RESULT_ARGUMENTS,
    Own,
    Refused,
)
from evalops.ui import note
from evalworker import inspect_internals
from evalworker.arguments import CannotEncode, encode
from evalworker.inspect_internals import InspectRefused
from evalworker.redact import secret_variable

F = TypeVar("F", bound=Callable[..., Any])

_META = "evalops.inspect_options"
_TASK_PARAMS = ("tasks", "task_names")
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
_NOT_PASSED_ON = frozenset({"tasks", "model", "log_dir"})
_COMMON = (
    "log_level",
    "log_dir",
    "display",
    "no_ansi",
    "traceback_locals",
    "env",
    "debug",
    "debug_port",
    "debug_errors",
)


@dataclass(frozen=True)
class TypedArguments:
    """What the user asked of Inspect, as typed values.

    Attributes:
        tasks: task specs in the order given, as typed; empty means all tasks of the current directory.
        models: names, or Inspect's `Model` objects where --model-spec made them.
        arguments: keyword arguments of `eval_set` but `tasks`, `model` and `log_dir`; those that Inspect would give
            itself are left out. `evalworker.arguments.encode` makes them fit for the manifest.
        result_arguments: the part that changes results, as JSON: what goes into a job's id beside task, task
            arguments and model.
        environment: `--env`, and what other options set through the environment.
    """

    tasks: list[str]
    models: list[Any]
    arguments: dict[str, Any]
    result_arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def split_names(values: Iterable[str]) -> list[str]:
    """Names from repeated options and commas, in order."""
    return [name for value in values for part in value.split(",") if (name := part.strip())]


def task_params() -> list[click.Parameter]:
    """`TASKS…` and `--task/--tasks`: for commands that take tasks but not Inspect's options, see `task_options`."""
    return [
        click.Argument(["tasks"], nargs=-1),
        click.Option(
            ["--task", "--tasks", "task_names"],
            multiple=True,
            metavar="TASK[,TASK…]",
            help="Task to run, as an argument would name it; repeat it or use commas.",
        ),
    ]


def task_options(function: F) -> F:
    """Decorator: `tasks` and `task_names` as parameters of a command; `collect_tasks` joins them."""
    # click reads this list from its end
    function.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(task_params())]  # type: ignore[attr-defined]
    return function


def collect_tasks(tasks: Iterable[str], task_names: Iterable[str]) -> list[str]:
    """The task specs of arguments and options, in order. An argument is one task, commas and all; an option is split."""
    return [*tasks, *split_names(task_names)]


@functools.cache
def inspect_params(in_process: bool = False) -> tuple[click.Parameter, ...]:
    """Copies of Inspect's parameters for a command of ours; what is refused stays known but out of the help."""
    params: list[click.Parameter] = []
    for original in inspect_internals.eval_set_params():
        name = original.name or ""
        kind = CLASSES.get(name)
        if name == "tasks" or isinstance(kind, Own) or not isinstance(original, click.Option):
            continue
        option = _models_option(original) if name == "model" else copy.copy(original)
        option.envvar = (
            [*_envvars(original), f"INSPECT_EVAL_SET_{name.upper()}"] if original.allow_from_autoenv else None
        )
        option.hidden = option.hidden or (
            isinstance(kind, Refused) and not kind.allowed and not _honoured(kind, in_process)
        )
        params.append(option)
    return tuple(params)


def _envvars(option: click.Option) -> list[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])


def _models_option(original: click.Option) -> click.Option:
    help_text = f"{original.help} Repeat it or use commas for several."
    return click.Option(
        ["--model", "--models", "model"],
        multiple=True,
        metavar="MODEL[,MODEL…]",
        envvar=original.envvar,
        help=help_text,
    )


def _honoured(refused: Refused, in_process: bool) -> bool:
    return in_process and refused.in_process


class InspectCommand(click.Command):
    """A command with the options of `inspect eval-set` beside its own. Use as `@click.command(cls=InspectCommand)`.

    `in_process=True` is for a command whose `eval_set` runs in this process, where more can be honoured than in a fleet.
    """

    def __init__(self, *args: Any, in_process: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.in_process = in_process
        self._task_params = task_params()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Tasks, our own options, Inspect's options."""
        return [*self._task_params, *super().get_params(ctx), *inspect_params(self.in_process)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and keep what is Inspect's apart: the command's function gets its own parameters alone."""
        rest = super().parse_args(ctx, args)
        names = [*_TASK_PARAMS, *(param.name or "" for param in inspect_params(self.in_process))]
        ctx.meta[_META] = {name: ctx.params.pop(name) for name in names if name in ctx.params}
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Our own options first, Inspect's under a title of their own."""
        own = [*self._task_params, *super().get_params(ctx)]
        sections = {
            "Options": own,
            "Inspect's options (as `inspect eval-set` has them)": inspect_params(self.in_process),
        }
        for title, params in sections.items():
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def changes_results(argument: str) -> bool:
    """Whether a keyword argument of `eval_set` changes results; a generate-config field does unless Inspect says otherwise."""
    if argument in RESULT_ARGUMENTS:
        return True
    return argument in inspect_internals.generate_fields() and argument not in inspect_internals.transport_fields()


def typed_arguments(ctx: click.Context, *, resuming: bool = False) -> TypedArguments:
    """What an `InspectCommand` was given for Inspect. Loads no task; raises click.UsageError with one sentence.

    `resuming`: a run is named that has its own tasks and models, so neither need be given.
    """
    in_process = bool(getattr(ctx.command, "in_process", False))
    params: dict[str, Any] = dict(ctx.meta[_META])
    tasks = collect_tasks(*(params.pop(name) for name in _TASK_PARAMS))
    sources = {name: source for name in params if (source := ctx.get_parameter_source(name)) is not None}
    try:
        _refuse(params, sources, in_process)
        environment = _environment(params)
        params["model"] = ",".join(dict.fromkeys(split_names(params["model"]))) or None
        raw = inspect_internals.eval_set_arguments(params, tasks, sources)
        models = [] if resuming and not tasks and raw["model"] is None else _models(raw["model"])
        arguments = _with_defaults(_compact(raw), params, sources, in_process)
        if not in_process:
            encode(arguments | {"models": models})
        result_arguments = _result_arguments(arguments, environment)
    except (CannotEncode, InspectRefused, inspect_internals.UnsupportedInspect) as error:
        raise click.UsageError(str(error), ctx) from error
    if params.get("traceback_locals"):
        environment["INSPECT_TRACEBACK_LOCALS"] = "1"
    return TypedArguments(tasks, models, arguments, result_arguments, environment)


def apply_common_options(ctx: click.Context) -> None:
    """Do in this process what Inspect's command does with display, `--env` and the debugger: for `in_process` commands."""
    inspect_internals.apply_common_options({name: ctx.meta[_META].get(name) for name in _COMMON})


def _refuse(params: dict[str, Any], sources: dict[str, ParameterSource], in_process: bool) -> None:
    """Refuse what was typed and cannot be honoured; forget it, with a warning, where it only stands in the environment."""
    by_name = {param.name: param for param in inspect_params(in_process)}
    for name, kind in CLASSES.items():
        if not isinstance(kind, Refused) or name not in params or _honoured(kind, in_process):
            continue
        option, source = by_name[name], sources.get(name, ParameterSource.DEFAULT)
        if source in _GIVEN and params[name] in kind.allowed:
            continue
        if source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[-1]} cannot be used here: {kind.reason}")
        if source in _GIVEN and params[name]:
            note(f"warning: {option.opts[-1]}, set in the environment, is ignored here: {kind.reason}")
        params[name] = () if getattr(option, "multiple", False) else None


def _environment(params: dict[str, Any]) -> dict[str, str]:
    environment = inspect_internals.parse_environment(params.get("env") or ())
    for name in environment:
        if secret_variable(name):
            raise CannotEncode(
                f"--env {name}: this looks like a credential, and options are stored with the run: "
                f"set it in the environment instead"
            )
    return environment


def _models(value: Any) -> list[Any]:
    if value is None:
        raise click.UsageError(
            "no model was given: use --model, or set INSPECT_EVAL_MODEL (`--model none` for none at all)"
        )
    return list(value) if isinstance(value, list) else split_names([value])


def _compact(raw: dict[str, Any]) -> dict[str, Any]:
    """Without what Inspect would take by itself, so that a new option of Inspect's leaves the ids of old jobs alone."""
    from inspect_ai import eval_set

    defaults = inspect.signature(eval_set).parameters
    return {
        name: value
        for name, value in raw.items()
        if value is not None
        and value != {}
        and name not in _NOT_PASSED_ON
        and not (name in defaults and _same(value, defaults[name].default))
    }


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _with_defaults(
    arguments: dict[str, Any], params: dict[str, Any], sources: dict[str, ParameterSource], in_process: bool
) -> dict[str, Any]:
    """The fleet's defaults where the user did not say, and his own display and log interval where he did."""
    given = {
        ARGUMENT_OF.get(name, name) for name, source in sources.items() if source in _GIVEN and params[name] is not None
    }
    if "display" in given:
        arguments["display"] = params["display"]
    for name, value in (IN_PROCESS_DEFAULTS if in_process else FLEET_DEFAULTS).items():
        if name not in given:
            arguments[name] = value
    if not in_process and not 1 <= arguments.get("log_shared", 0) <= LONGEST_LOG_SHARED_S:
        note(
            f"warning: --log-shared is set to {LONGEST_LOG_SHARED_S}, because unfinished logs are kept at this interval"
        )
        arguments["log_shared"] = LONGEST_LOG_SHARED_S
    return arguments


def _result_arguments(arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    chosen = {k: v for k, v in arguments.items() if changes_results(k) and k != "task_args"}
    if environment:
        chosen["env"] = dict(environment)
    return {name: without_base_url(value) for name, value in encode(chosen).items()}


def without_base_url(value: Any) -> Any:
    """An encoded value whose models name no server: as for Inspect, where a model is served does not change a job."""
    if isinstance(value, list):
        return [without_base_url(item) for item in value]
    if isinstance(value, dict):
        hidden = {"base_url"} if value.get("$type") == "Model" else set()
        return {key: without_base_url(item) for key, item in value.items() if key not in hidden}
    return value


def typed_names(ctx: click.Context) -> tuple[list[str], list[str]]:
    """The task specs and model names that stand on the command line; [] for none. What the shell is set to is no wish for a run."""
    params = ctx.meta[_META]
    typed = ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
    tasks = collect_tasks(*(params.get(name) or () for name in _TASK_PARAMS))
    return tasks, split_names(params.get("model") or ()) if typed else []


def typed_options(ctx: click.Context, ours: Collection[str] = ()) -> list[str]:
    """Inspect's options that stand on the command line, tasks and models apart, and those of `ours`, names of the command's own."""
    params = [
        param for param in inspect_params(bool(getattr(ctx.command, "in_process", False))) if param.name != "model"
    ]
    params += [param for param in ctx.command.params if param.name in ours]
    return [
        param.opts[0] for param in params if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
    ]


def suppose(ctx: click.Context, *, tasks: list[str] | None = None, models: list[str] | None = None) -> None:
    """Go on as if these had been given: for a retry, whose manifest knows them. Call before `typed_arguments`."""
    if tasks is not None:
        ctx.meta[_META] |= {"tasks": tuple(tasks), "task_names": ()}
    if models is not None:
        ctx.meta[_META]["model"] = tuple(models)
