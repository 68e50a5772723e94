"""`ies view FILE` opens exactly that log: Inspect's own viewer is started and asked what it lists."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

from ports import free_port


def test_the_viewer_lists_the_file(tmp_path: Path) -> None:
    """A file with any name, in a directory with others, is the one log that the viewer shows."""
    task = Task(dataset=[Sample(input="1 + 1 =", target="2")], scorer=includes(), name="sum")
    (log,) = eval(task, model="scripted/good", log_dir=str(tmp_path / "logs"), display="none")
    file = tmp_path / "job.eval"
    Path(log.location.removeprefix("file://")).rename(file)
    port = free_port()
    command = [sys.executable, "-m", "evalops", "ies", "view", str(file), "--port", str(port)]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        listed = _listed(f"http://127.0.0.1:{port}/api/logs", viewer)
    finally:
        os.killpg(viewer.pid, signal.SIGINT)
        viewer.wait(30)
    assert [Path(entry["name"]).name for entry in listed] == ["job.eval"]


def _listed(url: str, viewer: "subprocess.Popen[bytes]") -> list[dict[str, str]]:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if viewer.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return list(json.loads(answer.read())["files"])
        except OSError:
            time.sleep(0.2)
    viewer.kill()
    pytest.fail(f"the viewer did not answer: {viewer.communicate()[0].decode()}")
