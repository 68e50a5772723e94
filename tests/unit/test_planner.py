"""Jobs from tasks and models, and one sentence for whatever the user's code does instead."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evalops import planner
from evalops.planner import PlanError, plan, totals
from evalworker.contract.documents import JobSpec
from evalworker.contract.failures import Category
from evalworker.contract.ids import check_job_id

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

def samples(n):
    return [Sample(input="hi", target="hi") for _ in range(n)]

@task
def first(n: int = 3, tone="dry"):
    return Task(dataset=samples(n), name="renamed", epochs=2)

@task
def second():
    return Task(dataset=samples(5))
"""

ONE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

@task
def only({parameters}):
    {body}
    return Task(dataset=[Sample(input="hi", target="hi")])
"""


@pytest.fixture(autouse=True, scope="module")
def inspect_is_warm() -> None:
    """As in the command's process, Inspect and its entry points are loaded before a child is forked."""
    from inspect_ai.model import get_model

    get_model("mockllm/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def one(folder: Path, before: str = "", parameters: str = "", body: str = "pass") -> str:
    (folder / "one.py").write_text(before + "\n" + ONE.format(parameters=parameters, body=body))
    return "one.py"


def planned(folder: Path, *tasks: str, models: list[Any] | None = None, **arguments: Any) -> list[JobSpec]:
    return plan(list(tasks), models or ["mockllm/a"], arguments, {}, folder)


def refusal(folder: Path, *tasks: str, models: list[Any] | None = None, **arguments: Any) -> PlanError:
    with pytest.raises(PlanError) as error:
        planned(folder, *tasks, models=models, **arguments)
    assert error.value.category is Category.CONFIG
    assert error.value.exit == 2
    assert "\n" not in error.value.sentence
    return error.value


def test_jobs_of_two_tasks_and_two_models(folder: Path) -> None:
    jobs = planned(folder, "tasks.py", models=["mockllm/a", "mockllm/b"], task_args={"n": 4}, limit=3)
    assert [(j.task, j.name, j.model, j.model_index, j.samples, j.epochs, j.task_args) for j in jobs] == [
        ("tasks.py@first", "renamed", "mockllm/a", 0, 6, 2, {"n": 4}),
        ("tasks.py@second", "second", "mockllm/a", 0, 3, 1, {}),
        ("tasks.py@first", "renamed", "mockllm/b", 1, 6, 2, {"n": 4}),
        ("tasks.py@second", "second", "mockllm/b", 1, 3, 1, {}),
    ]
    assert len({check_job_id(job.job_id) for job in jobs}) == 4


def test_the_same_submission_has_the_same_ids_and_another_has_others(folder: Path) -> None:
    def ids(results: dict[str, Any], *tasks: str, **arguments: Any) -> list[str]:
        return [job.job_id for job in plan(list(tasks) or ["tasks.py"], ["mockllm/a"], arguments, results, folder)]

    base = ids({})
    assert ids({}, task_args={"unknown": 1}) == base
    assert ids({}, str(folder / "tasks.py")) == base
    assert ids({}, "tasks.py@first", "tasks.py@second") == base
    assert not set(ids({"temperature": 0.5})) & set(base)
    changed = ids({}, task_args={"n": 4})
    assert changed[0] != base[0]
    assert changed[1] == base[1]


def test_a_spec_runs_with_eval_set_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai import eval_set

    monkeypatch.chdir(folder)
    job = planned(folder, "tasks.py", models=["scripted/good"], task_args={"n": 2})[0]
    ok, logs = eval_set(
        [job.task], model=job.model, task_args=job.task_args, log_dir="logs", display="none", ctl_server=False
    )
    assert ok
    assert [log.eval.task for log in logs] == [job.name]
    assert logs[0].results is not None
    assert logs[0].results.total_samples == job.samples


def test_a_task_of_a_package_keeps_its_name(public_tasks: None, folder: Path) -> None:
    (job,) = planned(folder, "inspect_evals/agent_threat_bench_data_exfil", limit=2)
    assert job.task == "inspect_evals/agent_threat_bench_data_exfil"
    assert job.samples == 2


def test_no_task_means_all_of_the_directory(folder: Path) -> None:
    (folder / "deeper").mkdir()
    one(folder / "deeper")
    (folder / "helper.py").write_text("raise RuntimeError('a file without a task is not run')")
    assert {job.task for job in planned(folder)} == {"tasks.py@first", "tasks.py@second", "deeper/one.py@only"}
    assert {job.task for job in planned(folder, "deeper")} == {"deeper/one.py@only"}
    assert {job.task for job in planned(folder, "deeper/*.py")} == {"deeper/one.py@only"}


def test_files_outside_of_the_submit_directory_are_named_from_it(folder: Path) -> None:
    below = folder / "below"
    below.mkdir()
    expected = {"../tasks.py@first", "../tasks.py@second"}
    assert {job.task for job in planned(below, "../tasks.py")} == expected
    assert {job.task for job in planned(below, str(folder / "tasks.py"))} == expected


def test_models_of_a_spec_differ_by_their_config_and_not_by_their_server(folder: Path) -> None:
    from inspect_ai.model import GenerateConfig, get_model

    def ids(*models: tuple[float, str]) -> list[str]:
        made = [
            get_model("mockllm/m", config=GenerateConfig(temperature=t), base_url=url, memoize=False)
            for t, url in models
        ]
        return [job.job_id for job in planned(folder, "tasks.py@second", models=made)]

    cold, hot = ids((0.0, "http://a"), (1.0, "http://a"))
    assert cold != hot
    assert ids((0.0, "http://b")) == [cold]


def test_arguments_that_no_task_takes_are_reported(folder: Path) -> None:
    said: list[str] = []
    arguments = {"task_args": {"n": 1, "lenght": 2}}
    plan(["tasks.py"], ["mockllm/a"], arguments, {}, folder, warn=said.append)
    assert said == ["-T lenght: no task takes this argument, so it is ignored"]


def test_the_environment_of_the_run_reaches_the_tasks_and_not_us(folder: Path) -> None:
    one(folder, "import os\nassert os.environ['PLANNED_WITH'] == 'this'")
    jobs = plan(["one.py"], ["mockllm/a"], {}, {}, folder, environment={"PLANNED_WITH": "this"})
    assert len(jobs) == 1
    assert "PLANNED_WITH" not in os.environ


def test_totals_for_an_estimate(folder: Path) -> None:
    figures = totals(planned(folder, "tasks.py", models=["mockllm/a", "mockllm/b"]))
    assert {k: figures[k] for k in ("jobs", "samples", "tasks", "models")} == {
        "jobs": 4,
        "samples": 22,
        "tasks": 2,
        "models": 2,
    }
    assert [job["samples"] for job in figures["per_job"]] == [6, 5, 6, 5]
    json.dumps(figures)


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (
            "import no_such_module",
            "one.py (line 1) cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise KeyError('x [bold]y[/bold]')", "one.py (line 1) cannot be loaded: KeyError: 'x [bold]y[/bold]'"),
        ("def broken(:", "one.py (line 1) cannot be imported: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)", "one.py (line 2) cannot be loaded: it calls sys.exit(0)"),
        ("import sys\nsys.exit('bye')", "one.py (line 2) cannot be loaded: it calls sys.exit('bye')"),
        (
            "import os\nprint('going down', flush=True)\nos._exit(7)",
            "the code of a task ended its process with exit code 7 while it was being loaded; the last it printed was: going down",
        ),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            "the process that loads the tasks crashed with SIGSEGV",
        ),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            "the process that loads the tasks was killed, most likely for want of memory",
        ),
    ],
)
def test_what_user_code_does_instead_of_loading_is_one_sentence(folder: Path, before: str, sentence: str) -> None:
    assert refusal(folder, one(folder, before)).sentence == sentence


def test_an_error_in_a_module_that_the_task_imports_names_that_module(folder: Path) -> None:
    (folder / "helper.py").write_text("x = 1\nimport no_such_module\n")
    assert refusal(folder, one(folder, "import helper")).sentence.startswith("helper.py (line 2) cannot be imported")


def test_an_error_in_a_task_function_names_its_line(folder: Path) -> None:
    error = refusal(folder, one(folder, body="raise RuntimeError('no data')"))
    assert error.sentence == "one.py (line 8) cannot be loaded: RuntimeError: no data"
    assert "Traceback" in error.output


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("nowhere.py", "nowhere.py: there is no such file"),
        ("nowhere.py@x", "nowhere.py: there is no such file"),
        ("tasks.py@nowhere", "Task named 'nowhere' not found (tasks.py@nowhere)"),
        ("inspect_evals/nowhere", "Task named 'inspect_evals/nowhere' not found"),
        ("no_package/task", "Task named 'no_package/task' not found"),
        ("book.ipynb", "book.ipynb: tasks in notebooks cannot run on a fleet"),
    ],
)
def test_tasks_that_are_not_there(folder: Path, spec: str, text: str) -> None:
    assert refusal(folder, spec).sentence.startswith(text)
    assert refusal(folder, "tasks.py", spec).sentence.startswith(text.split(" (")[0])


def test_a_file_or_directory_without_a_task(folder: Path) -> None:
    (folder / "none.py").write_text("x = 1\n")
    (folder / "without_tasks").mkdir()
    assert "none.py" in refusal(folder, "none.py").sentence
    assert refusal(folder, "tasks.py", "none.py").sentence == "none.py: there is no function with @task in this file"
    assert refusal(folder, "tasks.py", "without_tasks").sentence.startswith(
        "without_tasks: there is no file with a @task function"
    )


def test_a_task_that_needs_an_argument(folder: Path) -> None:
    sentence = refusal(folder, one(folder, parameters="level")).sentence
    assert sentence == "only: the task needs the argument 'level': give it with -T NAME=VALUE"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("nowhere/model", "unknown model: Model API nowhere of model 'nowhere/model' not recognized"),
        ("gpt", "unknown model: Model name 'gpt' should be in the format of <api_name>/<model_name>"),
    ],
)
def test_unknown_models(folder: Path, model: str, text: str) -> None:
    assert refusal(folder, "tasks.py", models=[model]).sentence == text


def test_a_missing_key_is_inspects_sentence_without_markup(folder: Path) -> None:
    from inspect_ai.model import ModelAPI, modelapi
    from inspect_ai.model._providers.util import environment_prerequisite_error

    @modelapi(name="keyless_for_this_test")
    class Keyless(ModelAPI):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise environment_prerequisite_error("Keyless", "KEYLESS_API_KEY")

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    sentence = refusal(folder, "tasks.py", models=["keyless_for_this_test/m"]).sentence
    assert "KEYLESS_API_KEY" in sentence
    assert "[bold]" not in sentence


def test_tasks_without_samples(folder: Path) -> None:
    (folder / "none.py").write_text(
        "from inspect_ai import Task, task\n@task\ndef none():\n    return Task(dataset=[])\n"
    )
    assert "empty" in refusal(folder, "none.py").sentence
    sentence = refusal(folder, "tasks.py@second", sample_id=["99"]).sentence
    assert sentence.startswith("the task 'second' has no samples")


BOXES = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample

def samples(*kinds):
    return [Sample(input="hi", target="hi", sandbox=kind) for kind in kinds]

@task
def plain():
    return Task(dataset=samples(None))

@task
def boxed():
    return Task(dataset=samples(None, "local"), sandbox="docker")

@task
def by_sample():
    return Task(dataset=samples("docker", "docker"))

@task
def some():
    return Task(dataset=samples("docker", None))
"""


@pytest.mark.parametrize(
    "names, sandbox, refused",
    [
        (["plain", "some"], None, None),
        (["plain", "boxed", "by_sample", "some"], None, "boxed, by_sample"),
        (["boxed", "by_sample"], "local", None),
        (["plain"], "docker", "plain"),
    ],
)
def test_tasks_whose_samples_all_need_docker_where_there_is_none(
    folder: Path, names: list[str], sandbox: str | None, refused: str | None
) -> None:
    (folder / "boxes.py").write_text(BOXES)
    call = {"tasks": [f"boxes.py@{name}" for name in names], "models": ["mockllm/model"], "result_arguments": {}}
    call |= {"arguments": {"sandbox": sandbox} if sandbox else {}, "submit_dir": folder}
    assert len(plan(**call)) == len(names)
    assert len(plan(**call, boxes=lambda: "")) == len(names)
    if refused is None:
        assert len(plan(**call, boxes=lambda: "it is away")) == len(names)
        return
    with pytest.raises(PlanError) as caught:
        plan(**call, boxes=lambda: "it is away")
    assert caught.value.sentence == f"the samples of {refused} run in Docker sandboxes, but it is away"
    assert caught.value.exit == 2


def test_a_task_given_twice(folder: Path) -> None:
    assert "was given 2 times" in refusal(folder, "tasks.py", "tasks.py@second").sentence
    assert "was given 2 times" in refusal(folder, "tasks.py", models=["mockllm/a", "mockllm/a"]).sentence


def test_ten_megabytes_of_output_are_bounded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noise = (
        "import sys\nfor _ in range(100):\n    print('x' * 100_000)\n    sys.stderr.write('y' * 4096)\nprint('the end')"
    )
    assert len(planned(folder, one(folder, noise))) == 1
    error = refusal(folder, one(folder, noise + "\nraise ValueError('after it')"))
    assert error.sentence == "one.py (line 6) cannot be loaded: ValueError: after it"
    assert len(error.output) <= planner.OUTPUT_BYTES
    assert "the end" in error.output
    assert capfd.readouterr() == ("", "")


def test_closed_descriptors_and_another_directory_do_not_matter(folder: Path) -> None:
    one(folder, "import os\nos.closerange(0, 256)\nos.chdir('/')")
    assert [job.task for job in planned(folder, "one.py@only")] == ["one.py@only"]


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_user_code_leaves_behind_neither_delays_nor_survives(folder: Path) -> None:
    start = (
        "import subprocess, pathlib\np = subprocess.Popen(['sleep', '600'])\npathlib.Path('pid').write_text(str(p.pid))"
    )
    assert len(planned(folder, one(folder, start))) == 1
    pid = int((folder / "pid").read_text())
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("a process of the user's code was left running")


def test_loading_is_bounded_in_time(folder: Path) -> None:
    one(folder, "import time\nprint('loading', flush=True)\ntime.sleep(600)")
    with pytest.raises(PlanError) as error:
        plan(["one.py"], ["mockllm/a"], {}, {}, folder, timeout_s=2)
    assert error.value.sentence == "loading the tasks took longer than 2 seconds; the last it printed was: loading"


def test_ours_is_untouched_by_user_code(folder: Path) -> None:
    before = Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGINT), list(sys.path)
    one(
        folder,
        "import os, signal, sys\nos.environ['LEFT'] = '1'\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsys.path.insert(0, '/x')",
    )
    planned(folder, "one.py")
    assert (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGINT), list(sys.path)) == before
