"""Which tasks are run in shards, and how their samples are divided. Pure.

Called by the planner, which knows the samples' ids. A task that is sharded becomes a job for each shard and one that merges their logs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evalworker.contract.documents import JobSpec, Shard
from evalworker.contract.ids import SampleId, sample_key

LEAST = 600
"""Samples (× epochs) of a shard that nobody has asked for: below, starting and merging costs more than it brings."""


@dataclass(frozen=True)
class Wish:
    """What the user asks for.

    Attributes:
        size: samples in a shard at the most. count: shards of each task; 1 keeps every task whole.
        slots: jobs that run at once; without the two others a task is divided when it would keep one of them busy for longer than the
            others.
    """

    size: int | None = None
    count: int | None = None
    slots: int = 1

    @property
    def asked(self) -> bool:
        """Whether the user has asked for shards."""
        return self.size is not None or (self.count is not None and self.count > 1)


def how_many(wish: Wish, samples: int, ids: int, total: int) -> int:
    """Shards of a task with so many samples (× epochs) and sample ids, in a run of `total` samples; 1 keeps it whole."""
    if wish.size is not None:
        return math.ceil(ids / wish.size)
    if wish.count is not None:
        return min(wish.count, ids)
    even_share = math.ceil(total / wish.slots)
    return max(1, min(math.ceil(samples / even_share), samples // LEAST, ids))


def divide(ids: Sequence[SampleId], count: int, same: Callable[[SampleId], str]) -> list[list[SampleId]]:
    """The ids in `count` slices that differ by one sample at the most, each in the order of `ids`; fewer if there are too few.

    Neighbours go to different slices, because datasets are often sorted by difficulty. Ids that are the `same` to Inspect stay together.
    """
    groups: dict[str, list[SampleId]] = {}
    for each in ids:
        groups.setdefault(same(each), []).append(each)
    place = {id_: number % count for number, group in enumerate(groups.values()) for id_ in group}
    slices: list[list[SampleId]] = [[] for _ in range(count)]
    for each in ids:
        slices[place[each]].append(each)
    return [part for part in slices if part]


def shard_jobs(
    job: JobSpec, ids: Sequence[SampleId], slices: list[list[SampleId]], id_of: Callable[[Any], str]
) -> list[JobSpec]:
    """The jobs of a task that is run in these slices: the shards, then the one that merges them, which is `job` itself.

    Args:
        ids: of all samples, in the dataset's order.
        id_of: the id of the job for a shard's name. The name says which of how many it is and not which ids it has, so that a resume
            finds it again.
    """
    shards = [
        job.model_copy(
            update={
                "job_id": id_of(f"{index + 1}/{len(slices)}"),
                "samples": len(part) * job.epochs,
                "shard": Shard(index=index, of=len(slices), ids=part),
            }
        )
        for index, part in enumerate(slices)
    ]
    merges = [shard.job_id for shard in shards]
    return [*shards, job.model_copy(update={"merges": merges, "order": _order(ids, slices)})]


def _order(ids: Sequence[SampleId], slices: list[list[SampleId]]) -> list[int]:
    """The slice of each id; nothing when each slice has one in turn, as it has unless ids that are the same to Inspect stayed together."""
    place = {sample_key(each, 1): index for index, part in enumerate(slices) for each in part}
    order = [place[sample_key(each, 1)] for each in ids]
    return [] if order == [number % len(slices) for number in range(len(ids))] else order
