"""The job that merges, a shard that checks what it runs, and how many errors are too many: in a process that stands for the job's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inspect_ai import eval as inspect_eval
from inspect_ai import eval_set

from evalworker import inspect_internals, merge_job, streamer
from evalworker.contract.documents import JobSpec, Shard
from evalworker.contract.failures import EXIT_CONFIG, Category, JobEvidence, judge
from evalworker.job import SHARDS, AgentLine, JobEnd, Order, _left_to_the_merge, selection_of
from evalworker.reopen import reopen
from evalworker.results import Origin, read_log
from evalworker.streamer import Streaming
from evalworker.verdict import ProcessEnd, summary_of

CASES = Path(__file__).parents[1] / "tasks" / "metric_cases.py"
IDS: list[int | str] = list(range(1, 10))
JOBS = ["0123456789abcde0", "0123456789abcde1", "0123456789abcde2"]


class Line:
    """An agent that never says anything."""

    interruptible = AgentLine.interruptible

    def __init__(self) -> None:
        import threading

        self.stopped, self._interruptible, self._changing = False, False, threading.Lock()


def merged(folder: Path, task: str, shards: list[int], **arguments: Any) -> tuple[JobEnd, int]:
    """The end of the merge of these shards' logs (by number) of a task of three shards."""
    (folder / SHARDS).mkdir(parents=True)
    for number in shards:
        chosen = IDS[number::3]
        [log] = inspect_eval(
            f"{CASES}@{task}", model="none", sample_id=chosen, continue_on_fail=True, log_dir=str(folder / str(number)),
            display="none", ctl_server=False, **arguments,
        )  # fmt: skip
        Path(log.location.removeprefix("file://")).rename(folder / SHARDS / f"{JOBS[number]}.eval")
    spec = JobSpec(
        job_id="0123456789abcdef", task=f"{CASES}@{task}", name=task, model="none/none", samples=9, merges=JOBS, ids=IDS
    )
    order = Order(
        fleet_id="f", round=1, spec=spec, attempt=1, instance_id="w", arguments=arguments, model="none", path=[], share=1,
        log_dir=str(folder / "logs"),
    )  # fmt: skip
    return merge_job.run(order, Line())  # type: ignore[arg-type]


def verdict(end: JobEnd, status: int) -> Category | None:
    return judge(
        JobEvidence(
            exit_status=status,
            log_status=end.log_status,
            samples_total=end.samples.total,
            samples_completed=end.samples.completed,
            samples_errored=end.samples.errored,
            error_type=end.error_type,
            error_message=end.error_message,
        )
    )


def test_a_merge_ends_as_any_job_does(tmp_path: Path) -> None:
    end, status = merged(tmp_path, "numbers", [0, 1, 2])
    assert (status, end.log_status, end.samples.completed, end.samples.total) == (0, "success", 9, 9)
    assert (verdict(end, status), end.digest) == (None, None)
    assert set(end.metrics) == {f"number/{name}" for name in ("mean", "std", "var", "stderr")}
    assert end.log_path is not None
    assert read_log(end.log_path).counts(9).completed == 9


def test_a_merge_with_a_gap_says_what_is_missing(tmp_path: Path) -> None:
    end, status = merged(tmp_path, "numbers", [0, 2])
    assert (verdict(end, status), end.samples.completed, end.samples.total) == (Category.TASK_ERROR, 6, 9)
    assert end.error_message == "3 of 9 samples have not been run: 2 (epoch 1), 5 (epoch 1), 8 (epoch 1)"
    assert end.log_path is not None


def test_a_merge_of_nothing_is_no_traceback(tmp_path: Path) -> None:
    end, status = merged(tmp_path, "numbers", [])
    assert (status, end.error_type, end.log_path) == (EXIT_CONFIG, "CannotMerge", None)
    assert verdict(end, status) is Category.CONFIG


@pytest.mark.parametrize(("allowed", "category"), [(0.5, None), (3, Category.TASK_ERROR)])
def test_errors_are_judged_on_the_whole(tmp_path: Path, allowed: float, category: Category | None) -> None:
    """Samples 1, 4 and 7 fail: all of the first shard, a third of the whole."""
    end, status = merged(tmp_path, "errors_allowed", [0, 1, 2], fail_on_error=allowed)
    assert (end.samples.errored, verdict(end, status)) == (3, category)
    if category is not None:
        said = summary_of(ProcessEnd(end, status), category)
        assert said == "TooManyErrors: 3 of 9 samples errored, for example ValueError('sample 1 cannot be solved')"


def test_a_shard_leaves_a_number_of_errors_to_the_merge_and_all_else_to_nobody(tmp_path: Path) -> None:
    def left(task: str, samples: int, **more: Any) -> bool:
        [log] = inspect_eval(
            f"{CASES}@{task}", model="none", sample_id=[1, 2, 3, 4], continue_on_fail=True, display="none",
            log_dir=str(tmp_path), ctl_server=False, **more,
        )  # fmt: skip
        spec = JobSpec(job_id=JOBS[0], task="t", name="t", model="m", samples=samples)
        return _left_to_the_merge(read_log(log.location.removeprefix("file://")), spec)

    assert left("errors_allowed", 4, fail_on_error=0.25)
    assert left("errors_allowed", 4, fail_on_error=2)
    assert not left("errors_allowed", 5, fail_on_error=0.25)  # one has not been run
    assert not left("errors_allowed", 4, fail_on_error=True)
    assert not left("numbers", 4, fail_on_error=0.25)  # nothing to leave


def test_a_shard_that_is_opened_again_runs_its_errored_samples_alone(tmp_path: Path) -> None:
    """One of three errored, which is few enough for the shard."""
    given: dict[str, Any] = {"model": "none", "sample_id": [1, 2, 3], "continue_on_fail": True, "display": "none"}
    given |= {"log_dir": str(tmp_path), "ctl_server": False}
    [log] = inspect_eval(f"{CASES}@errors_allowed", **given)
    assert log.status == "success"
    path = Path(log.location.removeprefix("file://"))
    before = read_log(path)
    assert reopen(tmp_path) == [path]
    assert reopen(tmp_path) == []
    marked = read_log(path)
    assert (marked.header.status, marked.header.results, marked.digest) == (
        "error",
        before.header.results,
        before.digest,
    )
    [again] = eval_set(f"{CASES}@errors_allowed", retry_attempts=0, **given)[1]
    assert Path(again.location.removeprefix("file://")) != path
    uuids = [
        {summary.id: summary.uuid for summary in each.summaries}
        for each in (before, read_log(again.location.removeprefix("file://")))
    ]
    assert {id_ for id_, uuid in uuids[0].items() if uuids[1][id_] != uuid} == {1}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([1, "b", 3], ""),
        (["b", 3, 1], ""),
        ([1, "b"], "of the 3 samples of this shard 1 are missing and 0 are too many ([3] are not there)"),
        ([1, "b", 3, "x"], "of the 3 samples of this shard 0 are missing and 1 are too many (['x'] are not of it)"),
        (["1", "b", 3], "1 are missing and 1 are too many ([1] are not there)"),
    ],
)
def test_a_shard_runs_its_own_samples_or_none(there: list[Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[bool] = []
    monkeypatch.setattr(streamer, "_interrupt", lambda: interrupted.append(True))
    origin = Origin("f", 1, JOBS[0], 1, "t", "m", "w")
    streaming = Streaming(origin, lambda _: None, None, selection=[1, "b", 3])
    streaming.check(there)
    assert (said in streaming.wrong_selection, bool(streaming.wrong_selection)) == (True, bool(said))
    assert bool(interrupted) == bool(said)


def test_what_a_shard_tells_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(inspect_internals, "select_fast", told.append)
    spec = SimpleNamespace(shard=Shard(index=0, of=2, ids=[3, "a[1]", "t:x"]))
    assert selection_of(spec) == {"sample_id": [3, "a[[]1]", "t[:]x"], "limit": None, "sample_shuffle": None}  # type: ignore[arg-type]
    assert told == [[3, "a[1]", "t:x"]]
    assert selection_of(SimpleNamespace(shard=None)) == {}  # type: ignore[arg-type]
