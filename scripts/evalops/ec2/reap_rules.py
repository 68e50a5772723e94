"""What to do with what nobody owns any more: instances and volumes of ended fleets, lanes past their deadline, uploads that broke off.

`evalops.ec2.reaper` asks, on a pass of `ct fleet reap`. Pure functions, with a reason for what is kept as for what goes.
An instance is marked by a tag on one pass and ended on a later one, so that one wrong look ends nothing. Only what carries the estate's
and a fleet's tags is ever touched.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from evalops.ec2.pool import BUCKET, DEADLINE, FLEET, GONE
from evalworker.contract import layout
from evalworker.contract.ids import BadId, check_run_id
from evalworker.contract.wire import stamp

MARK = "inspect-fleet-reap"
"""The tag that a first pass leaves: since when a thing counts as ownerless; empty when it was taken back."""

YOUNG = timedelta(minutes=10)
"""Younger things are left alone: their fleet may just be beginning."""

GRACE = timedelta(minutes=5)
"""After a deadline or an end, machines may end themselves."""

MARK_AGE = timedelta(minutes=5)
"""Between the mark and the end."""

UPLOAD_AGE = timedelta(days=1)
"""An upload that is older has broken off: the largest takes minutes."""

MOST = 50
"""Things that one pass ends; the rest waits for the next, so that a mistake stays small."""

Action = Literal["keep", "mark", "unmark", "end"]
Kind = Literal["instance", "volume", "lane", "upload"]


@dataclass(frozen=True)
class FleetState:
    """What storage says of a fleet: `state` of its control document; None where it could not be read."""

    state: str | None
    missing: bool = False


@dataclass(frozen=True)
class Thing:
    """Something that costs money."""

    kind: Kind
    name: str
    created: datetime
    tags: Mapping[str, str] = field(default_factory=dict)
    state: str = ""

    @property
    def fleet_id(self) -> str | None:
        """The fleet that its tag names, None where it names none."""
        try:
            return check_run_id(self.tags[FLEET])
        except (KeyError, BadId):
            return None

    @property
    def marked(self) -> datetime | None:
        """Since when it bears the mark."""
        return _moment(self.tags.get(MARK, ""))


@dataclass(frozen=True)
class Decision:
    """What to do with a thing, and why."""

    thing: Thing
    action: Action
    reason: str


def decide(
    things: Iterable[Thing], fleets: Mapping[str, FleetState], at: datetime, own: Mapping[str, str]
) -> list[Decision]:
    """What to do with instances and volumes; those that are gone already are left out.

    Args:
        own: the tags that every worker of this estate has, and its disk: `Name` and the bucket.
    """
    return capped(_decide(thing, fleets, at, own) for thing in things if thing.state not in GONE)


def capped(decisions: Iterable[Decision]) -> list[Decision]:
    """The same, but no more ends than one pass may carry out."""
    found, ended = list(decisions), 0
    for index, decision in enumerate(found):
        if decision.action == "end":
            ended += 1
            if ended > MOST:
                found[index] = Decision(decision.thing, "keep", f"{decision.reason}, but a pass ends {MOST} things")
    return found


def _decide(thing: Thing, fleets: Mapping[str, FleetState], at: datetime, own: Mapping[str, str]) -> Decision:
    orphaned, reason = ownerless(thing, fleets, at, own)
    if not orphaned:
        return Decision(thing, "unmark" if thing.marked else "keep", reason)
    if thing.marked is None:
        return Decision(thing, "mark", f"{reason}; ended on the next pass")
    if at - thing.marked < MARK_AGE:
        return Decision(thing, "keep", f"{reason}; marked {_ago(at - thing.marked)} ago, ended after {_ago(MARK_AGE)}")
    return Decision(thing, "end", f"{reason}; marked since {stamp(thing.marked)}")


def ownerless(thing: Thing, fleets: Mapping[str, FleetState], at: datetime, own: Mapping[str, str]) -> tuple[bool, str]:
    """Whether nobody owns a thing, and why one should think so."""
    if thing.kind == "volume" and not own.items() <= thing.tags.items():
        return False, "is no worker's disk"
    if (bucket := thing.tags.get(BUCKET)) not in (None, own[BUCKET]):
        return False, f"keeps its records in the bucket {bucket}, which this pass does not look into"
    if at - thing.created < YOUNG:
        return False, f"is only {_ago(at - thing.created)} old"
    if thing.kind == "volume":
        return True, "is a worker's disk that belongs to no instance any more"
    if FLEET not in thing.tags:
        return False, "is no worker of a fleet"
    deadline = _moment(thing.tags.get(DEADLINE, ""))
    if deadline is not None and at > deadline + GRACE:
        return True, f"is past its deadline {stamp(deadline)}"
    fleet = fleets.get(thing.fleet_id or "", FleetState(None))
    if thing.fleet_id is None:
        return False, f"has a tag {FLEET} that is no fleet's id"
    if fleet.missing:
        return True, f"belongs to {thing.fleet_id}, of which nothing is stored"
    if fleet.state is None:
        return False, f"belongs to {thing.fleet_id}, which could not be read"
    if fleet.state == "ended":
        return True, f"belongs to {thing.fleet_id}, which has ended"
    until = f" until {stamp(deadline)}" if deadline else ""
    return False, f"works for {thing.fleet_id}{until}"


def uploads(things: Iterable[Thing], at: datetime) -> list[Decision]:
    """What to do with uploads in parts below our own prefixes: they have no tags, their age alone decides."""
    return capped(
        Decision(thing, "end", f"broke off {_ago(at - thing.created)} ago")
        if at - thing.created > UPLOAD_AGE
        else Decision(thing, "keep", f"began {_ago(at - thing.created)} ago")
        for thing in things
        if layout.is_ours(thing.name)
    )


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _ago(age: timedelta) -> str:
    minutes = round(age.total_seconds() / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} days"
