"""A merged log against the log of the same task that was never sharded: the same results, and what cannot be merged is refused."""

import json
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from inspect_ai import eval as inspect_eval
from inspect_ai import eval_set
from inspect_ai._cli.log import log_command
from inspect_ai._view import common as view
from inspect_ai.analysis import evals_df, samples_df
from inspect_ai.log import (
    EvalLog,
    list_eval_logs,
    read_eval_log,
    read_eval_log_sample,
    read_eval_log_sample_summaries,
)
from inspect_ai.model import ModelUsage

from evalworker import inspect_internals as internals
from evalworker import merge as merging
from evalworker import zipmembers
from evalworker.inspect_internals import CapturedTask
from evalworker.merge import CannotMerge, Merged, Whole, merge

CASES = Path(__file__).parents[1] / "tasks" / "metric_cases.py"
SHARDS = 3

NAMES = [
    line.removeprefix("def ").split("(")[0]
    for mark, line in zip(CASES.read_text().splitlines(), CASES.read_text().splitlines()[1:], strict=False)
    if mark == "@task"
]


def arguments(name: str) -> dict[str, Any]:
    return {
        "tasks": [f"{CASES}@{name}"],
        "model": "none",
        "continue_on_fail": True,
    }


def run(folder: Path, names: list[str], **more: Any) -> dict[str, Path]:
    """The log of each task, run in one call."""
    given = {"model": "none", "continue_on_fail": True, "display": "none", "log_dir": str(folder), "ctl_server": False}
    logs = inspect_eval([f"{CASES}@{name}" for name in names], **(given | more))
    return {log.eval.task: Path(log.location.removeprefix("file://")) for log in logs}


@dataclass
class Bench:
    """All cases, each run whole and in three interleaved shards."""

    whole: dict[str, Path]
    shards: list[dict[str, Path]]
    tasks: dict[str, CapturedTask]

    def merged(self, name: str, folder: Path) -> Merged:
        captured = self.tasks[name]
        plan = Whole(captured.ids, captured.epochs, {"sample_id": None})
        return merge([shard[name] for shard in self.shards], folder, plan, internals.live_task(arguments(name)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("metric-cases")
    given = arguments("") | {"tasks": [f"{CASES}@{name}" for name in NAMES]}
    tasks = {task.name: task for task in internals.capture(given, ids=True)}
    shards: list[dict[str, Path]] = []
    numbered = [name for name in NAMES if name != "odd_ids"]
    for number in range(SHARDS):
        logs: dict[str, Path] = {}
        for names in (numbered, ["odd_ids"]):
            chosen = internals.exact_selection(tasks[names[0]].ids[number::SHARDS])
            logs |= run(folder / str(number), names, sample_id=chosen)
        shards.append(logs)
    return Bench(run(folder / "whole", NAMES), shards, tasks)


def plain(value: Any) -> Any:
    return json.loads(internals.log_json(value))


@pytest.mark.parametrize("name", NAMES)
def test_results_and_reductions_are_those_of_the_unsharded_run(name: str, bench: Bench, tmp_path: Path) -> None:
    merged = bench.merged(name, tmp_path)
    whole, ours = (read_eval_log(str(path)) for path in (bench.whole[name], merged.path))
    assert plain(ours.results) == plain(whole.results)
    assert plain(ours.reductions) == plain(whole.reductions)
    assert (ours.status, plain(ours.error)) == (whole.status, plain(whole.error))
    assert plain(ours.eval.config) == plain(whole.eval.config)
    assert plain(ours.eval.dataset) == plain(whole.eval.dataset)
    assert not merged.missing
    pairs = zip(_by_key(ours), _by_key(whole), strict=True)
    assert all(plain(mine.scores) == plain(theirs.scores) and mine.id == theirs.id for mine, theirs in pairs)


def _by_key(log: EvalLog) -> list[Any]:
    return sorted(log.samples or [], key=lambda sample: (sample.epoch, str(sample.id)))


def test_a_public_task_with_a_model_gives_the_same(public_tasks: None, tmp_path: Path) -> None:
    given = {"tasks": ["inspect_evals/agent_threat_bench_memory_poison"], "model": "scripted/mixed", "limit": 6}
    [task] = internals.capture(given, ids=True)
    assert (len(task.ids), task.whole) == (6, "")
    [shared] = given["tasks"]

    def one(folder: Path, **more: Any) -> Path:
        [log] = inspect_eval(
            shared, model="scripted/mixed", log_dir=str(folder), display="none", ctl_server=False, **more
        )
        return Path(log.location.removeprefix("file://"))

    shards = [one(tmp_path / str(n), sample_id=internals.exact_selection(task.ids[n::2])) for n in range(2)]
    plan = Whole(task.ids, task.epochs, {"sample_id": None, "limit": 6})
    (tmp_path / "out").mkdir()
    merged = merge(shards, tmp_path / "out", plan, internals.live_task(given))
    whole, ours = (read_eval_log(str(path)) for path in (one(tmp_path / "whole", limit=6), merged.path))
    assert plain(ours.results) == plain(whole.results)
    assert plain(ours.reductions) == plain(whole.reductions)
    assert plain(ours.eval.config) == plain(whole.eval.config)
    usage = [{m: u.total_tokens for m, u in log.stats.model_usage.items()} for log in (ours, whole)]
    assert usage[0] == usage[1]


def test_a_shards_selection_is_looked_up_and_any_other_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai._eval import eval_set_manifest
    from inspect_ai._eval.task import util
    from inspect_ai.dataset import MemoryDataset, Sample

    for module in (util, eval_set_manifest):
        monkeypatch.setattr(module, "sample_id_filter", module.sample_id_filter)  # given back after the test
    ids: list[int | str] = ["a[1]", "a1", "*", "?x", "a:b", "007", 8, 19]
    dataset = MemoryDataset([Sample(id=each, input="x") for each in ids])
    for chosen in (["a[1]", "*", 8], ["a:b", "007"]):
        matched = [sample.id for sample in util.slice_dataset(dataset, None, internals.exact_selection(chosen))]
        assert matched == chosen
        internals.select_fast(chosen)
        looked_up = util.slice_dataset(dataset, None, internals.exact_selection(chosen))
        assert [sample.id for sample in looked_up] == chosen
        assert [sample.id for sample in util.slice_dataset(dataset, None, ["a*"])] == ["a[1]", "a1", "a:b"]
        assert eval_set_manifest.samples_selected(dataset, None, internals.exact_selection(chosen)) == len(chosen)


def some_shards(folder: Path, name: str = "one_error", **more: Any) -> list[Path]:
    return [run(folder / str(n), [name], sample_id=list(range(n + 1, 10, 3)), **more)[name] for n in range(SHARDS)]


def whole_of(**more: Any) -> Whole:
    return Whole(list(range(1, 10)), **({"config": {"sample_id": None}} | more))


def test_members_are_copied_byte_for_byte(bench: Bench, tmp_path: Path) -> None:
    merged = bench.merged("epochs_mean", tmp_path)
    with zipfile.ZipFile(merged.path) as ours:
        assert ours.testzip() is None
        names = [name for name in ours.namelist() if name.startswith("samples/")]
        assert len(names) == 27
        for shard in bench.shards:
            with zipfile.ZipFile(shard["epochs_mean"]) as theirs:
                for info in theirs.infolist():
                    if info.filename.startswith("samples/"):
                        assert packed(merged.path, ours.getinfo(info.filename)) == packed(shard["epochs_mean"], info)


def packed(path: Path, info: zipfile.ZipInfo) -> bytes:
    data = path.read_bytes()
    at = info.header_offset
    skip = 30 + int.from_bytes(data[at + 26 : at + 28], "little") + int.from_bytes(data[at + 28 : at + 30], "little")
    return data[at + skip : at + skip + info.compress_size]


def test_the_metadata_of_a_samples_epochs_is_held_once(bench: Bench, tmp_path: Path) -> None:
    metadata: dict[str, dict[str, Any]] = {}
    order = Whole(bench.tasks["groups_epochs"].ids, bench.tasks["groups_epochs"].epochs).order()
    with ExitStack() as stack:
        shards = [merging._open(shard["groups_epochs"], stack) for shard in bench.shards]
        target = stack.enter_context(zipfile.ZipFile(tmp_path / "x.zip", "w"))
        scored = [merging._take(found, target, metadata) for found in merging._collect(shards, order).values()]
    assert len(scored) > len(metadata) == 9
    assert len({id(sample.metadata) for sample in scored}) == 9
    assert all(sample.metadata["weight"] == sample.id for sample in scored)


def test_times_usage_and_ids_of_the_whole(bench: Bench, tmp_path: Path) -> None:
    ours = bench.merged("numbers", tmp_path).header
    theirs = [read_eval_log(str(shard["numbers"]), header_only=True) for shard in bench.shards]
    assert ours.stats.started_at == min(log.stats.started_at for log in theirs)
    assert ours.stats.completed_at == max(log.stats.completed_at for log in theirs)
    assert not {ours.eval.eval_id, ours.eval.run_id, ours.eval.task_id} & {
        each for log in theirs for each in (log.eval.eval_id, log.eval.run_id, log.eval.task_id)
    }
    assert ours.eval.shards is None
    assert ours.eval.dataset.sample_ids == list(range(1, 10))


def test_usage_is_summed_and_a_resumed_shard_counts_by_its_samples() -> None:
    def usage(tokens: int) -> dict[str, ModelUsage]:
        return {"m": ModelUsage(input_tokens=tokens, total_tokens=tokens)}

    assert merging._sum([usage(3), usage(4)])["m"].total_tokens == 7
    assert merging._fuller(usage(5), [usage(3), usage(4)])["m"].total_tokens == 7  # the log covers only its own part
    assert merging._fuller(usage(9), [usage(3), usage(4)])["m"].total_tokens == 9  # tries that were repeated cost too


def test_a_gap_makes_the_log_an_error_that_names_it_and_a_retry_runs_it_alone(tmp_path: Path) -> None:
    shards = some_shards(tmp_path, "numbers")
    given = arguments("numbers")
    (tmp_path / "set").mkdir()
    merged = merge(shards[:2], tmp_path / "set", whole_of(), internals.live_task(given))
    assert merged.missing == [(3, 1), (6, 1), (9, 1)]
    assert merged.header.status == "error"
    assert merged.header.error is not None
    assert merged.header.error.message == "3 of 9 samples have not been run: 3 (epoch 1), 6 (epoch 1), 9 (epoch 1)"
    kept = {summary.id: summary.uuid for summary in merged.summaries}
    success, [log] = eval_set(**given, log_dir=str(tmp_path / "set"), display="none", ctl_server=False)
    assert success
    after = read_eval_log_sample_summaries(log.location)
    assert {summary.id for summary in after} == set(range(1, 10))
    assert {s.id: s.uuid for s in after if s.id in kept} == kept
    whole = read_eval_log(str(run(tmp_path / "whole", ["numbers"])["numbers"]))
    assert [plain(score) for score in log.results.scores] == [plain(score) for score in whole.results.scores]


def test_eval_set_takes_a_merged_log_for_complete(bench: Bench, tmp_path: Path) -> None:
    merged = bench.merged("groups_epochs", tmp_path)
    before = merged.path.read_bytes()
    success, [log] = eval_set(**arguments("groups_epochs"), log_dir=str(tmp_path), display="none", ctl_server=False)
    assert success
    assert Path(log.location.removeprefix("file://")) == merged.path
    assert merged.path.read_bytes() == before


def test_readers_take_a_merged_log(bench: Bench, tmp_path: Path) -> None:
    merged = bench.merged("odd_ids", tmp_path)
    [listed] = list_eval_logs(str(tmp_path))
    assert listed.task == "odd-ids"
    frame = evals_df(str(tmp_path), quiet=True)
    assert list(frame["status"]) == ["success"]
    assert list(frame["completed_samples"]) == [9]
    assert sorted(samples_df(str(tmp_path), quiet=True)["id"]) == sorted(bench.tasks["odd_ids"].ids)
    assert read_eval_log_sample(str(merged.path), "a[1]", 1).id == "a[1]"
    shown = anyio.run(partial(view.get_logs, str(tmp_path), recursive=True, fs_options={}))
    assert shown is not None
    assert [Path(each.name).name for each in shown.files] == [merged.path.name]
    assert anyio.run(view.get_log_file, str(merged.path), "0") is not None
    dump = CliRunner().invoke(log_command, ["dump", str(merged.path)])
    assert dump.exit_code == 0, dump.output
    assert len(json.loads(dump.output)["samples"]) == 9


def test_two_executions_of_a_sample_are_refused_and_a_copied_record_is_one(bench: Bench, tmp_path: Path) -> None:
    task = internals.live_task(arguments("numbers"))
    logs = [shard["numbers"] for shard in bench.shards]
    copied = tmp_path / "copy-of-the-first.eval"
    copied.write_bytes(logs[0].read_bytes())
    (tmp_path / "out").mkdir()
    assert not merge([*logs, copied], tmp_path / "out", whole_of(), task).missing
    again = run(tmp_path / "again", ["numbers"], sample_id=[1])["numbers"]
    with pytest.raises(CannotMerge, match=r"sample 1, epoch 1, was run in two shards: .*eval and .*eval"):
        merge([*logs, again], tmp_path / "out", whole_of(), task)


def test_what_is_no_shard_of_the_task_is_refused(bench: Bench, tmp_path: Path) -> None:
    task = internals.live_task(arguments("numbers"))
    first, other = bench.shards[0]["numbers"], bench.shards[1]["clusters"]
    with pytest.raises(CannotMerge, match=r"is no shard of .*: its task is 'clusters', not 'numbers'"):
        merge([first, other], tmp_path, whole_of(), task)
    with pytest.raises(CannotMerge, match="holds sample 1, epoch 1, which is not of the run"):
        merge([first], tmp_path, Whole([4, 7]), task)
    with pytest.raises(CannotMerge, match="there is no shard with a log"):
        merge([], tmp_path, whole_of(), task)


def test_an_unfinished_log_gives_the_samples_that_it_has(bench: Bench, tmp_path: Path) -> None:
    killed = tmp_path / "killed.eval"
    with zipfile.ZipFile(bench.shards[0]["numbers"]) as whole, zipfile.ZipFile(killed, "w") as cut:
        for info in whole.infolist():
            if info.filename not in ("header.json", "summaries.json", "reductions.json"):
                cut.writestr(info.filename, whole.read(info))
    logs = [killed, *(shard["numbers"] for shard in bench.shards[1:])]
    merged = merge(logs, tmp_path, whole_of(), internals.live_task(arguments("numbers")))
    assert not merged.missing
    assert plain(merged.header.results) == plain(read_eval_log(str(bench.whole["numbers"]), header_only=True).results)


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
def test_the_head_of_a_member_is_read_no_further_than_needed(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipmembers, "FIRST_READ", pieces)
    body = {"n": 12345, "text": 'ä "quoted" \u0041 \ud83d', "list": [1, {"a": None}], "scores": {"x": 1.5}, "last": 7}
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("whole", text)
        made.writestr("broken after it", text[:-9] + b"!!!")
        made.writestr("nothing", b"")
        made.writestr("empty", b"{}")
    with zipfile.ZipFile(path) as archive:
        assert zipmembers.head_of(archive, archive.getinfo("whole"), {"n", "text", "last"}) == {
            name: body[name] for name in ("n", "text", "last")
        }
        assert zipmembers.head_of(archive, archive.getinfo("broken after it"), {"scores"}) == {"scores": {"x": 1.5}}
        assert zipmembers.head_of(archive, archive.getinfo("empty"), {"scores"}) == {}
        for name in ("broken after it", "nothing"):
            with pytest.raises(zipmembers.BadMember, match=name):
                zipmembers.head_of(archive, archive.getinfo(name), {"nowhere"})
