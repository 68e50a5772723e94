"""When the logs of a task's shards are merged: as soon as the last of them has ended. Pure.

Asked by `dispatch`, which sends the messages, and by who launches workers. What a merge comes to is the worker's business.
"""

from evalops.fleet.ledger import JobState, Ledger


def at_once(ledger: Ledger) -> int:
    """How many of the open jobs could run now: all but merges that wait for their shards. What workers are launched for."""
    merges = Merges(ledger)
    return sum(merges.ready(job) for job in ledger.open_jobs)


class Merges:
    """The merging jobs of one fleet that wait for their shards."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held = {job.spec.job_id for job in ledger.open_jobs if not self.ready(job)}

    def ready(self, job: JobState) -> bool:
        """Whether a job has nothing to wait for: all but a merge, whose shards must have ended."""
        return all(self._ledger.jobs[shard].done is not None for shard in job.spec.merges)

    def held(self) -> set[str]:
        """The jobs that wait. A controller that has taken over finds sent what is ready (or lost, which is noticed elsewhere)."""
        return self._held

    def release(self) -> list[JobState]:
        """The jobs to send now because their last shard has ended, each once."""
        found = [job for job in self._ledger.open_jobs if job.spec.job_id in self._held and self.ready(job)]
        self._held.difference_update(job.spec.job_id for job in found)
        return found

    def hopeless(self, job: JobState) -> JobState | None:
        """A failed shard of a merge whose shards have left no log at all, which is then the reason; None where there is one."""
        shards = [self._ledger.jobs[shard] for shard in job.spec.merges]
        if any(shard.done is None or shard.done.log is not None for shard in shards):
            return None
        return next((shard for shard in shards if shard.status == "failed"), None)
