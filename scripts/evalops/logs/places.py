"""From what the user typed to a store and a prefix: `--run-id` below the configured root, `--log-dir` anywhere.

Called by the commands. A log directory is read as it lies; only the root has the layout of `evalworker.contract.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evalops.settings import settings
from evalworker.contract import layout
from evalworker.contract.ids import check_run_id
from evalworker.storage import LocalStorage, Storage, open_storage


@dataclass(frozen=True)
class Place:
    """A log directory: its store, the prefix of its keys, and the run that it belongs to, if it is known."""

    storage: Storage
    prefix: str
    run_id: str | None

    @property
    def url(self) -> str:
        """The directory as a person would name it."""
        probe = self.storage.url(f"{self.prefix}x")
        return probe[:-1].rstrip("/")


def root() -> Storage:
    """The configured root: `s3://$S3_BUCKET_NAME`, or the current directory."""
    return open_storage(settings().root)


def of_run(run_id: str, storage: Storage | None = None) -> Place:
    """The working logs of a run. Raises BadId."""
    return Place(storage or root(), layout.working(run_id), check_run_id(run_id))


def of_log_dir(url: str, run_id: str | None = None) -> Place:
    """Any directory of logs by its URL or path. Raises StorageError."""
    if url.startswith("s3:") or "://" in url:
        opened = open_storage(url)
        return Place(_Plain(opened.root) if isinstance(opened, LocalStorage) else opened, "", run_id)
    return Place(_Plain(Path(url)), "", run_id)


class _Plain(LocalStorage):
    """A directory whose keys are its files' relative paths, without the root's layout."""

    def _folder(self, folder: str) -> Path:
        return self.root / folder

    def _path(self, key: str) -> Path:
        super()._path(f"logs/{key}")  # for its check of the key
        return self.root / key

    def _children(self, folder: str) -> Iterator[tuple[str, Path]]:
        try:
            entries = list(self._folder(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from ((path.name, path) for path in entries if not path.name.endswith(".part"))
