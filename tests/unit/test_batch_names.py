"""Names of Batch jobs and links into the consoles."""

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalops.batch import names
from evalworker.contract.documents import JobSpec
from evalworker.contract.ids import new_run_id

RUN = "2026-11-29-14-05-33-1a2b3c4d"
LEGAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def spec(task: str = "arithmetic", model: str = "openai/gpt-4o-mini") -> JobSpec:
    return JobSpec(job_id="0" * 16, task=task, name=task, model=model, samples=1)


def test_a_name_tells_what_runs_and_of_which_run() -> None:
    name = names.job_name(RUN, 1, [spec("inspect_evals/pubmedqa")])
    assert name == f"pubmedqa-openai-gpt-4o-mini-{RUN}-r1"
    several = names.job_name(RUN, 2, [spec("a"), spec("b"), spec("a", "x/y")], part=3)
    assert several == f"a-and-1-more-openai-gpt-4o-mini-and-1-more-{RUN}-r2-3"
    assert names.run_of(name) == names.run_of(several) == RUN


@given(st.text(max_size=300), st.text(max_size=300), st.integers(1, 999), st.integers(0, 999))
def test_any_name_is_legal_and_leads_back(task: str, model: str, round_: int, part: int) -> None:
    run = new_run_id()
    name = names.job_name(run, round_, [spec(task, model)], part)
    assert LEGAL.fullmatch(name)
    assert names.run_of(name) == run


def test_a_name_of_300_characters_is_cut_and_still_unique() -> None:
    long = spec("t" * 300, "provider/" + "m" * 300)
    found = {names.job_name(RUN, round_, [long], part) for round_ in (1, 2) for part in (0, 1)}
    assert len(found) == 4 and all(LEGAL.fullmatch(name) for name in found)


@pytest.mark.parametrize("name", ["someone-elses-job", "x-2026-11-29-14-05-33", f"{RUN}", ""])
def test_other_jobs_are_nobodys_run(name: str) -> None:
    assert names.run_of(name) is None


def test_links() -> None:
    job = "5b2152b4-7c28-4d95-9303-45ebe8b08a9b:7"
    assert names.job_link("eu-west-2", job) == (
        f"https://eu-west-2.console.aws.amazon.com/batch/home?region=eu-west-2#jobs/detail/{job}"
    )
    group = "https://us-east-1.console.aws.amazon.com/cloudwatch/home?region=us-east-1#logsV2:log-groups/log-group/$252Fa$252Fb"
    assert names.logs_link("us-east-1", "/a/b") == group
    link = names.logs_link("us-east-1", "/a/b", "job/default/é 1")
    assert link.startswith(group + "/log-events/")
    assert unquote(unquote(link.rsplit("/", 1)[1].replace("$", "%"))) == "job/default/é 1"
    assert "console.amazonaws.cn/" in names.job_link("cn-north-1", job)
    assert "console.amazonaws-us-gov.com/" in names.job_link("us-gov-west-1", job)
