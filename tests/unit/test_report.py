"""`evalops.report`: intervals, differences, the time line, and that nothing from a log gets out of its place."""

import itertools
import re
from collections import Counter
from datetime import UTC, datetime
from html.parser import HTMLParser

import logmaker
import pytest

from evalops.logs import places
from evalops.logs.facts import Facts, Metric, Score
from evalops.logs.metadata import Models
from evalops.logs.survey import survey
from evalops.report import build, stats, timeline, write
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import open_storage

RUN, OTHER = "2026-11-29-14-05-33-1a2b3c4d", "2026-11-28-14-05-33-1a2b3c4d"
HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "' onmouseover='alert(3)", "</style><b>", "{{ 7*7 }}",
    "\u202eevil", "a\x1b[31mred\x00", "-->", "&lt;b&gt;", "javascript:alert(4)", "\ud800",
]  # fmt: skip


class Page(HTMLParser):
    """What a browser would make of it: tags, attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


def _facts(value=0.5, stderr=None, metric="accuracy", n=100):
    metrics = [Metric(name=metric, value=value)] + ([Metric(name="stderr", value=stderr)] if stderr is not None else [])
    score = Score(name="match", scorer="match", metrics=metrics, scored=n)
    return Facts(status="success", scores=[score], headline=(0, 0), completed=n)


def test_the_interval_is_of_the_reported_standard_error():
    found = stats.headline(_facts(0.5, 0.05))
    assert (found.low, found.high) == pytest.approx((0.402, 0.598), abs=1e-3)


def test_all_right_is_not_certain():
    found = stats.headline(_facts(1.0, 0.0, n=20))
    assert found.high == 1.0 and found.low == pytest.approx(0.839, abs=1e-3)


def test_a_metric_without_a_standard_error_has_no_interval():
    assert stats.headline(_facts(17.5, metric="steps")).low is None
    assert stats.headline(_facts(None)) is None


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(0.5, 0.9, "higher"), (0.9, 0.5, "lower"), (0.5, 0.55, "no clear difference")],
)
def test_a_difference_comes_with_its_uncertainty(before, after, verdict):
    found = stats.difference(stats.headline(_facts(before, 0.04)), stats.headline(_facts(after, 0.03)))
    assert found.verdict == verdict
    assert found.high - found.low == pytest.approx(2 * stats.Z * 0.05)


def _event(kind, second, worker, **more):
    ts = datetime(2026, 11, 29, 14, 0, second, tzinfo=UTC).isoformat()
    return {"type": kind, "ts": ts, "instance_id": worker} | more


def test_the_time_line_packs_jobs_of_a_worker_without_overlap():
    events = [
        _event("worker_online", 0, "w1"),
        _event("job_done", 10, "w1", duration_s=10, status="completed", task="a"),
        _event("job_done", 12, "w1", duration_s=10, status="failed", failure_category="oom"),
        _event("job_done", 20, "w1", duration_s=8, status="completed"),
        _event("worker_draining", 20, "w1"),
        _event("worker_online", 5, "w2"),
    ]
    drawn = timeline.of_fleet(events)
    assert [(lane.name, [bar.kind for bar in lane.bars]) for lane in drawn.lanes] == [
        ("w1", ["success", "success"]),
        ("", ["error"]),
        ("w2", []),
    ]
    assert drawn.seconds == 20 and drawn.ticks[-1] == (1.0, "20 s")
    for lane in drawn.lanes:
        ends = [(bar.left, bar.left + bar.width) for bar in lane.bars]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seconds", [1, 7, 59, 61, 3599, 90_000, 10**7])
def test_there_are_a_few_ticks_whatever_the_span(seconds):
    ticks = timeline._ticks(float(seconds))
    assert 1 <= len(ticks) <= 18 and all(0 <= at <= 1 for at, _ in ticks)


def _report(root, run=RUN, compare=None):
    storage = open_storage(str(root))
    place = write(storage, run, compare=compare)
    assert place.endswith(f"logs/fleet/{run}/report.html")
    return storage.get(layout.report(run)).body.decode("utf-8")


def test_hostile_names_stay_text(tmp_path):
    folder = tmp_path / layout.working(RUN)
    for number, text in enumerate(HOSTILE):
        safe = text.encode("utf-8", "replace").decode()
        logmaker.write(
            folder,
            logmaker.log(
                task=safe, model=f"p/{safe}", number=number + 1, status="error", error=safe, task_args={safe: safe},
                scores=[logmaker.score(safe)], completed=3,
                samples=[logmaker.sample(1), logmaker.sample(2, error=f"ValueError({safe!r})")],
            ),
            name=f"2026-11-29T10-00-00-00-00_{number}<img src=x>'.eval",
        )  # fmt: skip
    text = _report(tmp_path)
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "form"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not [
        value for name, value in page.attributes if name == "href" and "javascript" in (value or "").split("/")[0]
    ]
    assert "{{ 7*7 }}" in text and ">49<" not in text
    assert "\u202e" not in text and "\x1b" not in text and "\x00" not in text


def test_the_page_asks_nobody_for_anything(tmp_path):
    logmaker.make(tmp_path / layout.working(RUN))
    text = _report(tmp_path)
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|@import|url\()\s*=?\s*[\"']?(?:https?:)?//", text)


def test_one_pair_several_pairs_and_none(tmp_path):
    folder = tmp_path / layout.working(RUN)
    assert "Nothing to show yet" in _report(tmp_path)
    logmaker.make(folder, number=1)
    one = _report(tmp_path)
    assert 'class="hero"' in one and '<table class="heat' not in one
    logmaker.make(folder, number=2, model="openai/gpt-4o")
    two = _report(tmp_path)
    assert 'class="hero"' not in two and '<table class="heat' in two


def test_all_that_a_person_looks_for_is_there(tmp_path):
    folder = tmp_path / layout.working(RUN)
    used = {"openai/gpt-4o": logmaker.usage(1_000_000, 100_000), "nobody/knows": logmaker.usage(5, 5)}
    logmaker.make(folder, number=1, model="openai/gpt-4o", used=used)
    errors = [logmaker.sample(i, error="RateLimitError('429 slow down')") for i in (2, 3)]
    logmaker.make(
        folder,
        number=2,
        model="openai/gpt-4o-mini",
        completed=2,
        samples=[logmaker.sample(1), logmaker.sample(4), *errors],
    )
    (folder / "2026-11-29T10-00-00-00-00_x_y.eval").write_bytes(b"broken")
    storage = open_storage(str(tmp_path))
    seen = survey(places.of_run(RUN, storage), Models().price)
    values = build.context(seen, [], Models())
    assert values["cost"] == pytest.approx(3.5 + 0.00027) and values["unpriced"] == 1
    assert {(failure.category, failure.count) for failure in values["failures"]} == {
        ("rate_limit", 2),
        ("unreadable log", 1),
    }
    text = _report(tmp_path)
    for wanted in ("RateLimitError", "&gt; $3.50", "unknown price", "../../working/", "95 % interval", "Time line"):
        assert wanted in text


JOBS = {name: f"{number:016x}" for number, name in enumerate(("s1", "s2", "whole", "other"))}


def _ends(ends):
    common = {"task": "t", "model": "m/m", "status": "failed", "duration_s": 1, "error_summary": "why"}
    return [_event("job_done", 1, "w", job_id=JOBS[name], failure_category=why, **common) for name, why in ends]


@pytest.mark.parametrize(
    ("ends", "failures"),
    [
        ([("s1", "oom"), ("s2", None), ("whole", "task_error")], {"oom (job)": 1}),
        ([("s1", "oom"), ("s2", "oom"), ("whole", "task_error"), ("other", "oom")], {"oom (job)": 2}),
        ([("s1", None), ("s2", None), ("whole", "task_error")], {"task_error (job)": 1}),
        ([("s1", "oom"), ("s2", None), ("whole", None)], {}),
        ([("s1", "oom"), ("s2", None), ("whole", "task_error"), ("s1", None), ("whole", None)], {}),
        ([("s1", "oom")], {"oom (job)": 1}),
    ],
)
def test_a_failed_shard_and_its_merge_are_one_failure(tmp_path, ends, failures):
    common = {"task": "t.py@t", "name": "t", "model": "m/m", "samples": 1}
    jobs = [JobSpec(job_id=JOBS[name], **common) for name in ("s1", "s2", "other")]
    jobs.append(JobSpec(job_id=JOBS["whole"], merges=[JOBS["s1"], JOBS["s2"]], **common))
    assert Counter(f"{event['failure_category']} (job)" for event in build._failed_ends(_ends(ends), jobs)) == failures
    storage = open_storage(str(tmp_path))
    manifest = Manifest(
        fleet_id=RUN, created=now(), backend="local", jobs=jobs, arguments={}, models=["m/m"], submit_dir="."
    )
    storage.put(layout.manifest(RUN), manifest.to_bytes())
    values = build.context(survey(places.of_run(RUN, storage), Models().price), _ends(ends), Models())
    assert {failure.category: failure.count for failure in values["failures"]} == failures


def test_two_runs_are_compared_by_task_model_and_arguments(tmp_path):
    for run, value in ((RUN, 0.9), (OTHER, 0.4)):
        folder = tmp_path / layout.working(run)
        logmaker.make(folder, number=1, scores=[logmaker.score(accuracy=value, stderr=0.02)])
        logmaker.make(folder, number=2, task_args={"n": value}, scores=[logmaker.score(accuracy=value, stderr=0.02)])
    text = _report(tmp_path, compare=OTHER)
    assert f"Compared with {OTHER}" in text and "+0.500" in text and "higher" in text
    assert "Only in this run" in text and "Only in the other" in text


def test_links_lead_to_the_log(tmp_path):
    storage = open_storage(str(tmp_path))
    assert build.link_to(storage, f"logs/working/{RUN}/a b?.eval", RUN) == f"../../working/{RUN}/a%20b%3F.eval"
    linked = (tmp_path / f"logs/fleet/{RUN}" / f"../../working/{RUN}/x").resolve()
    assert linked == tmp_path / f"logs/working/{RUN}/x"
