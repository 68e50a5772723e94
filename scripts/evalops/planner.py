"""From tasks and models to jobs: one (task, task arguments, model) each, with its id and its number of samples.

Called by the commands that submit a run, before anything is spent. The user's code is loaded in a forked child, so that nothing
it does (print, exit, crash, hang) reaches the controller. It makes no decision about workers and writes nothing.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from evalops import shards
from evalops.inspect_options import without_base_url
from evalops.ui import EXIT_USAGE
from evalworker import inspect_internals
from evalworker.arguments import encode
from evalworker.contract.documents import JobSpec, total_samples
from evalworker.contract.failures import Category
from evalworker.contract.ids import job_id
from evalworker.inspect_internals import CapturedTask, InspectRefused, TaskExited, UnsupportedInspect

TIMEOUT_S = 900.0
"""How long loading all tasks may take: a task may download its dataset the first time."""

OUTPUT_BYTES = 16 * 1024
"""How much of the end of what the user's code prints is kept, for the sentence about its failure."""

_POLL_S = 0.1


class PlanError(Exception):
    """The tasks or models cannot be planned.

    Attributes:
        sentence: what is wrong, where, and what to do.
        category: always `config` so far: nothing has been run.
        exit: the exit code of the command.
        output: the end of what the user's code printed, for a person who wants more.
    """

    def __init__(
        self, sentence: str, category: Category = Category.CONFIG, exit: int = EXIT_USAGE, output: str = ""
    ) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.category = category
        self.exit = exit
        self.output = output


def plan(
    tasks: list[str],
    models: list[Any],
    arguments: dict[str, Any],
    result_arguments: dict[str, Any],
    submit_dir: str | Path,
    *,
    environment: dict[str, str] | None = None,
    path: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    warn: Callable[[str], None] = lambda _: None,
    wish: shards.Wish | None = None,
    boxes: Callable[[], str] = lambda: "",
) -> list[JobSpec]:
    """The jobs of a submission, model by model, in the order of the tasks; the shards of a task come before the job that merges them.

    Args:
        tasks: task specs as typed; none means all tasks of the submit directory, as for Inspect.
        models: names or Inspect's `Model` objects.
        arguments: typed keyword arguments of `eval_set`, as `inspect_options.typed_arguments` gives them.
        result_arguments: those that change results, as JSON.
        submit_dir: where the user submits: task files are named relative to it.
        environment: more environment variables for the loading of the tasks (`--env`).
        path: directories from which modules are imported first, as jobs will do it.
        timeout_s: bound on the loading of all tasks, in seconds.
        warn: told of what is odd but no error.
        wish: which tasks are run in shards; None keeps all of them whole.
        boxes: why Docker sandboxes cannot run where the jobs will, empty when they can; asked when a task needs them.

    Raises:
        PlanError: one sentence.
    """
    folder = Path(submit_dir).resolve()
    specs = [_relative(task, folder) for task in tasks]
    for spec in specs:
        _check_file(spec, folder)
    call = {**arguments, "tasks": specs, "model": models}
    captured = _capture_in_child(call, folder, environment or {}, list(path), timeout_s, ids=wish is not None)
    _check_found(specs, captured, folder)
    jobs = _jobs(captured, models, result_arguments)
    _check_jobs(jobs)
    _check_boxes(captured, boxes)
    taken = {name for task in captured for name in task.args_full} | {name for task in captured for name in task.args}
    for name in sorted(set(arguments.get("task_args") or {}) - taken):
        warn(f"-T {name}: no task takes this argument, so it is ignored")
    if wish is None:
        return jobs
    return _sharded(list(zip(jobs, captured, strict=True)), wish, models, result_arguments, warn)


def _sharded(
    planned: list[tuple[JobSpec, CapturedTask]],
    wish: shards.Wish,
    models: list[Any],
    result_arguments: dict[str, Any],
    warn: Callable[[str], None],
) -> list[JobSpec]:
    """The jobs with those tasks divided that are to be."""
    total = sum(job.samples for job, _ in planned)
    found: list[JobSpec] = []
    for job, task in planned:
        count = shards.how_many(wish, job.samples, len(task.ids), total)
        if count > 1 and task.whole and wish.asked:
            warn(f"{job.name} is not run in shards: {task.whole}")
        slices = shards.divide(task.ids, count, inspect_internals.same_to_inspect) if not task.whole else []
        if len(slices) < 2:
            found.append(job)
            continue

        def id_of(name: str, job: JobSpec = job) -> str:
            identity = _identity(models[job.model_index], result_arguments)
            return job_id(task=job.task, task_args=job.task_args, model=job.model, shard=name, arguments=identity)

        found += shards.shard_jobs(job, task.ids, slices, id_of)
    return found


def totals(jobs: list[JobSpec]) -> dict[str, Any]:
    """What `--estimate` shows: the number of jobs, of samples (sample × epoch) in all, and of each job."""
    return {
        "jobs": len(jobs),
        "samples": total_samples(jobs),
        "tasks": len({(job.task, json.dumps(job.task_args, sort_keys=True, default=str)) for job in jobs}),
        "models": len({job.model_index for job in jobs}),
        "per_job": [
            {"job_id": job.job_id, "task": job.name, "model": job.model, "samples": job.samples} for job in jobs
        ],
    }


def _relative(task: str, folder: Path) -> str:
    """The spec with its file relative to the submit directory: that is how a worker, elsewhere, finds it."""
    path, at, name = task.partition("@")
    if not Path(path).expanduser().is_absolute():
        return task
    return os.path.relpath(Path(path).expanduser(), folder) + at + name


def _check_file(spec: str, folder: Path) -> None:
    """What can be said of a spec without loading it; Inspect passes over some of these in silence."""
    path = spec.partition("@")[0]
    if path.endswith(".ipynb"):
        raise PlanError(f"{path}: tasks in notebooks cannot run on a fleet: move the task into a .py file")
    file = folder / path
    if file.suffix != ".py":
        return
    if not file.is_file():
        if any(sign in path for sign in "*?["):
            return
        raise PlanError(f"{path}: there is no such file in {folder}")
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise PlanError(f"{path}{line} cannot be imported: {type(error).__name__}: {text}") from error


def _check_found(specs: list[str], captured: list[CapturedTask], folder: Path) -> None:
    """Each file or directory named must have given a task: Inspect passes over one that has none."""
    files = {os.path.normpath(folder / task.file) for task in captured if task.file is not None}
    for spec in specs:
        place = os.path.normpath(folder / spec)
        if Path(place).is_file() and place not in files:
            raise PlanError(f"{spec}: there is no function with @task in this file")
        if Path(place).is_dir() and not any(file.startswith(place + os.sep) for file in files):
            raise PlanError(f"{spec}: there is no file with a @task function in this directory")


def _jobs(captured: list[CapturedTask], models: list[Any], result_arguments: dict[str, Any]) -> list[JobSpec]:
    jobs: list[JobSpec] = []
    index = -1
    for task in captured:
        index = min(
            index + (task.sequence == 0), len(models) - 1
        )  # Inspect lists all tasks of the first model, then all of the second, …
        identity = _identity(models[index], result_arguments)
        spec = _spec(task)
        jobs.append(
            JobSpec(
                job_id=job_id(task=spec, task_args=task.args, model=task.model, arguments=identity),
                task=spec,
                name=task.name,
                task_args=task.args,
                model=task.model,
                model_index=index,
                samples=task.samples * task.epochs,
                epochs=task.epochs,
            )
        )
    return jobs


def _identity(model: Any, result_arguments: dict[str, Any]) -> dict[str, Any]:
    """What makes a job's result another one, beside its task and the model's name."""
    if isinstance(model, str):
        return dict(result_arguments)
    return result_arguments | {"model": without_base_url(encode({"model": model})["model"])}


def _spec(task: CapturedTask) -> str:
    """What a job gives to `eval_set` for this task."""
    if task.registry_name is None:
        raise PlanError(
            f"the task {task.name!r} was not made by a function with @task, so a worker could not make it again"
        )
    if task.file is None:
        return task.registry_name
    if task.file.endswith(".ipynb"):
        raise PlanError(f"{task.file}: tasks in notebooks cannot run on a fleet: move the task into a .py file")
    return f"{task.file}@{task.registry_name}"


def _check_jobs(jobs: list[JobSpec]) -> None:
    for job in jobs:
        if job.samples == 0:
            raise PlanError(
                f"the task {job.name!r} has no samples: its dataset is empty, or --limit and --sample-id leave none of it"
            )
    counts = Counter(job.job_id for job in jobs)
    for job in jobs:
        if counts[job.job_id] > 1:
            raise PlanError(
                f"the task {job.task!r} with the model {job.model} was given {counts[job.job_id]} times: "
                "each task, with its arguments and model, can be in a run only once"
            )


def _check_boxes(captured: list[CapturedTask], boxes: Callable[[], str]) -> None:
    """Without this, each sample of such a task would fail, and be tried again on every worker."""
    names = list(dict.fromkeys(task.name for task in captured if task.boxed))
    if names and (why := boxes()):
        raise PlanError(f"the samples of {', '.join(names)} run in Docker sandboxes, but {why}")


def _capture_in_child(
    call: dict[str, Any], folder: Path, environment: dict[str, str], path: list[str], timeout_s: float, *, ids: bool
) -> list[CapturedTask]:
    """Run `inspect_internals.capture` in a forked child (Inspect is imported already, so it costs no import).

    The result comes back in a file and the output through a pipe of which the end is kept: neither depends on what the
    user's code does to its file descriptors, and no process that it leaves behind keeps us waiting.
    """
    import inspect_ai  # noqa: F401  imported here so that the child need not

    with tempfile.TemporaryDirectory(prefix="inspect-fleet-plan-") as scratch:
        result = Path(scratch) / "result.json"
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        words = (call, str(folder), environment, path, str(result), writer, ids)
        child = get_context("fork").Process(target=_child, args=words)
        try:
            child.start()
            os.close(writer)
            output, timed_out = _follow(child, reader, timeout_s)
        finally:
            os.close(reader)
            _end(child)
        if timed_out:
            raise PlanError(
                f"loading the tasks took longer than {timeout_s:g} seconds{_last_line(output)}", output=output
            )
        if not result.exists():
            raise PlanError(_death(child.exitcode) + _last_line(output), output=output)
        answer = json.loads(result.read_text())
    if "sentence" in answer:
        raise PlanError(answer["sentence"], output=output)
    return [CapturedTask(**task) for task in answer["tasks"]]


def _follow(child: BaseProcess, reader: int, timeout_s: float) -> tuple[str, bool]:
    """Read what the child prints until it has gone or its time is up: the end of the output, and whether time was up."""
    kept = b""
    deadline = time.monotonic() + timeout_s
    timed_out = True
    os.set_blocking(reader, False)
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            alive = child.is_alive()
            ready = selector.select(_POLL_S if alive else 0)
            chunk = os.read(reader, 65536) if ready else None
            if chunk:
                kept = (kept + chunk)[-OUTPUT_BYTES:]
            elif not alive:
                timed_out = False
                break
            elif chunk == b"":
                child.join(_POLL_S)  # everybody closed the pipe: nothing to wait for but the end
    return kept.decode("utf-8", "replace"), timed_out


def _end(child: BaseProcess) -> None:
    """End the child and what it started in its process group."""
    if child.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.is_alive():
        child.kill()
    child.join()


def _death(exitcode: int | None) -> str:
    """Why there is no result, from how the child ended."""
    if exitcode == -signal.SIGKILL:
        return "the process that loads the tasks was killed, most likely for want of memory"
    if exitcode is not None and exitcode < 0:
        return f"the process that loads the tasks crashed with {signal.Signals(-exitcode).name}"
    return f"the code of a task ended its process with exit code {exitcode} while it was being loaded"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"; the last it printed was: {lines[-1][:200]}" if lines else ""


def _child(
    call: dict[str, Any],
    folder: str,
    environment: dict[str, str],
    path: list[str],
    result: str,
    writer: int,
    ids: bool,
) -> None:
    """In the child: resolve the tasks, write the answer, and end without running anything that belongs to the parent."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    devnull = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, devnull), (1, writer), (2, writer)):
        os.dup2(source, target)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.update(environment)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    os.chdir(folder)
    try:
        for spec in call["tasks"]:
            _check_known(spec)
        answer: dict[str, Any] = {"tasks": [asdict(task) for task in inspect_internals.capture(call, ids=ids)]}
    except BaseException as error:
        traceback.print_exc()
        answer = {"sentence": _sentence(error, folder, call["tasks"])}
    partial = Path(result + ".partial")
    partial.write_text(json.dumps(answer))
    partial.rename(result)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _check_known(spec: str) -> None:
    """A name that no package has and no file matches, which Inspect passes over when another spec gives a task."""
    if "@" in spec or spec.startswith("hf/") or inspect_internals.task_registered(spec):
        return
    if Path(spec).exists() or any(Path.cwd().glob(spec)):
        return
    raise InspectRefused(f"Task named '{spec}' not found")


_NOT_FOUND = re.compile(r"No inspect tasks were found|Task named .* not found")
_ARGUMENTS = re.compile(r"missing \d+ required (positional|keyword-only) arguments?: (?P<names>.*)")
_MODEL = re.compile(r"Model (API|name) |No model specified")


def _sentence(error: BaseException, folder: str, specs: list[str]) -> str:
    """One sentence for whatever came out of Inspect or of the user's code."""
    named = ", ".join(specs) or f"the tasks of {folder}"
    text = " ".join(str(error).split())
    where = _where(error, folder)
    if isinstance(error, InspectRefused):
        if _NOT_FOUND.search(text):
            return f"{text.rstrip('.')} ({named}): name a file with @task functions, or a task of an installed package"
        return text
    if isinstance(error, UnsupportedInspect):
        return text
    if isinstance(error, TaskExited):
        return f"{_where(error.__cause__, folder) or named} cannot be loaded: it calls sys.exit({error.code!r})"
    if isinstance(error, TypeError) and where is None and (found := _ARGUMENTS.search(text)):
        return f"{text.split('(')[0]}: the task needs the argument {found['names']}: give it with -T NAME=VALUE"
    if isinstance(error, ValueError) and where is None and _MODEL.search(text):
        return f"unknown model: {text.rstrip('.')}"
    doing = "imported" if isinstance(error, ImportError) else "loaded"
    return f"{where or named} cannot be {doing}: {type(error).__name__}: {text or 'no message'}"[:1000]


def _where(error: BaseException | None, folder: str) -> str | None:
    """The file and line of the user's code in which an exception was raised, None if that is not his."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if not re.search(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<", frame.filename):
                name = os.path.relpath(frame.filename, folder)
                own = Path(__file__).parent, Path(inspect_internals.__file__).parent
                if Path(frame.filename).parent not in own:
                    return f"{name} (line {frame.lineno})"
        error = error.__cause__
    return None
