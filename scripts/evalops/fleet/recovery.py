"""Finds jobs whose message is in no queue any more: a controller was killed between deciding on an attempt and sending it. Pure.

SQS counts approximately, so a loss is believed only when it has been seen several times in a row. A message sent twice is harmless (an
attempt's end is recorded once); a job that nobody is ever told of would keep its fleet waiting for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from evalworker.queues import Counts

SIGHTINGS = 3
"""Looks in a row that must agree."""


@dataclass
class LostMessages:
    """Remembers how often each job has been missing."""

    _seen: dict[str, int] = field(default_factory=dict)

    def look(self, *, open_jobs: Iterable[str], running: set[str], scheduled: set[str], counts: Counts) -> list[str]:
        """The jobs to send again.

        Args:
            open_jobs: jobs that have not ended.
            running: jobs that living workers have named in their last heartbeats.
            scheduled: jobs that this controller will send a message for.
            counts: of the jobs queue. While a message waits there, or is held by a worker that has not named its job, any open
                job may be the one it is for.
        """
        if counts.visible or counts.delayed or counts.in_flight > len(running):
            self._seen.clear()
            return []
        missing = [job for job in open_jobs if job not in running and job not in scheduled]
        self._seen = {job: self._seen.get(job, 0) + 1 for job in missing}
        lost = [job for job, times in self._seen.items() if times >= SIGHTINGS]
        for job in lost:
            del self._seen[job]
        return lost
