"""A fleet's instances as the controller sees them: launch, look, terminate.

Only instances that carry this fleet's and this owner's tags are ever terminated. `NotFound` just after a launch is eventual
consistency, and after a terminate no proof of death; what counts is a state that EC2 names, or silence for long.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.ec2.capacity import Instance, Launched, Market, Source, decode_denial, launch
from evalops.fleet.workers import Lost
from evalworker import aws

LOOK_S = 15.0
"""Between two DescribeInstances of a fleet: one call for all of its instances."""

GRACE_S = 90.0
"""How long a launched instance may be unknown to EC2."""

RETRY_S = (10.0, 20.0, 40.0, 80.0, 160.0)
"""Pauses between requests that gave fewer instances than were asked for."""

GONE = ("shutting-down", "terminated", "stopping", "stopped")
TAGS = ("fleet-id", "lane", "owner", "fleet-deadline")


class CannotLaunch(RuntimeError):
    """No instance can be had, for a reason that time does not heal; the text is one sentence."""


@dataclass
class Wishes:
    """What the user wants of the machines.

    Attributes:
        markets: in the order in which they are asked: spot then on-demand, or one of them.
        on_demand_base: so many workers are on-demand in any case.
    """

    markets: tuple[Market, ...] = ("spot", "on-demand")
    on_demand_base: int = 0


@dataclass
class Member:
    """One instance of the fleet."""

    instance: Instance
    launched: float
    seen: bool = False


@dataclass
class Ec2Pool:
    """Implements `evalops.fleet.workers.Pool`."""

    client: Any
    source: Source
    wishes: Wishes
    fleet_id: str
    lane: str
    owner: str
    deadline: datetime
    note: Callable[[str], None]
    tags: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    members: dict[str, Member] = field(default_factory=dict)
    wanted: int = 0
    _looked: float = float("-inf")
    _tries: int = 0
    _again: float = 0.0
    _told: set[str] = field(default_factory=set)

    # What the controller calls

    def start(self, count: int) -> None:
        """Ask for `count` more workers; what does not come is asked for again, with pauses. Raises CannotLaunch."""
        self.wanted += count
        self._fill()

    def adopt(self) -> int:
        """Take over the fleet's living instances, found by their tags."""
        for found in self._describe():
            if found["State"]["Name"] not in GONE:
                self._take(_instance(found), seen=True)
        self.wanted = max(self.wanted, len(self.members))
        return len(self.members)

    def ended(self) -> list[Lost]:
        """Instances that EC2 says are gone, each once; looks every `LOOK_S`, and asks again for what is missing."""
        if self.clock() - self._looked < LOOK_S:
            return []
        self._looked = self.clock()
        states = {found["InstanceId"]: found for found in self._describe()}
        lost = [gone for member in list(self.members.values()) if (gone := self._gone(member, states))]
        for gone in lost:
            del self.members[gone.instance_id]
            self.wanted -= 1
        self._fill()
        return lost

    @property
    def alive(self) -> int:
        """Instances that run or start."""
        return len(self.members)

    def stop(self, *, now: bool = False) -> None:
        """Terminate the fleet's instances. They have flushed already, or are told by EC2 to shut down."""
        self.wanted = 0
        ids = [found["InstanceId"] for found in self._describe() if found["State"]["Name"] not in GONE]
        if ids:
            self.client.terminate_instances(InstanceIds=ids)
        self.members.clear()

    # Launching

    def _fill(self) -> None:
        """Ask for what is missing: the on-demand base first, then market by market."""
        missing = self.wanted - len(self.members)
        if missing <= 0 or self.clock() < self._again:
            return
        base = self.wishes.on_demand_base - sum(
            member.instance.market == "on-demand" for member in self.members.values()
        )
        result = Launched()
        if base > 0:
            result.add(self._ask(min(base, missing), "on-demand"))
        for market in self.wishes.markets:
            left = missing - len(result.instances)
            if left > 0 and not result.final:
                result.add(self._ask(left, market))
        for instance in result.instances:
            self._take(instance)
        self._judge(result, missing - len(result.instances))

    def _ask(self, count: int, market: Market) -> Launched:
        return launch(self.client, self.source, count, market, self._all_tags(), secrets.token_hex(16))

    def _judge(self, result: Launched, short: int) -> None:
        for error in [*result.final, *result.retryable]:
            if error.sentence not in self._told:
                self._told.add(error.sentence)
                self.note(self._decoded(error.sentence))
        if short <= 0:
            self._tries = 0
            return
        if result.final and not self.members:
            raise CannotLaunch(self._decoded(result.final[0].sentence))
        self._again = self.clock() + RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1

    def _decoded(self, sentence: str) -> str:
        return decode_denial(aws.client("sts"), sentence) if "Encoded authorization" in sentence else sentence

    def _all_tags(self) -> dict[str, str]:
        own = (self.fleet_id, self.lane, self.owner, self.deadline.strftime("%Y-%m-%dT%H:%M:%SZ"))
        return self.tags | dict(zip(TAGS, own, strict=True))

    def _take(self, instance: Instance, *, seen: bool = False) -> None:
        self.members[instance.instance_id] = Member(instance, self.clock(), seen)

    # Looking

    def _describe(self) -> Iterator[dict[str, Any]]:
        """This fleet's instances as EC2 knows them, all pages; none when EC2 cannot be asked (said once)."""
        filters = [
            {"Name": f"tag:{key}", "Values": [value]}
            for key, value in (("fleet-id", self.fleet_id), ("owner", self.owner))
        ]
        try:
            for page in self.client.get_paginator("describe_instances").paginate(Filters=filters):
                for reservation in page["Reservations"]:
                    yield from reservation["Instances"]
        except (ClientError, BotoCoreError) as error:
            raise aws.ServiceError.of(error, "EC2 cannot be asked for the fleet's instances") from error

    def _gone(self, member: Member, states: dict[str, dict[str, Any]]) -> Lost | None:
        found = states.get(member.instance.instance_id)
        if found is None:
            if not member.seen and self.clock() - member.launched > GRACE_S:
                return Lost(member.instance.instance_id, "EC2 never knew it", [])
            return None
        member.seen = True
        if found["State"]["Name"] not in GONE:
            return None
        reason = found.get("StateReason", {}).get("Code") or found["State"]["Name"]
        return Lost(member.instance.instance_id, "ended" if _by_itself(reason) else reason, [])


def _by_itself(reason: str) -> bool:
    """Whether the instance shut itself down, as a worker does that has nothing left to do."""
    return reason == "Client.InstanceInitiatedShutdown"


def _instance(found: dict[str, Any]) -> Instance:
    market: Market = "spot" if found.get("InstanceLifecycle") == "spot" else "on-demand"
    return Instance(found["InstanceId"], found["InstanceType"], market)
