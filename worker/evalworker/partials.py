"""Unfinished logs: kept in storage while a job runs, and where the next attempt starts from.

A log alone lacks up to a buffer of finished samples, so the `.buffer/` folder that Inspect copies beside it (`log_shared`) goes along.
`eval_set` finds both in its log directory and runs only what is missing.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from evalworker import holdings
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.storage import Missing, Storage, StorageError

LOG = ".eval"
BUFFER = ".buffer"


class PartialKeeper:
    """The partial log of one running attempt: uploads what has changed since the last time."""

    def __init__(self, storage: Storage, fleet_id: str, job_id: str, log_dir: Path) -> None:
        self._storage = storage
        self._prefix = layout.partial(fleet_id, job_id)
        self._log_dir = log_dir
        self._uploaded: dict[str, tuple[int, int]] = {}

    @property
    def synced(self) -> bool:
        """Whether Inspect has copied its buffer since the last upload (it does so every `log_shared` seconds)."""
        for manifest in _files(self._log_dir):
            if manifest.name != "manifest.json":
                continue
            try:
                stat = manifest.stat()
            except FileNotFoundError:
                continue
            name = manifest.relative_to(self._log_dir).as_posix()
            if self._uploaded.get(name) != (stat.st_mtime_ns, stat.st_size):
                return True
        return False

    def save(self) -> int:
        """Upload new and changed files, the buffer first so that the log never promises more than is there. Returns how many.

        Raises StorageError; a file that goes away meanwhile is passed over.
        """
        saved = 0
        for path in sorted(_files(self._log_dir), key=lambda path: (path.suffix == LOG, path.name)):
            name = path.relative_to(self._log_dir).as_posix()
            try:
                stat = path.stat()
                seen = (stat.st_mtime_ns, stat.st_size)
                if self._uploaded.get(name) != seen:
                    self._storage.upload(path, self._prefix + name)
                    self._uploaded[name] = seen
                    saved += 1
            except (FileNotFoundError, StorageError):
                if path.exists():
                    raise
        return saved


def _files(log_dir: Path) -> list[Path]:
    """What belongs to the unfinished log. Directories may go away while they are listed: a job's end removes them."""
    found = (Path(folder, name) for folder, _, names in os.walk(log_dir) for name in names)
    return [path for path in found if _belongs(path.relative_to(log_dir))]


def _belongs(relative: Path) -> bool:
    """Inspect's logs and their buffers; not its lock or eval-set files, which it makes anew, nor what is no file of Inspect's."""
    parts = relative.parts
    if len(parts) == 1:
        return relative.suffix == LOG
    return len(parts) == 3 and parts[0] == BUFFER and ".." not in parts


def fetch(
    storage: Storage,
    fleet_id: str,
    spec: JobSpec,
    log_dir: Path,
    published_name: str | None,
    warn: Callable[[str], None],
) -> bool:
    """Bring what an earlier attempt left into a fresh log directory; whether there was anything.

    The partial log is the newest. Without one, the log that the job published in an earlier round (`published_name`) serves. What is
    there and is no whole log of this job would make Inspect refuse the directory: it is left out, and `warn` is given a sentence.
    """
    prefix = layout.partial(fleet_id, spec.job_id)
    keys = {Path(info.key.removeprefix(prefix)): info.key for info in list(storage.list(prefix))}
    if strange := [storage.url(key) for path, key in keys.items() if not _belongs(path)]:
        warn(f"{spec.name}: {', '.join(strange[:3])} is no part of an unfinished log, so it is left alone")
    known = {path: key for path, key in keys.items() if _belongs(path)}
    tops = {path: key for path, key in known.items() if len(path.parts) == 1}
    logs = {path.stem for path, key in tops.items() if _bring(storage, key, log_dir / path, spec, warn)}
    for path, key in known.items():
        if path not in tops and path.parts[1] in logs:
            with contextlib.suppress(Missing):
                storage.download(key, log_dir / path)
    if logs or published_name is None:
        return bool(logs)
    published = layout.job_log(fleet_id, spec.job_id)
    return _bring(storage, published, log_dir / Path(published_name).name, spec, warn)


def _bring(storage: Storage, key: str, target: Path, spec: JobSpec, warn: Callable[[str], None]) -> bool:
    """Download one log if it is whole and of this job; whether it was."""
    try:
        storage.download(key, target)
        holding = holdings.read(target)
    except Missing:
        return False
    except holdings.BadLog as error:
        warn(f"{spec.name}: {storage.url(key)} cannot be read, so the job goes on without it: {error}")
    else:
        task = holding.task and holding.task.rsplit("/", 1)[-1]
        if task in (None, spec.name.rsplit("/", 1)[-1]) and holding.model in (None, spec.model):
            return True
        warn(
            f"{spec.name}: {storage.url(key)} is a log of {holding.task} with {holding.model}, so the job goes on without it"
        )
    target.unlink()
    return False


def fetch_shards(storage: Storage, fleet_id: str, job_ids: list[str], folder: Path) -> list[Path]:
    """Bring the logs that these jobs have published, in their order; one that has published none is passed over."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for job_id in job_ids:
        target = folder / f"{job_id}.eval"
        try:
            storage.download(layout.job_log(fleet_id, job_id), target)
        except Missing:
            continue
        found.append(target)
    return found
