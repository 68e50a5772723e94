"""`evalops.sandbox`: what is judged, which images tasks use, and that only labelled things are removed."""

import json
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from evalops.cloud.payload import CloudError
from evalops.cloud.sandboxes import named_images
from evalops.commands.sandbox import sandbox
from evalops.sandbox import check, fetch, images
from evalops.sandbox import cleanup as leftovers
from evalops.sandbox.docker import DockerError
from evalops.sandbox.images import Image
from evalworker.contract import layout
from evalworker.contract.documents import Control
from evalworker.contract.labels import project_mark
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage, StorageError

GOOD = check.Facts(
    engine="28.2.2",
    compose="2.26.1",
    driver="overlay2",
    disk_free=10**11,
    networks_used=3,
    networks_most=256,
    watches=524288,
    instances=8192,
)


def _bad(**facts):
    return [item.what for item in check.judge(check.Facts(**(vars(GOOD) | facts))) if item.ok is False]


def test_a_good_machine_has_nothing_to_mend():
    assert _bad() == []


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"engine": "24.0.5"}, "Docker Engine"),
        ({"engine": None, "engine_error": "no daemon"}, "Docker Engine"),
        ({"compose": "2.20.9"}, "Docker Compose"),
        ({"compose": None}, "Docker Compose"),
        ({"driver": "vfs"}, "storage driver"),
        ({"disk_free": 10**9}, "free disk"),
        ({"networks_used": 200}, "networks"),
        ({"watches": 8192}, "inotify watches"),
        ({"instances": 128}, "inotify instances"),
    ],
)
def test_each_thing_that_is_wrong_is_found_and_says_what_to_do(facts, what):
    assert _bad(**facts) == [what]
    assert all(item.help for item in check.judge(check.Facts(**(vars(GOOD) | facts))) if item.ok is False)


def test_what_is_not_known_is_not_called_wrong():
    assert {item.ok for item in check.judge(check.Facts("28.0.0", "v2.30.0-desktop.1"))} == {True, None}


def test_the_size_of_address_pools():
    assert check.pool_size(None) == 31
    assert check.pool_size([{"Base": "10.128.0.0/9", "Size": 24}]) == 2**15
    assert check.pool_size([{"Base": "172.17.0.0/16", "Size": 16}, {"Base": "10.0.0.0/20", "Size": 24}]) == 17


COMPOSE = """
services:
  default:
    image: ${REGISTRY:-docker.io}/agent:${TAG-1}
  victim:
    build: {context: victim, dockerfile: Other}
  same:
    image: docker.io/agent:1
  made-here:
    image: local/thing
    x-local: true
"""

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

@task
def compose():
    return Task([Sample("x")], sandbox=("docker", "compose.yaml"))

@task
def plain(n=1):
    return Task([Sample("x", sandbox=("docker", "special/Dockerfile"))] * n, sandbox="docker")

@task
def elsewhere():
    return Task([Sample("x")], sandbox="local")

@task
def breaks():
    raise RuntimeError("no data")
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "special").mkdir()
    (tmp_path / "special" / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_images_of_a_compose_file(tasks):
    found = images.merge(images.of_file(tasks / "compose.yaml", "t"))
    assert [(image.name, image.context, image.dockerfile, image.service) for image in found] == [
        ("docker.io/agent:1", None, None, "default"),
        (None, str(tasks / "victim"), "Other", "victim"),
    ]


def test_images_of_tasks_are_found_as_inspect_finds_them(tasks):
    found, said = images.of_tasks(["tasks.py@compose", "tasks.py@plain", "tasks.py@elsewhere"], {})
    by_label = {image.label: image.tasks for image in found}
    assert by_label == {
        "docker.io/agent:1": ["compose", "plain"],  # `plain` names no file, and compose.yaml lies in its directory
        f"{tasks}/victim/Other": ["compose", "plain"],
        f"{tasks}/special/Dockerfile": ["plain"],
    }
    assert said == ["elsewhere uses the sandbox local, which has no Docker images"]
    (tasks / "compose.yaml").unlink()
    assert images.GENERIC_IMAGE in {image.name for image in images.of_tasks(["tasks.py@plain"], {})[0]}


def test_a_task_that_cannot_be_loaded_is_one_sentence(tasks):
    with pytest.raises(images.ImagesError, match="breaks cannot be loaded: RuntimeError: no data"):
        images.of_tasks(["tasks.py@breaks"], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A/b", "1/b"),
        ("${A}", "1"),
        ("${B:-x}", "x"),
        ("${B-x}", "x"),
        ("${A:-x}", "1"),
        ("${B}", ""),
        ("plain", "plain"),
    ],
)
def test_composes_variables(text, value):
    assert images.substitute(text, {"A": "1"}) == value


FAKE = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.load(open(os.environ["FAKE_ANSWERS"]))
for start, (code, text) in answers.items():
    if " ".join(sys.argv[1:]).startswith(start):
        (sys.stdout if code == 0 else sys.stderr).write(text)
        sys.exit(code)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` on PATH that answers as told and keeps what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(FAKE)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_ANSWERS", str(tmp_path / "answers"))

    class Fake:
        def answer(self, **answers):
            Path(tmp_path / "answers").write_text(json.dumps({k.replace("_", " "): v for k, v in answers.items()}))
            (tmp_path / "log").write_text("")

        @property
        def asked(self):
            return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    fake = Fake()
    fake.answer()
    return fake


OWN = secrets.token_hex(4)
"""Processes of this machine are looked at, so that other tests must not have the same runs."""


def _run(day):
    return f"2026-11-{day}-14-05-33-{OWN}"


def _project(day):
    return f"inspect-t-i{project_mark(_run(day), 'a' * 16)}x1y2z3"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root, in the current directory."""
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return LocalStorage(tmp_path)


@contextmanager
def _worker(run):
    """A process with a worker's command line."""
    own = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    command = [*own, "-m", "evalworker", "--root", "/elsewhere", "--fleet", run, "--lane", "l"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid


def _control(root, run, **changes):
    fields = {"round": 1, "state": "running", "deadline": now() + timedelta(hours=1), "beat": now()} | changes
    root.put(layout.control(run), Control(fleet_id=run, controller="elsewhere:7", **fields).to_bytes())


def _left(docker, *days, state="exited"):
    """A container and a network of the runs of these days."""
    docker.answer(
        ps=(0, "".join(f"{_project(day)}\tc{day}\tbox\t{state}\n" for day in days)),
        network_ls=(0, "".join(f"{_project(day)}\tn{day}\tnet\n" for day in days)),
        volume_ls=(0, ""),
    )


def _cleanup(*words):
    """What the command removed and kept, by id."""
    said = CliRunner().invoke(sandbox, ["cleanup", "--json", *words], catch_exceptions=False)
    document = json.loads(said.stdout)
    return [item["id"] for item in document["removed"]], {item["id"]: item["why"] for item in document["kept"]}


def test_cleanup_asks_for_the_label_and_removes_containers_before_networks(docker, root):
    docker.answer(
        ps=(
            0,
            f"{_project(29)}\tc1\tagent\texited\n{_project(28)}\tc2\tother\tcreated\nweb\tc3\tweb\texited\n"
            "inspect-t-ix1y2z3\tc4\tplain\texited\n",
        ),
        network_ls=(0, f"{_project(29)}\tn1\tnet\n"),
        volume_ls=(0, ""),
    )
    assert _cleanup("--dry-run") == (["c1", "c2", "n1"], {})
    assert not [words for words in docker.asked if "rm" in words]
    CliRunner().invoke(sandbox, ["cleanup", "--run-id", _run(29)], catch_exceptions=False)
    lists = [words for words in docker.asked if "ls" in words or "ps" in words]
    assert all("label=com.docker.compose.project" in words for words in lists)
    assert [words for words in docker.asked if "rm" in words] == [
        ["rm", "--force", "--volumes", "c1"],
        ["network", "rm", "n1"],
    ]


def test_cleanup_keeps_what_belongs_to_a_worker_here_even_of_another_root(docker, root):
    _left(docker, 28, 29, state="running")
    _control(root, _run(28), state="ended")
    with _worker(_run(29)) as pid:
        why = f"the run {_run(29)} has a worker on this machine (process {pid})"
        for words in (["--dry-run"], []):
            assert _cleanup(*words) == (["c28", "n28"], {"c29": why, "n29": why})
        said = CliRunner().invoke(sandbox, ["cleanup", "--dry-run"])
        assert f"kept {_project(29)}: {why}\n--force removes it all the same.\n" in said.stderr
    assert [words[-1] for words in docker.asked if "rm" in words] == ["c28", "n28"]
    assert _cleanup()[1]["c29"] == leftovers.UNKNOWN


def test_cleanup_keeps_what_belongs_to_a_run_whose_owner_lives(docker, root):
    _left(docker, 27, 28, 29)
    _control(root, _run(29))
    _control(root, _run(28), beat=now() - timedelta(hours=2), deadline=now() - timedelta(hours=1))
    removed, kept = _cleanup()
    assert removed == ["c27", "c28", "n27", "n28"]
    assert set(kept) == {"c29", "n29"} and f"the run {_run(29)} is not over: elsewhere:7 is running it" in kept["c29"]


def test_cleanup_keeps_a_running_container_when_nobody_can_tell_whose_it_is(docker, root, monkeypatch):
    _left(docker, 29, state="running")
    assert _cleanup() == ([], {"c29": leftovers.UNKNOWN, "n29": leftovers.UNKNOWN})
    root.put(layout.control(_run(29)), b"{")
    assert _cleanup()[0] == []

    def away(self, prefix):
        raise StorageError("the store is away")

    monkeypatch.setattr(LocalStorage, "list_dirs", away)
    said = CliRunner().invoke(sandbox, ["cleanup"])
    assert said.exit_code == 0 and "the store is away" in said.stderr and leftovers.UNKNOWN in said.stderr
    assert _cleanup("--force") == (["c29", "n29"], {})


def test_cleanup_of_a_run_that_lives_is_refused(docker, root):
    _left(docker, 29)
    _control(root, _run(29))
    for words in ([], ["--dry-run"], ["--json"]):
        said = CliRunner().invoke(sandbox, ["cleanup", "--run-id", _run(29), *words])
        assert said.exit_code == 2 and "is running it" in said.stderr and "--force" in said.stderr
    assert not [words for words in docker.asked if "rm" in words]
    assert _cleanup("--run-id", _run(29), "--force")[0] == ["c29", "n29"]
    _control(root, _run(29), state="ended")
    assert _cleanup("--run-id", _run(29)) == (["c29", "n29"], {})


@pytest.mark.parametrize("words", [[], ["--force"]])
def test_cleanup_asks_the_root_only_when_it_must(docker, monkeypatch, words):
    monkeypatch.setattr("evalops.logs.places.root", lambda: pytest.fail("the root is not needed"))
    _left(docker, *([29] if words else []))
    _cleanup(*words)
    with _worker(_run(29)):
        _left(docker, 29)
        _cleanup(*words)


def test_what_went_away_by_itself_is_no_failure(docker, root):
    docker.answer(ps=(0, f"{_project(29)}\tc1\tagent\texited\n"), rm=(1, "Error: No such container: c1"))
    assert CliRunner().invoke(sandbox, ["cleanup"]).exit_code == 0


def test_a_pull_waits_when_the_registry_asks_for_it(docker):
    docker.answer(pull=(1, "toomanyrequests: You have reached your pull rate limit"))
    pauses = []
    with pytest.raises(DockerError, match="toomanyrequests"):
        fetch.fetch(Image("a/b"), lambda text: None, pauses.append)
    assert len(pauses) == fetch.TRIES - 1 and pauses == sorted(pauses) and pauses[0] >= fetch.FIRST_PAUSE_S


def test_a_pull_that_can_never_work_is_not_repeated(docker):
    docker.answer(pull=(1, "pull access denied for a/b"))
    with pytest.raises(DockerError, match="pull access denied"):
        fetch.fetch(Image("a/b"), lambda text: None, lambda s: pytest.fail("no pause is due"))
    assert len(docker.asked) == 1


def test_pull_fetches_what_is_missing_and_goes_on_after_a_failure(docker, tasks):
    docker.answer(image_inspect=(1, "No such image"), pull=(1, "manifest unknown"), compose=(0, ""))
    done = CliRunner().invoke(sandbox, ["pull", "tasks.py@compose"])
    assert done.exit_code == 1 and "manifest unknown" in done.stderr and "built" in done.stdout
    assert ["compose", "--file", str(tasks / "compose.yaml"), "build", "victim"] in docker.asked
    docker.answer(image_inspect=(0, "sha256:1"))
    done = CliRunner().invoke(sandbox, ["pull", "tasks.py@compose"])
    assert done.exit_code == 0 and "have    docker.io/agent:1" in done.stdout


def test_images_as_json_is_what_the_ami_build_reads(docker, tasks, tmp_path):
    done = CliRunner().invoke(sandbox, ["images", "tasks.py@compose", "--json"])
    found = json.loads(done.stdout)["images"]
    assert found[0] | {"compose": None} == {
        "name": "docker.io/agent:1", "context": None, "dockerfile": None, "compose": None, "service": "default", "tasks": ["compose"],
    }  # fmt: skip
    file = tmp_path / "images.json"
    file.write_text(done.stdout)
    with pytest.raises(CloudError, match=r"cannot be pulled \(.*\): give its tasks by --tasks \(compose\)"):
        named_images(file)
    file.write_text(json.dumps({"images": [image for image in found if image["context"] is None]}))
    assert named_images(file) == [image["name"] for image in found if image["context"] is None]


def test_check_says_what_is_missing_when_there_is_no_docker(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(sandbox, ["check", "--json"])
    assert done.exit_code == 1
    found = {item["what"]: item for item in json.loads(done.stdout)["findings"]}
    assert "there is no `docker`" in found["Docker Engine"]["help"]
