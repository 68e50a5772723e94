"""One `eval_set` in this process, its logs in the run's working directory: a new run, or a retry of any that failed anywhere.

Called by `ies run local`. It writes the run's manifest and a control document with a heartbeat, so that others see whether the run
lives; what came out is decided from the stored logs alone, because an interrupted `eval_set` reports success.
"""

import contextlib
import importlib.metadata
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evalops.logs.places import Place
from evalops.logs.reading import list_directory, read_all
from evalops.logs.summarise import derived
from evalworker.arguments import CannotEncode, encode
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import Missing, Storage, StorageError

BEAT_S = 30.0
DEADLINE = timedelta(days=7)
"""Nothing enforces it; after it a run whose process nobody can see counts as dead."""

INSPECT = "inspect_ai"


class RetryRefused(ValueError):
    """A retry that would not be the same run; the text is one sentence with the difference."""


@dataclass(frozen=True)
class Submission:
    """What is to be run, as typed values."""

    tasks: list[str]
    models: list[Any]
    arguments: dict[str, Any]
    jobs: list[JobSpec]


def versions() -> dict[str, str]:
    """The versions that decide whether a retry recognises finished work."""
    found = {INSPECT: importlib.metadata.version("inspect-ai")}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["inspect_evals"] = importlib.metadata.version("inspect-evals")
    return found


def differences(manifest: Manifest, jobs: Sequence[JobSpec]) -> list[str]:
    """How a retry differs from the run: one clause each; a subset of its jobs is no difference."""
    planned = {job.job_id: job for job in manifest.jobs}
    found = [f"{job.task} with {job.model} is not part of it" for job in jobs if job.job_id not in planned]
    if found:
        known = sorted({f"{job.task} with {job.model}" for job in manifest.jobs})
        more = f" and {len(known) - 6} more" if len(known) > 6 else ""
        found.append(f"the run has {', '.join(known[:6])}{more}, with its own arguments")
    before, today = manifest.versions.get(INSPECT), versions()[INSPECT]
    if before is not None and before != today:
        found.append(f"it was run with Inspect {before}, and {today} is installed here, which may not recognise its finished work")
    return found


def submit_directory(manifest: Manifest) -> Path | None:
    """Where the run was submitted, if this machine has that directory: Inspect's task identity holds relative files."""
    folder = Path(manifest.code_root or "/") / manifest.submit_dir
    relative_only = manifest.code_root is None and not Path(manifest.submit_dir).is_absolute()
    return None if relative_only or not folder.is_dir() else folder


def new_manifest(run_id: str, submission: Submission, environment: dict[str, str], owner: str) -> Manifest:
    """The manifest of a run in this process. What cannot or must not be stored (credentials) is left out."""
    return Manifest(
        fleet_id=run_id,
        created=now(),
        backend="local",
        jobs=submission.jobs,
        arguments=_encodable(submission.arguments),
        models=_encodable({str(i): model for i, model in enumerate(submission.models)}, values=True),
        submit_dir=".",
        code_root=str(Path.cwd()),
        environment=environment,
        versions=versions(),
        owner=owner,
        command=[Path(sys.argv[0]).name, "run", "local"],
    )


def _encodable(arguments: dict[str, Any], *, values: bool = False) -> Any:
    kept: dict[str, Any] = {}
    for name, value in arguments.items():
        with contextlib.suppress(CannotEncode):
            kept |= encode({name: value})
    return list(kept.values()) if values else kept


def clear_the_way(place: Place) -> list[str]:
    """Remove what makes Inspect's `eval_set` fail on the directory; a sentence for each thing that was put aside.

    Dashboard files and zips are made again by `summarize`. A log that cannot be read is renamed, never removed.
    """
    storage, said = place.storage, []
    directory = list_directory(storage, place.prefix)
    for key in derived(directory):
        storage.delete(key)
    for listed in read_all(storage, directory.logs):
        if listed.facts.status == "unreadable" and not listed.facts.replaced:
            aside = listed.info.key + ".unreadable"
            storage.copy(listed.info.key, aside)
            storage.delete(listed.info.key)
            said.append(f"{listed.name} cannot be read ({listed.facts.reason}); it is now {aside.rsplit('/', 1)[-1]}")
    return said


def next_round(storage: Storage, run_id: str) -> tuple[int, Control | None]:
    """The number of the round that begins, and the control document of the last one."""
    try:
        last = Control.from_json(storage.get(layout.control(run_id)).body)
    except Missing:
        return 1, None
    return last.round + 1, last


@contextlib.contextmanager
def alive(storage: Storage, run_id: str, round_: int) -> Iterator[None]:
    """Beat in the run's control document for as long as the block runs, and say `ended` after it."""
    control = Control(
        fleet_id=run_id,
        round=round_,
        state="running",
        deadline=now() + DEADLINE,
        beat=now(),
        controller=f"{socket.gethostname()}:{os.getpid()}",
    )
    key = layout.control(run_id)
    storage.put(key, control.to_bytes())
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(StorageError):  # the next beat may get through; the eval goes on
                storage.put(key, control.model_copy(update={"beat": now()}).to_bytes())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(StorageError):
            storage.put(key, control.model_copy(update={"beat": now(), "state": "ended"}).to_bytes())


def run(place: Place, submission: Submission, *, dirty: bool) -> None:
    """Run Inspect's `eval_set` on the run's directory. `dirty`: logs of other tasks may lie there.

    Raises whatever Inspect raises for what it refuses.
    """
    from inspect_ai import eval_set

    arguments = dict(submission.arguments)
    if dirty:
        arguments["log_dir_allow_dirty"] = True
    models = submission.models
    eval_set(
        tasks=submission.tasks,
        log_dir=place.storage.url(f"{place.prefix}x")[:-2],
        model=models,
        **arguments,
    )
