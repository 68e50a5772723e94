"""Looks at many Batch jobs at once: plain jobs, arrays and their children, a hundred to a call.

One cycle over N children takes at most 1 + N/100 calls, because arrays and children share them and ended ones are not asked for
again. It decides nothing; errors of the calls go to the caller.
"""

from collections.abc import Iterable
from typing import Any

from evalops.batch import states
from evalworker.contract.documents import BatchSubmission

PER_CALL = 100
"""Job ids that one DescribeJobs takes."""

MISSES = 3
"""Looks after which a job that Batch does not know is taken for forgotten: a fresh one may not be known at once."""


class Follower:
    """The jobs of one submission, as they were at the last look.

    Attributes:
        jobs: what Batch said last, by job id. forgotten: ids that Batch does not know.
        calls: DescribeJobs calls so far.
    """

    def __init__(self, submissions: Iterable[BatchSubmission]) -> None:
        self._arrays = {each.job_id: each.size for each in submissions if each.size is not None}
        self._plain = [each.job_id for each in submissions if each.size is None]
        self.jobs: dict[str, states.Job] = {}
        self.forgotten: set[str] = set()
        self._missed: dict[str, int] = {}
        self.calls = 0

    @property
    def leaves(self) -> list[str]:
        """The ids of what actually runs."""
        return [*self._plain, *(child for array in self._arrays for child in self._children(array))]

    def _children(self, array: str) -> list[str]:
        return [f"{array}:{index}" for index in range(self._arrays[array] or 0)]

    @property
    def open(self) -> list[str]:
        """The ids that have not ended and are not forgotten; an array's children are asked for once it has made them."""
        found = [job for job in (*self._arrays, *self._plain) if self._is_open(job)]
        for array in self._arrays:
            if array in self.forgotten:
                continue
            parent = self.jobs.get(array)
            if parent is None or not (parent.ended or any((parent.children or {}).values())):
                continue  # its children are not there yet
            found += [child for child in self._children(array) if self._is_open(child)]
        return found

    def _is_open(self, job: str) -> bool:
        return job not in self.forgotten and not (job in self.jobs and self.jobs[job].ended)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self.open

    def look(self, client: Any) -> list[states.Job]:
        """One cycle; the jobs whose state or reason has changed. Raises what botocore raises."""
        wanted, changed = self.open, []
        for start in range(0, len(wanted), PER_CALL):
            part = wanted[start : start + PER_CALL]
            self.calls += 1
            seen = {entry["jobId"]: states.job(entry) for entry in client.describe_jobs(jobs=part)["jobs"]}
            for name in part:
                if name not in seen:
                    self._miss(name)
                    continue
                self._missed.pop(name, None)
                before, now = self.jobs.get(name), seen[name]
                self.jobs[name] = now
                if before is None or (before.state, before.reason) != (now.state, now.reason):
                    changed.append(now)
        return changed

    def _miss(self, name: str) -> None:
        self._missed[name] = self._missed.get(name, 0) + 1
        parent = self.jobs.get(name.split(":")[0])
        if self._missed[name] >= MISSES or (":" in name and parent is not None and parent.ended):
            self.forgotten.add(name)

    def of(self, ids: Iterable[str]) -> list[states.Job]:
        """What is known of these jobs."""
        return [self.jobs[name] for name in ids if name in self.jobs]

    @property
    def runs(self) -> list[states.Job]:
        """What is known of plain jobs and children."""
        return self.of(self.leaves)
