"""Environments of a run, installed by uv from the package index: the project's lock, and packages that were asked for.

Needs uv and a package index, so it is no part of the ordinary tests.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from fleets import Fleet, check, run

from evalworker.environment import find_uv

TASK = """
import json, sys
import {module} as wanted
from importlib.metadata import version
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer


@scorer(metrics=[accuracy()])
def facts():
    async def score(state, target):
        found = {{"version": version("{package}"), "prefix": sys.prefix, "inspect": version("inspect-ai"), "file": wanted.__file__}}
        return Score(value=1, explanation=json.dumps(found))

    return score


@task
def facts_of_the_environment():
    return Task(dataset=[Sample(id="one", input="x", target="x")], scorer=facts())
"""


def facts(fleet: Fleet) -> dict[str, str]:
    assert fleet.code == 0, fleet.err
    check(fleet)
    (result,) = fleet.of("result")
    found: dict[str, str] = json.loads(result["scores"]["facts"]["explanation"])
    return found


def test_the_lock_decides(tmp_path: Path) -> None:
    """An older release than the index's newest is locked: workers have exactly that one, in an environment of the run."""
    folder, cache = tmp_path / "project", tmp_path / "cache"
    folder.mkdir()
    (folder / "task.py").write_text(TASK.format(module="iniconfig", package="iniconfig"))
    project = '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["iniconfig==2.0.0"]\n'
    (folder / "pyproject.toml").write_text(project)
    (folder / ".gitignore").write_text("logs/\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run([find_uv() or "uv", "lock", "--quiet"], cwd=folder, check=True)
    words = ("task.py", "--model", "scripted/good", "--ship-code", "--max-workers", "2")
    found = facts(run(folder, *words, INSPECT_FLEET_CACHE=str(cache)))
    assert found["version"] == "2.0.0"
    assert Path(found["prefix"]).is_relative_to(cache / "environments")
    manifest = json.loads(next(folder.glob("logs/fleet/*/manifest.json")).read_bytes())
    assert manifest["lock"] == "."
    assert f"inspect-ai=={found['inspect']}" in [line.partition(" ")[0] for line in manifest["requirements"]]
    # The second run finds the environment in the cache.
    before = {path.name for path in (cache / "environments").iterdir()}
    facts(run(folder, *words, INSPECT_FLEET_CACHE=str(cache)))
    assert {path.name for path in (cache / "environments").iterdir()} == before


def test_packages_that_were_asked_for(tmp_path: Path) -> None:
    """Code in place, one more package: planned without it, run with it."""
    folder, cache = tmp_path / "plain", tmp_path / "cache"
    folder.mkdir()
    lazy = TASK.format(module="json", package="cowsay")
    (folder / "task.py").write_text(lazy)
    words = ("task.py", "--model", "scripted/good", "--max-workers", "1", "--package", "cowsay==6.0")
    found = facts(run(folder, *words, INSPECT_FLEET_CACHE=str(cache)))
    assert found["version"] == "6.0"


def test_a_package_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    """uv's reason, before anything starts."""
    (tmp_path / "task.py").write_text(TASK.format(module="json", package="inspect-ai"))
    fleet = run(tmp_path, "task.py", "--model", "scripted/good", "--package", "inspect-ai==0.0.0.1")
    assert (fleet.code, fleet.events) == (2, [])
    assert "0.0.0.1" in fleet.err
    assert "Traceback" not in fleet.err
