"""What makes a fleet stop before its jobs have ended: money, time, failures, silence, a canary. Pure rules on facts.

The controller asks them once a cycle. Each takes plain facts and gives a `Verdict` that ends the fleet, events to write, or nothing;
none knows of queues, storage or a clock. Design, section 7.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from evalops.fleet.ledger import JobState, Pair, Spend
from evalworker.contract.documents import Guards
from evalworker.contract.events import Event
from evalworker.contract.failures import Category
from evalworker.contract.messages import AttemptDone, Hung

FleetOutcome = Literal["complete", "failures", "stopped", "cancelled", "left"]

BUDGET_MARKS = (50, 80, 100)
"""Percent of a budget at which an event says so."""

FIRST_JOBS = 3
"""When so many ended first and all for one reason, the others would end so too."""

ENOUGH_JOBS = 10
"""Ended jobs before the share of failed ones means something."""


@dataclass
class Verdict:
    """How the fleet ended. `reason` is one sentence where something other than the jobs ended it."""

    ending: FleetOutcome
    reason: str | None = None


def deadline(moment: datetime, end: datetime) -> Verdict | None:
    """The time is over."""
    return Verdict("stopped", f"the deadline, {end:%Y-%m-%d %H:%M:%S} UTC, has passed") if moment >= end else None


def refused_key(ended: Iterable[AttemptDone]) -> Verdict | None:
    """A model provider has refused the credentials: every further call would be refused, and may be counted."""
    for done in ended:
        if done.failure_category is Category.AUTH:
            return Verdict("stopped", f"a model provider refused the credentials ({done.error_summary})")
    return None


def failure_rate(ended: Sequence[AttemptDone], max_share: float) -> Verdict | None:
    """The first jobs all failed for one reason outside of their tasks, or too many failed later.

    Args:
        ended: this round's ends in the order in which they came.
        max_share: of failed among ended jobs; 1 switches this guard off.
    """
    if max_share >= 1:
        return None
    first = {done.failure_category if done.status == "failed" else None for done in ended[:FIRST_JOBS]}
    if len(ended) >= FIRST_JOBS and len(first) == 1 and not first & {None, Category.TASK_ERROR, Category.CANCELLED}:
        category, example = first.pop(), ended[0].error_summary
        return Verdict("stopped", f"the first {FIRST_JOBS} jobs all failed with {category}, for example: {example}")
    failed = sum(done.status == "failed" for done in ended)
    if len(ended) >= ENOUGH_JOBS and failed > max_share * len(ended):
        return Verdict(
            "stopped",
            f"{failed} of the first {len(ended)} jobs failed, more than --max-failed-share {max_share:g} allows",
        )
    return None


# Money


@dataclass
class Budget:
    """The budgets of a run and which of their marks have been told.

    The marks belong to one budget: a resume with a larger one tells them anew.
    """

    told: set[tuple[str, float, int]] = field(default_factory=set)

    def replay(self, event: Event) -> None:
        """Take over a `budget` event of an earlier controller."""
        self.told.add((event["kind"], event["budget"], event["percent"]))

    def marks(self, guards: Guards, spend: Spend) -> list[Event]:
        """A `budget` event for each mark that has been passed since the last call."""
        events: list[Event] = []
        for kind, spent, budget in _budgets(guards, spend):
            for mark in BUDGET_MARKS:
                if spent >= budget * mark / 100 and (kind, budget, mark) not in self.told:
                    self.told.add((kind, budget, mark))
                    events.append({"type": "budget", "kind": kind, "percent": mark, "spent": spent, "budget": budget})
        return events


def _budgets(guards: Guards, spend: Spend) -> Iterable[tuple[str, float, float]]:
    """What is bounded: kind, spent so far, bound."""
    if guards.budget_usd is not None:
        yield "usd", round(spend.usd, 6), guards.budget_usd
    if guards.token_budget is not None:
        yield "tokens", spend.tokens, guards.token_budget


def over_budget(guards: Guards, spend: Spend) -> Verdict | None:
    """A budget is spent."""
    for kind, spent, budget in _budgets(guards, spend):
        if spent >= budget:
            return Verdict(
                "stopped", f"the {_kind_text(kind)} is spent: {_amount(kind, spent)} of {_amount(kind, budget)}"
            )
    return None


def _kind_text(kind: str) -> str:
    return "budget" if kind == "usd" else "token budget"


def _amount(kind: str, value: float) -> str:
    if kind == "tokens":
        return f"{value:.0f} tokens"
    return f"${value:.2f}" if value >= 1 else f"${value:.4f}"


# Canary


def canary_jobs(open_jobs: Iterable[JobState], passed: set[Pair]) -> list[JobState]:
    """The first open job of each (task, model) that has not passed yet: these run one sample before anything else runs."""
    chosen: dict[Pair, JobState] = {}
    for job in open_jobs:
        if job.pair not in passed:
            chosen.setdefault(job.pair, job)
    return list(chosen.values())


def canary(jobs: Iterable[JobState]) -> Verdict | None:
    """A job has failed while nothing but canaries ran."""
    for job in jobs:
        if job.done is not None and job.status == "failed":
            return Verdict(
                "stopped",
                f"the canary of {job.spec.name} with {job.spec.model} failed ({job.done.failure_category}): "
                f"{job.done.error_summary}",
            )
    return None


# Silence


@dataclass
class Stall:
    """Notices that nothing happens. Times are seconds of one monotonic clock, passed in.

    Attributes:
        since: when something last happened: a result, an end, a sample that got on, a worker that came or went, an attempt that was sent.
        told: whether this silence has been told.
        borne: until when it was borne; what lasts longer is counted from there.
    """

    since: float
    told: bool = False
    borne: float = float("-inf")

    def happened(self, at: float) -> None:
        """Something happened."""
        self.since, self.told = at, False

    def event(self, at: float, after_s: float, waiting_for: str) -> Event | None:
        """A `stalled` event, once for each silence that is longer than `after_s`."""
        if self.told or at - self.since < after_s:
            return None
        self.told = True
        return {"type": "stalled", "silent_s": round(at - self.since, 1), "waiting_for": waiting_for}

    def verdict(self, at: float, after_s: float, waiting_for: str, *, patient: bool = False) -> Verdict | None:
        """The silence is twice as long as that. `patient`: it is borne now, since nothing runs that could stall or cost."""
        if patient:
            self.borne = at
        silent_s = at - max(self.since, self.borne)
        if silent_s < 2 * after_s:
            return None
        return Verdict("stopped", f"nothing happened for {silent_s:.0f} s ({waiting_for})")


@dataclass
class HungSamples:
    """Which hung samples have been told of, so that each is told once an attempt and once more when it is ended for it."""

    told: set[tuple[str, int, str, int, bool]] = field(default_factory=set)

    def event(self, hung: Hung, task: str, model: str, instance_id: str) -> Event | None:
        """A `stalled` event about one sample, None if it was told."""
        identity = (hung.job_id, hung.attempt, repr(hung.sample_id), hung.epoch, hung.ended)
        if identity in self.told:
            return None
        self.told.add(identity)
        return {
            "type": "stalled",
            "job_id": hung.job_id,
            "task": task,
            "model": model,
            "sample_id": hung.sample_id,
            "epoch": hung.epoch,
            "attempt": hung.attempt,
            "silent_s": hung.quiet_s,
            "waiting_for": hung.activity,
            "ended": hung.ended,
            "instance_id": instance_id,
        }


def waiting_text(waits: Iterable[str]) -> str:
    """What running jobs wait for, as one phrase: equal ones together, the most frequent first, three at the most."""
    counts: dict[str, int] = {}
    for phrase in waits:
        counts[phrase] = counts.get(phrase, 0) + 1
    shown = sorted(counts, key=lambda phrase: -counts[phrase])[:3]
    return "; ".join(phrase if counts[phrase] == 1 else f"{counts[phrase]} × {phrase}" for phrase in shown)


def sentence(event: Event) -> str:
    """A guard's event as one line for the terminal."""
    if event["type"] == "budget":
        spent, budget = (_amount(event["kind"], event[name]) for name in ("spent", "budget"))
        return f"{event['percent']} % of the {_kind_text(event['kind'])} is spent: {spent} of {budget}"
    if event["type"] == "stalled":
        about = f"{event['task']} with {event['model']}, sample {event['sample_id']!r}: " if "job_id" in event else ""
        end = "; it was ended with an error" if event.get("ended") else ""
        return f"{about}nothing has happened for {event['silent_s']:.0f} s ({event['waiting_for']}){end}"
    return str(event["text"])
