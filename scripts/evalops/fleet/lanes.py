"""Who owns which lane, until when. Exclusive by conditional writes: an unowned lane is taken by replacing exactly the record that was read.

Ownership lasts to the fleet's deadline, not to a heartbeat, so a dead controller's fleet keeps its queues while its workers work.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from urllib.parse import urlsplit

from evalops.fleet.stream import Fenced
from evalops.ui import note
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import Unreadable, now
from evalworker.queues import Queue, QueueError
from evalworker.storage import AlreadyExists, Changed, Missing, Storage

LISTEN_S = 2.0
"""For a server of this machine to take a connection."""


class NoLane(RuntimeError):
    """No lane is free; the text says who holds which."""


def lanes(storage: Storage) -> Iterator[tuple[Lane, str]]:
    """All lane records with their tags, in the order of their names; one that cannot be read is named and passed over."""
    for info in sorted(storage.list(layout.LANES), key=lambda info: info.key):
        try:
            stored = storage.get(info.key)
            yield Lane.from_json(stored.body), stored.etag
        except Missing:
            continue
        except Unreadable as error:
            note(
                f"the lane record {info.key} cannot be read ({error}); `ies infra apply` writes it anew once it is removed"
            )


def register(storage: Storage, lane: Lane, fleet_id: str, owner: str, until: datetime) -> Lane:
    """Record a lane that was made for one fleet alone (the embedded default)."""
    owned = lane.model_copy(update={"fleet_id": fleet_id, "owner": owner, "until": until})
    try:
        storage.create(layout.lane(lane.name), owned.to_bytes())
    except AlreadyExists:
        storage.put(layout.lane(lane.name), owned.to_bytes())
    return owned


def find(storage: Storage, fleet_id: str) -> Lane | None:
    """The lane that a fleet owns."""
    return next((lane for lane, _ in lanes(storage) if lane.fleet_id == fleet_id), None)


def held(storage: Storage, lane: Lane) -> bool:
    """Whether a lane is still what its fleet took. A later round of the same fleet has taken it anew, with a deadline of its own."""
    return _ours(storage, lane) is not None


def _ours(storage: Storage, lane: Lane) -> tuple[Lane, str] | None:
    """A lane's record and its tag, None if it is not as it was taken."""
    if not lane.name:
        return None
    try:
        stored = storage.get(layout.lane(lane.name))
        found = Lane.from_json(stored.body)
    except (Missing, Unreadable):
        return None
    return (found, stored.etag) if (found.fleet_id, found.until) == (lane.fleet_id, lane.until) else None


def answers(lane: Lane) -> bool:
    """Whether a lane's queues can be reached: those of this machine end with it, and then nothing listens."""
    try:
        if lane.endpoint is not None:
            where = urlsplit(lane.endpoint)
            socket.create_connection((where.hostname or "", where.port or 80), LISTEN_S).close()
        Queue(aws.sqs(lane), lane.events).counts()
    except (OSError, QueueError):
        return False
    return True


def take(
    storage: Storage, fleet_id: str, owner: str, until: datetime, close: Callable[[Lane], None] = lambda _: None
) -> Lane:
    """Take the first lane that nobody owns, or whose owner is past its deadline; raises NoLane with who holds what.

    Args:
        close: ends the fleet of a lane that is past its deadline (its last messages go to its own stream) and releases the lane,
            or leaves it to the controller that is doing so.
    """
    held: list[str] = []
    for lane, etag in lanes(storage):
        if lane.endpoint is not None:
            continue
        if lane.fleet_id not in (None, fleet_id):
            if not expired(lane):
                until_text = f" until {lane.until:%Y-%m-%d %H:%M} UTC" if lane.until else ""
                held.append(f"{lane.name}: {lane.fleet_id} of {lane.owner or 'nobody'}{until_text}")
                continue
            try:
                close(lane)
            except (Changed, Fenced):
                held.append(f"{lane.name}: somebody else is ending {lane.fleet_id}")
                continue
            stored = storage.get(layout.lane(lane.name))
            lane, etag = Lane.from_json(stored.body), stored.etag
            if lane.fleet_id is not None:  # it is still being ended, or somebody else was faster
                held.append(f"{lane.name}: {lane.fleet_id} of {lane.owner or 'nobody'}")
                continue
        owned = lane.model_copy(update={"fleet_id": fleet_id, "owner": owner, "until": until})
        try:
            storage.replace(layout.lane(lane.name), owned.to_bytes(), etag)
            return owned
        except Changed:
            continue
    raise NoLane("no lane is free" + (f" ({'; '.join(held)})" if held else ": the estate has none"))


def release(storage: Storage, lane: Lane) -> None:
    """Give a lane back, if it is still ours; one made for this fleet alone is removed."""
    if (ours := _ours(storage, lane)) is None:
        return
    found, etag = ours
    if lane.endpoint is not None:
        storage.delete(layout.lane(lane.name))
        return
    free = found.model_copy(update={"fleet_id": None, "owner": "", "until": None})
    with contextlib.suppress(Changed):  # somebody else has it by now
        storage.replace(layout.lane(lane.name), free.to_bytes(), etag)


def expired(lane: Lane) -> bool:
    """Whether a lane's owner is past its deadline."""
    return lane.fleet_id is not None and lane.until is not None and lane.until < now()
