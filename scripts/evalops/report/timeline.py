"""Who worked when: bars on lanes, from a fleet's events or, for other runs, from the logs' own times. Pure.

Positions are shares of the whole span, so that the template only scales them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from evalops.logs.events import when
from evalops.logs.rows import Row, bare
from evalops.logs.survey import Survey

LANE_LIMIT = 120
"""Lanes that are drawn; what does not fit is said."""

_TICKS = 6
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


@dataclass(frozen=True)
class Span:
    """Something that went on. `kind` is a state's name (its colour); `label` is shown when pointed at."""

    start: datetime
    end: datetime
    kind: str
    label: str


@dataclass(frozen=True)
class Bar:
    """A span in shares of the whole: where it begins and how wide it is."""

    left: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True)
class Lane:
    """A line of the drawing; `first` of its owner's carries the name."""

    name: str
    bars: tuple[Bar, ...]
    presence: Bar | None = None


@dataclass(frozen=True)
class Timeline:
    """The whole drawing. `ticks`: (share, text)."""

    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    start: datetime
    seconds: float
    hidden: int = 0


def of_fleet(events: Sequence[dict[str, Any]]) -> Timeline | None:
    """Workers and their jobs, from a fleet's stream; None when it tells of no worker."""
    present: dict[str, list[datetime]] = {}
    work: dict[str, list[Span]] = {}
    for event in events:
        moment, worker = when(event), event.get("instance_id")
        if moment is None or not isinstance(worker, str) or not worker:
            continue
        begins = moment
        if event["type"] in ("job_done", "job_attempt"):
            begins = moment - timedelta(seconds=_seconds(event.get("duration_s")))
            work.setdefault(worker, []).append(_job(event, begins, moment))
        known = present.setdefault(worker, [begins, moment])
        known[0], known[1] = min(known[0], begins), max(known[1], moment)
    if not present:
        return None
    groups = [
        (worker, Span(start, end, "present", f"{worker} online"), work.get(worker, []))
        for worker, (start, end) in sorted(present.items())
    ]
    return _draw(groups)


def of_logs(found: Survey) -> Timeline | None:
    """One lane for each model, from the logs' own times; None when they have none."""
    groups: dict[str, list[Span]] = {}
    rows = {row.log: row for row in found.rows}
    for one in found.chosen:
        facts, row = one.log.facts, rows.get(one.log.info.key)
        if row is None or facts.started_at is None:
            continue
        end = facts.completed_at or max(one.log.info.modified, facts.started_at)
        groups.setdefault(facts.model, []).append(
            Span(facts.started_at, end, row.state, _label(row, end - facts.started_at))
        )
    return _draw([(model, None, spans) for model, spans in sorted(groups.items())]) if groups else None


def _job(event: dict[str, Any], start: datetime, end: datetime) -> Span:
    kinds = {"completed": "success", "failed": "error", "cancelled": "cancelled"}
    kind = kinds.get(str(event.get("status")), "retried") if event["type"] == "job_done" else "retried"
    name = bare(str(event.get("task") or event.get("job_id") or ""))
    why = f", {event['failure_category']}" if event.get("failure_category") else ""
    return Span(
        start, end, kind, f"{name} {event.get('model') or ''}: {kind}{why}, {(end - start).total_seconds():.1f} s"
    )


def _label(row: Row, took: timedelta) -> str:
    return f"{bare(row.task)} {row.model}: {row.state}, {took.total_seconds():.1f} s"


def _seconds(value: Any) -> float:
    return max(0.0, float(value)) if isinstance(value, int | float) and value == value else 0.0


def _draw(groups: Iterable[tuple[str, Span | None, list[Span]]]) -> Timeline:
    groups = list(groups)
    everything = [span for _, presence, spans in groups for span in (*([presence] if presence else []), *spans)]
    start = min(span.start for span in everything)
    seconds = max(1.0, max((span.end - start).total_seconds() for span in everything))

    def bar(span: Span) -> Bar:
        left = (span.start - start).total_seconds() / seconds
        return Bar(left, max(0.0, (span.end - span.start).total_seconds() / seconds), span.kind, span.label)

    lanes: list[Lane] = []
    for name, presence, spans in groups:
        packed = _pack(spans) or [[]]
        for index, row in enumerate(packed):
            lanes.append(
                Lane(name if index == 0 else "", tuple(bar(span) for span in row), bar(presence) if presence else None)
            )
    return Timeline(tuple(lanes[:LANE_LIMIT]), _ticks(seconds), start, seconds, max(0, len(lanes) - LANE_LIMIT))


def _pack(spans: Iterable[Span]) -> list[list[Span]]:
    """As few lines as hold the spans without overlap: each goes to the first line that is free."""
    lines: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.start, one.end)):
        free = next((line for line in lines if line[-1].end <= span.start), None)
        if free is None:
            lines.append([span])
        else:
            free.append(span)
    return lines


def _ticks(seconds: float) -> tuple[tuple[float, str], ...]:
    step = next((step for step in _STEPS_S if seconds / step <= _TICKS), _STEPS_S[-1])
    return tuple((i * step / seconds, _clock(i * step)) for i in range(int(seconds // step) + 1))


def _clock(seconds: int) -> str:
    if seconds == 0:
        return "0"
    if seconds % 3600 == 0:
        return f"{seconds // 3600} h"
    if seconds % 60 == 0:
        return f"{seconds // 60} min"
    return f"{seconds} s" if seconds < 60 else f"{seconds // 60}:{seconds % 60:02d}"
