"""`ies sandbox cleanup` against a real Docker engine: only what a job's Compose projects have made goes, and not while its run lives."""

import io
import json
import secrets
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from evalops.commands.sandbox import sandbox
from evalops.sandbox import cleanup
from evalworker.contract.ids import new_run_id
from evalworker.contract.labels import PROJECT_LABEL, project_mark


def _docker(*words: str, stdin: bytes | None = None) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, input=stdin, timeout=60).stdout.decode()


class Box:
    """A running container, a network and a volume of a run's job, and somebody else's volume; all have `name` in their names."""

    def __init__(self) -> None:
        self.run_id = new_run_id()
        self.name = f"inspect-fleet-test-{secrets.token_hex(4)}"
        self.project = f"inspect-t-i{project_mark(self.run_id, secrets.token_hex(8))}x1y2z3"
        self.ours = {("container", self.name), ("network", self.name), ("volume", self.name)}
        label = ("--label", f"{PROJECT_LABEL}={self.project}")
        _docker("import", "-", self.name, stdin=_busybox())
        _docker("network", "create", *label, self.name)
        _docker("volume", "create", *label, self.name)
        _docker("volume", "create", f"{self.name}-theirs")
        _docker("run", "--detach", "--network=none", "--name", self.name, *label, self.name, "/busybox", "sleep", "600")

    def clean(self, *words: str) -> tuple[set[tuple[str, str]], dict[tuple[str, str], str]]:
        """What of it the command says to have removed, and to have kept with why."""
        said = CliRunner().invoke(sandbox, ["cleanup", "--json", *words], catch_exceptions=False)
        found = json.loads(said.stdout)
        removed = {(item["kind"], item["name"]) for item in found["removed"]}
        return removed, {(item["kind"], item["name"]): item["why"] for item in found["kept"]}

    def there(self) -> set[tuple[str, str]]:
        """What of it there is."""
        lists = {"container": ["ps", "--all", "--format={{.Names}}"]}
        lists |= {kind: [kind, "ls", "--format={{.Name}}"] for kind in ("network", "volume")}
        return self.ours & {(kind, name) for kind, words in lists.items() for name in _docker(*words).split()}

    def remove(self) -> None:
        """All of it."""
        for words in (
            ("rm", "--force", "--volumes", self.name),
            ("network", "rm", self.name),
            ("volume", "rm", "--force", self.name, f"{self.name}-theirs"),
            ("image", "rm", "--force", self.name),
        ):
            subprocess.run(["docker", *words], capture_output=True, timeout=60)


def _busybox() -> bytes:
    """An image's file system: the machine's own static busybox, because none can be pulled."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add(shutil.which("busybox") or "/bin/busybox", "busybox")
    return made.getvalue()


@pytest.fixture
def box(tmp_path, monkeypatch) -> Iterator[Box]:
    """A job's sandbox; the root is a directory that knows nothing of its run."""
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    try:
        _docker("info", "--format", "{{.ServerVersion}}")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"no Docker engine answers: {error}")
    made = Box()
    try:
        yield made
    finally:
        made.remove()


def test_a_living_runs_sandbox_stays_and_an_ended_ones_goes(box: Box) -> None:
    own = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    command = [*own, "-m", "evalworker", "--fleet", box.run_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        _, kept = box.clean("--dry-run")  # of all runs: others' containers are not touched
        why = f"the run {box.run_id} has a worker on this machine (process {worker.pid})"
        assert {item: kept.get(item) for item in box.ours} == dict.fromkeys(box.ours, why)
        refused = CliRunner().invoke(sandbox, ["cleanup", "--run-id", box.run_id])
        assert refused.exit_code == 2 and why in refused.stderr
        assert box.there() == box.ours
    assert box.clean("--run-id", box.run_id) == (set(), dict.fromkeys(box.ours, cleanup.UNKNOWN))
    _docker("kill", box.name)
    assert box.clean("--run-id", box.run_id) == (box.ours, {})
    assert box.there() == set() and f"{box.name}-theirs" in _docker("volume", "ls")


def test_force_removes_what_runs(box: Box) -> None:
    assert box.clean("--run-id", box.run_id, "--force", "--dry-run")[0] == box.ours == box.there()
    assert box.clean("--run-id", box.run_id, "--force") == (box.ours, {})
    assert box.there() == set()
