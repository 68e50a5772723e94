"""What the fork server imports before it forks the first job: Inspect, the provider SDKs that it finds, the run's own code.

Imported by `multiprocessing`'s fork server in a process of its own, never by the agent. It must not raise (the server would die
of it) and must leave one thread: a fork copies only the thread that forks. What it warms up costs each job nothing more.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from evalworker import preload_settings, redact
from evalworker.preload_settings import SETTINGS, restore
from evalworker.processes import adopt_orphans

THREADS_S = 2.0
"""How long threads that the warm-up has left may take to end."""


def warm_up() -> None:
    """One trivial eval in memory: the first eval of a process imports the provider SDKs and a great deal of Inspect."""
    from inspect_ai import Task, eval_set
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    import evalworker.arguments
    import evalworker.job
    import evalworker.lookout
    import evalworker.prices
    import evalworker.streamer  # noqa: F401
    from evalworker.results import best_log

    with tempfile.TemporaryDirectory() as folder:
        eval_set(
            Task(dataset=[Sample(input="1+1=", target="2")], scorer=includes(), name="warm_up"),
            model="scripted/good",
            log_dir=folder,
            display="none",
            ctl_server=False,
            retry_attempts=1,
        )
        best_log(Path(folder))  # reading a log imports too


def import_tasks(specs: list[str]) -> None:
    """Import the modules that the run's tasks live in, so that jobs find them in memory.

    A registry name imports its package; a file's own code runs again in each job (Inspect loads it anew), what it imports stays.
    """
    from evalworker.inspect_internals import import_task_module

    for spec in dict.fromkeys(spec.rsplit("@", 1)[0] for spec in specs):
        import_task_module(spec)


def _prepare(settings: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    report: dict[str, Any] = {"error": None}
    try:
        # The run's code comes first from the beginning: Inspect imports what registers itself with it, and a copy of the run's
        # own package that is installed here must not be in memory before the shipped one.
        sys.path[:0] = settings["path"]
        os.chdir(settings["path"][0])
        warm_up()
        if settings.get("tasks"):
            import_tasks(settings["tasks"])
    except BaseException as error:
        # Whatever is wrong with the run's code, each job meets it again and reports it with its own name.
        report["error"] = redact.text(f"{type(error).__name__}: {error}")[:1024]
    _await_threads()
    report["threads"] = [thread.name for thread in threading.enumerate()]
    report["seconds"] = time.monotonic() - started
    return report


def _await_threads() -> None:
    """Give threads that are about to end (helpers of the warm-up's event loop) the time to; others stay, and are counted."""
    end = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _settle() -> dict[str, Any]:
    """Take the settings out of the environment. What user code prints here, it prints again in each job, where it is kept."""
    settings: dict[str, Any] = json.loads(os.environ[SETTINGS])
    restore()
    os.environ.update(settings["environment"])
    redact.learn_environment(settings["secrets"])
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return settings


if SETTINGS in os.environ:
    adopt_orphans()
    _settings = _settle()
    _report = _prepare(_settings)
    preload_settings.threads = threading.active_count()
    gc.freeze()  # nothing of it is ever garbage: jobs neither look through it nor copy it
    with contextlib.suppress(OSError):
        Path(_settings["report"]).write_text(json.dumps(_report))
