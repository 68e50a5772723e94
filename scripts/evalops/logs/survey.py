"""Everything that is known of a run, gathered: its logs, plan, owner, and the jobs that have no log yet.

Called by status, retries and the report. A few listings and small documents, then the headers; one that cannot be read
is said, and the rest goes on.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from evalops.batch import living
from evalops.fleet.ownership import runs_on
from evalops.logs import cost
from evalops.logs import rows as state
from evalops.logs.cache import FactsCache
from evalops.logs.choose import Chosen, choose
from evalops.logs.events import Progress
from evalops.logs.places import Place
from evalops.logs.reading import Directory, list_directory, read_all
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobDone, JobSpec, Manifest, wholes
from evalworker.contract.wire import Unreadable, Wire, now
from evalworker.storage import Denied, Info, Missing, Storage, StorageError

D = TypeVar("D", bound=Wire)


@dataclass(frozen=True)
class Survey:
    """A run as it is now."""

    place: Place
    directory: Directory
    chosen: list[Chosen]
    rows: list[state.Row]
    around: state.Surroundings
    manifest: Manifest | None
    control: Control | None
    problems: list[str]

    @property
    def headline(self) -> str:
        """The line on top of the table."""
        return state.headline(self.rows, self.around, self.place.run_id)


def survey(
    place: Place,
    price_of: cost.PriceOf,
    *,
    cached: bool = True,
    clock: Callable[[], datetime] = now,
    started: Callable[[int], Callable[[], None]] = lambda count: lambda: None,
) -> Survey:
    """Look at a run, or at a log directory without one.

    Args:
        price_of: a model's prices.
        cached: whether headers that were read before may be taken from this machine's memory.
        started: called with the number of logs, returns what is called for each that was read (a progress bar).
    """
    problems: list[str] = []
    directory = list_directory(place.storage, place.prefix)
    cache = FactsCache(place.url) if cached else None
    listed = read_all(place.storage, directory.logs, cache, started(len(directory.logs)))
    manifest = control = None
    jobs: list[state.Job] = []
    if place.run_id is not None:
        manifest = document(place.storage, layout.manifest(place.run_id), Manifest, problems)
        control = document(place.storage, layout.control(place.run_id), Control, problems)
    alive, owner = state.owner(control, clock(), process_alive(control.controller) if control else None)
    chosen = choose(listed)
    if manifest is not None and place.run_id is not None and not alive and _open_on_batch(manifest, chosen):
        on_batch = living.on_batch(place.storage, place.run_id)
        alive, owner = (alive, owner) if on_batch[0] is None else on_batch
    unattended = control is not None and not alive and _runs_on(place.storage, control, problems)
    if place.run_id is not None and manifest is not None:
        jobs = _jobs(place.storage, place.run_id, manifest, control, chosen, problems)
    around = state.Surroundings(
        now=clock(),
        alive=None if unattended else alive,  # its workers write, or not: the logs' ages tell
        owner=owner,
        unattended=unattended,
        planned=jobs,
        writes=_writes(directory.others),
        backend=manifest.backend if manifest else "",
    )
    return Survey(place, directory, chosen, state.rows(chosen, around, price_of), around, manifest, control, problems)


def _runs_on(storage: Storage, control: Control, problems: list[str]) -> bool:
    try:
        return runs_on(storage, control)
    except StorageError as error:
        problems.append(str(error))
        return False


def _open_on_batch(manifest: Manifest, chosen: list[Chosen]) -> bool:
    """Whether a run went to AWS Batch and its logs alone do not tell that it is over."""
    over = [one for one in chosen if one.log.facts.status in ("success", "error", "cancelled")]
    return manifest.backend == "batch" and len(over) < len(manifest.jobs)


def document(storage: Storage, key: str, kind: type[D], problems: list[str]) -> D | None:
    """A document, None when there is none; what is wrong with it goes to `problems`. A 403 is not a 404."""
    try:
        return kind.from_json(storage.get(key).body)
    except Missing:
        return None
    except Denied as error:
        problems.append(str(error))
    except Unreadable as error:
        problems.append(f"{storage.url(key)} cannot be read: {error}")
    return None


def process_alive(controller: str) -> bool | None:
    """Whether the owner's process lives, when it is one of this machine's (`<host>:<pid>`); None when that is not known."""
    host, _, pid = controller.rpartition(":")
    if not pid.isdigit() or host != socket.gethostname():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return None  # a process of that number lives, but it may be another by now: the heartbeat decides


def _writes(others: Mapping[str, Info]) -> dict[str, datetime]:
    """When something was last written into a log's shared buffer (`.buffer/<its name>/` beside it): the log's key → the time."""
    found: dict[str, datetime] = {}
    for key, info in others.items():
        parts = key.split("/")
        at = parts.index(".buffer") if ".buffer" in parts else len(parts)
        if at + 2 < len(parts):
            log = "/".join([*parts[:at], f"{parts[at + 1]}.eval"])
            found[log] = max(found.get(log, info.modified), info.modified)
    return found


def _jobs(
    storage: Storage,
    run_id: str,
    manifest: Manifest,
    control: Control | None,
    chosen: list[Chosen],
    problems: list[str],
) -> list[state.Job]:
    """The planned jobs; of those that have no log, what the fleet's own objects say of them."""
    jobs = [state.Job(spec) for spec in wholes(manifest.jobs)]
    bare = [job for job in jobs if not any(state.fits(job.spec, one.log.facts) for one in chosen)]
    if not bare:
        return jobs
    try:
        names = {info.key for info in storage.list(f"{run_id}/") if ".done-" in info.key and info.key.count("/") == 1}
        progress = Progress()
        if manifest.backend in ("local", "ec2"):
            progress = Progress.now(storage, run_id, control.round if control else None, problems)
        told = {job.spec.job_id: _tell(storage, run_id, job.spec, names, progress, problems) for job in bare}
    except StorageError as error:
        problems.append(str(error))
        return jobs
    return [told.get(job.spec.job_id, job) for job in jobs]


def _tell(
    storage: Storage, run_id: str, spec: JobSpec, names: set[str], progress: Progress, problems: list[str]
) -> state.Job:
    job = state.Job(spec)
    ends = sorted(key for key in names if key.startswith(f"{run_id}/{spec.job_id}.done-"))
    if ends:
        done = document(storage, ends[-1], JobDone, problems)
        if done is not None:
            said = done.attempt_done
            why = said.failure_category if said.failure_category != said.status else said.error_summary
            unmerged = progress.together(spec.merges) if said.log is None else None
            counts = unmerged or said.samples
            ended = f"{said.status}: {why or said.error_summary or 'no log'}"
            return replace(job, ended=ended, completed=counts.completed, errored=counts.errored)
    unfinished = list_directory(storage, layout.partial(run_id, spec.job_id)).logs
    best = choose(read_all(storage, unfinished)) if unfinished else []
    seen = progress.together([spec.job_id, *spec.merges])
    job = replace(job, partial=best[0] if best else None)
    return replace(job, completed=seen.completed, errored=seen.errored, last=seen.last) if seen else job


def as_json(found: Survey) -> dict[str, Any]:
    """The survey for programs."""
    return {
        "run_id": found.place.run_id,
        "log_dir": found.place.url,
        "headline": found.headline,
        "rows": [row.as_json() for row in found.rows],
        "problems": found.problems,
    }
