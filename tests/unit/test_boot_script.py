"""worker/boot.sh around the agent: what it asks the metadata service, and how it ends when that is silent. Tools are stand-ins on PATH.

On a machine with systemd it is tested by tests/e2e/test_image_boot.py.
"""

import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "worker" / "boot.sh"
DEADLINE = (datetime.now(UTC) + timedelta(hours=2)).isoformat(timespec="seconds")
CURL = r"""#!/bin/sh
echo "curl $*" >>"$CALLS"
case "$*" in
  *-X\ PUT*api/token*) [ -z "$SILENT" ] || exit 7; printf 'the-token' ;;
  *X-aws-ec2-metadata-token:\ the-token*meta-data/*)
    case "$*" in
      *instance-id) printf i-0abc ;;
      *placement/region) printf eu-west-2 ;;
      *instance/fleet-id) printf 2026-11-29-14-05-33-1a2b3c4d ;;
      *instance/fleet-deadline) printf '%s' "$DEADLINE" ;;
      *instance/lane) printf lane-00 ;;
      *instance/inspect-fleet-bucket) printf our-logs ;;
      *security-credentials/) printf the-role ;;
      *security-credentials/the-role) printf '{"AccessKeyId": "AKIA1", "SecretAccessKey": "s", "Token": "t"}' ;;
    esac ;;
  *--config*lanes/lane-00.json) cat >/dev/null; printf '{"events": "https://sqs.eu-west-2.amazonaws.com/1/events"}' ;;
  *--config*) cat >/dev/null ;;
esac
"""
LOGGED = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'


def boot(folder: Path, command: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it with its places below `folder`, and with a second's patience; returns what it did, and the tools it called."""
    text = SCRIPT.read_text()
    for before, after in (
        ("run=/run/inspect-fleet\n", f"run={folder}/run\n"),
        ("log=/var/log/inspect-fleet/boot.log\n", f"log={folder}/log/boot.log\n"),
        ("work=/var/lib/inspect-fleet/work\n", f"work={folder}/work\n"),
        ("token_wait_s=120 ", "token_wait_s=3 "),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    tools = folder / "bin"
    tools.mkdir()
    stand_ins = {"curl": CURL, "setpriv": '#!/bin/sh\nshift 3\nexec "$@"\n'}
    for name in ("systemctl", "systemd-run", "journalctl"):
        stand_ins[name] = LOGGED
    for name, body in stand_ins.items():
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    (folder / "boot.sh").write_text(text)
    calls = folder / "calls"
    calls.touch()
    surroundings = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CALLS": str(calls), "DEADLINE": DEADLINE}
    went = subprocess.run(
        ["bash", folder / "boot.sh", command],
        env=surroundings | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return went, calls.read_text().splitlines()


def tokens(calls: list[str]) -> int:
    return sum("api/token" in call for call in calls)


def test_the_deadline_becomes_a_timer_of_the_machine(tmp_path: Path) -> None:
    went, calls = boot(tmp_path, "start")
    assert went.returncode == 0, went.stderr
    (timer,) = (call for call in calls if call.startswith("systemd-run"))
    (seconds,) = re.findall(r"--on-active=(\d+) ", timer)
    assert 0 < int(seconds) <= 2 * 3600
    assert timer.endswith("systemctl poweroff")
    assert (tmp_path / "run/deadline").read_text().strip() == DEADLINE


def test_one_token_serves_all_that_it_asks(tmp_path: Path) -> None:
    """Each value is asked for in a subshell, whose own token would be lost with it."""
    went, calls = boot(tmp_path, "ended")
    assert went.returncode == 0, went.stderr
    assert sum("meta-data/" in call for call in calls) >= 7
    assert any("/2026-11-29-14-05-33-1a2b3c4d/workers/i-0abc.log" in call for call in calls)
    assert any("Action=SendMessage" in call for call in calls)
    assert tokens(calls) == 1


@pytest.mark.parametrize(("command", "code"), [("start", 1), ("ended", 0)])
def test_a_metadata_service_that_stays_silent_is_waited_for_in_seconds(tmp_path: Path, command: str, code: int) -> None:
    went, calls = boot(tmp_path, command, SILENT="1")
    assert went.returncode == code
    assert went.stderr.count("the metadata service has not answered for 3 s") == 1
    assert 2 <= tokens(calls) <= 12
    assert not any("meta-data/" in call or call.startswith("systemd-run") for call in calls)


def test_a_machine_without_the_tag_is_no_worker(tmp_path: Path) -> None:
    went, calls = boot(tmp_path, "start", DEADLINE="")
    assert went.returncode == 1
    assert "no tag fleet-deadline" in went.stderr
    assert not any(call.startswith("systemd-run") for call in calls)
