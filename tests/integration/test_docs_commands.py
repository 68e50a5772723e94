"""The commands of the documents, run as they stand there: a fenced block after `<!-- run -->` is executed.

A page's blocks run in order in one shell, in a copy of the repository. What is shown after `<!-- output -->` must be what the commands
before it print, ids, times and paths aside.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^<!-- (?P<kind>run|output) -->\n```\w*\n(?P<text>.*?)^```$", re.M | re.S)
LONGEST_S = 300
MARK = "=== next block ==="


@dataclass(frozen=True)
class Block:
    """What stands after a marker."""

    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, in order."""
    return [Block(found["kind"], found["text"]) for found in BLOCK.finditer(page.read_text("utf-8"))]


def pages() -> list[str]:
    """The pages that have a block to run."""
    candidates = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
    return [str(page.relative_to(ROOT)) for page in candidates if any(block.kind == "run" for block in blocks(page))]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the repository's files as a clone would have them, with the environment of these tests in place of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    folder = tmp_path / "clone"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A page's blocks in one shell. MAKEFLAGS keeps `make` from making an environment."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "INSPECT_", "S3_", "MAKE"))
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=kept | {"MAKEFLAGS": f"VENV={folder / '.venv'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def settled(text: str, folder: Path) -> list[str]:
    """Printed lines without what differs from run to run: ids, times, folders, widths, progress before the end."""
    text = text.replace(str(folder), ".")
    text = re.sub(r"\d{4}(-\d\d){5}-[0-9a-f]{8}", "RUN_ID", text)
    text = re.sub(r"\d+(\.\d)? (m|h|s)( \d\d [sm])?\b", "TIME", text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line and not re.match(r"\[(?!2/2)", line)]


def run_page(page: str, folder: Path) -> list[tuple[Block, str]]:
    """Run a page's blocks in one shell; each with what it printed. Fails where a command does."""
    found = blocks(ROOT / page)
    script = "exec 2>&1\n" + "".join(f"echo '{MARK}'\n{block.text}" for block in found if block.kind == "run")
    ran = run(script, folder)
    assert ran.returncode == 0, f"{page}:\n{ran.stdout[-5000:]}"
    printed = iter(ran.stdout.split(f"{MARK}\n")[1:])
    return [(block, next(printed) if block.kind == "run" else "") for block in found]


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page(page: str, clone: Path) -> None:
    before = ""
    for block, printed in run_page(page, clone):
        if block.kind == "output":
            assert settled(before, clone) == settled(block.text, clone)
        before = printed
    if page == "docs/local.md":
        (working,) = (clone / "logs/working").iterdir()
        assert len(list(working.glob("*.eval"))) == 4


def test_both_pages_of_the_first_day_are_run() -> None:
    assert {"README.md", "docs/local.md"} <= set(pages())
    assert "output" in {block.kind for block in blocks(ROOT / "README.md")}
