"""Which log a Batch job or a retry goes on from: the one that is further, with what stands only in the shared buffer beside it."""

import json
import os
from pathlib import Path

import logmaker
import pytest

from evalops.logs import local_run, places
from evalworker import batch_job
from evalworker.batch_job import Work
from evalworker.contract import layout
from evalworker.contract.documents import BatchRound, JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage, StorageError

RUN = "2026-11-29-14-05-33-1a2b3c4d"
JOB = JobSpec(job_id="0" * 16, task="gsm8k", name="gsm8k", model="openai/gpt-4o-mini", samples=4)
OTHER = JOB.model_copy(update={"job_id": "1" * 16, "model": "openai/gpt-4o"})
WORKING, OWN = layout.working(RUN), layout.partial(RUN, JOB.job_id)


class Root:
    """A run's working directory and that of a job of an array."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, LocalStorage(folder)

    def log(
        self, prefix: str, number: int, status: str, done: int, *, model: str = JOB.model, buffered: int = 0
    ) -> str:
        """A log with so many finished samples; `buffered` of them stand beside it alone. Its key."""
        made = logmaker.log(
            number=number, status=status, results=status == "success", model=model, samples=[logmaker.sample(n) for n in range(1, done + 1)]
        )  # fmt: skip
        where = layout.partial(RUN, OTHER.job_id) if model != JOB.model and prefix != WORKING else prefix
        local = LocalStorage(self.folder / "made")
        path = logmaker.write(Path(local.root), made)
        key = where + path.name
        self.storage.put(key, path.read_bytes())
        summaries = [
            {"id": n, "epoch": 1, "uuid": f"b{n}", "completed": True, "completed_at": "2026-11-29T14:00:01+00:00"}
            for n in range(done + 1, done + buffered + 1)
        ]
        if summaries:
            body = json.dumps({"samples": [{"summary": each} for each in summaries], "segments": []})
            self.storage.put(layout.buffer_of(key), body.encode())
        return key

    def fetch(self) -> int:
        return local_run.fetch_partials(places.of_run(RUN, self.storage))

    def names(self, prefix: str = WORKING) -> list[str]:
        return [info.key.removeprefix(prefix) for info in self.storage.list(prefix)]

    def work(self, named: str | None) -> Work:
        manifest = Manifest(
            fleet_id=RUN, created=now(), backend="batch", jobs=[JOB, OTHER], arguments={}, models=[], submit_dir="."
        )
        logs = {0: named} if named else {}
        round_ = BatchRound(number=2, queue="q", array=True, jobs=[0, 1], logs=logs)
        return Work(self.storage, manifest, round_, [manifest.jobs[0]], OWN.rstrip("/"), 1, "j")

    def goes_on_from(self, named: str | None) -> str:
        """The name of the newest log in the job's own directory when its eval begins."""
        for info in self.storage.list(OWN):
            os.utime(self.storage.url(info.key), (1, 1))
        batch_job._start_from(self.work(named))
        logs = [info for info in self.storage.list(OWN) if info.key.endswith(".eval")]
        return max(logs, key=lambda info: info.modified).key.removeprefix(OWN)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def test_what_a_retry_has_already_gone_on_from_does_not_come_back(root: Root) -> None:
    kept = root.log(OWN, 1, "cancelled", 2)
    assert root.fetch() == 1
    later = root.log(WORKING, 2, "cancelled", 3)
    root.storage.delete(WORKING + kept.removeprefix(OWN))  # Inspect removes a superseded log
    assert root.fetch() == 0
    assert root.names() == [later.removeprefix(WORKING)]


def test_a_finished_job_fetches_nothing_and_another_fetches_its_own(root: Root) -> None:
    root.log(OWN, 1, "cancelled", 3)
    root.log(WORKING, 2, "success", 4)
    other = root.log("", 3, "cancelled", 1, model=OTHER.model)
    assert root.fetch() == 1
    assert other.rsplit("/", 1)[-1] in root.names()


def test_what_a_killed_job_has_only_in_its_buffer_counts_and_comes_along(root: Root) -> None:
    root.log(WORKING, 1, "cancelled", 2)
    further = root.log(OWN, 2, "started", 1, buffered=2)
    root.log(OWN, 3, "started", 1)
    assert root.fetch() == 1, "the best of a job's logs alone"
    name = further.removeprefix(OWN)
    assert {name, f".buffer/{name.removesuffix('.eval')}/manifest.json"} < set(root.names())
    assert root.fetch() == 0


def test_a_job_of_an_array_goes_on_from_what_is_further(root: Root) -> None:
    own = root.log(OWN, 1, "cancelled", 1)
    assert root.goes_on_from(None) == own.removeprefix(OWN)
    named = root.log(WORKING, 2, "cancelled", 3)
    assert root.goes_on_from(named) == named.removeprefix(WORKING), "an older directory does not hide a later progress"
    further = root.log(OWN, 3, "started", 3, buffered=1)
    os.utime(root.storage.url(further), (2, 2))
    before = set(root.names(OWN))
    batch_job._start_from(root.work(named))
    assert set(root.names(OWN)) == before
    assert root.storage.head(further).modified.timestamp() == 2  # type: ignore[union-attr]
    batch_job._start_from(root.work(WORKING + "gone.eval"))


def test_an_unfinished_log_that_is_gone_on_from_brings_its_buffer(root: Root) -> None:
    named = root.log(WORKING, 1, "started", 1, buffered=2)
    assert root.goes_on_from(named) == named.removeprefix(WORKING)
    assert root.storage.exists(layout.buffer_of(OWN + named.removeprefix(WORKING)))


def test_dashboard_files_do_not_stand_in_the_way_of_an_attempt(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    log = root.log(OWN, 1, "cancelled", 1)
    for suffix in (layout.DASHBOARD_SUFFIX, layout.ZIP_SUFFIX):
        root.storage.put(log + suffix, b"{}")
    seen: list[str] = []
    monkeypatch.setattr(batch_job, "eval_set", lambda work: seen.extend(root.names(OWN)))
    batch_job._evaluate(root.work(None))
    assert seen == [log.removeprefix(OWN)]


def test_a_store_that_fails_after_the_eval_is_no_broken_set_up(
    root: Root, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root.log(WORKING, 1, "success", 4)
    root.log(WORKING, 2, "success", 4, model=OTHER.model)
    whole = root.work(None)
    work = Work(root.storage, whole.manifest, whole.round, whole.manifest.jobs, WORKING.rstrip("/"), 1, "j")
    monkeypatch.setattr(batch_job, "eval_set", lambda work: None)
    create = root.storage.create

    def failing(key: str, body: bytes) -> str:
        if JOB.job_id in key:
            raise StorageError("S3 is away")
        return create(key, body)

    monkeypatch.setattr(root.storage, "create", failing)
    assert batch_job._evaluate(work) == batch_job.EXIT_STORAGE
    assert root.storage.exists(layout.job_done(RUN, OTHER.job_id, 2)), "the other job is concluded"
    said = capsys.readouterr().out
    assert "gsm8k with openai/gpt-4o-mini has ended, but its end could not be recorded: S3 is away" in said
