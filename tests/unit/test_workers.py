"""Workers of this machine: what those leave that did not end well. The agents themselves run in tests/integration."""

import os
import time
from pathlib import Path

import pytest

from evalops.fleet.workers import LocalPool, fleets_here
from evalworker import containers
from evalworker.contract.ids import new_run_id

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
PATIENCE_S = 30.0
FAKE = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in "ps --all"*) cat "$CONTAINERS" ;; "rm "*) : >"$CONTAINERS" ;; esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The containers of a stand-in for `docker`, one until it is removed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(FAKE)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "containers").write_text("c1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CONTAINERS", str(tmp_path / "containers"))
    monkeypatch.setattr(containers, "UNSETTLED_S", 0.0)
    return tmp_path / "containers"


def killed_worker(folder: Path) -> Path:
    """The directory of a worker that was killed while its job had a sandbox."""
    attempt = folder / "local-00000001" / "0123456789abcdef-1-1-5"
    attempt.mkdir(parents=True)
    (attempt.parent / "agent.pid").write_text("999999999")
    (attempt / containers.RECORD).write_text("inspect-t-iabc\n")
    return attempt.parent


def test_the_sandboxes_of_a_killed_worker_go_with_the_fleet(docker: Path, tmp_path: Path) -> None:
    work = killed_worker(tmp_path / "work")
    pool = LocalPool("root", FLEET, "lane-00", tmp_path / "work", 1, {})
    pool.stop()
    assert docker.read_text() == ""
    assert containers.nothing_noted(work)
    assert "removed what the sandbox inspect-t-iabc had left: 1 container" in (work / "worker.log").read_text()


def test_a_new_controller_begins_with_it_at_once(docker: Path, tmp_path: Path) -> None:
    work = killed_worker(tmp_path / "work")
    pool = LocalPool("root", FLEET, "lane-00", tmp_path / "work", 1, {})
    assert pool.adopt() == 0
    end = time.monotonic() + PATIENCE_S
    while not containers.nothing_noted(work):  # a thread does it; the end would do it as well
        assert time.monotonic() < end
        time.sleep(0.01)
    pool.stop()
    removed = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("rm ")]
    assert removed == ["rm --force --volumes c1"]


def test_an_engine_that_stays_away_holds_nothing_up_and_the_record_stays(
    docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalops.fleet.workers.SANDBOXES_S", 0.1)
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexit 1\n")
    work = killed_worker(tmp_path / "work")
    LocalPool("root", FLEET, "lane-00", tmp_path / "work", 1, {}).stop()
    assert not containers.nothing_noted(work)


def test_a_machine_without_docker_is_not_asked_for_it(docker: Path, tmp_path: Path) -> None:
    work = killed_worker(tmp_path / "work")
    next(work.glob(f"*/{containers.RECORD}")).unlink()
    LocalPool("root", FLEET, "lane-00", tmp_path / "work", 1, {}).stop()
    assert not (tmp_path / "calls").exists()


def test_a_worker_of_any_fleet_is_seen_among_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nwhile :; do sleep 0.05; done\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    fleet = new_run_id()
    pool = LocalPool("root", fleet, "lane-00", tmp_path / "work", 1, dict(os.environ))
    pool.start(1)
    try:
        end = time.monotonic() + PATIENCE_S
        while fleet not in fleets_here():  # the kernel shows a command line a moment after its process has begun
            assert time.monotonic() < end
        assert f"--fleet\0{fleet}" in Path(f"/proc/{fleets_here()[fleet]}/cmdline").read_text()
    finally:
        pool.stop(now=True)
    assert fleet not in fleets_here()
