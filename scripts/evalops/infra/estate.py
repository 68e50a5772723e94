"""What Terraform made, as one SSM parameter says: every name that the scripts need. Nobody builds a name.

Called by every command that touches AWS, and by `ies infra apply`, which keeps the lane records in step with the lanes.
"""

from evalops.ui import fail
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import Part, Unreadable, Wire
from evalworker.storage import AlreadyExists, Changed, Missing, Storage


class LaneQueues(Part):
    """A lane's queue URLs."""

    jobs: str
    events: str
    dead: str


class Workers(Part):
    """What EC2 workers are launched from, by architecture (x86_64, arm64)."""

    launch_templates: dict[str, str]
    images: dict[str, str]
    instance_types: dict[str, list[str]]
    subnets: list[str]
    role: str
    max_lifetime_minutes: int


class Batch(Part):
    """What Batch jobs are submitted to. `queues` by kind (spot, on-demand); `image` is None until one was pushed."""

    queues: dict[str, str]
    job_definition: str
    log_group: str
    image: str | None


class Estate(Wire):
    """All names of one estate. `secrets` maps environment variables to SSM parameters; `batch` is None when it is off."""

    name: str
    account: str
    region: str
    bucket: str
    lanes: dict[str, LaneQueues]
    secrets: dict[str, str]
    topic: str
    metrics: str
    repository: str
    workers: Workers
    batch: Batch | None

    def lane_records(self) -> list[Lane]:
        """The lanes as unowned records."""
        return [
            Lane(name=name, jobs=urls.jobs, events=urls.events, dead=urls.dead, region=self.region)
            for name, urls in sorted(self.lanes.items())
        ]


def parameter(name: str) -> str:
    """The parameter that holds an estate's names: the one name that scripts know beforehand."""
    return f"/inspect-fleet/{name}/config"


def read_estate(name: str) -> Estate:
    """The estate of that name in the caller's account and region; ends with one sentence where there is none."""
    try:
        answer = aws.client("ssm").get_parameter(Name=parameter(name))
    except aws.ServiceError as error:
        fail(str(error))
    except Exception as error:
        fault = aws.explain(error)
        if fault.code == "ParameterNotFound":
            fail(
                f"there is no estate {name!r} in this account and region (no parameter {parameter(name)}): "
                "run `make apply`, or set INSPECT_FLEET_NAME and AWS_DEFAULT_REGION to those of one"
            )
        fail(f"cannot read {parameter(name)}: {fault.text}")
    try:
        return Estate.from_json(answer["Parameter"]["Value"])
    except Unreadable as error:
        fail(
            f"{parameter(name)} was written by another version of this project ({error}): run `make apply` from this checkout"
        )


def sync_lanes(storage: Storage, wanted: list[Lane]) -> list[str]:
    """Make the lane records say what Terraform made; returns a line for each record made, corrected, freed or removed.

    An owned record is never touched: its fleet ends on the queues that it began with. A lane that was fenced off and is there all the
    same (its queues were replaced, its removal was taken back) is free again. One that cannot be read is said.
    """
    lines = []
    for lane in wanted:
        try:
            storage.create(layout.lane(lane.name), lane.to_bytes())
            lines.append(f"recorded {lane.name}")
        except AlreadyExists:
            lines += _corrected(storage, lane)
    names = {lane.name for lane in wanted}
    for key in [info.key for info in storage.list(layout.LANES)]:
        try:
            found = Lane.from_json(storage.get(key).body)
        except (Missing, Unreadable):
            continue
        gone = found.endpoint is None and found.name not in names
        if gone and found.fleet_id in (None, REMOVAL):
            storage.delete(key)
            lines.append(f"removed the record of {found.name}")
    return lines


def _corrected(storage: Storage, lane: Lane) -> list[str]:
    """Put right the record of a lane that no fleet owns; what was done, or why it could not be."""
    try:
        stored = storage.get(layout.lane(lane.name))
        found = Lane.from_json(stored.body)
        if found == lane or found.fleet_id not in (None, REMOVAL):
            return []
        storage.replace(layout.lane(lane.name), lane.to_bytes(), stored.etag)
    except (Missing, Changed):  # a fleet has just taken it
        return []
    except Unreadable as error:
        key = storage.url(layout.lane(lane.name))
        return [f"{key} cannot be read ({error}), so no fleet takes this lane: remove it and apply again"]
    return [f"{'corrected' if found.fleet_id is None else 'freed'} {lane.name}"]


REMOVAL = "removed-by-terraform"
"""Who owns a lane between the decision to remove it and its end; no fleet can take it then."""
