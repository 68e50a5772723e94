"""The worker's start: what AWS cannot serve just now is tried again, anything else ends it with one sentence."""

from pathlib import Path
from typing import Any

import pytest

from evalworker import __main__ as module
from evalworker.aws import Fault
from evalworker.storage import StorageError

FLEET = "2026-11-29-16-05-07-0123abcd"


class Started:
    """An agent that ends at once."""

    ran = 0

    def __init__(self, _config: Any) -> None: ...

    def run(self) -> None:
        Started.ran += 1


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *faults: Fault | None) -> int:
    """The exit code when storage answers the first tries with these faults."""
    left = list(faults)

    def settle(*_: Any) -> None:
        if left and (fault := left.pop(0)) is not None:
            raise StorageError(f"cannot read: {fault.text}", fault)

    Started.ran = 0
    monkeypatch.setattr(module.boot, "settle", settle)
    monkeypatch.setattr(module, "Agent", Started)
    monkeypatch.setattr(module, "PAUSE_S", (0.0, 0.0))
    words = ["--root", str(tmp_path / "root"), "--fleet", FLEET, "--lane", "lane-01", "--instance", "i-1"]
    return module.main([*words, "--work", str(tmp_path / "work")])


def test_a_start_is_tried_again_while_aws_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Fault("SlowDown", 503, "SlowDown", retryable=True)
    assert (start(tmp_path, monkeypatch, busy, busy), Started.ran) == (0, 1)
    assert (tmp_path / "work/worker.log").read_text().count("cannot read: SlowDown; trying again") == 2


def test_a_refusal_ends_the_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Fault("AccessDenied", 403, "access denied")
    assert (start(tmp_path, monkeypatch, refused), Started.ran) == (1, 0)
    assert capsys.readouterr().err == "the worker i-1 cannot start: cannot read: access denied\n"


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.0)
    busy = Fault("SlowDown", 503, "SlowDown", retryable=True)
    assert (start(tmp_path, monkeypatch, *[busy] * 1000), Started.ran) == (1, 0)
