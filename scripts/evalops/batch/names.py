"""Names of Batch jobs, legal and unique whatever a task or model is called, and links into the AWS consoles. Pure."""

import re
from collections.abc import Sequence
from urllib.parse import quote

from evalworker.contract.documents import JobSpec
from evalworker.contract.ids import check_run_id, slug

LONGEST = 128
"""Characters of a job's name; Batch takes letters, digits, `-` and `_`, the first a letter or digit."""

_RUN_ID = re.compile(r"(\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-[0-9a-f]{8})-r\d+(-\d+)?$")
_ROOM = 30
"""Characters each of task and model in a name: the run's id, which makes it unique, needs the rest."""


def job_name(run_id: str, round_: int, jobs: Sequence[JobSpec], part: int = 0) -> str:
    """The name of one submission: what it runs, for people, then the run, the round and the part, which make it unique."""
    tasks = list(dict.fromkeys(job.name.rsplit("/", 1)[-1] for job in jobs))
    models = list(dict.fromkeys(job.model for job in jobs))
    named = [_short(names) for names in (tasks, models)]
    tail = f"{slug(check_run_id(run_id))}-r{round_}" + (f"-{part}" if part else "")
    return f"{'-'.join(named)}-{tail}"[-LONGEST:].lstrip("-_")


def _short(names: Sequence[str]) -> str:
    more = f"-and-{len(names) - 1}-more" if len(names) > 1 else ""
    return slug(names[0], _ROOM - len(more)).strip("-_") + more


def run_of(name: str) -> str | None:
    """The run that a job of this name belongs to; None for a job that is none of ours."""
    found = _RUN_ID.search(name)
    return found[1] if found else None


def job_link(region: str, job_id: str) -> str:
    """The job in the Batch console; a child of an array leads to its own page."""
    return f"{_console(region)}/batch/home?region={region}#jobs/detail/{quote(job_id, safe=':')}"


def logs_link(region: str, group: str, stream: str | None = None) -> str:
    """The job's log stream in the CloudWatch console; its group as long as there is no stream."""
    link = f"{_console(region)}/cloudwatch/home?region={region}#logsV2:log-groups/log-group/{_escaped(group)}"
    return link if stream is None else f"{link}/log-events/{_escaped(stream)}"


def _console(region: str) -> str:
    if region.startswith("cn-"):
        return f"https://{region}.console.amazonaws.cn"
    if region.startswith("us-gov-"):
        return f"https://{region}.console.amazonaws-us-gov.com"
    return f"https://{region}.console.aws.amazon.com"


def _escaped(text: str) -> str:
    """CloudWatch's own form: escaped twice, with `$` in the place of the outer `%`."""
    return quote(quote(text, safe=""), safe="").replace("%", "$")
