"""Packer's output, its exit and its interruption, by a stand-in program; the real one is in tests/e2e."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from evalops.cloud import build, packer, payload
from evalops.cloud.payload import CloudError

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, version: str = "1.6.6") -> packer.Packer:
    """A program `packer` that prints its version and, for `build`, does what `body` says."""
    program = folder / "packer"
    program.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        f"if sys.argv[1] == 'version':\n    print('Packer v{version}'); sys.exit()\n"
        "def ui(kind, text): print(f'1,,ui,{kind},' + text.replace(',', '%!(PACKER_COMMA)'), flush=True)\n"
        + textwrap.dedent(body)
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return packer.find("1.6.6")


def run(found: packer.Packer, folder: Path) -> tuple[packer.Result, list[str]]:
    shown: list[str] = []
    return packer.build(found, folder, folder / "values", shown.append), shown


def test_the_failing_step_and_its_last_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    ui('say', '==> amazon-ebs.worker: Provisioning with shell script: /x/10-packages.sh')
    ui('message', '    amazon-ebs.worker: all fine')
    ui('say', '==> amazon-ebs.worker: Provisioning with shell script: /x/20-system.sh')
    for n in range(30): ui('message', f'    amazon-ebs.worker: line {n}, of 30')
    ui('say', '==> amazon-ebs.worker: Provisioning step had errors: Running the cleanup provisioner, if present...')
    ui('say', '==> amazon-ebs.worker: Terminating the source AWS instance...')
    ui('message', 'cleaning')
    ui('error', "Build 'amazon-ebs.worker' errored: Script exited with non-zero exit status: 1.")
    print('1,,error-count,1')
    sys.exit(1)
    """
    result, shown = run(install(tmp_path, monkeypatch, body), tmp_path)
    assert (result.status, result.step, result.interrupted) == (1, "20-system.sh", False)
    assert list(result.lines) == [f"line {n}, of 30" for n in range(10, 30)]
    assert result.errors == ["Build 'amazon-ebs.worker' errored: Script exited with non-zero exit status: 1."]
    assert shown[0] == "Provisioning with shell script: /x/10-packages.sh" and shown[1] == "    all fine"
    text = build.explain(result, [])
    assert text.startswith("the build failed (Packer's status 1) at: 20-system.sh\n") and text.endswith(
        "non-zero exit status: 1."
    )


def test_an_interrupt_reaches_the_whole_group_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Packer's outer process ignores SIGINT; its inner one cleans up
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.fork():
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    def interrupted(*_):
        ui('say', '==> amazon-ebs.worker: Cleanly cancelled builds after being interrupted.'); os._exit(1)
    signal.signal(signal.SIGINT, interrupted)
    ui('say', '==> amazon-ebs.worker: Waiting for AMI to become ready...')
    os.kill(int(os.environ['WRAPPER']), signal.SIGINT)
    time.sleep(60)
    """
    monkeypatch.setenv("WRAPPER", str(os.getpid()))
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    result, shown = run(install(tmp_path, monkeypatch, body), tmp_path)
    assert (result.status, result.interrupted) == (1, True)
    assert shown[-1] == "Cleanly cancelled builds after being interrupted."
    assert signal.getsignal(signal.SIGINT) is before
    assert build._exit_code(result) == 130


def test_a_packer_that_is_killed_has_a_signals_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(install(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)"), tmp_path)
    assert (result.status, result.interrupted, build._exit_code(result)) == (137, False, 137)
    assert build.explain(result, ["the key k cannot be removed: denied"]) == (
        "the build was killed by signal 9 at: the start\nnot removed: the key k cannot be removed: denied (run `ct cloud clean-amis` later)"
    )


def test_packer_is_told_to_clean_up_when_we_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    def told(*_): open(os.environ['TOLD'], 'w').close(); os._exit(1)
    signal.signal(signal.SIGTERM, told)
    ui('say', 'running'); time.sleep(60)
    """
    install(tmp_path, monkeypatch, body)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    folder = str(tmp_path)
    code = f"from pathlib import Path; from evalops.cloud import packer as p; p.build(p.find('1.6.6'), Path({folder!r}), Path('v'), print)"
    wrapper = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True)
    assert wrapper.stdout is not None and wrapper.stdout.readline() == "running\n"
    wrapper.kill()
    wrapper.wait()
    while not (tmp_path / "told").exists():
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [("Packer v1.5.9", "too old"), ("cracklib-packer: 3 words", "not HashiCorp's Packer")],
)
def test_another_packer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, complaint: str) -> None:
    program = tmp_path / "packer"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(CloudError, match=complaint):
        packer.find("1.6.6")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(CloudError, match="packer is not on PATH"):
        packer.find("1.6.6")


def test_the_manifest_is_read_by_its_last_run(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    builds = [
        {"packer_run_uuid": "old", "artifact_id": "us-east-1:ami-1"},
        {"packer_run_uuid": "new", "artifact_id": "us-east-1:ami-2"},
    ]
    file.write_text(json.dumps({"builds": builds, "last_run_uuid": "new"}))
    assert packer.artifact(file) == "ami-2"
    file.write_text("{}")
    with pytest.raises(CloudError, match="no result"):
        packer.artifact(file)


@pytest.mark.parametrize("modern", [False, True])
def test_the_template_is_staged_for_the_packer_that_is_there(tmp_path: Path, modern: bool) -> None:
    packer.stage(ROOT, tmp_path, modern)
    text = (tmp_path / "worker.pkr.hcl").read_text()
    assert packer.MARK not in text
    assert ("metadata_options" in text) is modern
    assert (tmp_path / "plugins.pkr.hcl").exists() is modern


def test_the_values_of_an_order(tmp_path: Path) -> None:
    print_ = payload.Fingerprint("1", "c", "l", "w", "s")
    order = build.Order("mine", "arm64", ssh_from=("10.0.0.0/8",), subnet="subnet-1")
    versions = {"DEBIAN_RELEASE": "13", "DEBIAN_OWNER": "1"}
    values = build._values(order, ROOT, versions, tmp_path, "20261129t160507z-0123abcd", print_, {}, "eu-west-1")
    assert values["ami_name"] == "inspect-fleet-worker-mine-arm64-20261129t160507z-0123abcd"
    assert (values["debian_architecture"], values["instance_type"], values["ssh_interface"]) == (
        "arm64",
        "m7g.large",
        "public_ip",
    )
    assert values["ssh_from"] == ["10.0.0.0/8"]
    assert values["image_tags"]["inspect-fleet-lock"] == "l" and values["image_tags"]["inspect-fleet-images"] == "none"
    session = build._values(
        build.Order("mine", ssm_profile="p"), ROOT, versions, tmp_path, "b", print_, {}, "eu-west-1"
    )
    assert (session["ssh_interface"], session["instance_profile"], session["ssh_from"]) == (
        "session_manager",
        "p",
        ["127.0.0.1/32"],
    )
    assert "amazon-ssm-agent" in session["user_data"]
    # every value is a variable of the template
    template = (ROOT / "packer/worker.pkr.hcl").read_text()
    for name in values | session:
        assert f'variable "{name}"' in template
