"""`evalops.logs.rows` and `choose`: states, the owner, the line on top, and which of several logs counts."""

from datetime import UTC, datetime, timedelta

import pytest

from evalops.logs import rows
from evalops.logs.choose import Chosen, choose
from evalops.logs.facts import Facts
from evalops.logs.reading import Listed
from evalops.logs.survey import _writes
from evalworker.contract.documents import Control, JobSpec
from evalworker.storage import Info

NOW = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)


def _listed(name="a.eval", age_s=10.0, **facts):
    values = {
        "status": "success",
        "identity": "i",
        "task": "t",
        "model": "m/x",
        "total": 4,
        "completed": 4,
        "errored": 0,
    }
    values |= {"has_results": True} | facts
    return Listed(Info(name, 100, "e", NOW - timedelta(seconds=age_s)), Facts(**values))


def _around(**values):
    return rows.Surroundings(now=NOW, **values)


def _row(listed, **around):
    return rows.rows([Chosen(listed)], _around(**around), lambda model: None)[0]


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "success"),
        ({"completed": 3, "errored": 1}, "partial"),
        ({"completed": 0, "errored": 4}, "error"),
        ({"has_results": False}, "error"),
        ({"status": "error"}, "error"),
        ({"status": "cancelled", "completed": 1}, "cancelled"),
        ({"status": "unreadable", "identity": ""}, "unreadable"),
        ({"status": "unreadable", "replaced": True}, "running"),
    ],
)
def test_states_of_ended_logs(facts, state):
    assert _row(_listed(**facts)).state == state


@pytest.mark.parametrize(
    ("alive", "age_s", "state"),
    [
        (True, 9999, "running"),
        (False, 1, "dead"),
        (None, 60, "running"),
        (None, rows.STALE_S + 1, "dead"),
    ],
)
def test_a_started_log_runs_while_its_owner_lives(alive, age_s, state):
    row = _row(_listed(status="started", completed=None, errored=None, logged=2, age_s=age_s), alive=alive)
    assert (row.state, row.completed) == (state, 2)


def test_what_is_written_into_the_buffer_counts_as_a_write():
    listed = _listed(status="started", completed=None, age_s=rows.STALE_S * 2)
    assert _row(listed, writes={"a.eval": NOW - timedelta(seconds=5)}).state == "running"


@pytest.mark.parametrize("prefix", ["", "logs/working/R/"])
def test_the_buffer_of_a_log_lies_beside_it(prefix):
    key = f"{prefix}.buffer/2026-11-29T14-00-00_t_x/segment.1.zip"
    assert _writes({key: Info(key, 1, "e", NOW)}) == {f"{prefix}2026-11-29T14-00-00_t_x.eval": NOW}
    assert _writes({"a/b.json": Info("a/b.json", 1, "e", NOW)}) == {}


def _control(**values):
    base = {"fleet_id": "f", "round": 1, "state": "running", "deadline": NOW + timedelta(hours=1), "beat": NOW}
    base["controller"] = "elsewhere:1"
    return Control(**(base | values))


@pytest.mark.parametrize(
    ("control", "process", "alive"),
    [
        (None, None, None),
        (_control(), None, True),
        (_control(state="ended"), None, False),
        (_control(), False, False),
        (_control(deadline=NOW - timedelta(seconds=1)), None, False),
        (_control(beat=NOW - timedelta(hours=1)), None, None),
    ],
)
def test_the_owner(control, process, alive):
    assert rows.owner(control, NOW, process)[0] is alive


def _job(name="t", model="m/x", **args):
    return rows.Job(JobSpec(job_id="0" * 16, task=f"f.py@{name}", name=name, model=model, samples=4, task_args=args))


def test_a_planned_job_without_a_log_waits_and_one_with_a_log_has_one_row():
    found = rows.rows([Chosen(_listed(task="pkg/t"))], _around(planned=[_job(), _job("u")]), lambda model: None)
    assert [(row.task, row.state) for row in found] == [("pkg/t", "success"), ("u", "waiting")]


def test_two_jobs_of_one_task_take_the_logs_of_their_own_arguments():
    logs = [
        Chosen(_listed("a.eval", identity="1", task_args={"n": 1, "d": 0})),
        Chosen(_listed("b.eval", identity="2", task_args={"n": 2})),
    ]
    found = rows.rows(logs, _around(planned=[_job(n=2), _job(n=1), _job(n=3)]), lambda model: None)
    assert [(row.args.get("n"), row.state) for row in found] == [(1, "success"), (2, "success"), (3, "waiting")]


def test_two_tasks_of_one_name_take_the_logs_of_their_own_files():
    logs = [
        Chosen(_listed("a.eval", identity="1", file="v/f.py", status="error")),
        Chosen(_listed("b.eval", identity="2", file="f.py")),
    ]
    jobs = [rows.Job(_job().spec.model_copy(update={"task": f"{name}.py@t"})) for name in ("f", "v/f", "third")]
    found = rows.rows(logs, _around(planned=jobs), lambda model: None)
    seen = [(row.file, row.state, rows.file_beside(row, found)) for row in found]
    assert seen == [("f.py", "success", "f.py"), ("third.py", "waiting", "third.py"), ("v/f.py", "error", "v/f.py")]
    assert rows.fits(jobs[0].spec, _listed(file="").facts), "an old log, or one of a package, does not say"


def test_jobs_that_ended_without_a_log_and_jobs_that_run():
    jobs = [
        rows.Job(_job().spec, ended="failed: oom"),
        rows.Job(_job("u").spec, ended="cancelled: cancelled"),
        rows.Job(_job("v").spec, completed=2, last=NOW),
        rows.Job(_job("w").spec, partial=Chosen(_listed(task="w", status="started", completed=None, logged=1))),
    ]
    alive = {row.task: row.state for row in rows.rows([], _around(planned=jobs, alive=True), lambda model: None)}
    assert alive == {"t": "error", "u": "cancelled", "v": "running", "w": "running"}
    dead = {
        row.task: row.state
        for row in rows.rows([], _around(planned=jobs, alive=False, owner="gone"), lambda model: None)
    }
    assert dead == {"t": "error", "u": "cancelled", "v": "dead", "w": "dead"}


def _headline(listed, planned=(), **around):
    place = _around(planned=planned, **around)
    return rows.headline(rows.rows([Chosen(one) for one in listed], place, lambda model: None), place, "RUN")


def test_the_line_on_top_says_why_nothing_happens():
    started = {"status": "started", "completed": None, "logged": 1}
    assert _headline([]).startswith("No logs and no plan")
    assert _headline([_listed()]) == "Finished: 1 success."
    assert _headline([_listed(**started)], alive=True).startswith("Running (1 running).")
    assert "Nothing has been written for 10 min" in _headline([_listed(age_s=600, **started)], alive=True)
    assert _headline([], [_job()], alive=True, owner="o").startswith("Waiting for a worker to start, o")
    dead = _headline([_listed(**started)], alive=False, owner="its process is gone")
    assert dead == "Nothing is running: its process is gone (1 dead). To go on: `ies run local --run-id RUN`"
    far = _headline([_listed(**started)], alive=False, owner="its process is gone", backend="ec2")
    assert far.endswith("To go on: `ct run eval --ec2 --run-id RUN` or `ies run local --run-id RUN`")
    assert "not all well: 1 error" in _headline([_listed(status="error")])
    allowed = "Finished: 1 partial. 1 sample did not complete, which the run's options allow: a retry runs none again."
    assert _headline([_listed(completed=3, errored=1)]) == allowed


def _choice(*listed):
    return [one.log.name for one in choose(listed)]


def test_success_counts_before_samples_and_samples_before_time():
    old, new = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
    good = _listed("good", created=old)
    more = _listed("more", status="error", completed=4, created=new)
    assert _choice(more, good) == ["good"]
    hollow = _listed("hollow", completed=0, errored=4, created=new)
    some = _listed("some", status="error", completed=2, created=old)
    assert _choice(hollow, some) == ["some"]
    assert _choice(_listed("late", completed=2, created=new), _listed("full", completed=4, created=old)) == ["full"]
    assert _choice(_listed("older", created=old), _listed("newer", created=new)) == ["newer"]


def test_zero_samples_are_fewer_than_some():
    assert _choice(_listed("zero", status="error", completed=0), _listed("one", status="error", completed=1)) == ["one"]


def test_other_experiments_and_unreadable_logs_stand_for_themselves():
    listed = [
        _listed("a", identity="1"),
        _listed("b", identity="2"),
        _listed("c", identity="", status="unreadable"),
        _listed("d", identity="", status="unreadable"),
    ]
    assert len(choose(listed)) == 4
    assert [len(one.superseded) for one in choose([_listed("a"), _listed("b"), _listed("c")])] == [2]
