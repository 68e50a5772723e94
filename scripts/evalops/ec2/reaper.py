"""One pass of the reaper over an estate: look, decide (`evalops.ec2.reap_rules`), do. The edges of it.

Called by `ct fleet reap`. With `dry_run` nothing is changed. A thing that cannot be dealt with is reported by name, and the others are
dealt with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evalops.ec2 import reap_rules
from evalops.ec2.pool import BUCKET, ESTATE, GONE
from evalops.ec2.reap_rules import MARK, Decision, FleetState, Thing
from evalops.fleet import lanes, ownership, takeover
from evalops.fleet.stream import Fenced
from evalops.infra.estate import REMOVAL, Estate
from evalops.settings import Settings
from evalops.ui import Failure
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Control, Lane, Manifest
from evalworker.contract.wire import Unreadable, now, stamp
from evalworker.storage import Changed, Missing, Storage, StorageError

DEAD_FLEET = "its workers are gone and nobody drove it"


@dataclass
class Reaper:
    """One pass. `failed` holds a sentence for each thing that could not be dealt with."""

    settings: Settings
    estate: Estate
    storage: Storage
    dry_run: bool = False
    clock: Callable[[], datetime] = now
    failed: list[str] = field(default_factory=list)

    def run(self) -> Iterator[Decision]:
        """Deal with everything; yields each decision when it has been carried out."""
        at = self.clock()
        things = [*self._instances(), *self._volumes()]
        fleets = {name: self._state(name) for name in {thing.fleet_id for thing in things if thing.fleet_id}}
        own = {"Name": f"inspect-fleet-{self.estate.name}-worker", BUCKET: self.estate.bucket}
        for decision in reap_rules.decide(things, fleets, at, own):
            yield from self._do(decision)
        alive = {thing.fleet_id for thing in things if thing.kind == "instance" and thing.state not in GONE}
        found = list(self._lanes(at, alive))
        for (lane, _), decision in zip(found, reap_rules.capped(decision for _, decision in found), strict=True):
            yield from self._close(lane, decision)
        for decision in reap_rules.uploads(self._uploads(), at):
            yield from self._do(decision)

    # Looking

    def _pages(self, service: str, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from aws.client(service, self.estate.region).get_paginator(operation).paginate(**arguments)
        except Exception as error:
            raise aws.ServiceError.of(error, f"cannot look for what is left over ({operation})") from error

    @property
    def _own(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{ESTATE}", "Values": [self.estate.name]}]

    def _instances(self) -> Iterator[Thing]:
        for page in self._pages("ec2", "describe_instances", Filters=self._own):
            for reservation in page["Reservations"]:
                for found in reservation["Instances"]:
                    name, state = found["InstanceId"], found["State"]["Name"]
                    yield Thing("instance", name, found["LaunchTime"], _tags(found), state)

    def _volumes(self) -> Iterator[Thing]:
        filters = [*self._own, {"Name": "status", "Values": ["available"]}]
        for page in self._pages("ec2", "describe_volumes", Filters=filters):
            for found in page["Volumes"]:
                yield Thing("volume", found["VolumeId"], found["CreateTime"], _tags(found), found["State"])

    def _uploads(self) -> Iterator[Thing]:
        for page in self._pages("s3", "list_multipart_uploads", Bucket=self.estate.bucket):
            for found in page.get("Uploads", []):
                yield Thing("upload", found["Key"], found["Initiated"], {"id": found["UploadId"]})

    def _state(self, fleet_id: str) -> FleetState:
        try:
            return FleetState(Control.from_json(self.storage.get(layout.control(fleet_id)).body).state)
        except Missing:
            return FleetState(None, missing=True)
        except (StorageError, Unreadable) as error:
            self.failed.append(f"the fleet {fleet_id} could not be read: {error}")
            return FleetState(None)

    def _lanes(self, at: datetime, alive: set[str | None]) -> Iterator[tuple[Lane, Decision]]:
        """The lanes in use: those past their owner's deadline, or whose fleet is dead, are freed."""
        for lane, _ in lanes.lanes(self.storage):
            if lane.fleet_id in (None, REMOVAL) or lane.endpoint is not None:
                continue
            yield lane, self._lane(lane, at, alive)

    def _lane(self, lane: Lane, at: datetime, alive: set[str | None]) -> Decision:
        until = lane.until or at
        thing = Thing("lane", lane.name, until)
        who = f"{lane.fleet_id} of {lane.owner or 'nobody'}"
        try:
            control = Control.from_json(self.storage.get(layout.control(lane.fleet_id or "")).body)
            manifest = Manifest.from_json(self.storage.get(layout.manifest(lane.fleet_id or "")).body)
        except Missing:
            return Decision(thing, "end", f"belongs to {who}, of which nothing is stored")
        except (StorageError, Unreadable) as error:
            return Decision(thing, "keep", f"belongs to {who}, which cannot be read: {error}")
        silent = at - control.beat
        if (
            control.state == "ended" and silent > reap_rules.YOUNG
        ):  # before, its controller may still be emptying the lane
            return Decision(thing, "end", f"belongs to {who}, which has ended")
        if not ownership.controller_gone(control):
            return Decision(thing, "keep", f"belongs to {who}, driven by {control.controller}")
        if at > until + reap_rules.GRACE:
            return Decision(thing, "end", f"belongs to {who}, past its deadline {stamp(until)}")
        # Of workers on somebody's own machine EC2 knows nothing: their fleet has its lane until the deadline.
        if manifest.machines is not None and lane.fleet_id not in alive and silent > reap_rules.YOUNG:
            return Decision(thing, "end", f"belongs to {who}, which has no worker and no controller")
        return Decision(thing, "keep", f"belongs to {who} until {stamp(until)}")

    # Doing

    def _do(self, decision: Decision) -> Iterator[Decision]:
        if not self.dry_run:
            try:
                self._carry_out(decision)
            except Exception as error:
                self.failed.append(f"{decision.thing.kind} {decision.thing.name}: {aws.explain(error).text}")
                return
        yield decision

    def _carry_out(self, decision: Decision) -> None:
        thing, ec2 = decision.thing, aws.client("ec2", self.estate.region)
        if decision.action in ("mark", "unmark"):
            value = stamp(self.clock()) if decision.action == "mark" else ""
            ec2.create_tags(Resources=[thing.name], Tags=[{"Key": MARK, "Value": value}])
        elif decision.action == "end" and thing.kind == "instance":
            ec2.terminate_instances(InstanceIds=[thing.name])
        elif decision.action == "end" and thing.kind == "volume":
            ec2.delete_volume(VolumeId=thing.name)
        elif decision.action == "end" and thing.kind == "upload":
            aws.client("s3", self.estate.region).abort_multipart_upload(
                Bucket=self.estate.bucket, Key=thing.name, UploadId=thing.tags["id"]
            )

    def _close(self, lane: Lane, decision: Decision) -> Iterator[Decision]:
        """Write the end that a fleet without a controller lacks, which also tells its topic, and free its lane."""
        if decision.action == "end" and not self.dry_run:
            why = takeover.PAST_DEADLINE if lanes.expired(lane) else DEAD_FLEET
            try:
                takeover.close_abandoned(self.settings, self.storage, lane, why)
            except (Changed, Fenced):
                yield Decision(decision.thing, "keep", "is being ended by somebody else")
                return
            except (Failure, aws.ServiceError) as error:
                self.failed.append(f"lane {lane.name}: {error}")
                return
        yield decision


def _tags(found: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}
