"""A nightly list: what is run, what is skipped, what is remembered."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalops import nightly
from evalops.nightly import Busy, Ended, Entry, Nightly
from evalops.ui import Failure

FILE = """
runs:
- name: first
  tasks: [examples/arithmetic.py, b.py@t]
  models: [scripted/good, scripted/mixed]
  options: {ec2: true, local: false, max-workers: 4, T: {n: 3, label: "a,b", deep: [1]}, package: [x, y]}
"""


def entry(name: str, **options: int) -> Entry:
    return Entry(name=name, tasks=["a.py"], models=["m/x"], options=dict(options))


def write(folder: Path, text: str) -> Path:
    path = folder / "nightly.yaml"
    path.write_text(text)
    return path


def test_a_run_is_the_words_of_a_command(tmp_path: Path) -> None:
    (first,) = nightly.read(write(tmp_path, FILE)).runs
    shown = (
        "examples/arithmetic.py b.py@t --model scripted/good --model scripted/mixed --ec2 --max-workers 4 "
        "-T n=3 -T label=a,b -T deep=[1] --package x --package y"
    )
    assert nightly.words(first) == shown.split()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: [", "is no YAML"),
        ("runs: []", "cannot be used: runs: List should have at least 1 item"),
        ("runs: [{name: a, tasks: [t], model: m}]", "cannot be used: runs.0.models: Field required"),
        ("runs: [{name: a, tasks: [t], models: [m]}, {name: a, tasks: [t], models: [m]}]", "two runs of the name a"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Failure, match=said):
        nightly.read(write(tmp_path, text))
    with pytest.raises(Failure, match="cannot be read: No such file"):
        nightly.read(tmp_path / "none.yaml")


class Runs:
    """Stands for `ct run eval`; `codes` are the exit codes by a word of the command."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.asked: list[list[str]] = []

    def __call__(self, words: list[str]) -> Ended:
        self.asked.append(words)
        code = next((code for word, code in self.codes.items() if word in words), 0)
        return Ended(code, {"fleet_id": f"f{len(self.asked)}", "samples": {"completed": 3, "total": 4}}, "why")


def lines(runs: Nightly, run: Runs, state: Path, digest: str = "d", **more: bool) -> list[tuple[str, bool]]:
    return [(line.split(" since")[0], good) for line, good in nightly.work(runs, digest, run, state=state, **more)]


def test_what_is_unchanged_since_its_success_is_skipped(tmp_path: Path) -> None:
    state, runs, run = tmp_path / "s" / "state.json", Nightly(runs=[entry("a"), entry("b", limit=7)]), Runs(**{"7": 1})
    first = lines(runs, run, state)
    assert first == [("completed a: f1, 3 of 4 samples", True), ("failed b: f2, exit code 1: why", False)]
    assert [line for line, _ in lines(runs, run, state)] == ["skipped a: unchanged", "failed b: f3, exit code 1: why"]
    assert len(run.asked) == 3
    assert [line.split(":")[0] for line, _ in lines(runs, run, state, digest="other code")] == [
        "completed a",
        "failed b",
    ]
    changed = Nightly(runs=[entry("a", limit=1)])
    assert [line.split(":")[0] for line, _ in lines(changed, run, state, digest="other code")] == ["completed a"]
    assert [line.split(":")[0] for line, _ in lines(changed, run, state, digest="other code", again=True)] == [
        "completed a"
    ]


def test_two_never_overlap(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "lock"
    with nightly.lock(path), pytest.raises(Busy), nightly.lock(path):
        pass
    with nightly.lock(path):
        pass


def test_the_code_decides(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = nightly.code_digest(tmp_path)
    assert nightly.code_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert nightly.code_digest(tmp_path) != before


def test_code_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> str:
        raise PermissionError(13, "Permission denied", "a.py")

    monkeypatch.setattr(nightly.code, "pack", gone)
    with pytest.raises(Failure, match=r"cannot be read: .*Permission denied"):
        nightly.code_digest(tmp_path)


def test_the_command_says_one_line_for_each(tmp_path: Path) -> None:
    """A run that is refused by the real command: its sentence is the line's."""
    path = write(tmp_path, "runs: [{name: a, tasks: [none.py], models: [scripted/good]}]")
    done = subprocess.run(
        [sys.executable, "-m", "evalops.commands.nightly", str(path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.startswith("failed a: no fleet, exit code 2: ")
    assert done.stdout.count("\n") == 1
