"""PID 1 of the worker image, as a process of this machine: modes, refusals, signals, statuses. The engine is in tests/e2e."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "worker" / "entrypoint.py"


def start(*command: str, mode: str = "no", before: tuple[str, ...] = (), **options: object) -> "subprocess.Popen[str]":
    environment = os.environ | {"INSPECT_FLEET_DOCKER": mode}
    pipes = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment,
    }
    return subprocess.Popen([*before, sys.executable, "-I", ENTRYPOINT, *command], **(pipes | options))  # type: ignore


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("status", [0, 3, 77])
def test_the_commands_status_is_the_containers(status: int) -> None:
    assert finish(start("sh", "-c", f"echo said; exit {status}")) == (status, "said\n", "")


def test_a_command_killed_by_a_signal_ends_with_128_and_its_number() -> None:
    assert finish(start("sh", "-c", "kill -KILL $$"))[0] == 137


def test_sigterm_is_ctrl_c_for_the_command_and_the_second_is_sigterm() -> None:
    code = """
import os, signal, sys, time
def say(word): os.write(1, word.encode() + b'\\n')  # a handler that comes in the middle of a print() must not print
def told(number, _): say(signal.Signals(number).name); number == signal.SIGTERM and sys.exit(5)
signal.signal(signal.SIGINT, told); signal.signal(signal.SIGTERM, told)
say('ready')
while True: time.sleep(0.1)
"""
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[:2] == (5, "SIGTERM\n")


def test_the_default_action_of_sigint_is_there_even_below_a_background_shell() -> None:
    # a shell gives its background children SIGINT ignored, and Python would then never raise KeyboardInterrupt
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = start(sys.executable, "-c", code, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert finish(process)[1] == "True\n"


def test_orphans_are_reaped_without_ending_the_container(tmp_path: Path) -> None:
    process = start("sh", "-c", "(sleep 0.2 &) ; sleep 1; exit 4")
    assert finish(process)[0] == 4


@pytest.mark.parametrize(
    ("command", "mode", "status", "said"),
    [
        (("true",), "maybe", 2, "INSPECT_FLEET_DOCKER is 'maybe', and must be auto, yes or no"),
        (("no-such-command",), "no", 127, "there is no command 'no-such-command' in this image"),
        ((), "no", 127, "there is no command '' in this image"),
    ],
)
def test_refusals_are_one_sentence(command: tuple[str, ...], mode: str, status: int, said: str) -> None:
    assert finish(start(*command, mode=mode)) == (status, "", f"inspect-fleet: {said}\n")


@pytest.mark.parametrize(("mode", "status"), [("yes", 69), ("auto", 0)])
def test_without_privileges_an_engine_is_refused_or_left_out(mode: str, status: int) -> None:
    without = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
    code, _, err = finish(start("true", mode=mode, before=without))
    assert code == status
    assert (
        "a Docker engine needs a privileged container"
        if mode == "yes"
        else "no Docker engine: the container is not privileged"
    ) in err
