"""What `ct fleet …` shows of a fleet that lies in a directory."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from evalops.commands.fleet import fleet
from evalops.fleet.stream import EventStream
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
EVIL = "\x1b]0;pwned\x07\x1b[2J"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """A root with a fleet that runs, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)
    storage = LocalStorage(tmp_path)
    specs = [JobSpec(job_id=f"{0:016x}", task="t.py@t", name="t", model="scripted/good", samples=1)]
    manifest = Manifest(
        fleet_id=FLEET, created=now(), backend="local", jobs=specs, arguments={}, models=["m"], submit_dir="."
    )
    storage.create(layout.manifest(FLEET), manifest.to_bytes())
    control = Control(fleet_id=FLEET, round=1, state="running", deadline=now() + timedelta(hours=1), beat=now())
    storage.create(layout.control(FLEET), control.to_bytes())
    return storage


def test_what_a_model_or_a_task_wrote_cannot_drive_the_terminal(store: LocalStorage, tmp_path: Path) -> None:
    found = store.get(layout.control(FLEET))
    waiting = {"waiting_for": f"the tool {EVIL}", "controller": "here:1", "connections": {EVIL: 1}}
    control = Control.from_json(found.body).model_copy(update=waiting)
    control = control.model_copy(update={"limits": control.limits.model_copy(update={"fleet_connections": 4})})
    store.replace(layout.control(FLEET), control.to_bytes(), found.etag)
    stream = EventStream(store, FLEET, tmp_path / "events.jsonl")
    list(stream.restore())
    stream.append([{"type": "fleet_summary", "outcome": "stopped", "reason": f"first: {EVIL}", "round": 1}])
    stream.store()
    shown = CliRunner().invoke(fleet, ["status", FLEET])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("pwned") == 3
    assert not {"\x1b", "\x07"} & set(shown.output)


def test_lists_are_one_document_for_programs(store: LocalStorage) -> None:
    (row,) = json.loads(CliRunner().invoke(fleet, ["list", "--json"]).stdout)["fleets"]
    assert (row["fleet"], row["jobs"], row["samples"], row["backend"]) == (FLEET, 1, 1, "local")
    assert FLEET in CliRunner().invoke(fleet, ["list"]).stdout


def test_logs_of_ended_and_of_living_workers(store: LocalStorage, tmp_path: Path) -> None:
    found = store.get(layout.manifest(FLEET))
    work = tmp_path / "work"
    manifest = Manifest.from_json(found.body).model_copy(update={"work_dir": str(work)})
    store.replace(layout.manifest(FLEET), manifest.to_bytes(), found.etag)
    store.put(f"{layout.worker_logs(FLEET)}ended.log", "".join(f"line {n}\n" for n in range(9)).encode())
    (work / "living").mkdir(parents=True)
    (work / "living" / "worker.log").write_text(f"{EVIL}\xff\n")
    shown = CliRunner().invoke(fleet, ["logs", FLEET, "--lines", "2", "--json"])
    assert json.loads(shown.stdout) == {
        "fleet_id": FLEET,
        "logs": [{"worker": "ended", "lines": ["line 7", "line 8"]}, {"worker": "living", "lines": [f"{EVIL}\xff"]}],
    }
    said = CliRunner().invoke(fleet, ["logs", FLEET, "--lines", "1"]).stdout
    assert said.splitlines()[:2] == ["== ended", "line 8"] and "\x1b" not in said
    absent = CliRunner().invoke(fleet, ["logs", FLEET, "--worker", "i-none"])
    assert absent.exit_code == 2 and "has no log of a worker i-none" in absent.stderr
