"""What the report shows, gathered from a run's survey, its event stream and the summaries of logs with errors.

Called by `ies report` and at the end of each fleet through `write`. Reads headers, and summaries of failed logs alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from evalops import ui
from evalops.logs import cost, places
from evalops.logs.archive import BadArchive
from evalops.logs.choose import Chosen
from evalops.logs.events import read_events
from evalops.logs.facts import Facts
from evalops.logs.metadata import Models
from evalops.logs.reading import read_summaries
from evalops.logs.rows import Row, bare, file_beside, number
from evalops.logs.survey import Survey, survey
from evalops.report import stats, timeline
from evalworker.contract import layout
from evalworker.contract.documents import JobSpec
from evalworker.contract.failures import classify_exception
from evalworker.storage import LocalStorage, Storage, StorageError

SUMMARY_BYTES = 300_000
"""The largest summaries that are read for one log's failures; of a larger log the header's error is shown."""

SUMMARY_LOGS = 60
"""Logs whose summaries are read."""

EXAMPLE_CHARACTERS = 1500

_TYPE = re.compile(r"\s*(?:[\w.]+\.)?(?P<type>[A-Z]\w*)\s*[(:]")


@dataclass
class Pair:
    """A row of the table: what came out of one (task, model)."""

    row: Row
    task: str
    args: str
    estimate: stats.Estimate | None
    seconds: float | None
    metrics: list[tuple[str, str, str]]
    link: str | None
    name: str


@dataclass
class Cell:
    """A field of the heat map: shade from 0 to 1, None where there is no number."""

    text: str
    shade: float | None
    state: str
    title: str
    incomplete: bool = False


@dataclass
class Failure:
    """One category of failure with one example."""

    category: str
    count: int
    task: str
    model: str
    example: str


@dataclass
class Spending:
    """One model's tokens and cost over the whole run."""

    model: str
    tokens: cost.Tokens
    cost_usd: float | None
    share: float


def write(storage: Storage, run_id: str, *, compare: str | None = None, model_files: Sequence[Path] = ()) -> str:
    """Write a run's report below the root; returns its URL. Raises StorageError."""
    body = render(storage, run_id, compare=compare, model_files=model_files)
    storage.put(layout.report(run_id), body)
    return storage.url(layout.report(run_id))


def render(storage: Storage, run_id: str, *, compare: str | None = None, model_files: Sequence[Path] = ()) -> bytes:
    """The report as UTF-8 HTML. Raises StorageError."""
    models = Models(model_files)
    found = survey(places.of_run(run_id, storage), models.price)
    other = survey(places.of_run(compare, storage), models.price) if compare else None
    events = read_events(storage, run_id, found.problems)
    return page(context(found, events, models, other))


def page(values: dict[str, Any]) -> bytes:
    """The template filled in."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evalops.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"number": number, "seconds": ui.seconds_text, "money": ui.money_text, "percent": _percent}
    return environment.get_template("template.html.j2").render(values).encode("utf-8", "backslashreplace")


def _shown(value: Any) -> Any:
    """Text without control characters and direction overrides: they would change what stands around them."""
    return ui.printable(value) if type(value) is str else value


def _percent(value: float) -> str:
    return f"{100 * value:.4f}".rstrip("0").rstrip(".")


def context(found: Survey, events: list[dict[str, Any]], models: Models, other: Survey | None = None) -> dict[str, Any]:
    """All that the template needs, in plain values."""
    logs = {one.log.info.key: one for one in found.chosen}
    pairs = [_pair(found, row, logs.get(row.log or "")) for row in found.rows]
    spending = _spending(found.chosen, models)
    known = [item.cost_usd for item in spending if item.cost_usd is not None]
    return {
        "run_id": found.place.run_id or found.place.url,
        "headline": found.headline,
        "now": found.around.now,
        "pairs": pairs,
        "single": len(pairs) == 1,
        "tasks": len({pair.row.task for pair in pairs}),
        "models": len({pair.row.model for pair in pairs}),
        "completed": sum(pair.row.completed or 0 for pair in pairs),
        "errored": sum(pair.row.errored or 0 for pair in pairs),
        "total": sum(pair.row.total or 0 for pair in pairs),
        "tokens": sum(item.tokens.total for item in spending),
        "cost": sum(known) if known or not spending else None,
        "unpriced": len(spending) - len(known),
        "heat": _heat(pairs),
        "timeline": timeline.of_fleet(events) or timeline.of_logs(found),
        "of_fleet": bool(events),
        "failures": _failures(found, events),
        "spending": spending,
        "comparison": _comparison(found, other) if other else None,
        "manifest": found.manifest,
        "problems": found.problems,
        "took": _took(found.chosen),
        "log_dir": found.place.url,
        "versions": sorted({one.log.facts.inspect_version for one in found.chosen if one.log.facts.inspect_version}),
    }


def _pair(found: Survey, row: Row, one: Chosen | None) -> Pair:
    facts = one.log.facts if one else None
    metrics = [
        (
            f"{score.name}{f' ({score.reducer})' if score.reducer else ''}",
            metric.name,
            metric.text if metric.value is None else number(metric.value),
        )
        for score in row.scores
        for metric in score.metrics
    ]
    link = link_to(found.place.storage, row.log, found.place.run_id) if row.log else None
    args = ", ".join(
        filter(None, (file_beside(row, found.rows), *(f"{name}={value}" for name, value in row.args.items())))
    )
    return Pair(
        row,
        bare(row.task),
        args,
        stats.headline(facts) if facts else None,
        _duration(facts),
        metrics,
        link,
        one.log.name if one else "",
    )


def _duration(facts: Facts | None) -> float | None:
    if facts is None or facts.started_at is None or facts.completed_at is None:
        return None
    return max(0.0, (facts.completed_at - facts.started_at).total_seconds())


def _took(chosen: Sequence[Chosen]) -> float | None:
    starts = [one.log.facts.started_at for one in chosen if one.log.facts.started_at]
    ends = [one.log.facts.completed_at for one in chosen if one.log.facts.completed_at]
    return (max(ends) - min(starts)).total_seconds() if starts and ends else None


def link_to(storage: Storage, key: str, run_id: str | None) -> str:
    """Where a reader of the report finds a log: the bucket's console, or the file relative to the report."""
    if not isinstance(storage, LocalStorage):
        bucket, _, path = storage.url(key).removeprefix("s3://").partition("/")
        return f"https://s3.console.aws.amazon.com/s3/object/{quote(bucket)}?prefix={quote(path, safe='')}"
    inner = key.removeprefix("logs/") if run_id else key
    return ("../../" if run_id else "") + quote(inner.encode("utf-8", "surrogateescape"))


def _heat(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Tasks × models. A share is shaded from 0 to 1; other metrics from the lowest to the highest of their row."""
    models = sorted({pair.row.model for pair in pairs})
    grouped: dict[str, dict[str, list[Pair]]] = {}
    for pair in pairs:
        label = pair.task if not _ambiguous(pair, pairs) else f"{pair.task} ({pair.args})"
        grouped.setdefault(label, {}).setdefault(pair.row.model, []).append(pair)
    rows = []
    for task, by_model in sorted(grouped.items()):
        values = [pair.estimate.value for found in by_model.values() for pair in found if pair.estimate]
        share = all(0 <= value <= 1 for value in values)
        low, high = (0.0, 1.0) if share or not values else (min(values), max(values))
        cells = [_cell(by_model[model][0], low, high) if model in by_model else None for model in models]
        metric = next((pair.estimate.metric for found in by_model.values() for pair in found if pair.estimate), "")
        rows.append({"task": task, "metric": metric, "cells": cells})
    return {"models": models, "rows": rows}


def _ambiguous(pair: Pair, pairs: Sequence[Pair]) -> bool:
    return any(
        other is not pair and other.row.model == pair.row.model and other.task == pair.task and other.args != pair.args
        for other in pairs
    )


def _cell(pair: Pair, low: float, high: float) -> Cell:
    row, estimate = pair.row, pair.estimate
    done = f"{row.completed if row.completed is not None else '?'} of {row.total if row.total is not None else '?'} samples"
    title = f"{pair.task} · {row.model}: {row.state}, {done}"
    if estimate is None:
        return Cell("", None, row.state, title, row.state != "success")
    shade = 0.5 if high == low else (estimate.value - low) / (high - low)
    interval = (
        f" [{number(estimate.low)}, {number(estimate.high)}]"
        if estimate.low is not None and estimate.high is not None
        else ""
    )
    text = f"{estimate.value:.2f}" if abs(estimate.value) < 100 else f"{estimate.value:.4g}"
    return Cell(
        text, shade, row.state, f"{title}, {estimate.metric} {number(estimate.value)}{interval}", row.state != "success"
    )


def _failures(found: Survey, events: Sequence[dict[str, Any]]) -> list[Failure]:
    """Failed jobs by the fleet's own category, errored samples by that of their exception; one example each."""
    seen: dict[str, Failure] = {}

    def add(category: str, task: str, model: str, example: str, count: int = 1) -> None:
        known = seen.get(category)
        if known is None:
            seen[category] = Failure(category, count, bare(task), model, _excerpt(example))
        else:
            known.count += count

    for event in _failed_ends(events, found.manifest.jobs if found.manifest else []):
        text = event.get("error_summary") or "no error text"
        add(
            f"{event['failure_category']} (job)", str(event.get("task") or ""), str(event.get("model") or ""), str(text)
        )
    wanted = [one for one in found.chosen if one.log.facts.errored or one.log.facts.error][:SUMMARY_LOGS]
    for one in wanted:
        facts = one.log.facts
        errors = _sample_errors(found, one)
        for error in errors or ([facts.error] if facts.error else []):
            add(str(category_of(error, facts if error == facts.error else None)), facts.task, facts.model, error)
    for one in found.chosen:
        if one.log.facts.status == "unreadable":
            add("unreadable log", one.log.name, "", one.log.facts.reason or "")
    return sorted(seen.values(), key=lambda failure: -failure.count)


def _failed_ends(events: Sequence[dict[str, Any]], jobs: Sequence[JobSpec]) -> list[dict[str, Any]]:
    """The last ends of what failed, one of each (task, model): of a task in shards a shard's, its merge's only when no shard failed."""
    whole = {shard: job.job_id for job in jobs for shard in job.merges}
    last = {str(event.get("job_id")): event for event in events if event["type"] == "job_done"}
    failed: dict[str, dict[str, Any]] = {}
    for job_id, event in last.items():
        about = whole.get(job_id, job_id)
        if event.get("failure_category") and last.get(about, event).get("failure_category"):
            failed.setdefault(about, event)
    return list(failed.values())


def _sample_errors(found: Survey, one: Chosen) -> list[str]:
    if not one.log.facts.errored:
        return []
    try:
        rows = read_summaries(found.place.storage, one.log.info, SUMMARY_BYTES)
    except (BadArchive, ValueError, KeyError, StorageError):
        return []
    return [str(row["error"]) for row in rows if row.get("error")]


def category_of(error: str, facts: Facts | None) -> str:
    """A failure's category by the exception's class; a summary holds its `repr` alone."""
    shown = _TYPE.match(error)
    type_name = (facts.error_type if facts and facts.error_type else "") or (shown["type"] if shown else "")
    return str(classify_exception(type_name, error))


def _excerpt(text: str) -> str:
    text = text.strip()
    return text if len(text) <= EXAMPLE_CHARACTERS else text[: EXAMPLE_CHARACTERS - 1] + "…"


def _spending(chosen: Sequence[Chosen], models: Models) -> list[Spending]:
    sums: dict[str, list[cost.Tokens]] = {}
    for one in chosen:
        for model, usage in one.log.facts.usage.items():
            sums.setdefault(model, []).append(cost.tokens(usage))
    rows = []
    for model, used in sums.items():
        together = cost.Tokens(
            *(sum(getattr(item, name) for item in used) for name in ("input", "output", "cached", "write"))
        )
        price = models.price(model)
        usage = {
            "input_tokens": together.input, "output_tokens": together.output,
            "input_tokens_cache_read": together.cached, "input_tokens_cache_write": together.write,
        }  # fmt: skip
        rows.append(Spending(model, together, sum(cost.parts(usage, price).values()) if price else None, 0.0))
    most = max((row.tokens.total for row in rows), default=0)
    for row in rows:
        row.share = row.tokens.total / most if most else 0.0
    return sorted(rows, key=lambda row: (-(row.cost_usd or 0), -row.tokens.total, row.model))


def _comparison(found: Survey, other: Survey) -> dict[str, Any]:
    """Rows for what both runs have, and what only one has."""
    here, there = _by_identity(found), _by_identity(other)
    rows: list[dict[str, Any]] = []
    for key in sorted(here.keys() & there.keys()):
        before, after = stats.headline(there[key]), stats.headline(here[key])
        if before is None or after is None or before.metric != after.metric:
            continue
        rows.append(
            {
                "task": key[0],
                "model": key[1],
                "before": before,
                "after": after,
                "difference": stats.difference(before, after),
            }
        )
    reach = (
        max(
            (
                abs(x)
                for row in rows
                for x in (row["difference"].low, row["difference"].high, row["difference"].value)
                if x is not None
            ),
            default=1.0,
        )
        or 1.0
    )
    return {
        "run_id": other.place.run_id,
        "rows": rows,
        "reach": reach,
        "only_here": sorted(" · ".join(key[:2]) for key in here.keys() - there.keys()),
        "only_there": sorted(" · ".join(key[:2]) for key in there.keys() - here.keys()),
    }


def _by_identity(found: Survey) -> dict[tuple[str, str, str], Facts]:
    rows = [one.log.facts for one in found.chosen if one.log.facts.status != "unreadable"]
    return {
        (bare(facts.task), facts.model, ", ".join(f"{k}={v}" for k, v in facts.task_args.items())): facts
        for facts in rows
    }
