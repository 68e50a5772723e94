"""The report in a real browser: rendered without an error for 1, 6 and 200 pairs and for hostile names.

The pictures are kept in tests/.cache/report for a person to look at.
"""

import shutil
import subprocess
from pathlib import Path

import logmaker
import pytest

from evalops.report import write
from evalworker.contract import layout
from evalworker.storage import open_storage

RUN = "2026-11-29-14-05-33-1a2b3c4d"
PICTURES = Path(__file__).parent.parent / ".cache" / "report"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
]  # fmt: skip
HOSTILE = ["<script>document.title='taken'</script>", "\"><img src=x onerror=\"document.title='taken'\">", "a" * 200,
           "</style><style>body{display:none}", "line\nbreak", "日本語 مرحبا", "{{ 7*7 }}"]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Chromium of the machine."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.fail("there is no Chromium: apt-get install chromium")
    return found


def _pairs(folder: Path, tasks: int, models: int) -> None:
    for number in range(tasks * models):
        value = (number * 37 % 100) / 100
        logmaker.make(
            folder,
            task=f"inspect_evals/task_{number // models}",
            model=f"openai/model-{number % models}",
            number=number + 1,
            status="success" if number % 13 else "error",
            scores=[logmaker.score(accuracy=value, stderr=0.05)],
            minutes=1 + number % 7,
        )


def _hostile(folder: Path) -> None:
    for number, text in enumerate(HOSTILE):
        logmaker.write(
            folder,
            logmaker.log(task=text, model=f"x/{text}", number=number + 1, status="error", error=text, scores=[logmaker.score(text)]),
            name=f"2026-11-29T10-00-00-00-00_<b>{number}'.eval",
        )  # fmt: skip


@pytest.mark.parametrize("case", ["1", "6", "200", "hostile"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_renders_without_an_error(browser, tmp_path, case, dark):
    folder = tmp_path / layout.working(RUN)
    if case == "hostile":
        _hostile(folder)
    else:
        _pairs(folder, *{"1": (1, 1), "6": (3, 2), "200": (20, 10)}[case])
    page = write(open_storage(str(tmp_path)), RUN)
    flags = [
        *FLAGS,
        f"--user-data-dir={tmp_path}/browser",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{case}-{'dark' if dark else 'light'}.png"
    picture.unlink(missing_ok=True)
    shot = [browser, *flags, "--window-size=1240,2400", f"--screenshot={picture}", f"file://{page}"]
    done = subprocess.run(shot, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert picture.stat().st_size > 20_000
    dom = subprocess.run(
        [browser, *flags, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=120
    ).stdout
    assert f"<title>{RUN}" in dom and "taken</title>" not in dom
    assert dom.count("<script") == 0
    assert "Results" in dom and dom.rstrip().endswith("</html>")
