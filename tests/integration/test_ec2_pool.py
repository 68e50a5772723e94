"""The pool, the preflight and the reaper on moto's EC2, in this process, with a clock of the test's own."""

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import ec2_world
import pytest
from botocore.exceptions import ClientError
from ec2_world import World, short_of
from emulators import Emulator

from evalops.ec2 import backend, preflight
from evalops.ec2 import pool as pool_module
from evalops.ec2.capacity import Source
from evalops.ec2.machines import Book
from evalops.ec2.pool import BOOT_S, GRACE_S, LEAVE_S, LOOK_S, Ec2Pool, Identity
from evalops.ec2.prices import Prices
from evalops.ec2.reaper import Reaper
from evalops.fleet import lanes, submit
from evalops.fleet.request import Request
from evalops.fleet.workers import CannotLaunch
from evalops.settings import Settings
from evalops.ui import Failure
from evalworker import aws
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, JobSpec, Manifest
from evalworker.contract.wire import now, stamp
from gateway import Gateway, ec2_error, gateway

FLEET, OTHER = "2026-11-29-14-05-33-1a2b3c4d", "2026-11-29-14-05-34-1a2b3c4d"
_names = iter(range(1000))


@pytest.fixture
def world(moto: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """An estate, which this process's clients reach by the standard variables."""
    made = ec2_world.make(moto, f"pool-{next(_names)}", tmp_path)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    backend.estate_of.cache_clear()
    yield made
    for found in made.instances("running"):
        made.client("ec2").terminate_instances(InstanceIds=[found["InstanceId"]])


@dataclass
class Bench:
    """A pool with a clock that the test moves, and what it said."""

    pool: Ec2Pool
    said: list[str] = field(default_factory=list)
    time: float = 1000.0

    def later(self, seconds: float) -> None:
        self.time += seconds


class Seeing:
    """The world's EC2, in whose answers stand only the instances that `keep` says; it may change what is said of one."""

    def __init__(self, world: World, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._ec2 = world.client("ec2")
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ec2, name)

    def get_paginator(self, name: str) -> "Seeing":
        self._pages = self._ec2.get_paginator(name)
        return self

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        for page in self._pages.paginate(**arguments):
            for each in page["Reservations"]:
                each["Instances"] = [found for found in each["Instances"] if self._keep(found)]
            yield page


def bench(world: World, fleet_id: str = FLEET, owner: str = "ann", client: Any = None, **more: Any) -> Bench:
    identity = Identity(fleet_id, "lane-01", owner, now() + timedelta(hours=1), world.name, world.estate.bucket)
    workers = world.estate.workers
    made = Bench(
        Ec2Pool(
            client=client or world.client("ec2"),
            source=Source(workers.launch_templates, workers.instance_types, workers.subnets),
            markets=more.pop("markets", ("spot", "on-demand")),
            on_demand_base=more.pop("on_demand_base", 0),
            identity=identity,
            book=Book(fleet_id, Prices("us-east-1", world.client("ec2"))),
            storage=world.storage,
            note=lambda text: made.said.append(text),
            clock=lambda: made.time,
        )
    )
    return made


def running(world: World, fleet_id: str = FLEET) -> list[str]:
    return sorted(each["InstanceId"] for each in world.instances("running", fleet_id=fleet_id))


def through(world: World, gate: Gateway) -> Any:
    return Emulator("moto", gate.endpoint).client("ec2")


def test_instances_are_born_with_their_tags_and_the_template_s_user_data(world: World) -> None:
    a = bench(world, on_demand_base=1)
    a.pool.start(3)
    born = world.instances("running")
    assert sorted(each.get("InstanceLifecycle", "on-demand") for each in born) == ["on-demand", "spot", "spot"]
    for each in born:
        tags = {tag["Key"]: tag["Value"] for tag in each["Tags"]}
        assert a.pool.identity.tags.items() <= tags.items()
    data = world.client("ec2").describe_instance_attribute(InstanceId=born[0]["InstanceId"], Attribute="userData")
    assert base64.b64decode(data["UserData"]["Value"]).startswith(b"#!/bin/sh\nshutdown -P +1440\n")
    assert (a.pool.alive, a.pool.waiting_for, a.said) == (3, None, [])


def test_only_the_fleet_s_own_instances_are_ever_terminated(world: World) -> None:
    a, b, same_fleet_other_owner = bench(world), bench(world, OTHER), bench(world, owner="bob")
    for each in (a, b, same_fleet_other_owner):
        each.pool.start(1)
    (of_b,) = b.pool.members
    a.pool.lose(of_b, "silent")
    a.pool.stop()
    assert running(world, OTHER) == [of_b]
    assert running(world) == list(same_fleet_other_owner.pool.members)


def test_what_spot_does_not_give_is_asked_of_on_demand_and_again_later(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:
        less = short_of(1, "InsufficientInstanceCapacity", "none")
        gate.rule = lambda service, operation, body: less(body) if operation == "CreateFleet" else None
        a = bench(world, client=through(world, gate))
        a.pool.start(4)
        assert (a.pool.alive, gate.count("ec2", "CreateFleet")) == (2, 2)
        assert a.pool.waiting_for == "EC2 capacity for 2 of 4 workers"
        assert sorted(a.said) == [
            "EC2 has no on-demand capacity for these instance types and subnets now",
            "EC2 has no spot capacity for these instance types and subnets now",
        ]
        a.later(LOOK_S)
        assert a.pool.ended() == []
        assert gate.count("ec2", "CreateFleet") == 4
        assert (a.pool.alive, a.pool.waiting_for, len(running(world))) == (4, None, 4)
        assert len(a.said) == 2  # the same words are said once


def test_requests_that_give_nothing_come_ever_less_often(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:
        gate.rule = lambda service, operation, body: (
            ec2_error("InsufficientInstanceCapacity", "none") if operation == "CreateFleet" else None
        )
        a = bench(world, client=through(world, gate), markets=("spot",))
        a.pool.start(1)
        times = []
        for _ in range(40):
            a.later(LOOK_S)
            before = gate.count("ec2", "CreateFleet")
            a.pool.ended()
            if gate.count("ec2", "CreateFleet") > before:
                times.append(a.time)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps == sorted(gaps)
        assert gaps[-1] >= pool_module.RETRY_S[-1]


def test_spot_only_never_asks_for_on_demand(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:
        less = short_of(1, "UnfulfillableCapacity", "none")
        gate.rule = lambda service, operation, body: less(body) if operation == "CreateFleet" else None
        a = bench(world, client=through(world, gate), markets=("spot",))
        a.pool.start(3)
        assert (a.pool.alive, gate.count("ec2", "CreateFleet")) == (1, 1)


def test_a_quota_of_one_market_does_not_keep_the_other_from_being_asked(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:

        def rule(service: str, operation: str, body: bytes) -> Any:
            on_demand = operation == "CreateFleet" and b"DefaultTargetCapacityType=on-demand" in body
            return ec2_error("VcpuLimitExceeded", "limit of 2") if on_demand else None

        gate.rule = rule
        a = bench(world, client=through(world, gate), on_demand_base=1)
        a.pool.start(2)
        assert a.pool.alive == 2
        assert "is 2 vCPUs: 1 more on-demand workers do not fit" in a.said[0]
        lone = bench(world, OTHER, client=through(world, gate), markets=("on-demand",))
        with pytest.raises(CannotLaunch, match="is 2 vCPUs: 3 more on-demand workers do not fit"):
            lone.pool.start(3)


def test_a_request_without_an_answer_is_repeated_as_the_same_request(world: World) -> None:
    asked: list[tuple[str, int]] = []

    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.client("ec2"), name)

        def create_fleet(self, **arguments: Any) -> Any:
            asked.append((arguments["ClientToken"], arguments["TargetCapacitySpecification"]["TotalTargetCapacity"]))
            if len(asked) == 1:
                raise ec2_world_timeout()
            return world.client("ec2").create_fleet(**arguments)

    a = bench(world, client=Deaf())
    a.pool.start(2)
    assert (a.pool.alive, len(asked)) == (0, 1)
    a.later(LOOK_S)
    a.pool.ended()
    assert asked[1] == asked[0]
    assert a.pool.alive == 2


def ec2_world_timeout() -> Exception:
    from botocore.exceptions import ReadTimeoutError

    return ReadTimeoutError(endpoint_url="https://ec2")


def test_instances_of_a_lost_answer_are_found_by_their_tags_and_not_launched_again(world: World) -> None:
    class Forgetful:
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(world.client("ec2"), name)

        def create_fleet(self, **arguments: Any) -> Any:
            self.calls += 1
            world.client("ec2").create_fleet(**arguments)
            raise ec2_world_timeout()

    client = Forgetful()
    a = bench(world, client=client)
    a.pool.start(2)
    a.later(LOOK_S)
    assert a.pool.ended() == []
    assert (a.pool.alive, client.calls, len(running(world))) == (2, 1, 2)


def test_an_instance_that_ec2_calls_gone_is_lost_once(world: World) -> None:
    a = bench(world)
    a.pool.start(2)
    victim = sorted(a.pool.members)[0]
    world.client("ec2").terminate_instances(InstanceIds=[victim])
    assert a.pool.ended() != []
    a.later(LOOK_S / 2)
    assert a.pool.ended() == []  # too early for another look
    a.later(LOOK_S)
    assert a.pool.ended() == []
    assert (a.pool.alive, a.pool.waiting_for) == (1, None)  # whether it is replaced is the controller's decision
    assert a.pool.book.records[victim].ended is not None


def test_a_loss_is_told_although_a_later_step_of_the_look_fails(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:
        a = bench(world, client=through(world, gate), markets=("on-demand",))
        a.pool.start(1)
        (name,) = a.pool.members
        a.pool.wanted += 1
        world.client("ec2").terminate_instances(InstanceIds=[name])
        gate.rule = lambda service, operation, body: (
            ec2_error("ExpiredToken", "expired", 400) if operation == "CreateFleet" else None
        )
        with pytest.raises(ServiceError, match="EC2 cannot be asked for instances"):
            a.pool.ended()
        assert [lost.instance_id for lost in a.pool.ended()] == [name]
        assert a.pool.ended() == []


def test_one_unknown_instance_does_not_keep_the_others_alive(world: World) -> None:
    """EC2 refuses the whole call, which leaves open what became of the one; it is ended when EC2 knows it again."""
    unknown: list[str] = []

    class Forgetful:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.client("ec2"), name)

        def terminate_instances(self, InstanceIds: list[str]) -> Any:
            if found := [each for each in InstanceIds if each in unknown]:
                said = {
                    "Code": "InvalidInstanceID.NotFound",
                    "Message": f"The instance IDs '{', '.join(found)}' do not exist",
                }
                raise ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": 400}}, "TerminateInstances")
            return world.client("ec2").terminate_instances(InstanceIds=InstanceIds)

    a = bench(world, client=Forgetful())
    a.pool.start(3)
    first, second, third = sorted(a.pool.members)
    unknown.append(first)
    a.pool.lose(first, "silent")
    a.pool.ended()
    assert running(world) == [first, second, third]
    unknown[:] = [second]
    a.later(LOOK_S)
    a.pool.ended()
    assert running(world) == [second, third]
    a.pool.stop()
    assert running(world) == [second]
    ended = {name for name, record in a.pool.book.records.items() if record.ended is not None}
    assert ended == {first, third}


def test_machines_that_ended_unseen_are_paid_for_until_their_last_sign_of_life(world: World) -> None:
    a = bench(world)
    a.pool.start(3)
    told, heard, silent = sorted(a.pool.members)
    begun, stored = now() - timedelta(hours=9), now() - timedelta(hours=8)
    for name in a.pool.members:
        a.pool.book.records[name] = a.pool.book.records[name].model_copy(update={"launched": begun})
    world.client("ec2").terminate_instances(InstanceIds=[told, heard, silent])
    spoken = stored + timedelta(hours=3)
    line = {"type": "worker_draining", "instance_id": heard, "ts": stamp(spoken)}
    world.storage.create(layout.segment(FLEET, 1), json.dumps(line).encode())

    def late(found: dict[str, Any]) -> bool:
        """An hour after their end EC2 knows instances no more."""
        found["LaunchTime"] = begun
        found["StateTransitionReason"] = f"User initiated ({stored:%Y-%m-%d %H:%M:%S} GMT)"
        return found["InstanceId"] == told

    b = bench(world, client=Seeing(world, late))
    b.pool.book = Book(FLEET, Prices("us-east-1", world.client("ec2")), a.pool.book.records.values(), stored)
    assert b.pool.adopt() == 0
    ended = {name: record.ended for name, record in b.pool.book.records.items()}
    assert ended == {told: stored.replace(microsecond=0), heard: datetime.fromisoformat(stamp(spoken)), silent: stored}


def test_one_that_said_goodbye_is_no_loss_and_is_helped_out(world: World) -> None:
    a = bench(world)
    a.pool.start(1)
    (name,) = a.pool.members
    a.pool.online(name)
    a.pool.left(name)
    assert (a.pool.alive, a.pool.waiting_for) == (0, None)
    a.later(LEAVE_S + 1)
    (lost,) = a.pool.ended()
    assert (lost.instance_id, lost.reason) == (name, "ended")
    assert running(world) == []


def test_an_instance_that_never_comes_online_is_ended(world: World) -> None:
    a = bench(world)
    a.pool.start(2)
    first, second = sorted(a.pool.members)
    a.pool.online(second)
    a.later(BOOT_S + 1)
    (lost,) = a.pool.ended()
    assert (lost.instance_id, lost.reason) == (first, "it did not come online within 15 minutes")
    assert running(world) == [second]


def test_not_found_is_believed_only_after_a_while(world: World) -> None:
    """Just after a launch EC2 may not know an instance yet; one that it knew and does not name any more is not lost by that."""
    hidden: list[str] = []

    a = bench(world, client=Seeing(world, lambda found: found["InstanceId"] not in hidden))
    a.pool.start(2)
    first, second = sorted(a.pool.members)
    hidden.append(first)
    assert a.pool.ended() == []
    hidden.append(second)
    a.later(GRACE_S + 1)
    assert [(lost.instance_id, lost.reason) for lost in a.pool.ended()] == [(first, "EC2 never knew it")]
    assert a.pool.alive == 1


def test_three_minutes_of_throttling_lose_nobody(world: World) -> None:
    with gateway(world.moto.endpoint) as gate:
        a = bench(world, client=through(world, gate))
        a.pool.start(2)
        gate.rule = lambda service, operation, body: (
            ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)
            if operation == "DescribeInstances"
            else None
        )
        for _ in range(12):
            a.later(LOOK_S)
            with pytest.raises(ServiceError, match="EC2 cannot be asked for the fleet's instances") as raised:
                a.pool.ended()
            assert not raised.value.credentials
        gate.rule = lambda service, operation, body: None
        a.later(LOOK_S)
        assert a.pool.ended() == []
        assert a.pool.alive == 2


def test_another_controller_adopts_what_lives(world: World) -> None:
    a = bench(world)
    a.pool.start(2)
    dead, alive = sorted(a.pool.members)
    world.client("ec2").terminate_instances(InstanceIds=[dead])
    b = bench(world)
    assert b.pool.adopt() == 1
    assert list(b.pool.members) == [alive]
    b.later(BOOT_S - 1)  # it may have been online for long: its next heartbeat says so
    assert b.pool.ended() == []


# Preflight


def settings(world: World, **more: Any) -> Settings:
    return replace(Settings(root=".", bucket=None, estate=world.name, owner="ann"), **more)


def test_the_estate_s_bucket_is_the_root(world: World) -> None:
    found, estate = preflight.surroundings(settings(world))
    assert (found.root, found.bucket, estate.name) == (f"s3://{world.estate.bucket}", world.estate.bucket, world.name)
    with pytest.raises(Failure, match=r"S3_BUCKET_NAME is other and the estate's bucket is bucket-pool-\d+"):
        preflight.surroundings(settings(world, bucket="other"))
    with pytest.raises(Failure, match="there is no estate 'nowhere' in this account and region"):
        preflight.surroundings(settings(world, estate="nowhere"))


def test_a_deadline_that_no_machine_lives_to_see_is_refused(world: World) -> None:
    preflight.check_deadline(timedelta(hours=24), world.estate)
    with pytest.raises(Failure, match="--deadline is longer than the 1440 minutes that a worker of"):
        preflight.check_deadline(timedelta(hours=24, minutes=1), world.estate)


def wanted(**more: Any) -> preflight.Wanted:
    return preflight.Wanted(workers=2, markets=["spot", "on-demand"], **more)


def test_machines_are_of_the_image_that_the_estate_names_now(world: World) -> None:
    found = preflight.machines(world.estate, wanted())
    stored = world.client("ssm").get_parameter(Name=world.estate.workers.images["x86_64"])["Parameter"]["Value"]
    assert found.images == {"x86_64": stored}
    assert found.instance_types == {"x86_64": ["m5.large", "m6i.large"]}
    other = preflight.machines(world.estate, wanted(instance_types=("m5.xlarge", "c5.large"), image=stored))
    assert other.instance_types == {"x86_64": ["m5.xlarge", "c5.large"]}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            {"image": "ami-0123456789abcdef0"},
            "the image ami-0123456789abcdef0 does not exist: choose another with --ami",
        ),
        ({"instance_types": ("m5.nonsense",)}, "--instance-type: "),
        ({"instance_types": ("m6g.large",)}, "--instance-type m6g.large: the estate has no launch template for arm64"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_sentence(world: World, choice: dict[str, Any], said: str) -> None:
    with pytest.raises(Failure) as raised:
        preflight.machines(world.estate, wanted(**choice))
    assert raised.value.message.startswith(said)


def test_a_run_goes_on_with_the_image_that_it_had(world: World) -> None:
    name = world.estate.workers.images["x86_64"]
    ssm = world.client("ssm")
    stored = ssm.get_parameter(Name=name)["Parameter"]["Value"]
    ssm.put_parameter(Name=name, Value="ami-0123456789abcdef0", Overwrite=True)
    assert preflight.machines(world.estate, wanted(images={"x86_64": stored})).images == {"x86_64": stored}


def test_an_image_that_is_gone_is_refused(world: World) -> None:
    name = world.estate.workers.images["x86_64"]
    world.client("ssm").put_parameter(Name=name, Value="ami-0123456789abcdef0", Overwrite=True)
    with pytest.raises(Failure, match="the image ami-0123456789abcdef0 does not exist"):
        preflight.machines(world.estate, wanted())


def test_a_quota_that_is_too_small_is_named_with_value_and_need(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quotas:
        def get_service_quota(self, ServiceCode: str, QuotaCode: str) -> Any:
            return {"Quota": {"Value": 2.0}}

    real: Callable[..., Any] = aws.client
    monkeypatch.setattr(
        preflight.aws, "client", lambda name, *more: Quotas() if name == "service-quotas" else real(name, *more)
    )
    assert preflight.machines(world.estate, wanted()).workers == 2
    with pytest.raises(Failure) as raised:
        preflight.machines(world.estate, replace(wanted(), markets=["on-demand"], workers=3))
    assert raised.value.message == (
        "3 workers need 6 vCPUs and the quota Running On-Demand Standard instances is 2: lower --max-workers to 1, "
        "or ask for more of Running On-Demand Standard instances (L-1216C47A) in Service Quotas"
    )


# The reaper


def reaper(world: World, minutes: float = 0, **more: Any) -> Reaper:
    surroundings, estate = preflight.surroundings(settings(world))
    return Reaper(surroundings, estate, world.storage, clock=lambda: now() + timedelta(minutes=minutes), **more)


def store_fleet(world: World, fleet_id: str, state: Any, until: timedelta, beat: timedelta = timedelta(0)) -> None:
    spec = JobSpec(job_id="00000000000000aa", task="t.py@t", name="t", model="scripted/good", samples=1)
    manifest = Manifest(
        fleet_id=fleet_id,
        created=now() - timedelta(hours=3),
        backend="ec2",
        jobs=[spec],
        arguments={},
        models=["m"],
        submit_dir=".",
        owner="ann",
        machines=preflight.machines(world.estate, wanted()),
    )
    control = Control(
        fleet_id=fleet_id, round=1, state=state, deadline=now() + until, beat=now() + beat, controller="elsewhere:1"
    )
    world.storage.put(layout.manifest(fleet_id), manifest.to_bytes())
    world.storage.put(layout.control(fleet_id), control.to_bytes())


def passes(found: Reaper) -> dict[str, str]:
    done = {decision.thing.name: decision.action for decision in found.run()}
    assert found.failed == []
    return done


def test_a_machine_of_an_ended_fleet_is_marked_on_one_pass_and_ended_on_the_next(world: World) -> None:
    store_fleet(world, FLEET, "ended", timedelta(hours=1))
    store_fleet(world, OTHER, "running", timedelta(hours=1))
    a, b = bench(world), bench(world, OTHER)
    a.pool.start(1)
    b.pool.start(1)
    (dead,), (alive,) = a.pool.members, b.pool.members
    assert passes(reaper(world)) == {dead: "keep", alive: "keep"}  # too young
    assert passes(reaper(world, 30, dry_run=True)) == {dead: "mark", alive: "keep"}
    assert passes(reaper(world, 30)) == {dead: "mark", alive: "keep"}
    assert passes(reaper(world, 31)) == {dead: "keep", alive: "keep"}
    assert running(world) == [dead]
    assert passes(reaper(world, 36)) == {dead: "end", alive: "keep"}
    assert (running(world), running(world, OTHER)) == ([], [alive])


def test_what_is_not_ours_is_not_touched(world: World) -> None:
    ec2 = world.client("ec2")
    image = world.client("ssm").get_parameter(Name=world.estate.workers.images["x86_64"])["Parameter"]["Value"]
    foreign = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    host = [{"ResourceType": "instance", "Tags": [{"Key": "inspect-fleet", "Value": world.name}]}]
    batch = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=host)["Instances"][0]
    assert passes(reaper(world, 600)) == {batch["InstanceId"]: "keep"}
    assert passes(reaper(world, 1200)) == {batch["InstanceId"]: "keep"}
    ec2.terminate_instances(InstanceIds=[foreign])


def test_orphan_disks_and_broken_uploads_go(world: World) -> None:
    ec2, s3 = world.client("ec2"), world.client("s3")
    zone = ec2.describe_availability_zones()["AvailabilityZones"][0]["ZoneName"]
    own = {
        "inspect-fleet": world.name,
        "Name": f"inspect-fleet-{world.name}-worker",
        "inspect-fleet-bucket": world.estate.bucket,
    }
    tags = [{"ResourceType": "volume", "Tags": [{"Key": key, "Value": value} for key, value in own.items()]}]
    volume = ec2.create_volume(AvailabilityZone=zone, Size=1, TagSpecifications=tags)["VolumeId"]
    ec2.create_volume(AvailabilityZone=zone, Size=1)
    s3.create_multipart_upload(Bucket=world.estate.bucket, Key=f"{FLEET}/x.eval")  # moto: each began in 2010
    first = passes(reaper(world, 30))
    assert (first[volume], first[f"{FLEET}/x.eval"]) == ("mark", "end")
    assert s3.list_multipart_uploads(Bucket=world.estate.bucket).get("Uploads", []) == []
    assert passes(reaper(world, 40))[volume] == "end"
    assert volume not in [each["VolumeId"] for each in ec2.describe_volumes()["Volumes"]]


def test_a_lane_past_its_deadline_is_freed_and_its_fleet_gets_its_end(world: World) -> None:
    store_fleet(world, FLEET, "running", -timedelta(minutes=30), -timedelta(minutes=40))
    lane = lanes.take(world.storage, FLEET, "ann", now() - timedelta(minutes=30))
    found = reaper(world)
    decisions = {each.thing.name: each for each in found.run()}
    assert found.failed == []
    assert decisions[lane.name].action == "end"
    assert decisions[lane.name].reason.startswith(f"belongs to {FLEET} of ann, past its deadline")
    events = world.events(FLEET)
    assert [event["type"] for event in events][-2:] == ["job_done", "fleet_summary"]
    assert (events[-1]["outcome"], events[-1]["reason"]) == ("stopped", "its deadline passed while nobody drove it")
    assert all(each.fleet_id is None for each, _ in lanes.lanes(world.storage))
    assert ec2_world.told(world) == [f"fleet {FLEET} has ended: stopped"]


def test_a_lane_of_a_driven_or_working_fleet_is_kept(world: World) -> None:
    store_fleet(world, FLEET, "running", -timedelta(minutes=30))  # its controller wrote just now
    store_fleet(world, OTHER, "running", timedelta(minutes=30), -timedelta(minutes=40))
    lanes.take(world.storage, FLEET, "ann", now() - timedelta(minutes=30))
    lanes.take(world.storage, OTHER, "bob", now() + timedelta(minutes=30))
    b = bench(world, OTHER, owner="bob")
    b.pool.start(1)
    found = {each.thing.name: each.action for each in reaper(world).run()}
    assert (found["lane-01"], found["lane-02"]) == ("keep", "keep")
    world.client("ec2").terminate_instances(InstanceIds=list(b.pool.members))
    again = {each.thing.name: (each.action, each.reason) for each in reaper(world).run()}
    assert again["lane-02"] == ("end", f"belongs to {OTHER} of bob, which has no worker and no controller")


def test_a_lane_of_an_ended_or_unknown_fleet_is_freed(world: World) -> None:
    store_fleet(world, FLEET, "ended", timedelta(minutes=30), -timedelta(minutes=40))
    lanes.take(world.storage, FLEET, "ann", now() + timedelta(minutes=30))
    lanes.take(world.storage, OTHER, "bob", now() + timedelta(minutes=30))
    found = {each.thing.name: (each.action, each.reason) for each in reaper(world, dry_run=True).run()}
    assert found["lane-01"] == ("end", f"belongs to {FLEET} of ann, which has ended")
    assert found["lane-02"] == ("end", f"belongs to {OTHER} of bob, of which nothing is stored")
    assert sum(each.fleet_id is not None for each, _ in lanes.lanes(world.storage)) == 2
    assert len(list(reaper(world).run())) == 2
    assert all(each.fleet_id is None for each, _ in lanes.lanes(world.storage))
    assert world.events(FLEET) == []


def test_who_waits_for_a_lane_gets_the_next_one_with_a_whole_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(4):
        lanes.take(world.storage, f"{FLEET[:-1]}{index}", "bob", now() + timedelta(hours=1))
    store_fleet(world, OTHER, "running", timedelta(minutes=30))
    manifest = Manifest.from_json(world.storage.get(layout.manifest(OTHER)).body)
    stored = world.storage.get(layout.control(OTHER))
    control = Control.from_json(stored.body)
    ask = (settings(world), world.storage)
    begun = Request(queues="estate", deadline=timedelta(minutes=30))
    with pytest.raises(Failure, match=f"no lane is free .lane-01: {FLEET[:-1]}0 of bob until"):
        submit._lane(*ask, begun, manifest, control, stored.etag)
    stored = world.storage.get(layout.control(OTHER))

    def one_ends(_seconds: float) -> None:
        third = next(each for each, _ in lanes.lanes(world.storage) if each.name == "lane-03")
        lanes.release(world.storage, third)

    monkeypatch.setattr(submit.time, "sleep", one_ends)
    before = now()
    taken, fresh, etag = submit._lane(*ask, replace(begun, wait=True), manifest, control, stored.etag)
    assert (taken.name, taken.fleet_id) == ("lane-03", OTHER)
    assert fresh.deadline >= before + timedelta(minutes=30) - timedelta(seconds=1)
    assert taken.until == fresh.deadline
    assert world.storage.get(layout.control(OTHER)).etag == etag
    assert "waiting for a lane: no lane is free" in capsys.readouterr().err


def test_the_stock_image_gets_its_boot_script_and_a_baked_one_needs_none(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = preflight.machines(world.estate, wanted())
    preflight.prepare_boot(world.storage, machines, world.estate)
    assert not world.storage.exists(layout.BOOT_SCRIPT)
    stock = [{"ImageId": "ami-1", "OwnerId": preflight.DEBIAN}]
    monkeypatch.setattr(preflight, "_described", lambda ec2, images: stock)
    preflight.prepare_boot(world.storage, machines, world.estate)
    assert world.storage.get(layout.BOOT_SCRIPT).body.startswith(b"#!/usr/bin/env bash")
    assert "workers boot the image ami-1 and install everything first" in capsys.readouterr().err
