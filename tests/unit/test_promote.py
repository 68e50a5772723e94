"""`evalops.logs.promote`: the plan, the dashboard's key rules, and being killed at every step."""

import json
import shutil
import zipfile
from pathlib import Path

import dashboard_reader
import logmaker
import pytest

from evalops.logs import places, promote
from evalops.logs.metadata import Evaluations, Models
from evalops.logs.summarise import Work, summarise
from evalops.logs.survey import survey
from evalworker.contract import layout
from evalworker.contract.ids import BadId
from evalworker.storage import open_storage

RUN, LATER = "2026-11-29-14-05-33-1a2b3c4d", "2026-11-30-14-05-33-1a2b3c4d"
MODELS = ["openai/gpt-4o", "openrouter/anthropic/claude-3.5-sonnet:beta"]


class Killed(BaseException):
    """Stands for the end of the process."""


class Mortal:
    """A store whose process dies at the n-th change: before it, or just after it."""

    def __init__(self, inner, dies_at: int, *, after: bool) -> None:
        self.inner, self.left, self.after = inner, dies_at, after

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if name not in ("put", "copy", "delete", "create", "replace", "upload"):
            return method

        def call(*arguments):
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            done = method(*arguments)
            if self.left == 0:
                raise Killed
            return done

        return call


@pytest.fixture
def root(tmp_path):
    """A root with one summarised run of one task and two models."""
    return _run(tmp_path / "root", RUN)


def _run(root, run_id, **what):
    folder = root / layout.working(run_id)
    for number, model in enumerate(MODELS):
        logmaker.make(folder, model=model, number=number + 1, **what)
    place = places.of_run(run_id, open_storage(str(root)))
    seen = survey(place, Models().price, cached=False)
    results = summarise(Work(place.storage, Models(), Evaluations()), seen.directory, seen.chosen)
    assert [result.outcome for result in results] == ["written", "written"]
    return root


def _place(root, run_id=RUN):
    return places.of_run(run_id, open_storage(str(root)))


def _promote(root, run_id=RUN, environment="stage", **options):
    place = _place(root, run_id)
    moves, problems = promote.plan(place, environment, **options)
    assert not problems
    promote.carry_out(place.storage, moves)
    return moves


def _tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _states(root):
    """The states of the run's logs, wherever they are now."""
    seen = survey(_place(root), Models().price, cached=False)
    assert seen.problems == []
    return [row.state for row in seen.rows]


def _check_promoted(root, run_id=RUN, environment="stage"):
    """What the dashboard's reader sees is whole and true."""
    tree = _tree(root)
    shown = dashboard_reader.newest(list(tree), environment)
    assert set(shown) == {("gsm8k", model.replace("/", "+")) for model in MODELS}
    for key in shown.values():
        assert f"/{run_id}/" in key
        file = dashboard_reader.load(tree[key])
        log = zipfile.ZipFile(root / dashboard_reader.download(key))
        assert log.testzip() is None
        assert Path(file.location).read_bytes() == log.read(log.namelist()[0]), (
            "`location` is the log that was summarised"
        )


def test_the_keys_follow_the_dashboards_rules():
    assert layout.promoted_run("stage", "inspect_evals/gpqa-diamond", MODELS[1], RUN) == (
        f"logs/stage/gpqa_diamond/openrouter+anthropic+claude-3.5-sonnet:beta/{RUN}/"
    )
    with pytest.raises(BadId, match="provider"):
        layout.promoted_run("stage", "t", "gpt-4o", RUN)


@pytest.mark.parametrize(
    "task", ["../../x", "..", "a+b", "a b", "x\ny", "töst", "2020-01-01-00-00-00?", "inspect_evals/"]
)
@pytest.mark.parametrize("model", ["a/../../b", "a/b c", "a/..", "a/\x00", "p/2019-01-01T00-00-00#"])
def test_hostile_names_become_one_safe_step_each(task, model, tmp_path):
    key = layout.promoted_run("stage", task, model, RUN) + "x.eval.dashboard.json"
    parts = key.split("/")
    assert len(parts) == 6 and not {"", ".", ".."} & set(parts)
    assert "+" not in parts[2] and "+" in parts[3]
    open_storage(str(tmp_path)).put(key, b"{}")


def test_two_names_that_differ_only_in_what_is_illegal_stay_apart():
    pairs = {layout.promoted_pair("stage", task, "a/b") for task in ("a b", "a?b", "a_b", "a+b")}
    assert len(pairs) == 4


def test_promote_moves_json_and_zip_and_leaves_the_log(root):
    moves = _promote(root)
    assert [move.instead_of for move in moves] == [(), ()]
    _check_promoted(root)
    working = [path.name for path in (root / layout.working(RUN)).iterdir() if path.is_file()]
    assert all(name.endswith(".eval") for name in working) and len(working) == 2


def test_with_logs_the_log_goes_along_and_its_location_with_it(root):
    _promote(root, with_logs=True)
    _check_promoted(root)
    assert not list((root / layout.working(RUN)).glob("*.eval"))
    assert not [path for path in (root / layout.working(RUN)).iterdir() if layout.is_derived(path.name)]


def test_a_run_whose_logs_were_promoted_is_still_finished(root):
    def rows():
        seen = survey(_place(root), Models().price, cached=False)
        assert seen.problems == []
        return seen, [(row.model, row.state, row.completed, row.headline_text(), row.cost_usd) for row in seen.rows]

    _, before = rows()
    for environment in ("stage", "prod"):
        _promote(root, environment=environment, with_logs=True)
        seen, after = rows()
        assert after == before and seen.headline == "Finished: 2 success."
        assert all(row.remark == f"promoted to {row.log.rpartition('/')[0]}" for row in seen.rows)
        assert {row.log.split("/")[1] for row in seen.rows} == {environment}
    assert summarise(Work(seen.place.storage, Models(), Evaluations()), seen.directory, seen.chosen) == []
    shutil.rmtree(root / "logs/prod")
    problems = survey(_place(root), Models().price, cached=False).problems
    assert len(problems) == 2 and all("was promoted to logs/prod/" in problem for problem in problems)


def test_a_second_time_there_is_nothing_to_do(root):
    _promote(root)
    before = _tree(root)
    assert _promote(root) == []
    assert _tree(root) == before


def test_from_stage_to_prod(root):
    _promote(root, with_logs=True)
    _promote(root, environment="prod")
    _check_promoted(root, environment="prod")
    assert not [key for key in _tree(root) if key.startswith("logs/stage/")]


def test_straight_to_prod_and_a_later_summary_wins_over_what_was_staged(root):
    shutil.copytree(root / "logs/working", root.parent / "kept")
    _promote(root)
    shutil.copytree(root.parent / "kept", root / "logs/working", dirs_exist_ok=True)
    key = next((root / layout.working(RUN)).glob("*gsm8k*.dashboard.json"))
    document = json.loads(key.read_bytes())
    document["results"]["metadata"] = {"made": "later"}
    key.write_text(json.dumps(document))
    _promote(root, environment="prod")
    _check_promoted(root, environment="prod")
    found = [json.loads(body) for name, body in _tree(root).items() if name.endswith(".dashboard.json")]
    assert {"made": "later"} in [document["results"]["metadata"] for document in found]


def test_another_run_in_its_place_is_named_and_replaced_without_losing_anything(root):
    _promote(root)
    _run(root, LATER)
    moves, _ = promote.plan(_place(root, LATER), "stage")
    assert [move.instead_of for move in moves] == [(RUN,), (RUN,)]
    before = _tree(root)
    promote.carry_out(_place(root, LATER).storage, moves)
    _check_promoted(root, LATER)
    after = _tree(root)
    old = {key: body for key, body in before.items() if f"/{RUN}/" in key and "/stage/" in key}
    for key, body in old.items():
        assert after[key.replace(".dashboard.json", ".replaced.json")] == body


def test_an_older_run_takes_the_place_of_a_newer_one_when_asked(root):
    _run(root, LATER)
    _promote(root, LATER)
    _promote(root, RUN)
    _check_promoted(root, RUN)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("options", [{}, {"with_logs": True}], ids=["plain", "with_logs"])
def test_killed_at_any_change_and_run_again_nothing_is_lost_or_doubled(root, after, options, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(root, whole)
    _promote(whole, **options)
    expected = {key: body.replace(str(whole).encode(), b"ROOT") for key, body in _tree(whole).items()}
    contents = {body for key, body in _tree(root).items() if key.endswith((".eval", ".zip"))}
    changes = 0
    while True:
        changes += 1
        scene = tmp_path / f"scene{changes}"
        shutil.copytree(root, scene)
        storage = open_storage(str(scene))
        moves, _ = promote.plan(_place(scene), "stage", **options)
        try:
            promote.carry_out(Mortal(storage, changes, after=after), moves)
        except Killed:
            assert contents <= set(_tree(scene).values()), "every log and zip is still somewhere"
            assert _states(scene) == ["success"] * 2
            _promote(scene, **options)
        else:
            break
        finally:
            found = {key: body.replace(str(scene).encode(), b"ROOT") for key, body in _tree(scene).items()}
        found = {key: body.replace(str(scene).encode(), b"ROOT") for key, body in _tree(scene).items()}
        assert found == expected, f"killed {'after' if after else 'before'} change {changes}"
        shutil.rmtree(scene)
    assert changes > 2 * (7 if options else 4), "every change was met"


def test_killed_between_stage_and_prod_the_logs_are_found(root, tmp_path):
    _promote(root, with_logs=True)
    for change in range(1, 15):
        scene = tmp_path / f"scene{change}"
        shutil.copytree(root, scene)
        moves, _ = promote.plan(_place(scene), "prod")
        with pytest.raises(Killed):
            promote.carry_out(Mortal(open_storage(str(scene)), change, after=True), moves)
        assert _states(scene) == ["success"] * 2
        _promote(scene, environment="prod")
        assert _states(scene) == ["success"] * 2
        assert not [key for key in _tree(scene) if key.startswith("logs/stage/")]


def test_killed_while_replacing(root, tmp_path):
    _promote(root)
    _run(root, LATER)
    for change in range(1, 13):
        scene = tmp_path / f"scene{change}"
        shutil.copytree(root, scene)
        moves, _ = promote.plan(_place(scene, LATER), "stage")
        with pytest.raises(Killed):
            promote.carry_out(Mortal(open_storage(str(scene)), change, after=True), moves)
        _promote(scene, LATER)
        _check_promoted(scene, LATER)
        replaced = [key for key in _tree(scene) if key.endswith(".replaced.json")]
        assert len(replaced) == 2, f"killed after change {change}"


def test_a_copy_that_is_not_the_same_is_not_taken_for_one(root):
    place = _place(root)

    class Lossy(Mortal):
        def __getattr__(self, name):
            if name == "copy":
                return lambda source, target: self.inner.put(target, self.inner.get(source).body[:-1] + b"!")
            return getattr(self.inner, name)

    moves, _ = promote.plan(place, "stage")
    with pytest.raises(promote.PromoteError, match="not the same"):
        promote.carry_out(Lossy(place.storage, 0, after=False), moves)
    assert len(list((root / layout.working(RUN)).glob("*.zip"))) == 2, "no source went"


def test_a_lost_zip_is_named_and_the_rest_goes_on(root):
    lost = sorted((root / layout.working(RUN)).glob("*.zip"))[0]
    lost.unlink()
    moves, problems = promote.plan(_place(root), "stage")
    assert len(moves) == 1
    assert len(problems) == 1 and str(lost) in str(problems[0]) and "ies summarize" in str(problems[0])


def test_a_file_that_is_no_dashboard_file_is_named(root):
    bad = sorted((root / layout.working(RUN)).glob("*.dashboard.json"))[0]
    bad.write_text("[]")
    moves, problems = promote.plan(_place(root), "stage")
    assert len(moves) == 1 and "no dashboard file" in str(problems[0])
