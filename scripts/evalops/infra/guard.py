"""What stops a plan that would hurt: a lane that a fleet owns, a bucket that still holds logs, a registry at which it would
fail when the logs have gone. A bare `terraform apply` or `destroy` cannot know of them, so `ies infra` asks here before it
applies a plan file.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from evalops.infra.estate import REMOVAL
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import Unreadable
from evalworker.storage import Changed, Missing, Storage

_LANE = re.compile(r'module\.lane\["(?P<name>[^"]+)"\]\.aws_sqs_queue\.')
_BUCKET = "aws_s3_bucket.this[0]"
_REGISTRY = "aws_ecr_repository.worker"

_DELETE_BATCH = 1000
"""Versions that S3 deletes in one call."""


def removed_lanes(plan: dict[str, Any]) -> list[str]:
    """Lanes of which the plan removes or replaces a queue, from Terraform's JSON of it."""
    found = (_LANE.match(change["address"]) for change in _deleted(plan))
    return sorted({match["name"] for match in found if match})


def removed_bucket(plan: dict[str, Any]) -> str | None:
    """The name of the estate's own bucket if the plan removes it."""
    return next(
        (change["change"]["before"]["bucket"] for change in _deleted(plan) if change["address"] == _BUCKET), None
    )


def kept_registry(plan: dict[str, Any]) -> str | None:
    """The name of the registry if the plan removes it and AWS would refuse that with an image in it, as older states say."""
    return next(
        (
            change["change"]["before"]["name"]
            for change in _deleted(plan)
            if change["address"] == _REGISTRY and not change["change"]["before"]["force_delete"]
        ),
        None,
    )


def planned_bucket(plan: dict[str, Any]) -> str | None:
    """The bucket that holds the lane records, as the state before the plan knows it; None before the first apply."""
    outputs = plan.get("prior_state", {}).get("values", {}).get("outputs", {})
    value = outputs.get("bucket", {}).get("value")
    return str(value) if value else None


def _deleted(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (change for change in plan.get("resource_changes", []) if "delete" in change["change"]["actions"])


def owned(storage: Storage, names: list[str]) -> list[Lane]:
    """Those of the lanes that a fleet owns, also past its deadline: its last messages may still wait there."""
    found = []
    for name in names:
        try:
            lane = Lane.from_json(storage.get(layout.lane(name)).body)
        except (Missing, Unreadable):
            continue
        if lane.fleet_id not in (None, REMOVAL):
            found.append(lane)
    return found


def fence(storage: Storage, names: list[str]) -> list[Lane]:
    """Take the unowned lanes, so that no fleet can while they are removed. Returns those that a fleet took in between."""
    for name in names:
        try:
            stored = storage.get(layout.lane(name))
            lane = Lane.from_json(stored.body)
        except (Missing, Unreadable):
            continue
        if lane.fleet_id is None:
            held = lane.model_copy(update={"fleet_id": REMOVAL, "owner": "ies infra"})
            try:
                storage.replace(layout.lane(name), held.to_bytes(), stored.etag)
            except Changed:
                pass
    return owned(storage, names)


def unfence(storage: Storage, names: list[str]) -> None:
    """Give back what `fence` took, when the removal did not happen."""
    for name in names:
        try:
            stored = storage.get(layout.lane(name))
            lane = Lane.from_json(stored.body)
            if lane.fleet_id == REMOVAL:
                free = lane.model_copy(update={"fleet_id": None, "owner": ""})
                storage.replace(layout.lane(name), free.to_bytes(), stored.etag)
        except (Missing, Unreadable, Changed):
            continue


def say_owned(lanes: list[Lane]) -> str:
    """Who holds what, in one clause."""
    return "; ".join(
        f"{lane.name} is owned by {lane.fleet_id} of {lane.owner or 'somebody'}"
        + (f" until {lane.until:%Y-%m-%d %H:%M} UTC" if lane.until else "")
        for lane in lanes
    )


HOUSEKEEPING = ("lanes/", "code/", "worker/", "timings/", "locks/")
"""What the scripts put there themselves and can make again; everything else is somebody's."""


def remaining_logs(storage: Storage) -> list[str]:
    """The first few places that hold more than housekeeping: logs, runs, and whatever else a person put there."""
    found: list[str] = []
    for info in storage.list(""):
        top, slash, _ = info.key.partition("/")
        if f"{top}{slash}" not in (*HOUSEKEEPING, *found):
            found.append(f"{top}{slash}")
        if len(found) == 3:
            break
    return found


def empty_bucket(client: Any, bucket: str, report: Callable[[str], None]) -> int:
    """Delete every version of every object; returns how many. Only after a person has said so."""
    count = 0
    pages = client.get_paginator("list_object_versions").paginate(
        Bucket=bucket, PaginationConfig={"PageSize": _DELETE_BATCH}
    )
    for page in pages:
        versions = page.get("Versions", []) + page.get("DeleteMarkers", [])
        if not versions:
            continue
        objects = [{"Key": item["Key"], "VersionId": item["VersionId"]} for item in versions]
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        count += len(objects) - len(answer.get("Errors", []))
        for error in answer.get("Errors", [])[:3]:
            report(f"cannot delete {error['Key']}: {error['Code']}")
    return count
