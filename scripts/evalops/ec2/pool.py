"""A fleet's instances as the controller sees them: launch, look, lose, terminate.

Only instances that carry this fleet's and this owner's tags are ever terminated. `NotFound` just after a launch is eventual
consistency, and after a terminate no proof of death; what counts is a state that EC2 names, or silence for long.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.ec2.capacity import Instance, Launched, Source, decode_denial, launch
from evalops.ec2.machines import Book
from evalops.fleet.stream import read_events
from evalops.fleet.workers import CannotLaunch, Lost
from evalworker import aws
from evalworker.contract.documents import Market
from evalworker.contract.wire import now
from evalworker.storage import Storage

LOOK_S = 15.0
"""Between two DescribeInstances of a fleet: one call for all of its instances."""

GRACE_S = 90.0
"""How long a launched instance may be unknown to EC2."""

BOOT_S = 900.0
"""How long an instance may take to come online: the stock image installs everything first."""

LEAVE_S = 300.0
"""How long a worker that has said goodbye may take to shut its instance down."""

BOOK_S = 60.0
"""Between two reckonings of what the machines cost."""

RETRY_S = (10.0, 20.0, 40.0, 80.0, 160.0)
"""Pauses between requests that gave fewer instances than were asked for."""

MANY = 500
"""Instances in one TerminateInstances."""

GONE = ("shutting-down", "terminated", "stopping", "stopped")
BY_ITSELF = "Client.InstanceInitiatedShutdown"
UNKNOWN = "InvalidInstanceID.NotFound"
FLEET, LANE, OWNER, DEADLINE, ESTATE, BUCKET = (
    "fleet-id",
    "lane",
    "owner",
    "fleet-deadline",
    "inspect-fleet",
    "inspect-fleet-bucket",
)
"""The tags that an instance is born with; it reads them by its metadata service, and the reaper by DescribeInstances."""


def tag_value(text: str) -> str:
    """A text as EC2 takes it for a tag's value: 256 of letters, digits, spaces and + - = . _ : / @."""
    return re.sub(r"[^\w +=.:/@-]", "_", text)[:256]


def deadline_text(moment: datetime) -> str:
    """The deadline's tag: UTC to the second, as `date -d` reads it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Identity:
    """Whose instances these are; together all their tags."""

    fleet_id: str
    lane: str
    owner: str
    deadline: datetime
    estate: str
    bucket: str

    @property
    def tags(self) -> dict[str, str]:
        """What each instance is tagged with by the call that makes it."""
        return {
            FLEET: self.fleet_id,
            LANE: self.lane,
            OWNER: tag_value(self.owner),
            DEADLINE: deadline_text(self.deadline),
            ESTATE: self.estate,
            BUCKET: self.bucket,
            "Name": f"inspect-fleet-{self.estate}-worker",
        }

    @property
    def filters(self) -> list[dict[str, Any]]:
        """What finds them, and nothing else."""
        return [
            {"Name": f"tag:{key}", "Values": [value]}
            for key, value in self.tags.items()
            if key in (FLEET, OWNER, ESTATE)
        ]


@dataclass
class Member:
    """One instance of the fleet. Times in monotonic seconds, but for `alive_at`: when EC2 last called it alive."""

    instance: Instance
    launched: float
    seen: bool = False
    alive_at: datetime | None = None
    online: bool = False
    left_at: float | None = None

    @property
    def left(self) -> bool:
        """Whether its worker has said goodbye."""
        return self.left_at is not None


@dataclass(frozen=True)
class Ask:
    """A request to which no answer came: repeated with its token, it launches nothing twice."""

    count: int
    market: Market
    token: str


@dataclass
class Ec2Pool:
    """Implements `evalops.fleet.workers.Pool`.

    Attributes:
        markets: in the order in which they are asked. on_demand_base: so many workers are on-demand in any case.
        note: tells the user a sentence.
    """

    client: Any
    source: Source
    markets: tuple[Market, ...]
    on_demand_base: int
    identity: Identity
    book: Book
    storage: Storage
    note: Callable[[str], None]
    sts: Callable[[], Any] = lambda: aws.client("sts")
    clock: Callable[[], float] = time.monotonic
    members: dict[str, Member] = field(default_factory=dict)
    wanted: int = 0
    stays: bool = True
    _looked: float = float("-inf")
    _booked: float = float("-inf")
    _tries: int = 0
    _again: float = 0.0
    _unclear: Ask | None = None
    _told: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)
    _untold: list[Lost] = field(default_factory=list)

    # What the controller calls

    def start(self, count: int) -> None:
        """Ask for `count` more workers; what does not come is asked for again, with pauses. Raises CannotLaunch, ServiceError."""
        self.wanted += count
        self._fill()

    def adopt(self) -> int:
        """Take over the fleet's living instances, found by their tags. Raises ServiceError."""
        self._settle({entry["InstanceId"]: entry for entry in self._describe()})
        self.wanted = max(self.wanted, len(self.members))
        return len(self.members)

    def ended(self) -> list[Lost]:
        """Instances that EC2 says are gone or that never came online, each once; looks every `LOOK_S`, and asks for what is missing.

        Raises CannotLaunch, ServiceError; what it had found by then is told by the next call.
        """
        if self.clock() - self._looked >= LOOK_S:
            self._looked = self.clock()
            self._look()
        told, self._untold = self._untold, []
        return told

    def _look(self) -> None:
        found = {entry["InstanceId"]: entry for entry in self._describe()}
        for entry in found.values():
            self._meet(entry)
        for member in list(self.members.values()):
            if gone := self._judge(member, found):
                self._forget(gone.instance_id)
                self._untold.append(gone)
        # EC2 may not have known them when they were to end.
        self._terminate(name for name in self._gone & found.keys() if found[name]["State"]["Name"] not in GONE)
        self._fill()
        self._reckon()

    def online(self, instance_id: str) -> None:
        """A worker has come online."""
        if instance_id in self.members:
            self.members[instance_id].online = True

    def left(self, instance_id: str) -> None:
        """A worker has said goodbye; its instance ends itself."""
        member = self.members.get(instance_id)
        if member is not None and not member.left:
            member.left_at = self.clock()
            self.wanted = max(0, self.wanted - 1)

    def lose(self, instance_id: str, reason: str) -> Lost | None:
        """End an instance that nobody hears of any more, if it is this fleet's. Raises ServiceError."""
        if instance_id in self.members:
            found = {entry["InstanceId"]: entry for entry in self._describe() if entry["InstanceId"] == instance_id}
            for entry in found.values():
                self._meet(entry)
            self._terminate(found)
            self._forget(instance_id)
        return Lost(instance_id, reason, [])

    @property
    def alive(self) -> int:
        """Workers that run or start."""
        return sum(not member.left for member in self.members.values())

    @property
    def waiting_for(self) -> str | None:
        """What the pool waits for, if for anything."""
        missing = self.wanted - self.alive
        return f"EC2 capacity for {missing} of {self.wanted} workers" if missing > 0 else None

    def stop(self, *, now: bool = False) -> None:
        """Terminate the fleet's instances: those that flush have done so, or EC2's shutdown tells them. Raises ServiceError."""
        self.wanted = 0
        found = {entry["InstanceId"]: entry for entry in self._describe()}
        self._settle(found)
        for name in self.members.keys() - found.keys():
            self._forget(name)
        unknown = self._terminate(name for name, entry in found.items() if entry["State"]["Name"] not in GONE)
        self.members.clear()
        self._reckon(over=True, but=unknown)

    def cost(self) -> tuple[float | None, str | None]:
        """Dollars for the machines so far (None: not known) and what to know of the figure."""
        spent = self.book.reckon(now())
        return spent.usd, spent.note

    # Launching

    def _fill(self) -> None:
        """Ask for what is missing: the on-demand base first, then market by market."""
        missing = self.wanted - self.alive
        if missing <= 0 or self.clock() < self._again:
            return
        result = Launched()
        on_demand = sum(m.instance.market == "on-demand" and not m.left for m in self.members.values())
        if (base := min(self.on_demand_base - on_demand, missing)) > 0:
            self._ask(base, "on-demand", result)
        for market in self.markets:
            left = missing - len(result.instances)
            if left > 0 and not result.unclear:
                self._ask(left, market, result)
        for instance in result.instances:
            self.members[instance.instance_id] = Member(instance, self.clock())
            self.book.launched(instance.instance_id, instance.instance_type, instance.market, now())
        self._react(result, missing - len(result.instances))

    def _ask(self, count: int, market: Market, result: Launched) -> None:
        """One request; the same one again when no answer came to the last."""
        ask = self._unclear or Ask(count, market, secrets.token_hex(16))
        answer = launch(self.client, self.source, ask.count, ask.market, self.identity.tags, ask.token)
        self._unclear = ask if answer.unclear else None
        known = self.members.keys()
        result.add(answer)
        result.instances = [each for each in result.instances if each.instance_id not in known]
        result.unclear = answer.unclear

    def _react(self, result: Launched, short: int) -> None:
        """Say what went wrong, once; plan the next request, or give up when nothing would come of it."""
        for error in [*result.final, *result.retryable]:
            if error.sentence not in self._told:
                self._told.add(error.sentence)
                self.note(self._plain(error.sentence))
        if short <= 0:
            self._tries = 0
            return
        if result.final and not result.retryable and not self.alive:
            raise CannotLaunch(self._plain(result.final[0].sentence))
        self._again = self.clock() + RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1

    def _plain(self, sentence: str) -> str:
        return decode_denial(self.sts(), sentence) if "Encoded authorization" in sentence else sentence

    # Looking

    def _describe(self) -> Iterator[dict[str, Any]]:
        """This fleet's instances as EC2 knows them, all pages. Raises ServiceError."""
        try:
            for page in self.client.get_paginator("describe_instances").paginate(Filters=self.identity.filters):
                for reservation in page["Reservations"]:
                    yield from reservation["Instances"]
        except (ClientError, BotoCoreError) as error:
            raise aws.ServiceError.of(error, "EC2 cannot be asked for the fleet's instances") from error

    def _meet(self, found: dict[str, Any]) -> None:
        """Take note of an instance of ours, also of one that came of a request whose answer was lost."""
        name, at = found["InstanceId"], found["LaunchTime"]
        instance = _instance(found)
        self.book.launched(
            name, instance.instance_type, instance.market, at, found.get("Placement", {}).get("AvailabilityZone")
        )
        if found["State"]["Name"] in GONE:
            self.book.ended(name, _ended_at(found) or now())
            return
        if name not in self.members and name not in self._gone:
            self.members[name] = Member(instance, self.clock(), seen=True)
        if name in self.members:
            self.members[name].alive_at = now()

    def _settle(self, found: dict[str, dict[str, Any]]) -> None:
        """Take note of all instances. EC2 forgets one an hour after its end: it is paid for up to its last sign of life."""
        for entry in found.values():
            self._meet(entry)
        open_ = {name for name, record in self.book.records.items() if record.ended is None}
        if unseen := open_ - found.keys() - self.members.keys():
            signs: dict[str, datetime] = {}
            for event in read_events(self.storage, self.identity.fleet_id):
                signs[event.get("instance_id", "")] = datetime.fromisoformat(event["ts"])
            for name in unseen:
                known = [signs.get(name), self.book.as_of, self.book.records[name].launched]
                self.book.ended(name, max(moment for moment in known if moment is not None))

    def _judge(self, member: Member, found: dict[str, dict[str, Any]]) -> Lost | None:
        """Whether an instance counts as gone, and why."""
        name, age = member.instance.instance_id, self.clock() - member.launched
        entry = found.get(name)
        member.seen = member.seen or entry is not None
        if entry is None and not member.seen and age > GRACE_S:
            return Lost(name, "EC2 never knew it", [])
        if entry is not None and entry["State"]["Name"] in GONE:
            code = entry.get("StateReason", {}).get("Code") or entry["State"]["Name"]
            if member.left:
                return Lost(name, "ended", [])
            return Lost(name, "it shut itself down" if code == BY_ITSELF else f"EC2 says {code}", [])
        if not member.online and not member.left and age > BOOT_S:
            self._terminate([name] if entry is not None else [])
            return Lost(name, f"it did not come online within {BOOT_S / 60:.0f} minutes", [])
        if member.left_at is not None and self.clock() - member.left_at > LEAVE_S:
            self._terminate([name] if entry is not None else [])
            return Lost(name, "ended", [])
        return None

    def _forget(self, instance_id: str) -> None:
        member = self.members.pop(instance_id)
        self._gone.add(instance_id)
        self.book.ended(instance_id, member.alive_at or now())
        if not member.left:
            self.wanted = max(0, self.wanted - 1)

    def _terminate(self, instance_ids: Iterable[str]) -> set[str]:
        """Terminate instances that a look by our tags has just found; returns those that EC2 says it does not know.

        One unknown instance makes EC2 refuse the whole call, so the others are asked for again.
        """
        ids, unknown = list(instance_ids), set[str]()
        while ids:
            try:
                self.client.terminate_instances(InstanceIds=ids[:MANY])
                del ids[:MANY]
            except (ClientError, BotoCoreError) as error:
                fault = aws.explain(error)
                named = set(re.findall(r"i-[0-9a-f]+", fault.text)) & set(ids)
                if fault.code != UNKNOWN or not named:
                    raise aws.ServiceError.of(error, "EC2 did not terminate the fleet's instances") from error
                unknown |= named
                ids = [each for each in ids if each not in named]
        return unknown

    def _reckon(self, *, over: bool = False, but: Iterable[str] = ()) -> None:
        """Store what the machines have cost, now and then. Raises ServiceError."""
        if over:
            self.book.all_ended(now(), but)
        elif self.clock() - self._booked < BOOK_S:
            return
        self._booked = self.clock()
        self.book.store(self.storage)


def _ended_at(found: dict[str, Any]) -> datetime | None:
    """When an instance ended, as EC2 tells in words: `User initiated (2026-11-29 14:05:33 GMT)`."""
    told = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", found.get("StateTransitionReason", ""))
    return datetime.fromisoformat(told[1]).replace(tzinfo=UTC) if told else None


def _instance(found: dict[str, Any]) -> Instance:
    market: Market = "spot" if found.get("InstanceLifecycle") == "spot" else "on-demand"
    return Instance(found["InstanceId"], found["InstanceType"], market)
