"""Unfinished logs: kept in storage while a job runs, and where the next attempt starts from.

A log alone lacks up to a buffer of finished samples, so the `.buffer/` folder that Inspect copies beside it (`log_shared`) goes along.
`eval_set` finds both in its log directory and runs only what is missing. A log goes from storage when a newer one with all of its samples
is there, so that there is one, as a rule.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from evalworker import holdings
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.holdings import BUFFER, LOG, MANIFEST, Holding
from evalworker.storage import Info, Missing, Storage, StorageError

Seen = tuple[int, int]
"""Time of the last write, in ns, and size of a file."""


@dataclass(frozen=True)
class _Kept:
    """A file as storage has it.

    Attributes:
        seen: the local file that it is; None of one that was not fetched.
        etag: of an object that was found there: another worker may still write it.
        least: of a log, what it holds at least.
        most: of a log, what it holds at most: more, where Inspect has written it anew while it went up.
        buffered: of a manifest, the finished samples.
    """

    seen: Seen | None
    etag: str | None = None
    least: Holding = holdings.UNKNOWN
    most: Holding = holdings.UNKNOWN
    buffered: holdings.Finished | None = None


class PartialKeeper:
    """The partial log of one attempt: brings what there is of it, and uploads what has changed since."""

    def __init__(self, storage: Storage, fleet_id: str, job_id: str, log_dir: Path) -> None:
        self._storage = storage
        self._prefix = layout.partial(fleet_id, job_id)
        self._published = layout.job_log(fleet_id, job_id)
        self._log_dir = log_dir
        self._kept: dict[str, _Kept] = {}
        self._looked: dict[Path, tuple[Seen, Holding]] = {}
        self._fetching = False

    @property
    def synced(self) -> bool:
        """Whether Inspect has copied its buffer since the last upload (it does so every `log_shared` seconds)."""
        for manifest in self._files():
            with contextlib.suppress(FileNotFoundError):
                if manifest.name == MANIFEST and self._changed(manifest):
                    return True
        return False

    # Up

    def save(self) -> int:
        """Upload new and changed files, and remove what they make superfluous. Returns how many were uploaded.

        A buffer's manifest is read first and written last: a sample leaves it when the log has it, so the log must be there before, and
        what the manifest names too. Raises StorageError; a file that goes away meanwhile is passed over.
        """
        if self._fetching:
            return 0
        manifests = [self._manifest(path) for path in self._files() if path.name == MANIFEST]
        files = self._files()
        logs = holdings.newest_last(path for path in files if path.parent == self._log_dir)
        needless = holdings.superseded(logs, self._look)
        stems = {log.stem for log in needless}
        segments = [path for path in files if path.parent != self._log_dir and path.name != MANIFEST]
        saved = sum(self._upload(path) for path in sorted(segments) if path.parent.name not in stems)
        saved += sum(self._upload(path) for path in logs if path not in needless)
        saved += sum(
            self._put(*manifest) for manifest in manifests if manifest and manifest[0].parent.name not in stems
        )
        if logs:
            self._drop_superseded(logs[-1].name, {self._name(path) for path in files})
        return saved

    def _files(self) -> list[Path]:
        """What belongs to the unfinished log. Directories may go away while they are listed: a job's end removes them."""
        found = (Path(folder, name) for folder, _, names in os.walk(self._log_dir) for name in names)
        return [path for path in found if _belongs(path.relative_to(self._log_dir))]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._log_dir).as_posix()

    def _changed(self, path: Path) -> bool:
        kept = self._kept.get(self._name(path))
        return kept is None or kept.seen != _seen(path)

    def _upload(self, path: Path) -> bool:
        """Upload a file that has changed; whether it was one."""
        name = self._name(path)
        try:
            if not self._changed(path):
                return False
            seen = _seen(path)
            least = self._look(path)
            self._storage.upload(path, self._prefix + name)
        except (FileNotFoundError, StorageError):
            if path.exists():
                raise
            return False
        self._kept[name] = _Kept(seen, least=least, most=self._look(path))
        return True

    def _look(self, log: Path) -> Holding:
        """What a log holds, read once of each version; UNKNOWN of what is no log."""
        if log.parent != self._log_dir:
            return holdings.UNKNOWN
        try:
            seen = _seen(log)
        except FileNotFoundError:
            return holdings.UNKNOWN
        before = self._looked.get(log)
        if before is None or before[0] != seen:
            self._looked[log] = before = (seen, holdings.look(log))
        return before[1]

    def _manifest(self, path: Path) -> tuple[Path, Seen, bytes] | None:
        """A manifest as it is now, None if it has not changed; while Inspect writes it, it is no JSON, and the next round takes it."""
        try:
            if not self._changed(path):
                return None
            seen, body = _seen(path), path.read_bytes()
            json.loads(body)
        except (FileNotFoundError, ValueError):
            return None
        return path, seen, body

    def _put(self, path: Path, seen: Seen, body: bytes) -> bool:
        self._storage.put(self._prefix + self._name(path), body)
        self._kept[self._name(path)] = _Kept(seen, buffered=holdings.buffered(body))
        return True

    # What is superfluous

    def _drop_superseded(self, newest: str, present: set[str]) -> None:
        """Remove logs whose samples are all in the newest, as it was uploaded, and buffers of which the log has all.

        Args: present: the files that were there before the newest log was uploaded.
        """
        if newest not in self._kept:
            return
        whole = self._kept[newest].least
        for name in filter(_is_log, list(self._kept)):
            buffer = [other for other in self._kept if other.startswith(_buffer_of(name))]
            both = self._whole(name)
            if name != newest and both.within(whole):
                self._delete([*buffer, name])
            elif buffer and present.isdisjoint(buffer) and both.within(self._kept[name].least):
                self._delete(buffer)

    def _whole(self, name: str) -> Holding:
        """What a log holds at most, together with its buffer, as storage has them."""
        manifest = self._kept.get(_buffer_of(name) + MANIFEST)
        return self._kept[name].most.with_buffer(manifest.buffered if manifest else frozenset())

    def _delete(self, names: list[str]) -> None:
        """Remove these objects, unless another worker has written to one of them; what cannot be removed is tried again."""
        with contextlib.suppress(StorageError):
            for name in names:
                found = self._storage.head(self._prefix + name) if self._kept[name].etag else None
                if found is not None and found.etag != self._kept[name].etag:
                    return
            for name in names:
                self._storage.delete(self._prefix + name)
                del self._kept[name]

    # Down

    def fetch(self, spec: JobSpec, published_name: str | None, warn: Callable[[str], None]) -> bool:
        """Bring what an earlier attempt left into a fresh log directory; whether there was anything.

        Without a partial log, the one that the job published in an earlier round (`published_name`) serves. What is there and is no
        whole log of this job would make Inspect refuse the directory: it is left out, and `warn` is given a sentence.
        """
        self._fetching = True
        try:
            self._kept, self._looked = {}, {}
            infos = sorted(self._storage.list(self._prefix), key=lambda info: (info.modified, info.key))
            objects = {info.key.removeprefix(self._prefix): info for info in infos}
            found = {name: info for name, info in objects.items() if _belongs(Path(name))}
            if strange := [self._storage.url(info.key) for name, info in objects.items() if name not in found]:
                warn(f"{spec.name}: {', '.join(strange[:3])} is no part of an unfinished log, so it is left alone")
            here = self._fetch_logs(found, spec, warn)
            if not here and published_name is not None:
                name = Path(published_name).name
                return self._bring(self._published, name, spec, warn) is not None
            return bool(here)
        finally:
            self._fetching = False

    def _fetch_logs(self, found: dict[str, Info], spec: JobSpec, warn: Callable[[str], None]) -> list[Path]:
        """Bring the logs one after the other, in the order of their writing, so that the disk never holds many; which stayed."""
        here: list[Path] = []
        for name in filter(_is_log, found):
            holding = self._bring(found[name].key, name, spec, warn)
            if holding is None:
                continue
            self._kept[name] = _Kept(None, found[name].etag, holding, holding)
            buffer = {other: info for other, info in found.items() if other.startswith(_buffer_of(name))}
            self._kept |= {other: _Kept(None, info.etag) for other, info in buffer.items()}
            self._fetch_buffer(name for name in buffer if name.endswith(f"/{MANIFEST}"))
            here.append(self._log_dir / name)
            for older in holdings.superseded(here, lambda path: self._kept[path.name].least):
                here.remove(older)
                for path in (older, holdings.manifest_of(older)):
                    path.unlink(missing_ok=True)
        best = self._best(here) if here else None
        for log in [log for log in here if best not in (None, log)]:
            # Inspect goes on from the last log of each of its task ids, so an older one with more samples would not be enough
            if best is not None and self._whole(log.name).within(self._kept[best.name].least):
                here.remove(log)
                for path in (log, holdings.manifest_of(log)):
                    path.unlink(missing_ok=True)
        for log in here:
            buffer_of = _buffer_of(log.name)
            self._fetch_buffer(name for name in found if name.startswith(buffer_of) and name != buffer_of + MANIFEST)
        if best is not None:
            self._put_last(best, here)
        for name, kept in list(self._kept.items()):
            with contextlib.suppress(FileNotFoundError):
                self._kept[name] = replace(kept, seen=_seen(self._log_dir / name))
        return here

    def _fetch_buffer(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(Missing):
                self._storage.download(self._prefix + name, self._log_dir / name)
                if name.endswith(f"/{MANIFEST}"):
                    buffered = holdings.buffered((self._log_dir / name).read_bytes())
                    self._kept[name] = replace(self._kept[name], buffered=buffered)

    def _bring(self, key: str, name: str, spec: JobSpec, warn: Callable[[str], None]) -> Holding | None:
        """Download one log if it is whole and of this job; what it holds."""
        target = self._log_dir / name
        try:
            self._storage.download(key, target)
            holding = holdings.read(target)
        except Missing:
            return None
        except holdings.BadLog as error:
            why = f"cannot be read, so the job goes on without it: {error}"
        else:
            if _bare(holding.task) in (None, _bare(spec.name)) and holding.model in (None, spec.model):
                return holding
            why = f"is a log of {holding.task} with {holding.model}, so the job goes on without it"
        warn(f"{spec.name}: {self._storage.url(key)} {why}")
        target.unlink()
        return None

    def _best(self, logs: list[Path]) -> Path:
        """The log to go on from: the newest, unless an older one of its dataset has more samples."""
        best = logs[-1]
        for log in reversed(logs):
            mine, its = self._whole(log.name), self._whole(best.name)
            if mine.finished and its.finished is not None and mine.dataset == its.dataset:
                best = log if len(mine.finished) > len(its.finished) else best
        return best

    def _put_last(self, best: Path, logs: list[Path]) -> None:
        """Inspect goes on from the log that was written last."""
        before = _seen(best)[0] - 1_000_000_000
        for log in logs:
            if log != best:
                os.utime(log, ns=(before, before))


def _seen(path: Path) -> Seen:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _is_log(name: str) -> bool:
    return name.endswith(LOG) and "/" not in name


def _buffer_of(name: str) -> str:
    """How the names of a log's buffer begin."""
    return f"{BUFFER}/{name.removesuffix(LOG)}/"


def _bare(task: str | None) -> str | None:
    """A task's name without its package."""
    return task.rsplit("/", 1)[-1] if task else None


def _belongs(relative: Path) -> bool:
    """Inspect's logs and their buffers; not its lock or eval-set files, which it makes anew, nor what is no file of Inspect's."""
    parts = relative.parts
    if len(parts) == 1:
        return relative.suffix == LOG
    return len(parts) == 3 and parts[0] == BUFFER and ".." not in parts


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
