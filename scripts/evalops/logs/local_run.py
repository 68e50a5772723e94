"""One `eval_set` in this process, its logs in the run's working directory: a new run, or a retry of any that failed anywhere.

Called by `ies run local`. It writes the run's manifest and a control document with a heartbeat, so that others see whether the run
lives; what came out is decided from the stored logs alone, because an interrupted `eval_set` reports success.
"""

import contextlib
import importlib.metadata
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evalops import code, hints, shipping
from evalops.batch import living
from evalops.fleet.ownership import controller_name, runs_on
from evalops.inspect_options import TypedArguments, changes_results, without_base_url
from evalops.logs import rows
from evalops.logs.choose import Chosen, choose
from evalops.logs.places import Place
from evalops.logs.reading import Listed, list_directory, read_all
from evalops.logs.summarise import derived
from evalops.logs.survey import process_alive
from evalworker.arguments import CannotEncode, decode, encode
from evalworker.contract import layout
from evalworker.contract.documents import Control, Guards, JobSpec, Limits, Manifest, wholes
from evalworker.contract.wire import now
from evalworker.storage import AlreadyExists, Changed, Missing, Storage, StorageError

BEAT_S = 30.0
DEADLINE = timedelta(days=7)
"""Nothing enforces it; after it a run whose process nobody can see counts as dead."""

INSPECT = "inspect-ai"
_NOT_KEPT = frozenset({"display", "ctl_server", "log_dir_allow_dirty"})
"""Arguments of a fleet's jobs that have no meaning for a person's own terminal."""


@dataclass(frozen=True)
class Submission:
    """What is to be run, as typed values."""

    tasks: list[str]
    models: list[Any]
    arguments: dict[str, Any]
    jobs: list[JobSpec]


def differences(manifest: Manifest, jobs: Sequence[JobSpec]) -> list[str]:
    """How a retry differs from the run: one clause each; a subset of its jobs is no difference."""
    planned = {job.job_id: job for job in wholes(manifest.jobs)}
    found = [f"{job.task} with {job.model} is not part of it" for job in jobs if job.job_id not in planned]
    if found:
        known = sorted({f"{job.task} with {job.model}" for job in manifest.jobs})
        more = f" and {len(known) - 6} more" if len(known) > 6 else ""
        found.append(f"the run has {', '.join(known[:6])}{more}, with its own arguments")
    before, today = manifest.versions.get(INSPECT), importlib.metadata.version(INSPECT)
    if before is not None and before != today:
        found.append(
            f"it was run with Inspect {before}, and {today} is installed here, which may not recognise its finished work"
        )
    return found


def as_before(typed: TypedArguments, manifest: Manifest) -> TypedArguments:
    """The run's own arguments and models, with what was typed on top: for a retry that names neither tasks nor models."""
    kept = {name: value for name, value in decode(manifest.arguments).items() if name not in _NOT_KEPT}
    arguments = kept | typed.arguments
    environment = manifest.environment | typed.environment
    chosen = {name: value for name, value in arguments.items() if changes_results(name) and name != "task_args"}
    if environment:
        chosen["env"] = dict(environment)
    results = {name: without_base_url(value) for name, value in encode(chosen).items()}
    models = [decode({"model": model})["model"] for model in manifest.models]
    return TypedArguments(typed.tasks, models, arguments, results, environment)


@dataclass(frozen=True)
class Seen:
    """A run's control document and its tag when the owner was looked for: nobody else may have written it when it is taken over."""

    control: Control
    etag: str


def last_seen(storage: Storage, run_id: str) -> Seen | None:
    """The control document as it is; None when the run has none."""
    try:
        stored = storage.get(layout.control(run_id))
    except Missing:
        return None
    return Seen(Control.from_json(stored.body), stored.etag)


def living_owner(storage: Storage, run_id: str, seen: Seen | None) -> str | None:
    """Why the run must be left alone, None when nobody is running it: two owners of one directory steal from each other."""
    if seen is not None:
        control = seen.control
        alive, clause = rows.owner(control, now(), process_alive(control.controller))
        if alive:
            return f"{control.controller} is running it ({clause})"
        if runs_on(storage, control):
            return f"the fleet {run_id} runs on, although {clause}: {hints.unattended(run_id)}"
    on_batch = living.on_batch(storage, run_id)
    return on_batch.clause if on_batch.alive else None


def submit_directory(manifest: Manifest) -> Path | None:
    """Where the run was submitted, if this machine has that directory: Inspect's task identity holds relative files."""
    folder = Path(manifest.code_root or "/") / manifest.submit_dir
    relative_only = manifest.code_root is None and not Path(manifest.submit_dir).is_absolute()
    return None if relative_only or not folder.is_dir() else folder


def fetch_partials(place: Place) -> int:
    """Copy into the run's directory what unfinished jobs have kept elsewhere (an array's children), so that a retry goes on from it.

    Of each job the best log, and only when it is further than what the directory has of the job: Inspect goes on from the newest log,
    which the copy is. A shard's stays where it is: to Inspect it would be the whole task's. Returns how many logs came.
    """
    from evalworker import batch_logs

    if place.run_id is None:
        return 0
    storage, prefix = place.storage, layout.partials(place.run_id)
    shards = _shards(storage, place.run_id)
    kept: dict[str, list[Listed]] = {}  # by job
    for listed in read_all(storage, list_directory(storage, prefix).logs):
        job_id = listed.info.key.removeprefix(prefix).partition("/")[0]
        if job_id not in shards and listed.facts.status != "unreadable":
            kept.setdefault(job_id, []).append(listed)
    if not kept:
        return 0
    own = {one.log.facts.identity: one for one in choose(read_all(storage, list_directory(storage, place.prefix).logs))}
    came = 0
    for one in (one for logs in kept.values() for one in choose(logs)):
        there = own.get(one.log.facts.identity)
        if there is not None and there.log.facts.status == "success" and not there.log.facts.hollow:
            continue
        further, progress = _furthest(storage, one) if there or one.superseded else (one.log, None)
        if there is None or progress is None or progress > _furthest(storage, there)[1]:
            batch_logs.copy(storage, further.info.key, place.prefix + further.name)
            came += 1
    return came


def _shards(storage: Storage, run_id: str) -> set[str]:
    """The ids of the run's jobs that are shards of a task."""
    try:
        manifest = Manifest.from_json(storage.get(layout.manifest(run_id)).body)
    except Missing:
        return set()
    return {job.job_id for job in manifest.jobs if job.shard is not None}


def unmerged(place: Place, manifest: Manifest, jobs: Sequence[JobSpec]) -> list[str]:
    """The tasks of these jobs that ran in shards whose samples no log of the whole holds yet: a retry here would run them all again."""
    storage, run_id, wanted = place.storage, manifest.fleet_id, {job.job_id for job in jobs}
    merges = [job for job in manifest.jobs if job.merges and job.job_id in wanted]
    if not merges:
        return []

    def begun(job_id: str) -> bool:
        where = (layout.job_log(run_id, job_id), layout.partial(run_id, job_id))
        return any(next(iter(storage.list(prefix)), None) is not None for prefix in where)

    logs = [listed.facts for listed in read_all(storage, list_directory(storage, place.prefix).logs)]
    open_ = [job for job in merges if not any(rows.fits(job, facts) for facts in logs)]
    return [f"{job.name} with {job.model}" for job in open_ if any(map(begun, job.merges))]


def _furthest(storage: Storage, one: Chosen) -> tuple[Listed, tuple[bool, int]]:
    """The log of an experiment that is furthest, and how far, with what stands only in the shared buffers."""
    from evalworker import batch_logs

    found = [
        (log, batch_logs.progress(storage, batch_logs.read_one(storage, log.info.key)))
        for log in (one.log, *one.superseded)
    ]
    return max(found, key=lambda pair: pair[1])


def new_manifest(
    run_id: str, submission: Submission, environment: dict[str, str], owner: str, shipped: dict[str, Any]
) -> Manifest:
    """The manifest of a run in this process. What cannot or must not be stored (credentials) is left out.

    `shipped`: its fields about code and environment, as `shipping.ship` gives them.
    """
    manifest = Manifest(
        fleet_id=run_id,
        created=now(),
        backend="local",
        jobs=submission.jobs,
        arguments=_encodable(submission.arguments),
        models=_encodable({str(i): model for i, model in enumerate(submission.models)}, values=True),
        environment=environment,
        git=code.state(Path.cwd()),
        owner=owner,
        **shipped,
    )
    shipping.check_no_secret(manifest)
    return manifest


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


@contextlib.contextmanager
def alive(storage: Storage, run_id: str, seen: Seen | None) -> Iterator[None]:
    """Beat in the run's control document for as long as the block runs, and say `ended` after it.

    `seen`: the document that it takes the place of, None for a new one. A fleet's limits and guards stay, for when it is resumed as
    one. Raises Changed when somebody was faster.
    """
    before = seen.control if seen else None
    control = Control(
        fleet_id=run_id,
        round=before.round + 1 if before else 1,
        state="running",
        deadline=now() + DEADLINE,
        beat=now(),
        begun=now(),
        controller=controller_name(),
        limits=before.limits if before else Limits(),
        guards=before.guards if before else Guards(),
    )
    key = layout.control(run_id)
    try:
        if seen is None:
            storage.create(key, control.to_bytes())
        else:
            storage.replace(key, control.to_bytes(), seen.etag)
    except (AlreadyExists, Changed) as error:
        raise Changed(f"somebody else took the run {run_id} at this moment: look at it and try again") from error
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
