"""A program named `terraform` that records how it is called and answers as told; for the tests of `ies infra`."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({folder!r})
with (here / "argv.jsonl").open("a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "automation": os.environ.get("TF_IN_AUTOMATION"), "cwd": os.getcwd()}}) + "\\n")
answers = json.loads((here / "answers.json").read_text())
answer = answers.get(sys.argv[1], {{}})
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("code", 0))
"""
VERSION = {"version": {"out": json.dumps({"terraform_version": "1.11.4"})}}


class Fake:
    """The program's folder: what it answers and how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "terraform"
        program.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.answer({})

    def answer(self, answers: dict[str, Any]) -> None:
        (self.folder / "answers.json").write_text(json.dumps(VERSION | answers))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "argv.jsonl").read_text().splitlines()]


@pytest.fixture(name="fake")
def fake_terraform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("TF_IN_AUTOMATION", raising=False)
    return Fake(folder)


@pytest.fixture(name="directory")
def configuration(tmp_path: Path) -> Path:
    folder = tmp_path / "terraform"
    folder.mkdir()
    (folder / "versions.tf").touch()
    return folder


def lines(*messages: dict[str, Any]) -> str:
    return "".join(json.dumps(message) + "\n" for message in messages)


def diagnostic(summary: str, detail: str = "", **more: str) -> dict[str, Any]:
    found = {"severity": "error", "summary": summary, "detail": detail, **more}
    return {"type": "diagnostic", "@message": f"Error: {summary}", "diagnostic": found}
