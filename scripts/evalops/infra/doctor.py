"""Whether a shell can use the estate, one line for each thing that must be so. Nothing is changed, nothing costs money.

`ies infra doctor` calls `examine`; each check is a function of clients and values that returns one `Check`, and a check whose
own call fails says so instead of ending the others.
"""

import configparser
import os
import secrets as random_names
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from evalops.infra import secrets
from evalops.infra.estate import Estate, read_estate
from evalops.settings import Settings
from evalops.ui import Failure
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import Unreadable, now
from evalworker.storage import Missing, Storage, StorageError, open_storage

SKEW_LIMIT_S = 60
"""AWS refuses signatures that are five minutes off; a minute is already worth a word."""

OLD_IMAGE_DAYS = 30
"""After that an image lacks a month of security updates."""

DEBIAN = "136693071363"
"""The account that publishes Debian's images: an image of its is no baked one."""

ON_DEMAND_QUOTA, SPOT_QUOTA = "L-1216C47A", "L-34B43A08"
"""Service Quotas' codes for running standard (A, C, D, H, I, M, R, T, Z) instances, counted in vCPUs."""

WORKER_VCPUS = 2
"""vCPUs of the smallest worker among the default types."""

State = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `warn` works but may disappoint; `skip` could not be looked at."""

    name: str
    state: State
    text: str

    def to_dict(self) -> dict[str, str]:
        """For --json."""
        return asdict(self)


def examine(settings: Settings) -> list[Check]:
    """All checks, in the order in which one rests on another; those without a base are left out."""
    checks = [credential_sources(os.environ)]
    if checks[0].state == "fail":
        return checks
    try:
        identity = aws.client("sts").get_caller_identity()
    except Exception as error:
        return [*checks, Check("identity", "fail", f"cannot ask AWS who we are: {aws.explain(error).text}")]
    checks += [who(identity), clock(identity, now())]
    try:
        estate = read_estate(settings.estate)
    except Failure as error:
        return [*checks, Check("estate", "fail", error.message)]
    checks += [
        same_account(estate, identity["Account"]),
        _guarded("permissions", lambda: permissions(aws.client("iam"), estate, identity["Arn"])),
        _guarded("quota on-demand", lambda: quota(aws.client("service-quotas"), "quota on-demand", ON_DEMAND_QUOTA)),
        _guarded("quota spot", lambda: quota(aws.client("service-quotas"), "quota spot", SPOT_QUOTA)),
        _guarded("bucket", lambda: bucket(open_storage(f"s3://{estate.bucket}"), estate.bucket)),
        _guarded("lanes", lambda: lanes(open_storage(f"s3://{estate.bucket}"), estate)),
        *(
            _guarded(f"image {arch}", partial(image, arch, path))
            for arch, path in sorted(estate.workers.images.items())
        ),
        _guarded("secrets", lambda: keys(aws.client("ssm"), estate)),
    ]
    return checks


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    """A check, or why it could not be made."""
    try:
        return look()
    except Exception as error:
        text = aws.explain(error).text
        return Check(name, "skip", f"could not be looked at: {text if len(text) <= 160 else text[:159] + '…'}")


def credential_sources(environ: Mapping[str, str]) -> Check:
    """One set of credentials is meant: with keys and a profile at once, the keys win in silence and may be another account's."""
    keys_set = "AWS_ACCESS_KEY_ID" in environ or "AWS_SECRET_ACCESS_KEY" in environ
    profile = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    if keys_set and profile:
        return Check(
            "credentials",
            "fail",
            f"two sets at once: AWS_ACCESS_KEY_ID is set and AWS_PROFILE is {profile!r}; unset one of them",
        )
    if keys_set and ("AWS_ACCESS_KEY_ID" in environ) != ("AWS_SECRET_ACCESS_KEY" in environ):
        return Check("credentials", "fail", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together; one is missing")
    if keys_set and _default_profile(environ):
        return Check("credentials", "warn", "from the environment; the profile `default` has keys too and is not used")
    source = "the environment" if keys_set else f"profile {profile}" if profile else "the default profile or role"
    return Check("credentials", "ok", f"one set, from {source}")


def _default_profile(environ: Mapping[str, str]) -> bool:
    path = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, OSError):
        return False
    return parser.has_option("default", "aws_access_key_id")


def who(identity: Mapping[str, Any]) -> Check:
    """The account and principal that AWS sees."""
    return Check("identity", "ok", f"{identity['Arn']} in account {identity['Account']}")


def clock(answer: Mapping[str, Any], local: datetime) -> Check:
    """This machine's clock against the time in AWS's answer, which has whole seconds."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if not text:
        return Check("clock", "skip", "the answer carried no time")
    skew = (local - parsedate_to_datetime(text).astimezone(UTC)).total_seconds()
    if abs(skew) > SKEW_LIMIT_S:
        direction = "ahead of" if skew > 0 else "behind"
        return Check("clock", "fail", f"{abs(skew):.0f} s {direction} AWS: set the clock (`timedatectl set-ntp true`)")
    return Check("clock", "ok", f"within {max(abs(skew), 1):.0f} s of AWS")


def same_account(estate: Estate, account: str) -> Check:
    """The estate is the caller's own account's."""
    if estate.account != account:
        return Check(
            "estate", "fail", f"{estate.name} is in account {estate.account}, the credentials are for {account}"
        )
    batch = "with Batch" if estate.batch else "without Batch"
    return Check("estate", "ok", f"{estate.name} in {estate.region}, {len(estate.lanes)} lanes, {batch}")


def needed(estate: Estate) -> list[tuple[str, str]]:
    """(action, ARN) of what a researcher cannot do without: one of each kind that a fleet or a Batch job uses."""
    run = f"arn:aws:s3:::{estate.bucket}/2026-01-01-00-00-00-00000000/manifest.json"
    first = next(iter(estate.lanes.values()))
    queue = f"arn:aws:sqs:{estate.region}:{estate.account}:{first.jobs.rsplit('/', 1)[-1]}"
    wanted = [
        ("s3:PutObject", run),
        ("s3:GetObject", run),
        ("s3:ListBucket", f"arn:aws:s3:::{estate.bucket}"),
        ("sqs:SendMessage", queue),
        ("sqs:ReceiveMessage", queue),
        ("iam:PassRole", estate.workers.role),
        ("ec2:CreateFleet", f"arn:aws:ec2:{estate.region}:{estate.account}:fleet/*"),
        ("ec2:DescribeInstances", "*"),
        ("sns:Publish", estate.topic),
    ]
    if estate.batch:
        queues = f"arn:aws:batch:{estate.region}:{estate.account}:job-queue/"
        wanted += [("batch:SubmitJob", queues + name) for name in sorted(estate.batch.queues.values())[:1]]
    return wanted


def principal(arn: str) -> str | None:
    """The IAM ARN whose policies can be simulated, for the ARN that STS reports; None for the account's root."""
    if arn.endswith(":root"):
        return None
    if ":assumed-role/" in arn:
        account, role = arn.split(":")[4], arn.split("/")[1]
        return f"arn:aws:iam::{account}:role/{role}"
    return arn


def permissions(client: Any, estate: Estate, arn: str) -> Check:
    """Policy simulation of what a researcher needs, each action on the ARN that it will meet."""
    source = principal(arn)
    if source is None:
        return Check("permissions", "warn", "the account's root user may do everything: use a role instead")
    denied = []
    for action, resource in needed(estate):
        context = {"iam:PassRole": [("iam:PassedToService", "ec2.amazonaws.com")]}.get(action, [])
        answer = client.simulate_principal_policy(
            PolicySourceArn=source,
            ActionNames=[action],
            ResourceArns=[resource],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in context
            ],
        )
        if any(result["EvalDecision"] != "allowed" for result in answer["EvaluationResults"]):
            denied.append(action)
    if denied:
        return Check(
            "permissions",
            "fail",
            f"{source} may not {', '.join(denied)}: attach the policy inspect-fleet-{estate.name}-researcher",
        )
    return Check("permissions", "ok", f"{len(needed(estate))} actions that a fleet needs are allowed")


def quota(client: Any, name: str, code: str) -> Check:
    """How many vCPUs may run at once. A new account has few, and raising it takes AWS a day."""
    found = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
    if found < WORKER_VCPUS:
        return Check(
            name, "fail", f"{found:.0f} vCPUs: no worker can start; ask for more under Service Quotas, EC2, {code}"
        )
    state: State = "warn" if found < 8 * WORKER_VCPUS else "ok"
    hint = f"; ask for more under Service Quotas, EC2, {code}" if state == "warn" else ""
    return Check(name, state, f"{found:.0f} vCPUs, {found // WORKER_VCPUS:.0f} workers of {WORKER_VCPUS}{hint}")


def bucket(storage: Storage, name: str) -> Check:
    """That the bucket is there and ours, and that a missing key is a 404 and not a 403."""
    try:
        missing = storage.head(layout.lane(f"doctor-{random_names.token_hex(4)}")) is None
    except StorageError as error:
        status = error.fault.status if error.fault else 0
        if status == 403:
            return Check("bucket", "fail", f"s3://{name} answers 403: access denied, or s3:ListBucket is not allowed")
        return Check("bucket", "fail", str(error))
    # A HEAD has no body to tell a missing key from a missing bucket: a listing does.
    try:
        next(iter(storage.list(layout.LANES)), None)
    except StorageError as error:
        return Check("bucket", "fail", str(error))
    return Check("bucket", "ok" if missing else "warn", f"s3://{name} can be read; a missing key is a 404")


def lanes(storage: Storage, estate: Estate) -> Check:
    """How many lanes are free, who holds the others, and whether each has a record at all."""
    owned: list[str] = []
    expired: list[str] = []
    absent: list[str] = []
    for wanted in estate.lane_records():
        try:
            lane = Lane.from_json(storage.get(layout.lane(wanted.name)).body)
        except (Missing, Unreadable):
            absent.append(wanted.name)
            continue
        if lane.fleet_id is not None:
            (expired if lane.until and lane.until < now() else owned).append(lane.name)
    total = len(estate.lanes)
    free = total - len(owned) - len(expired) - len(absent)
    text = f"{free} of {total} free"
    if absent:
        return Check("lanes", "fail", f"{text}; no record of {', '.join(absent)}: run `make apply`")
    if expired:
        return Check("lanes", "warn", f"{text}; past their deadline: {', '.join(expired)} (`ct fleet reap` frees them)")
    return Check("lanes", "ok" if free else "warn", text if free else f"{text}: the next fleet has to wait")


def image(architecture: str, path: str) -> Check:
    """How old the workers' image is, and whether it is a baked one."""
    name = f"image {architecture}"
    ssm, ec2 = aws.client("ssm"), aws.client("ec2")
    ami = ssm.get_parameter(Name=path)["Parameter"]["Value"]
    found = ec2.describe_images(ImageIds=[ami])["Images"]
    if not found:
        return Check(name, "fail", f"{ami} (in {path}) does not exist any more: `ct cloud amis --activate` another one")
    age = (now() - datetime.fromisoformat(found[0]["CreationDate"].replace("Z", "+00:00"))).days
    if found[0].get("OwnerId") == DEBIAN:
        return Check(name, "warn", f"{ami} is the stock Debian image: workers boot in minutes; `make ami` bakes one")
    if age > OLD_IMAGE_DAYS:
        return Check(name, "warn", f"{ami} is {age} days old: `make ami` bakes a new one")
    return Check(name, "ok", f"{ami}, {age} days old")


def keys(client: Any, estate: Estate) -> Check:
    """Which provider keys have a value."""
    listed = secrets.listed(client, estate)
    unset = [secret.name for secret in listed if not secret.is_set]
    if listed and len(unset) == len(listed):
        return Check("secrets", "warn", f"none of {', '.join(unset)} is set: `ies secrets push`")
    text = f"{len(listed) - len(unset)} of {len(listed)} set"
    return Check("secrets", "ok", f"{text}; without a value: {', '.join(unset)}" if unset else text)
