"""Trees as users have them, shipped to workers that hold older copies of the same packages; and no secret anywhere afterwards."""

import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleets import PATIENCE_S, Fleet, check, command, ended, environment, left_running, python_path
from fleets import run as run_fleet

import evalworker
from evalworker.processes import kill_tree


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


TASK = """
import json, os, sys
from pathlib import Path

import evalworker.job
import mypkg
import ns.part.module
import scripts.helper
import worker
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from vendored import lib


@scorer(metrics=[accuracy()])
def facts():
    async def score(state, target):
        modules = {"mypkg": mypkg, "ns": ns.part.module, "scripts": scripts.helper, "worker": worker, "vendored": lib}
        found = {name: [module.VERSION, os.path.relpath(module.__file__)] for name, module in modules.items()}
        found["evalworker"] = ["stale" if hasattr(evalworker.job, "STALE") else "shipped", evalworker.__file__]
        found["linked"] = Path("data link.txt").read_text()
        found["cwd"] = os.getcwd()
        found["pythonpath"] = os.environ.get("PYTHONPATH", "")
        return Score(value=1, explanation=json.dumps(found))

    return score


@task
def facts_of_the_tree():
    return Task(dataset=[Sample(id="one", input="x", target="x")], scorer=facts())
"""

MODULES = {
    "src/mypkg/__init__.py": "VERSION = 'shipped'\n",
    "src/mypkg/registry.py": "from mypkg import VERSION\n",
    "scripts/__init__.py": "",
    "scripts/helper.py": "VERSION = 'shipped'\n",
    "worker.py": "VERSION = 'shipped'\n",
    "ns/part/module.py": "VERSION = 'shipped'\n",
}


def user_tree(folder: Path) -> Path:
    """A repository with all that makes importing hard; tasks are run from a sub-directory of it."""
    library = folder / "library"
    write(library, {"lib.py": "VERSION = 'shipped'\n", "__init__.py": ""})
    git(library, "init", "-q")
    git(library, "add", "-A")
    git(library, "commit", "-qm", "one")
    repo = folder / "my répo"
    project = '[project]\nname = "mypkg"\nversion = "1"\n[tool.uv]\npackage = true\n'
    write(
        repo,
        MODULES | {"evals/tasks of mine/täsk.py": TASK, "files/data.txt": "through a link", "pyproject.toml": project},
    )
    write(
        repo,
        {
            "evals/notebook.ipynb": "{}",
            ".gitignore": "logs/\n.env\n",
            "evals/.env": "MY_UNTRACKED_TOKEN=untracked-0123456\n",
        },
    )
    git(repo, "init", "-q")
    git(repo, "submodule", "--quiet", "add", str(library), "vendored")
    (repo / "evals" / "data link.txt").symlink_to("../files/data.txt")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "one")
    return repo


def installed(folder: Path) -> Path:
    """What an old machine image might hold: an `evalworker` whose jobs fail, and an old copy of everything of the user's."""
    place = folder / "installed"
    shutil.copytree(
        Path(evalworker.__file__).parent, place / "evalworker", ignore=shutil.ignore_patterns("__pycache__")
    )
    job = place / "evalworker" / "job.py"
    job.write_text(job.read_text() + "\n\nSTALE = True\n\n\ndef main(*_):\n    sys.exit(1)\n")
    write(place, {name.removeprefix("src/"): text.replace("shipped", "stale") for name, text in MODULES.items()})
    # Inspect imports what registers itself with it, before any job runs.
    write(
        place,
        {
            "mypkg-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mypkg\nVersion: 0\n",
            "mypkg-0.dist-info/entry_points.txt": "[inspect_ai]\nmypkg = mypkg.registry\n",
        },
    )
    return place


CONTROLLER = """
import os, sys
from evalops.cli import ct
import evalops.commands.run, evalworker.job
os.environ["PYTHONPATH"] = sys.argv.pop(1)
ct(prog_name="ct")
"""
"""The command itself runs today's package; what it starts finds the old ones first."""


def test_shipped_code_wins_over_what_is_installed(tmp_path: Path) -> None:
    repo, stale, cache = user_tree(tmp_path), installed(tmp_path), tmp_path / "cache"
    words = ["-c", CONTROLLER, str(stale), "run", "eval", "tasks of mine/täsk.py", "--model", "scripted/good"]
    done = subprocess.run(
        [sys.executable, *words, "--ship-code", "--max-workers", "1"],
        cwd=repo / "evals",
        env=environment(repo / "evals", INSPECT_FLEET_CACHE=str(cache)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    fleet = ended(repo / "evals", done.returncode, done.stdout, done.stderr)
    assert fleet.code == 0, fleet.err
    check(fleet)
    (result,) = fleet.of("result")
    found = json.loads(result["scores"]["facts"]["explanation"])
    work = fleet.path / "work"
    files = {"mypkg": "src/mypkg/__init__.py", "ns": "ns/part/module.py", "scripts": "scripts/helper.py"}
    for name, file in (files | {"worker": "worker.py", "vendored": "vendored/lib.py"}).items():
        assert found[name] == ["shipped", f"../{file}"]
    assert found["evalworker"][0] == "shipped"
    assert Path(found["evalworker"][1]).is_relative_to(cache)
    assert Path(found["cwd"]).is_relative_to(work)
    assert Path(found["cwd"]).name == "evals"
    assert found["linked"] == "through a link"
    assert found["pythonpath"] == str(stale)
    manifest = json.loads((fleet.path / "manifest.json").read_bytes())
    assert manifest["submit_dir"] == "evals"
    assert manifest["python_path"][:2] == ["src", "."]
    assert [job["task"] for job in manifest["jobs"]] == ["tasks of mine/täsk.py@facts_of_the_tree"]
    # The archive holds what git sees, and not the .env beside the tasks.
    (archive,) = (repo / "evals").glob("logs/fleet/code/*.tar.gz")
    names = subprocess.run(["tar", "tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    assert "vendored/lib.py" in names
    assert ".env" not in names


def test_notebooks_and_dirty_trees_are_refused_in_one_sentence(tmp_path: Path) -> None:
    repo = user_tree(tmp_path)
    refused = run_fleet(repo / "evals", "notebook.ipynb", "--model", "scripted/good")
    assert (refused.code, refused.events) == (2, [])
    assert "notebook" in refused.err
    (repo / "worker.py").write_text("VERSION = 'changed'\n")
    refused = run_fleet(repo / "evals", "tasks of mine/täsk.py", "--model", "scripted/good", "--require-clean")
    assert (refused.code, refused.events) == (2, [])
    assert "worker.py" in refused.err


# Secrets

MARKERS = {
    "MARKED_API_KEY": "marker-environment-4f9c1d",
    "ODDLY_NAMED": "marker-named-77ab02e4",
    "FROM_DOTENV": "marker-dotenv-5e6f7a8b9c0d",
    "DOTENV_TOKEN": "marker-dotenv-token-31",
}

LEAKY = """
import logging, os, sys
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver

SECRETS = [os.environ[name] for name in ("MARKED_API_KEY", "ODDLY_NAMED", "FROM_DOTENV", "DOTENV_TOKEN")]
print("at import", *SECRETS, file=sys.stderr, flush=True)


@solver
def leaks():
    async def solve(state, generate):
        print("printed", *SECRETS, flush=True)
        os.write(2, SECRETS[0][:9].encode()); os.write(2, SECRETS[0][9:].encode() + b"\\n")
        logging.getLogger("task").warning("logged %s", SECRETS)
        if state.sample_id == "raises":
            raise RuntimeError("x" * 1000 + " refused: " + " ".join(SECRETS))
        if state.sample_id == "cut":
            raise RuntimeError("x" * 1012 + SECRETS[1] + "y" * 4000)
        return state

    return solve


@scorer(metrics=[accuracy()])
def leaky():
    async def score(state, target):
        text = " ".join(SECRETS)
        return Score(value="C", answer="a" * 1010 + text, explanation=text)

    return score


def data():
    return [Sample(id=name, input="x", target="x") for name in ("scores", "raises", "cut")]


@task
def leaky_samples():
    return Task(dataset=data(), solver=leaks(), scorer=leaky())


@task
def leaky_death():
    @solver
    def dies():
        async def solve(state, generate):
            print("dying with", *SECRETS, flush=True)
            os._exit(7)
        return solve
    return Task(dataset=data(), solver=dies(), scorer=leaky())
"""

RECORDER = """
import http.client, os

def recording(original):
    def send(self, data):
        if isinstance(data, (bytes, bytearray)):
            with open(os.path.join(os.environ["RECORDINGS"], str(os.getpid())), "ab") as file:
                file.write(bytes(data) + b"\\n")
        return original(self, data)
    return send

http.client.HTTPConnection.send = recording(http.client.HTTPConnection.send)
"""
"""A `sitecustomize` for every process of the fleet: what it sends over HTTP, which is every queue message, is kept."""


def holds(data: bytes) -> list[str]:
    return [name for name, value in MARKERS.items() if value.encode() in data]


def watch_arguments(process: "subprocess.Popen[str]") -> set[str]:
    """Which markers stood in the arguments of any process of the machine while this one ran."""
    seen: set[str] = set()
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < end, "the fleet hangs"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    seen.update(holds((entry / "cmdline").read_bytes()))
                except OSError:
                    continue
        time.sleep(0.1)
    return seen


@pytest.fixture
def leaky_tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    dotenv = f"FROM_DOTENV={MARKERS['FROM_DOTENV']}\nDOTENV_TOKEN={MARKERS['DOTENV_TOKEN']}\n"
    write(folder, {"leaky.py": LEAKY, ".env": dotenv, ".gitignore": ".env\nlogs/\n"})
    git(folder, "init", "-q")
    return folder


def secrets_in_environment() -> dict[str, str]:
    return {name: MARKERS[name] for name in ("MARKED_API_KEY", "ODDLY_NAMED")}


def test_a_secret_is_found_nowhere(leaky_tree: Path, tmp_path: Path) -> None:
    recordings, custom = tmp_path / "recordings", tmp_path / "custom"
    recordings.mkdir()
    write(custom, {"sitecustomize.py": RECORDER})
    more = secrets_in_environment() | {"RECORDINGS": str(recordings), "PYTHONPATH": python_path(custom)}
    words = ("leaky.py", "--model", "scripted/good", "--secret", "ODDLY_NAMED", "--ship-code", "--max-workers", "1")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            command(*words, "--retry-attempts", "0", "--slots", "2"),
            cwd=leaky_tree,
            env=environment(leaky_tree, INSPECT_FLEET_CACHE=str(tmp_path / "cache"), **more),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            text=True,
        )
    try:
        in_arguments = watch_arguments(process)
    finally:
        for left in left_running(leaky_tree) if process.poll() is None else []:
            kill_tree(left)
    said = {name: (tmp_path / name).read_text() for name in ("out", "err")}
    fleet = ended(leaky_tree, process.returncode, said["out"], said["err"])
    check(fleet)
    assert fleet.code == 1, fleet.err
    _all_was_said(fleet)
    assert in_arguments == set()
    for name, text in said.items():
        assert holds(text.encode()) == [], name
    sent = [path.read_bytes() for path in recordings.iterdir()]
    assert any(b"sample_done" in data for data in sent)
    assert [holds(data) for data in sent if holds(data)] == []
    assert _files_with_markers(leaky_tree) == []


def _all_was_said(fleet: Fleet) -> None:
    """The texts are there, with names in place of values: nothing was just lost."""
    results = {event["sample_id"]: event for event in fleet.of("result", task="leaky_samples")}
    hidden = " ".join(f"[redacted {name}]" for name in MARKERS)
    assert results["scores"]["scores"]["leaky"]["explanation"] == hidden
    assert f"refused: {hidden}" in results["raises"]["error"]
    assert "[redacted ODDLY_NAMED]" in results["cut"]["error"]
    assert results["scores"]["scores"]["leaky"]["answer"].endswith("a[redacted MARK")  # cut after it was redacted
    death = fleet.done("leaky_death")
    assert f"dying with {hidden}" in death["error_summary"]
    logs = b"".join(path.read_bytes() for path in (fleet.path / "workers").glob("*.log")).decode()
    assert f"printed {hidden}" in logs
    assert f"at import {hidden}" in logs


def _files_with_markers(folder: Path) -> list[str]:
    """Files below a directory that hold a marker or half of one; Inspect's own logs and the user's `.env` are not ours."""
    found = []
    halves = [value[: len(value) // 2 + 4].encode() for value in MARKERS.values()]
    for path in folder.rglob("*"):
        if not path.is_file() or path.suffix == ".eval" or path == folder / ".env":
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if any(half in data for half in halves):
            found.append(str(path.relative_to(folder)))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("-M", "api_key=typed-marker-0123"),
        ("-M", f"harmless={MARKERS['MARKED_API_KEY']}"),
        ("-T", f"prompt={MARKERS['ODDLY_NAMED']}"),
        ("--env", "SOME_TOKEN=typed-marker-0123"),
        ("--secret", "NOT_IN_THE_ENVIRONMENT"),
        ("--secret", "SOME_TOKEN=typed-marker-0123"),
    ],
)
def test_what_would_be_stored_with_a_secret_in_it_is_refused(leaky_tree: Path, words: tuple[str, ...]) -> None:
    more = secrets_in_environment()
    arguments = ("leaky.py", "--model", "scripted/good", "--secret", "ODDLY_NAMED")
    refused = run_fleet(leaky_tree, *arguments, *words, **more)
    assert (refused.code, refused.events) == (2, [])
    assert holds((refused.out + refused.err).encode()) == []
    assert "typed-marker" not in refused.out + refused.err
    assert "Traceback" not in refused.err
    stored = [path for path in leaky_tree.glob("logs/fleet/**/*") if path.is_file()]
    assert [path for path in stored if b"marker" in path.read_bytes()] == []
