"""The fork server as an agent uses it: user code that ends it or starts threads in it makes jobs slower, never wrong."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from evalworker import job
from evalworker.contract.documents import JobSpec
from evalworker.contract.messages import SampleDone, read_from_worker
from evalworker.process import CODE, INSPECT, SPAWN, JobProcess, Launcher, LauncherClosed
from evalworker.processes import alive
from evalworker.scripted_answers import REFUSAL

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
PATIENCE_S = 180.0
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

{prelude}

@task
def sums():
    return Task(dataset=[Sample(id=1, input="What is 1 + 1?", target="2")], scorer=includes())
"""
IN_A_JOB = "'INSPECT_FLEET_JOB' in __import__('os').environ"

Made = Callable[..., Launcher]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes launchers whose run's code begins with `prelude`, and ends their servers."""
    launchers: list[Launcher] = []

    def make(prelude: str = "", *, fork: bool = True, environment: dict[str, str] | None = None) -> Launcher:
        (tmp_path / "sums.py").write_text(TASK.format(prelude=prelude))
        launchers.append(Launcher(tmp_path, [str(tmp_path)], ["sums.py@sums"], environment or {}, [], fork=fork))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close()


def order(folder: Path, name: str = "a") -> job.Order:
    logs = folder / name / "logs"
    logs.mkdir(parents=True)
    return job.Order(
        fleet_id=FLEET,
        round=1,
        spec=JobSpec(job_id="00000000000000aa", task="sums.py@sums", name="sums", model="scripted/good", samples=1),
        attempt=1,
        instance_id="w",
        arguments={"retry_attempts": 0, "display": "none"},
        model="scripted/good",
        path=[str(folder)],
        log_dir=str(logs),
        share=1,
    )


def follow(process: JobProcess) -> tuple[job.JobEnd | None, list[SampleDone]]:
    """What a job says until it is gone."""
    end, samples, deadline = None, [], time.monotonic() + PATIENCE_S
    open_ = [process.pipe, process.output]
    while True:
        ready = wait([*open_, process.sentinel], timeout=1.0)
        for source in [source for source in open_ if source in ready]:
            try:
                data = os.read(source.fileno(), 65536) if source is process.output else source.recv_bytes()
            except (EOFError, OSError):
                data = b""
            if not data:
                open_.remove(source)
            elif source is process.pipe and data[:1] == job.END:
                end = job.JobEnd.model_validate_json(data[1:])
            elif source is process.pipe and data[:1] == job.SAMPLE:
                message = read_from_worker(data[1:].decode())
                assert isinstance(message, SampleDone)
                samples.append(message)
        if process.sentinel in ready and not set(open_) & set(ready):
            return end, samples
        assert time.monotonic() < deadline


def works(launcher: Launcher, folder: Path, name: str = "a") -> int | None:
    process = launcher.start(order(folder, name))
    end, samples = follow(process)
    status = launcher.finish(process)
    process.close()
    if end is not None:
        assert (end.log_status, end.samples.completed) == ("success", 1)
        assert [sample.sample_id for sample in samples] == [1]
    return status


def test_a_job_is_forked_from_the_warm_server(made: Made, tmp_path: Path) -> None:
    """A thread that ends by itself (an event loop's helper) does not make the server useless: it is waited for.

    What the server has in memory is out of reach of a job's garbage collection, which would copy all of it.
    """
    thread = "threading.Thread(target=time.sleep, args=(0.5,)).start()"
    frozen = "__import__('gc').get_freeze_count() > 0"
    launcher = made(f"import threading, time\nif not {IN_A_JOB}: {thread}\nelse: assert {frozen}")
    assert works(launcher, tmp_path) == 0
    assert launcher._level == CODE


STUBBORN = """
from inspect_ai.solver import Generate, TaskState, solver

@solver
def second_fails():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == 2:
            raise ValueError("never")
        return await generate(state)
    return solve

@task
def stubborn():
    samples = [Sample(id=id_, input="What is 1 + 1?", target="2") for id_ in (1, 2)]
    return Task(dataset=samples, solver=second_fails(), scorer=includes())
"""


def test_a_jobs_tries_leave_one_log(made: Made, tmp_path: Path) -> None:
    """Each try's log has all finished samples again: of a gigabyte's job, the disk must not hold one for each."""
    launcher, given = made(STUBBORN), order(tmp_path)
    spec = given.spec.model_copy(update={"task": "sums.py@stubborn", "name": "stubborn", "samples": 2})
    more = {"retry_attempts": 3, "retry_cleanup": False, "continue_on_fail": True}
    process = launcher.start(dataclasses.replace(given, spec=spec, arguments=given.arguments | more))
    end, samples = follow(process)
    launcher.finish(process)
    process.close()
    assert end is not None
    assert (end.log_status, end.samples.completed, end.samples.errored) == ("error", 1, 1)
    assert [sample.sample_id for sample in samples].count(2) == 4, "there were four tries"
    assert [str(path) for path in Path(given.log_dir).glob("*.eval")] == [end.log_path]


def test_a_killed_server_is_replaced_and_its_job_is_seen_gone(made: Made, tmp_path: Path) -> None:
    launcher = made(f"if {IN_A_JOB}: __import__('time').sleep(600)")
    process = launcher.start(order(tmp_path))
    from multiprocessing.forkserver import _forkserver

    os.kill(_forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert wait([process.sentinel], timeout=PATIENCE_S)
    assert alive(process.pid), "the job lives on without its server"
    assert launcher.finish(process) is None
    assert not alive(process.pid)
    process.close()
    (tmp_path / "sums.py").write_text(TASK.format(prelude=""))
    assert works(launcher, tmp_path, "b") == 0
    assert launcher._level == CODE


def test_code_that_ends_the_server_is_left_out_of_it(made: Made, tmp_path: Path) -> None:
    launcher = made(f"if not {IN_A_JOB}: __import__('os')._exit(3)")
    assert works(launcher, tmp_path) == 0
    assert launcher._level == INSPECT


def test_code_that_starts_threads_is_left_out_of_the_server(made: Made, tmp_path: Path) -> None:
    """A fork copies one thread only: locks that others hold would stay locked for ever."""
    launcher = made(
        "import threading, time\n"
        f"if not {IN_A_JOB}: threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    assert works(launcher, tmp_path) == job.EXIT_UNSAFE_FORK
    assert launcher._level == INSPECT
    assert works(launcher, tmp_path, "b") == 0


def test_without_forks_jobs_are_spawned(made: Made, tmp_path: Path) -> None:
    launcher = made(fork=False)
    assert works(launcher, tmp_path) == 0
    assert launcher._level == SPAWN


def test_a_setting_of_the_jobs_is_no_secret_unless_it_is_named(made: Made, tmp_path: Path) -> None:
    """`--env` and secrets reach a job together; what it says of its samples hides the values of secrets alone."""
    environment = {"NOTE": REFUSAL}
    launcher = made(environment=environment)
    said = {}
    for name, secrets in (("a", ()), ("b", ("NOTE",))):
        wanted = dataclasses.replace(order(tmp_path, name), environment=environment, secrets=secrets)
        process = launcher.start(dataclasses.replace(wanted, model="scripted/refuse"))
        _, samples = follow(process)
        launcher.finish(process)
        process.close()
        said[name] = samples[0].scores["includes"]["explanation"]
    assert said == {"a": REFUSAL, "b": "[redacted NOTE]"}


def test_a_closed_launcher_starts_nothing(made: Made, tmp_path: Path) -> None:
    launcher = made()
    launcher.warm()
    launcher.close()
    with pytest.raises(LauncherClosed):
        launcher.start(order(tmp_path))
