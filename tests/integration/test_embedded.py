"""The embedded queue server as real processes: it serves a lane, outlives its starter, and ends with its fleet."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from evalops import embedded, embedded_guard
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Control, Lane
from evalworker.contract.wire import now, stamp
from evalworker.queues import Queue
from evalworker.storage import LocalStorage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
ENDS_S = 30.0
"""Before something that is to end counts as left running."""


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ENDS_S
    while not true():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.05)


def serves(lane: Lane) -> bool:
    address = urlsplit(lane.endpoint or "")
    try:
        socket.create_connection((address.hostname or "", address.port or 0), timeout=5).close()
    except OSError:
        return False
    return True


def control(state: str, deadline: datetime, beat: datetime | None = None) -> bytes:
    document = {"fleet_id": RUN, "round": 1, "state": state, "deadline": deadline, "beat": beat or now()}
    return Control.model_validate(document).to_bytes()


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def running(store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[embedded.Embedded]:
    monkeypatch.setenv("OPENAI_API_KEY", "not to be handed on")
    started = embedded.start(str(store.root), RUN, tmp_path / "log" / "embedded.log", 45)
    yield started
    embedded.stop(started)
    assert not serves(started.lane)


def test_the_lane_works(running: embedded.Embedded, tmp_path: Path) -> None:
    lane = running.lane
    client = aws.sqs(lane)
    jobs, events, dead = (Queue(client, url) for url in (lane.jobs, lane.events, lane.dead))
    assert len({jobs.url, events.url, dead.url}) == 3
    jobs.send(["job"])
    events.send(["event"])
    assert [message.body for message in jobs.receive(1, 5)] == ["job"]
    assert [message.body for message in events.receive(1, 5)] == ["event"]
    assert dead.counts().total == 0
    found = client.get_queue_attributes(QueueUrl=jobs.url, AttributeNames=["All"])["Attributes"]
    assert found["VisibilityTimeout"] == "45"
    assert found["MessageRetentionPeriod"] == str(14 * 24 * 3600)
    assert '"maxReceiveCount": 20' in found["RedrivePolicy"].replace('"20"', "20")
    assert Lane.from_json(lane.to_json()) == lane
    assert (tmp_path / "log" / "embedded.log").read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_listens_on_loopback_alone_and_knows_no_key(running: embedded.Embedded) -> None:
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) == 1
    assert b"OPENAI_API_KEY" not in Path(f"/proc/{children[0]}/environ").read_bytes()
    inodes = set()
    for fd in Path(f"/proc/{children[0]}/fd").iterdir():
        target = str(fd.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = [
        fields[1]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    port = urlsplit(running.lane.endpoint or "").port
    assert listening == [f"0100007F:{port:04X}"]
    assert os.getsid(running.pid) == running.pid != os.getsid(0)


def test_it_ends_when_the_fleet_has_ended(running: embedded.Embedded, store: LocalStorage) -> None:
    key = layout.control(RUN)
    store.put(key, control("running", now() + timedelta(hours=1)))
    store.put(key, control("ended", now() + timedelta(hours=1)))
    assert running.process.wait(ENDS_S) == 0
    until(lambda: not serves(running.lane), "the server has gone")


def test_it_ends_after_the_deadline(running: embedded.Embedded, store: LocalStorage) -> None:
    store.put(layout.control(RUN), control("running", now() - embedded_guard.GRACE - timedelta(seconds=1)))
    assert running.process.wait(ENDS_S) == 0
    until(lambda: not serves(running.lane), "the server has gone")


def test_an_earlier_rounds_end_is_not_this_ones(store: LocalStorage, tmp_path: Path) -> None:
    """Also: a document that cannot be read is said and survived."""
    old = now() - timedelta(hours=1)
    store.put(layout.control(RUN), control("ended", old, beat=old))
    log = tmp_path / "log"
    started = embedded.start(str(store.root), RUN, log, 45)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            started.process.wait(2 * embedded_guard.POLL_S)
        store.put(layout.control(RUN), b"not a document")
        until(lambda: "embedded queues: " in log.read_text(), "the unreadable document is named")
        assert serves(started.lane)
        store.put(layout.control(RUN), control("ended", now() + timedelta(hours=1)))
        assert started.process.wait(ENDS_S) == 0
    finally:
        embedded.stop(started)


def test_sigterm_ends_both(running: embedded.Embedded) -> None:
    os.kill(running.pid, signal.SIGTERM)
    running.process.wait(ENDS_S)
    until(lambda: not serves(running.lane), "the server has gone")
    embedded.stop(running)  # again is nothing


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_the_server_dies_with_a_killed_guard(running: embedded.Embedded) -> None:
    os.kill(running.pid, signal.SIGKILL)
    running.process.wait(ENDS_S)
    until(lambda: not serves(running.lane), "the server has gone")


def test_the_guard_ends_with_a_broken_server(running: embedded.Embedded) -> None:
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert running.process.wait(ENDS_S) == 1
    assert not serves(running.lane)


def test_it_outlives_a_killed_starter(store: LocalStorage, tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from evalops import embedded
started = embedded.start({str(store.root)!r}, {RUN!r}, pathlib.Path({str(tmp_path / "log")!r}), 45)
print(started.lane.to_json(), flush=True)
os.killpg(os.getpgid(0), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    lane = Lane.from_json(killed.stdout)
    queue = Queue(aws.sqs(lane), lane.jobs)
    queue.send(["still here"])
    assert [message.body for message in queue.receive(1, 5)] == ["still here"]
    store.put(layout.control(RUN), control("ended", now() + timedelta(hours=1)))
    until(lambda: not serves(lane), "the server has gone")


def test_a_server_that_cannot_start_is_one_sentence(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "ministack"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken.parent), os.environ.get("PYTHONPATH", "")]))
    log = tmp_path / "log"
    with pytest.raises(embedded.EmbeddedError, match=r"the embedded queue server did not start; see .*log"):
        embedded.start(str(store.root), RUN, log, 45)
    assert "broken on purpose" in log.read_text()


def summary(folder: Path, ts: datetime, *, kind: str = "fleet_summary") -> Path:
    """The live events of a fleet, with this as their last line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.jsonl"
    lines = [{"ts": stamp(ts), "seq": 1, "type": "fleet_start"}, {"ts": stamp(ts), "seq": 2, "type": kind}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_it_ends_with_its_fleet_although_its_own_credentials_no_longer_read_anything(
    running: embedded.Embedded, store: LocalStorage, tmp_path: Path
) -> None:
    store.put(layout.control(RUN), control("running", now() + timedelta(hours=1)))
    until(lambda: serves(running.lane), "the server is there")
    store.put(layout.control(RUN), b"as good as a refusal")
    log = tmp_path / "log" / "embedded.log"
    until(lambda: "embedded queues: " in log.read_text(), "it has looked in vain")
    assert running.process.poll() is None
    summary(log.parent, now())
    assert running.process.wait(ENDS_S) == 0
    until(lambda: not serves(running.lane), "the server has gone")


def test_the_local_end_of_a_fleet(tmp_path: Path) -> None:
    started = now() - timedelta(minutes=5)

    def ended() -> bool:
        return embedded_guard.has_ended_here(tmp_path, started)

    assert not ended()  # no live events
    summary(tmp_path, now(), kind="job_done")
    assert not ended()
    summary(tmp_path, started - timedelta(seconds=1))
    assert not ended()  # of the round before
    path = summary(tmp_path, now())
    assert ended()
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not ended()  # its controller is about to leave
    worker = tmp_path / "work" / "local-1" / "agent.pid"
    worker.parent.mkdir(parents=True)
    worker.write_text(str(os.getpid()))
    assert not ended()
    worker.write_text("99999999")
    assert ended()
    path.write_bytes(path.read_bytes() + b'{"ts": "half a li')
    assert not ended()


@pytest.mark.parametrize(
    ("state", "deadline_min", "running_min", "over"),
    [
        (None, None, 9, False),
        (None, None, 11, True),
        ("running", 60, 50, False),
        ("running", 60, 61, False),
        ("running", 60, 63, True),
        ("draining", 60, 50, False),
        ("ended", 60, 1, True),
    ],
)
def test_when_it_is_over(state: str | None, deadline_min: int | None, running_min: int, over: bool) -> None:
    started = datetime(2026, 11, 29, tzinfo=UTC)
    deadline = None if deadline_min is None else started + timedelta(minutes=deadline_min)
    assert embedded_guard.is_over(state, deadline, started, started + timedelta(minutes=running_min)) is over
