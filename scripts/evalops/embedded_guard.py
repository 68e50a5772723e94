"""The process that keeps the embedded queue server: starts it, and ends it when its fleet is over. Run as a program.

`evalops.embedded` starts it in a session of its own, so it outlives a controller that is killed; the server dies with it.
Only the standard library is imported before the server runs, because everybody waits for that.
"""

import argparse
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

POLL_S = 3.0
"""Between two looks at the fleet's control document."""

GRACE = timedelta(minutes=2)
"""After the fleet's deadline."""

UNKNOWN = timedelta(minutes=10)
"""From the start, while there is no control document of this round: its controller died before writing one."""

GONE_LOOKS = 20
"""Looks in a row (a minute) that no longer find the control document: somebody has removed the run."""

LAST_LINE_BYTES = 65536
"""More than a `fleet_summary` has: so much of the live events' end is read."""

_PR_SET_PDEATHSIG = 1
_KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "PYTHONDONTWRITEBYTECODE",
)


def server_environment(port: int) -> dict[str, str]:
    """The server's whole environment: nothing of the user's keys, and nothing that opens a port or meets Docker."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
        "SERVICES": "sqs",
        "LOG_LEVEL": "ERROR",
        "SFTP_ENABLED": "0",
        "IOT_MTLS_ENABLED": "0",
        "DOCKER_HOST": "unix:///nonexistent",  # it would stop its own containers of other servers
    }


def start_server(fd: int, port: int) -> subprocess.Popen[bytes]:
    """Start the server on a socket that listens already (so no port can be lost to somebody else)."""
    parent = os.getpid()

    def die_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    command = ["-m", "hypercorn", "ministack.app:app", "--bind", f"fd://{fd}", "--workers", "0"]
    return subprocess.Popen(
        [sys.executable, "-P", *command, "--log-level", "ERROR", "--keep-alive", "75"],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        env=server_environment(port),
        preexec_fn=die_with_parent,
    )


def is_over(state: str | None, deadline: datetime | None, started: datetime, now: datetime) -> bool:
    """Whether the server is to end. `state` and `deadline` are this round's control document's, None while there is none."""
    if deadline is None:
        return now > started + UNKNOWN
    return state == "ended" or now > deadline + GRACE


def has_ended_here(folder: Path, started: datetime) -> bool:
    """Whether this machine's own files and processes say that the round is over, for when its documents cannot be read any more.

    The credentials that this process was started with may have expired while those of a later controller are good. The last line of the
    live events must be a summary that was written after `started`, and nobody be left to use the queues: no controller, which would hold
    its lock on that file, and no worker.
    """
    try:
        with (folder / "events.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
            last = json.loads(file.read().splitlines()[-1])
        ended = last["type"] == "fleet_summary" and datetime.fromisoformat(last["ts"]) >= started
    except (OSError, ValueError, LookupError, TypeError):
        return False
    workers = [_text(path) for path in folder.glob("work/*/agent.pid")]
    return ended and not any(Path("/proc", pid).exists() for pid in workers if pid)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def watch(root: str, fleet_id: str, folder: Path, started: datetime, wait: Callable[[float], bool]) -> None:
    """Return once the fleet is over; `wait` sleeps and says whether the server has ended, which ends this too.

    `folder` is where the fleet's controller keeps its live files.
    """
    from evalworker.aws import ServiceError
    from evalworker.contract import layout
    from evalworker.contract.documents import Control
    from evalworker.contract.wire import Unreadable
    from evalworker.storage import Missing, open_storage

    storage = open_storage(root)
    etag = state = deadline = said = None
    gone = 0
    while gone < GONE_LOOKS:
        try:
            stored = storage.get_if_changed(layout.control(fleet_id), etag)
            gone = 0
            if stored is not None:
                control = Control.from_json(stored.body)
                etag = stored.etag
                # An older one is an earlier round's, which ended; the controller is on this machine, so clocks agree.
                if control.beat >= started:
                    state, deadline = control.state, control.deadline
        except Missing:
            gone += deadline is not None
        except (ServiceError, Unreadable) as error:  # the last known deadline still ends it
            if str(error) != said:  # once, not at every look
                said = str(error)
                print(f"embedded queues: {said}", file=sys.stderr, flush=True)  # noqa: T201
            if has_ended_here(folder, started):
                return
        if is_over(state, deadline, started, datetime.now(UTC)) or wait(POLL_S):
            return


def main() -> int:
    """Start the server, wait for the fleet's end or SIGTERM, end the server. The exit code is 0, or 1 if it broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--fleet-id", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--started", type=datetime.fromisoformat, required=True)
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child_ended = wake_on_child()
    server = start_server(options.fd, options.port)
    try:
        os.close(options.fd)  # so that a dead server refuses connections instead of leaving them to wait

        def wait(seconds: float) -> bool:
            select.select([child_ended], [], [], seconds)
            return server.poll() is not None

        if not wait(POLL_S):  # leave the processor to the server and the workers, which start now
            watch(options.root, options.fleet_id, options.folder, options.started, wait)
        if server.poll() is not None:
            print(f"embedded queues: the server ended with {server.returncode}", file=sys.stderr)  # noqa: T201
        return 0 if server.poll() is None else 1
    finally:
        server.kill()  # it keeps nothing on disk that would need a clean end
        server.wait()


def wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


if __name__ == "__main__":
    sys.exit(main())
