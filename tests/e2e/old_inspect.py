"""Environments with other versions of Inspect, made once and kept in tests/.cache: for tests that need what they write or read."""

import os
import subprocess
from pathlib import Path

from evalworker.environment import find_uv

CACHE = Path(__file__).parent.parent / ".cache" / "inspect"

MAKE = """
import sys
from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match

def answer(text):
    output = ModelOutput.from_content("mockllm/model", text)
    output.usage = ModelUsage(input_tokens=10, output_tokens=2, total_tokens=12)
    return output

@task
def sums(n=4):
    return Task([Sample(f"{i} + 1?", target=str(i + 1), id=i) for i in range(n)], scorer=match(), name="sums")

model = get_model("mockllm/model", custom_outputs=[answer(str(i)) for i in (1, 2, 3, 9)])
log = eval(sums(), model=model, log_dir=sys.argv[1], log_format="eval", display="none")[0]
assert log.status == "success", log.error
"""


def python_of(version: str) -> Path:
    """The Python of an environment with inspect-ai of this version; made if it is not there."""
    folder = CACHE / version
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if not done.exists():
        # What the version itself would have met: newer releases of its dependencies break it.
        words = [
            find_uv() or "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            f"inspect-ai=={version}",
            *_BESIDE.get(version, []),
        ]
        subprocess.run([find_uv() or "uv", "venv", "--quiet", "--clear", "--python", "3.11", str(folder)], check=True)
        subprocess.run(words, check=True)
        done.touch()
    return python


_BESIDE = {"0.3.76": ["click<8.2"], "0.3.100": ["click<8.2"]}


def run(version: str, *words: str, cwd: Path) -> str:
    """Run that Python; its stdout. Raises CalledProcessError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("INSPECT_", "PYTHON"))}
    done = subprocess.run([str(python_of(version)), *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
