"""The progress line and the table: what a person sees, and that nothing of a model's reaches the terminal raw."""

import io
import os
from typing import Any

import pytest
from rich.cells import cell_len

from evalops.fleet import view
from evalops.fleet.ledger import Ledger
from evalops.fleet.view import ProgressLine, line_of, results_table, scores_text
from evalworker.contract.documents import JobSpec
from evalworker.contract.failures import Category
from evalworker.contract.messages import AttemptDone, SampleCounts
from evalworker.contract.wire import now

FLEET = "2026-11-29-14-05-33-1a2b3c4d"


def ledger(*ends: dict[str, Any] | None) -> Ledger:
    """A fleet of one job for each end; None is a job that still runs."""
    specs = [
        JobSpec(job_id=f"{n:016x}", task=f"t{n}.py@t{n}", name=f"t{n}", model="scripted/good", samples=4)
        for n in range(len(ends))
    ]
    made = Ledger(specs)
    for spec, end in zip(specs, ends, strict=True):
        if end is not None:
            fields = {"status": "completed", "samples": SampleCounts(total=4, completed=4)} | end
            done = AttemptDone(
                fleet_id=FLEET,
                instance_id="w",
                ts=now(),
                round=1,
                job_id=spec.job_id,
                attempt=1,
                ended=True,
                duration_s=65.2,
                **fields,
            )
            made.attempt(done)
            made.conclude(done)
    return made


FAILED = {
    "status": "failed",
    "failure_category": Category.AUTH,
    "samples": SampleCounts(total=4, completed=1, errored=3),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_counts_jobs_and_samples() -> None:
    text = line_of(ledger({}, FAILED, None), 2, 61.0, None)
    assert text == "[2/3] 1 done, 1 failed, 5/12 samples, 3 errored, 2 workers, 1 m 01 s"


def test_the_line_says_what_is_waited_for() -> None:
    assert line_of(ledger(None), 1, 0.5, "waiting for the first worker").endswith(
        "1 worker, 0.5 s, waiting for the first worker"
    )


def test_a_terminal_has_one_line_that_is_drawn_over() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream=stream, clock=clock)
    line.show(ledger(None), 1, "a long phrase that has to be wiped out")
    line.show(ledger(None), 1)  # too soon
    clock.now += view.REDRAW_EVERY_S
    line.show(ledger({}), 1)
    line.end()
    _, first, second = stream.getvalue().split("\r")
    assert second.rstrip("\n").rstrip() == "[1/1] 1 done, 4/4 samples, 1 worker, 0.2 s"
    assert len(second.rstrip("\n")) >= len(first)
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize("phrase", ["x" * 200, "\x1b[2J\x07first\nsecond\tthird", "模型" * 60])
def test_a_line_stays_in_its_row_whatever_it_holds(monkeypatch: pytest.MonkeyPatch, phrase: str) -> None:
    width = [70]
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((width[0], 24)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream=stream, clock=clock)
    line.show(ledger(None), 1, phrase)
    width[0] = 60  # the window has become smaller
    for text in ("short", phrase):
        clock.now += view.REDRAW_EVERY_S
        line.show(ledger(None), 1, text)
    line.note("a remark")
    _, *drawn = stream.getvalue().split("\r")
    assert max(cell_len(text) for text in drawn) <= 69
    assert max(cell_len(text) for text in drawn[1:]) <= 59
    assert drawn.pop() == "a remark\n"
    assert all(text.isprintable() for text in drawn)
    assert drawn[0].startswith("[0/1] 0 done, 0/4 samples, 1 worker, 0.0 s, ")


def test_without_a_terminal_there_is_a_plain_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream=stream, clock=clock)
    for _ in range(100):
        line.show(ledger(None), 1)
        clock.now += 1
    assert "\r" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 4
    line.show(ledger({}), 1, force=True)
    assert stream.getvalue().splitlines()[-1].startswith("[1/1] 1 done")


def test_a_quiet_line_is_silent_and_remarks_are_not_lost() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream=stream, quiet=True)
    line.show(ledger(None), 1, force=True)
    assert stream.getvalue() == ""


def test_remarks_cannot_drive_the_terminal() -> None:
    stream = Terminal()
    line = ProgressLine(stream=stream)
    line.show(ledger(None), 1)
    line.note("\x1b[2J\x07pwned")
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    assert "pwned" in stream.getvalue()


def test_the_table_has_a_row_for_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    results_table(ledger({"metrics": {"includes/accuracy": 0.95, "includes/stderr": 0.05}}, FAILED, None))
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "task",
        "model",
        "status",
        "scores",
        "completed",
        "errored",
        "total",
        "time",
        "tokens",
        "cost",
    ]
    assert "includes/accuracy 0.950 ±0.050" in rows[0]
    assert rows[0].split()[:3] == ["t0", "scripted/good", "completed"]
    assert "failed: auth" in rows[1]
    assert rows[2].split()[2] == "open"
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, None),
        ({"match/accuracy": 0.0, "match/stderr": 0.0}, "match/accuracy 0.000 ±0.000"),
        ({"match/accuracy": None}, "match/accuracy -"),
        ({"a/mean": 1.0, "b/mean": 2.0, "b/stderr": 0.5}, "a/mean 1.000, b/mean 2.000 ±0.500"),
        ({"p/match/accuracy": 0.5, "p/match/stderr": 0.1}, "p/match/accuracy 0.500 ±0.100"),
        (
            {"p/match/accuracy/mean": 0.5, "p/match/stderr/mean": 0.1, "p/match/stderr/max": 0.2},
            "p/match/accuracy/mean 0.500 ±0.100, p/match/stderr/max 0.200",
        ),
        ({"stderr/accuracy": 0.5, "mean/stderr": None}, "stderr/accuracy 0.500, mean/stderr -"),
        ({"x" * 128: 0.5, "/": 1.0, "": None}, "x" * 128 + " 0.500, / 1.000,  -"),
        ({f"s{n}/mean": 1.0 for n in range(9)}, ", ".join(f"s{n}/mean 1.000" for n in range(4))),
    ],
)
def test_scores_in_a_cell(metrics: dict[str, float | None], text: str | None) -> None:
    assert scores_text(metrics) == text
