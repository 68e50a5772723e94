"""What a fleet on EC2 has that one of this machine has not: its pool and its topic, made from the manifest and the estate.

Called by `evalops.fleet.assemble` for whoever drives a fleet: at its start, at a resume, after an attach from anywhere.
"""

from collections.abc import Callable
from functools import cache

from evalops.ec2 import preflight, tell
from evalops.ec2.machines import Book
from evalops.ec2.pool import Ec2Pool, Identity
from evalops.ec2.prices import Prices
from evalops.infra.estate import Estate, read_estate
from evalworker import aws
from evalworker.contract.documents import Control, Lane, Machines, Manifest
from evalworker.storage import Storage


@cache
def estate_of(name: str) -> Estate:
    """The estate that a run was launched in, read once; ends with a sentence when there is none."""
    return read_estate(name)


def pool(
    manifest: Manifest,
    machines: Machines,
    control: Control,
    lane: Lane,
    storage: Storage,
    note: Callable[[str], None],
) -> Ec2Pool:
    """The fleet's instances."""
    estate = estate_of(machines.estate)
    identity = Identity(
        fleet_id=manifest.fleet_id,
        lane=lane.name,
        owner=manifest.owner,
        deadline=control.deadline,
        estate=estate.name,
        bucket=estate.bucket,
    )
    return Ec2Pool(
        client=aws.client("ec2", estate.region),
        source=preflight.source(estate, machines),
        markets=tuple(machines.markets),
        on_demand_base=machines.on_demand_base,
        identity=identity,
        book=Book.read(storage, manifest.fleet_id, Prices(estate.region)),
        storage=storage,
        note=note,
    )


def teller(machines: Machines, note: Callable[[str], None]) -> Callable[[str, str], None]:
    """Who is told of the fleet's end."""
    estate = estate_of(machines.estate)
    return tell.teller(estate.topic, estate.region, note)
