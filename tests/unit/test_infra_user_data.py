"""The user data of workers, run by the machine's own `sh` with every tool that would touch the machine replaced by a recorder."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "terraform" / "templates" / "user-data.sh.tftpl"
VALUES = {
    "max_lifetime_minutes": "1440",
    "name": "default",
    "bucket": "our-logs",
    "region": "eu-west-2",
    "parameter": "/inspect-fleet/default/config",
}
RECORDER = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'
CURL = """#!/bin/sh
echo "curl $*" >>"$CALLS"
case "$*" in
  *latest/api/token*) echo TOKEN ;;
  *security-credentials/) echo the-role ;;
  *security-credentials/the-role) printf '{\\n "AccessKeyId" : "AKIA1",\\n "SecretAccessKey" : "sec+ret/1",\\n "Token" : "tok=="\\n}' ;;
  *--config*) cat >"$CALLS.config"
    printf '#!/bin/sh\\necho "boot.sh" >>"$CALLS"\\nexit ${BOOT_EXIT:-0}\\n' >"$ROOT/opt/inspect-fleet/boot.sh.part" ;;
esac
"""
SETPRIV = '#!/bin/sh\necho "setpriv $1 $2 $3" >>"$CALLS"\nshift 3\nexec "$@"\n'


@dataclass
class Boot:
    """How a boot went: exit code, the tools that were called in order, and the machine's files."""

    code: int
    calls: list[str]
    root: Path


def rendered() -> str:
    text = TEMPLATE.read_text()
    for name, value in VALUES.items():
        text = text.replace("${" + name + "}", value)
    assert not re.search(r"(?<!\$)\$\{[a-z_]+\}", text), "a value that the test does not know"
    return text.replace("$${", "${")


def boot(tmp_path: Path, *, baked: bool = False, **environ: str) -> Boot:
    root, tools, calls = tmp_path / "root", tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    calls.touch()
    for folder in ("etc", "opt"):
        (root / folder).mkdir(parents=True)
    for name in ("shutdown", "nft", "useradd", "sync", "apt-get"):
        (tools / name).write_text(RECORDER)
    (tools / "systemctl").write_text(RECORDER + ("exit 0\n" if baked else '[ "$1" != cat ]\n'))
    (tools / "id").write_text("#!/bin/sh\nexit 1\n")
    (tools / "nft").write_text(RECORDER + 'cat >"$CALLS.rules"\n[ -z "$NFT_FAILS" ]\n')
    (tools / "curl").write_text(CURL)
    (tools / "setpriv").write_text(SETPRIV)
    for name in ("cat", "install", "sh", "basename", "sed", "printf", "echo"):
        if (found := shutil.which(name)) and not (tools / name).exists():
            (tools / name).symlink_to(found)
    for tool in tools.iterdir():
        if not tool.is_symlink():
            tool.chmod(0o755)
    script = tmp_path / "user-data"
    # The longest first: what begins with /etc or /opt is the machine's.
    script.write_text(re.sub(r"(?<![\w.])/(etc|opt)/", rf"{root}/\1/", rendered()))
    done = subprocess.run(
        ["/bin/sh", str(script)],
        env={"PATH": str(tools), "CALLS": str(calls), "ROOT": str(root), "NFT_FAILS": ""} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Boot(done.returncode, calls.read_text().splitlines(), root)


def test_syntax() -> None:
    assert subprocess.run(["/bin/sh", "-n"], input=rendered(), text=True, check=False).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run(
            [shellcheck, "-s", "sh", "-e", "SC1091,SC2086", "-"],
            input=rendered(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == ""


def test_the_dead_man_switch_is_the_first_command() -> None:
    lines = [line for line in rendered().splitlines() if not line.startswith("#")]
    assert lines[0].startswith("shutdown -P +1440 ")
    assert len(rendered()) < 8192


def test_a_stock_image_fetches_boot_sh_and_runs_it_in_the_workers_group(tmp_path: Path) -> None:
    went = boot(tmp_path)
    assert went.code == 0, went.calls
    assert went.calls[0].startswith("shutdown -P +1440")
    assert went.calls[-2:] == ["setpriv --regid inspect-fleet --clear-groups", "boot.sh"]
    assert [call for call in went.calls if call.startswith("shutdown")] == went.calls[:1]
    assert went.calls.index("nft -f -") < min(n for n, call in enumerate(went.calls) if call.startswith("curl"))
    config = (tmp_path / "calls.config").read_text()
    assert 'url = "https://s3.eu-west-2.amazonaws.com/our-logs/worker/boot.sh"' in config
    assert 'user = "AKIA1:sec+ret/1"' in config and 'header = "x-amz-security-token: tok=="' in config
    assert not any("sec+ret" in call or "tok==" in call for call in went.calls), "no key on a command line"
    estate = dict(line.split("=", 1) for line in (went.root / "etc/inspect-fleet/estate.env").read_text().splitlines())
    assert estate["S3_BUCKET_NAME"] == "our-logs" and estate["INSPECT_FLEET_CONFIG"] == "/inspect-fleet/default/config"


def test_a_baked_image_only_starts_its_unit(tmp_path: Path) -> None:
    went = boot(tmp_path, baked=True)
    assert went.code == 0
    assert went.calls[-1] == "systemctl start --no-block inspect-fleet-worker.service"
    assert not any(call.startswith("curl") for call in went.calls)


@pytest.mark.parametrize("failing", [{"NFT_FAILS": "1"}, {"BOOT_EXIT": "3"}])
def test_a_failed_boot_powers_off(tmp_path: Path, failing: dict[str, str]) -> None:
    went = boot(tmp_path, **failing)
    assert went.code != 0
    assert went.calls[-2:] == ["sync ", "shutdown -P now"]


def test_only_the_workers_user_and_group_reach_the_metadata_service(tmp_path: Path) -> None:
    boot(tmp_path)
    rules = (tmp_path / "calls.rules").read_text()
    assert (
        'ip daddr 169.254.169.254 meta skuid != "inspect-fleet" meta skgid != "inspect-fleet" counter reject' in rules
    )
    assert re.search(r"hook forward .*\n *ip daddr 169\.254\.169\.254 counter reject", rules)
    nft = shutil.which("nft")
    if nft and os.geteuid() == 0:
        known = rules.replace('"inspect-fleet"', "0")  # the user exists on workers alone
        checked = subprocess.run([nft, "--check", "-f", "-"], input=known, capture_output=True, text=True, check=False)
        assert checked.returncode == 0 or "Operation not permitted" in checked.stderr, checked.stderr
