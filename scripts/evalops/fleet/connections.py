"""The model connections of a whole fleet (to each model), divided over its workers by the jobs that they run. Pure.

The heartbeat writes the shares into control.json, each worker divides its own over its jobs. A worker whose calls are refused for
their rate gets less before anybody else does, and its share back step by step. Times are seconds of one monotonic clock, passed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evalops.fleet.roster import Seen

LOWERED = 0.5
"""What is left of a worker's share after refused calls."""

RAISED = 1.25
"""What it grows by in each calm spell."""

CALM_S = 30.0
"""How long no call must have been refused for a share to grow again."""

LEAST = 1 / 16
"""A worker's share is never lowered to less than this part of it."""


@dataclass
class _Worker:
    """`part` of its share that a worker has, `refused` calls at the last look, and when its part last changed."""

    part: float = 1.0
    refused: int = 0
    since: float = 0.0


@dataclass
class Connections:
    """The division of `total` connections; None divides nothing."""

    total: int | None
    shares: dict[str, int] = field(default_factory=dict)
    _workers: dict[str, _Worker] = field(default_factory=dict)

    def look(self, seen: Mapping[str, Seen], at: float) -> bool:
        """Divide anew by what the workers last said; whether anything has changed."""
        if self.total is None:
            return False
        online = {name: worker for name, worker in seen.items() if worker.online}
        self._workers = {name: self._workers.get(name, _Worker(since=at)) for name in online}
        for name, worker in online.items():
            self._feel(self._workers[name], worker.refused, at)
        before, self.shares = self.shares, self._divide(online)
        return self.shares != before

    def _feel(self, worker: _Worker, refused: int, at: float) -> None:
        """Less after refused calls, more after a calm spell."""
        if refused > worker.refused:
            worker.part, worker.since = max(LEAST, worker.part * LOWERED), at
        elif worker.part < 1 and at - worker.since >= CALM_S:
            worker.part, worker.since = min(1.0, worker.part * RAISED), at
        worker.refused = refused

    def _divide(self, online: Mapping[str, Seen]) -> dict[str, int]:
        """A share by the number of jobs; an idle worker has that of one job, which it may take any moment. None gets less than one."""
        assert self.total is not None
        weights = {name: max(1, len(worker.running)) for name, worker in sorted(online.items())}
        left, jobs, shares = self.total, sum(weights.values()), {}
        for name, weight in weights.items():
            fair = round(left * weight / jobs)
            left, jobs = left - fair, jobs - weight
            shares[name] = max(1, int(fair * self._workers[name].part))
        return shares
