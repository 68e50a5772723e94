"""One log for each (task, model): which of several tries counts. Pure.

Success first, then the most completed samples, then the latest. So a retry that got less far never hides what is there, and nothing
is counted twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from evalops.logs.reading import Listed

_OLD = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Chosen:
    """The log that counts of one experiment, and those it supersedes."""

    log: Listed
    superseded: tuple[Listed, ...] = ()


def choose(logs: Iterable[Listed]) -> list[Chosen]:
    """One for each experiment, by task, model and file name; an unreadable log stands for itself."""
    groups: dict[str, list[Listed]] = {}
    for log in logs:
        groups.setdefault(log.facts.identity or f"unreadable:{log.info.key}", []).append(log)
    chosen = []
    for group in groups.values():
        best, *rest = sorted(group, key=_rank, reverse=True)
        chosen.append(Chosen(best, tuple(rest)))
    return sorted(chosen, key=lambda one: (one.log.facts.task, one.log.facts.model, one.log.name))


def _rank(log: Listed) -> tuple[bool, int, datetime, str]:
    facts = log.facts
    done = facts.completed if facts.completed is not None else (facts.logged or 0)
    finished = facts.status == "success" and not facts.hollow
    return finished, done, facts.created or log.info.modified or _OLD, log.name
