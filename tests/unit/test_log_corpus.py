"""The corpus of broken and odd logs: the state that each shows, and what summarize does with it and why."""

import json
import zipfile
from pathlib import Path

import dashboard_reader
import logmaker
import pytest

from evalops.logs import dashboard, places
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.reading import list_directory, read_all
from evalops.logs.summarise import Work, summarise
from evalops.logs.survey import survey

STATES = {
    "good": "success",
    "truncated": "unreadable",
    "empty": "unreadable",
    "no_log": "unreadable",
    "flipped_header": "unreadable",
    "flipped_sample": "success",
    "started": "running",
    "cancelled": "cancelled",
    "all_errored": "error",
    "no_results": "error",
    "nan": "success",
    "infinite": "success",
    "null": "unreadable",
    "dict_scores": "success",
    "list_scores": "success",
    "unscored": "success",
    "reducers": "success",
    "two_scorers": "success",
    "better": "success",
    "path_ids": "success",
    "surrogates": "success",
    "long_explanation": "success",
    "string_version": "success",
    "wordy_version": "success",
    "some_errored": "partial",
    "limited": "success",
    "invalidated": "success",
    "empty_scores": "success",
}

REFUSED = {
    "truncated": {"unreadable"},
    "empty": {"unreadable"},
    "no_log": {"unreadable"},
    "flipped_header": {"unreadable"},
    "flipped_sample": {"unreadable"},
    "started": {"status", "no-results"},
    "cancelled": {"status", "partial"},
    "all_errored": {"all-errored"},
    "no_results": {"no-results"},
    "nan": {"non-finite"},
    "infinite": {"non-finite"},
    "null": {"unreadable"},
    "wordy_version": {"task-version"},
    "some_errored": {"errors"},
    "limited": {"limited"},
    "invalidated": {"invalidated"},
    "empty_scores": {"no-scores"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The corpus in a directory, and metadata for its tasks."""
    folder = tmp_path_factory.mktemp("corpus")
    made = logmaker.corpus(folder / "logs")
    tasks = folder / "tasks.yaml"
    names = [*made, "twice"]
    entries = "".join(f"      - {{name: '{name}', dataset_samples: 4}}\n" for name in names)
    tasks.write_text(
        "evaluations:\n  made:\n    title: Made\n    description: for tests\n    path: x\n    group: Knowledge\n"
        f"    contributors: [a]\n    tasks:\n{entries}"
    )
    return folder / "logs", made, tasks


def _summarise(folder: Path, tasks: Path, **options):
    place = places.of_log_dir(str(folder))
    seen = survey(place, Models().price, cached=False)
    work = Work(place.storage, Models(), Evaluations([tasks]), **options)
    return {result.log: result for result in summarise(work, seen.directory, seen.chosen)}


def test_the_state_of_each(corpus):
    folder, made, _ = corpus
    seen = survey(places.of_log_dir(str(folder)), Models().price, cached=False)
    states = {row.log: row.state for row in seen.rows}
    names = {name: path.name for name, path in made.items()}
    assert {name: states.get(names[name]) for name in STATES} == STATES
    assert names["worse"] not in states, "the worse of two logs of a task is superseded"
    assert next(row.superseded for row in seen.rows if row.log == names["better"]) == 1


def test_counts_come_from_the_samples(corpus):
    folder, made, _ = corpus
    rows = {row.log: row for row in survey(places.of_log_dir(str(folder)), Models().price, cached=False).rows}
    counts = {
        name: (r.completed, r.errored, r.total) for name in STATES if (r := rows[made[name].name]).total is not None
    }
    assert counts["good"] == (4, 0, 4)
    assert counts["started"] == (1, 1, 4)
    assert counts["all_errored"] == (0, 4, 4)
    assert counts["some_errored"] == (3, 1, 4)
    assert counts["cancelled"] == (2, 0, 4)
    assert counts["reducers"] == (8, 0, 8)


def test_what_summarize_does_with_each_and_why(corpus):
    folder, made, tasks = corpus
    results = _summarise(folder, tasks)
    for name in STATES:
        result = results[made[name].name]
        kinds = {item.kind for item in result.refusals}
        assert kinds == REFUSED.get(name, set()), (name, result)
        assert (result.outcome == "refused") == (name in REFUSED), (name, result)
        assert all(item.text for item in result.refusals)
    assert made["worse"].name not in results


def test_each_written_file_can_be_read_by_the_dashboard_and_holds_its_log(corpus):
    folder, made, tasks = corpus
    _summarise(folder, tasks)
    good = [made[name] for name in STATES if name not in REFUSED]
    assert sorted(folder.glob("*.dashboard.json")) == sorted(Path(f"{path}.dashboard.json") for path in good)
    for path in good:
        file = dashboard_reader.load(Path(f"{path}.dashboard.json").read_bytes())
        assert file.location == str(path)
        assert file.first_value() is not None
        with zipfile.ZipFile(f"{path}.zip") as archive:
            assert archive.namelist() == [path.name]
            assert archive.read(path.name) == path.read_bytes()


def test_what_needs_care_is_written_with_care(corpus):
    folder, made, tasks = corpus
    _summarise(folder, tasks)

    def file(name: str) -> dict:
        return json.loads(Path(f"{made[name]}.dashboard.json").read_bytes())

    assert [score["name"] for score in file("dict_scores")["results"]["scores"]] == ["main", "side"]
    assert [score["reducer"] for score in file("reducers")["results"]["scores"]] == ["mean", "at_least_2"]
    assert [score["name"] for score in file("two_scorers")["results"]["scores"]] == ["includes", "includes1"]
    assert file("string_version")["eval"]["task_version"] == 3
    assert file("string_version")["eval"]["metadata"]["full_task_version"] == "3-D"
    assert Path(f"{made['long_explanation']}.dashboard.json").stat().st_size < 20_000, "no sample's text is in it"
    assert b"\\\\ud800" in Path(f"{made['surrogates']}.dashboard.json").read_bytes()


def test_a_second_time_changes_nothing(corpus):
    folder, _, tasks = corpus
    _summarise(folder, tasks)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    results = _summarise(folder, tasks)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert {result.outcome for result in results.values()} == {"unchanged", "refused"}


def test_force_overrides_one_kind_and_no_other(corpus):
    folder, made, tasks = corpus
    forced = _summarise(folder, tasks, forced=("non-finite", "limited"))
    outcomes = {name: forced[made[name].name].outcome for name in REFUSED}
    assert {name for name, outcome in outcomes.items() if outcome != "refused"} == {"nan", "infinite", "limited"}
    written = dashboard_reader.load(Path(f"{made['nan']}.dashboard.json").read_bytes())
    assert list(written.results.scores[0].metrics) == ["stderr"], "the metric that is not finite is left out"
    again = _summarise(folder, tasks)
    assert again[made["nan"].name].outcome == "refused"
    assert not Path(f"{made['nan']}.dashboard.json").exists(), (
        "a file that was forced does not outlive a run without force"
    )


@pytest.mark.parametrize("kind", sorted(dashboard.FINAL))
def test_no_option_forces_what_cannot_be_shown(kind):
    assert kind not in dashboard.FORCIBLE


def test_a_listing_takes_neither_shards_nor_buffers_for_logs(tmp_path):
    log = logmaker.make(tmp_path)
    for inside in ("x.shards/1.eval", f"{log.stem}.buffer/1.eval", "x.checkpoints/2.eval"):
        logmaker.make((tmp_path / inside).parent, number=99)
    (tmp_path / f"{log.name}.dashboard.json").write_text("{}")
    (tmp_path / "2026-11-29T10-00-00-00-00_old_x.json").write_text("{}")
    place = places.of_log_dir(str(tmp_path))
    found = list_directory(place.storage, place.prefix)
    facts = {one.name: one.facts for one in read_all(place.storage, found.logs)}
    assert set(facts) == {log.name, "2026-11-29T10-00-00-00-00_old_x.json"}
    assert "JSON format" in (facts["2026-11-29T10-00-00-00-00_old_x.json"].reason or "")
