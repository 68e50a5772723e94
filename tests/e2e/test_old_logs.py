"""Logs of three Inspect versions, each written by that version: all are listed, and those that today's Inspect reads are summarised.

And the other way round: the version that the public dashboard pins reads the parts of our dashboard file that are Inspect's.
"""

import json
from importlib.metadata import version
from pathlib import Path

import dashboard_reader
import old_inspect
import pytest

from evalops.logs import places
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.summarise import Work, summarise
from evalops.logs.survey import survey

VERSIONS = ("0.3.100", "0.3.200", version("inspect-ai"))
PINNED = "0.3.76"

METADATA = """
evaluations:
  mine:
    title: Mine
    description: for tests
    path: tests
    group: Mathematics
    contributors: [somebody]
    tasks: [{name: sums, dataset_samples: 4}]
"""

READ_PINNED = """
import json, sys
from inspect_ai.log import EvalPlan, EvalResults, EvalSpec, EvalStats
for path in sys.argv[1:]:
    body = json.load(open(path))
    spec = EvalSpec(**body["eval"])
    results = EvalResults(**body["results"])
    EvalPlan(**body["plan"])
    EvalStats(**body["stats"])
    print(spec.task, results.scores[0].metrics["accuracy"].value)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A directory with one log of each version, and the task's metadata."""
    folder = tmp_path_factory.mktemp("old")
    (folder / "make.py").write_text(old_inspect.MAKE)
    (folder / "tasks.yaml").write_text(METADATA)
    for one in VERSIONS:
        old_inspect.run(one, "make.py", str(folder / "logs" / one), cwd=folder)
    return folder


def test_logs_of_all_three_versions_are_listed_and_summarised(logs):
    for one in VERSIONS:
        place = places.of_log_dir(str(logs / "logs" / one))
        seen = survey(place, Models().price, cached=False)
        [row] = seen.rows
        facts = seen.chosen[0].log.facts
        assert (row.state, row.completed, row.errored, row.total) == ("success", 4, 0, 4), one
        assert (facts.inspect_version, row.headline_text(), row.tokens) == (one, "accuracy 0.750", 48)
        assert facts.created is not None and facts.created.utcoffset().total_seconds() == 0
        work = Work(place.storage, Models(), Evaluations([logs / "tasks.yaml"]))
        [result] = summarise(work, seen.directory, seen.chosen)
        assert result.outcome == "written", result
        [path] = Path(logs / "logs" / one).glob("*.dashboard.json")
        file = dashboard_reader.load(path.read_bytes())
        assert (file.first_value(), file.eval.packages["inspect_ai"]) == (0.75, one)


def test_a_run_of_mixed_versions_has_one_row_for_the_experiment(logs, tmp_path):
    for one in VERSIONS:
        for path in (logs / "logs" / one).glob("*.eval"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    seen = survey(places.of_log_dir(str(tmp_path)), Models().price, cached=False)
    assert sum(1 + row.superseded for row in seen.rows) == 3
    assert {row.state for row in seen.rows} == {"success"}


def test_the_version_that_the_dashboard_pins_reads_what_we_write(logs):
    files = [str(path) for one in VERSIONS for path in (logs / "logs" / one).glob("*.dashboard.json")]
    assert len(files) == 3, "the test above writes them"
    said = old_inspect.run(PINNED, "-c", READ_PINNED, *files, cwd=logs)
    assert said.split() == ["inspect_evals/sums", "0.75"] * 3
    for path in files:
        assert json.loads(Path(path).read_bytes())["schema_version"] == "1.1"
