"""Unfinished logs: kept in storage while a job runs, and where the next attempt starts from.

A log alone lacks up to a buffer of finished samples, so the `.buffer/` folder that Inspect copies beside it (`log_shared`) goes along.
`eval_set` finds both in its log directory and runs only what is missing.
"""

import os
from pathlib import Path

from evalworker.contract import layout
from evalworker.storage import Missing, Storage, StorageError

NEWEST = ".eval"


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
        for path in sorted(_files(self._log_dir), key=lambda path: (path.suffix == NEWEST, path.name)):
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
    return [path for path in found if _belongs(path)]


def _belongs(path: Path) -> bool:
    """Inspect's logs and buffer segments; not its lock or eval-set files, which it makes anew."""
    return path.suffix == NEWEST or any(parent.name == ".buffer" for parent in path.parents)


def fetch(storage: Storage, fleet_id: str, job_id: str, log_dir: Path, published_name: str | None) -> bool:
    """Bring what an earlier attempt left into a fresh log directory; whether there was anything.

    The partial log is the newest. Without one, the log that the job published in an earlier round (`published_name`) serves.
    """
    prefix = layout.partial(fleet_id, job_id)
    found = False
    for info in list(storage.list(prefix)):
        relative = Path(info.key.removeprefix(prefix))
        if relative.is_absolute() or ".." in relative.parts:
            continue
        target = log_dir / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage.download(info.key, target)
            found = True
        except Missing:
            continue
    if not found and published_name is not None:
        try:
            storage.download(layout.job_log(fleet_id, job_id), log_dir / Path(published_name).name)
            found = True
        except Missing:
            return False
    return found


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
