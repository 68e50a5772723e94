"""From logs to the dashboard by the commands, on a directory and on an emulator's S3, with real small evals.

What differs between the emulators is the business of test_storage.py; the main way is walked on both.
"""

import json
from pathlib import Path

import dashboard_reader
import logmaker
import pytest
from click.testing import CliRunner

from evalops.commands.log import log
from evalops.commands.promote import promote
from evalops.commands.publish import publish
from evalops.commands.report import report
from evalops.commands.run_local import run_local
from evalops.commands.status import status
from evalops.commands.summarize import summarize
from evalops.logs import places
from evalops.logs import publish as publishing
from evalworker.contract import layout
from evalworker.storage import open_storage

TASKS = """
import asyncio, os, signal
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver

@task
def sums(n: int = 4) -> Task:
    return Task([Sample(f"What is {i} + 1?", target=str(i + 1), id=i) for i in range(n)], scorer=match(numeric=True))

@solver
def fragile():
    async def solve(state, generate):
        if state.sample_id == 1 and open("broken").read():
            raise ValueError("broken")
        return await generate(state)
    return solve

@task
def sometimes() -> Task:
    return Task([Sample(f"What is {i} + 1?", target=str(i + 1), id=i) for i in range(3)], solver=fragile(), scorer=match(numeric=True))

@solver
def interrupts():
    async def solve(state, generate):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    return solve

@task
def interrupted() -> Task:
    return Task([Sample("What is 1 + 1?", target="2")], solver=interrupts(), scorer=match(numeric=True))
"""

METADATA = """
evaluations:
  mine:
    title: Mine
    description: for tests
    path: tests
    group: Mathematics
    contributors: [somebody]
    tasks:
      - {name: sums, dataset_samples: 4}
      - {name: sometimes, dataset_samples: 3}
"""


@pytest.fixture(params=["directory", "ministack"])
def root(request, tmp_path, monkeypatch):
    """A root that commands find by themselves, in a directory of the user's with tasks and metadata."""
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "tasks.yaml").write_text(METADATA)
    (tmp_path / "broken").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("INSPECT_FLEET_TASK_METADATA", "tasks.yaml")
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)
    if request.param == "directory":
        return open_storage(".")
    emulator = request.getfixturevalue(request.param)
    for name, value in {
        "AWS_ENDPOINT_URL": emulator.endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "S3_BUCKET_NAME": f"logs-{tmp_path.name.replace('_', '-').lower()[:40]}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    bucket = f"logs-{tmp_path.name.replace('_', '-').lower()[:40]}"
    emulator.client("s3").create_bucket(Bucket=bucket)
    return open_storage(f"s3://{bucket}")


def ies(command, *words, code=0):
    """Run a command as a user would; its stdout."""
    done = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, (done.output, done.stderr)
    return done.stdout


def tree(root):
    return {info.key: info.etag for info in root.list("")}


def run(*words, code=0):
    """`ies run local …`; the RUN_ID, which is the first line."""
    return ies(run_local, *words, "--display", "none", code=code).splitlines()[0]


@pytest.mark.parametrize("root", ["directory", "ministack", "moto"], indirect=True)
def test_each_command_twice_changes_nothing_the_second_time(root):
    run_id = run("tasks.py@sums", "--model", "scripted/good,scripted/wrong")
    first = json.loads(ies(status, "check", "--run-id", run_id, "--json"))
    assert {(row["task"], row["model"], row["state"], row["completed"]) for row in first["rows"]} == {
        ("sums", "scripted/good", "success", 4),
        ("sums", "scripted/wrong", "success", 4),
    }
    assert "Finished: 2 success." in ies(status, "check", "--run-id", run_id)
    before = tree(root)
    ies(status, "check", "--run-id", run_id)
    assert tree(root) == before

    for command, words in ((summarize, ()), (promote, ())):
        ies(command, "--run-id", run_id, *words)
        after = tree(root)
        ies(command, "--run-id", run_id, *words)
        if command is promote:
            assert tree(root) == after
        else:
            assert tree(root) == after and after != before
    keys = list(tree(root))
    shown = dashboard_reader.newest(keys)
    assert set(shown) == {("sums", "scripted+good"), ("sums", "scripted+wrong")}
    for key in shown.values():
        file = dashboard_reader.load(root.get(key).body)
        assert file.eval.task == "inspect_evals/sums"
        assert root.exists(dashboard_reader.download(key))
        assert open_storage(str(Path(file.location).parent)) if "://" not in file.location else True
    values = {key[1]: dashboard_reader.load(root.get(path).body).first_value() for key, path in shown.items()}
    assert values == {"scripted+good": 1.0, "scripted+wrong": 0.0}


def test_a_retry_after_summarize_redoes_only_what_failed(root):
    Path("broken").write_text("yes")
    failing = ("--continue-on-fail", "--retry-attempts", "0")
    run_id = run("tasks.py@sums", "tasks.py@sometimes", "--model", "scripted/good", *failing, code=1)
    ies(summarize, "--run-id", run_id, code=1)
    assert any(key.endswith(".dashboard.json") for key in tree(root))
    Path("broken").write_text("")
    assert run("--run-id", run_id) == run_id
    rows = json.loads(ies(status, "check", "--run-id", run_id, "--json"))["rows"]
    assert {(row["task"], row["state"], row["completed"]) for row in rows} == {
        ("sums", "success", 4),
        ("sometimes", "success", 3),
    }
    ies(summarize, "--run-id", run_id)
    ies(promote, "--run-id", run_id, "--with-logs")
    shown = dashboard_reader.newest(list(tree(root)))
    assert len(shown) == 2
    for key in shown.values():
        assert dashboard_reader.load(root.get(key).body).location == root.url(key.removesuffix(".dashboard.json"))
    before = tree(root)
    assert "Finished: 2 success." in ies(status, "check", "--run-id", run_id)
    done = CliRunner().invoke(run_local, ["--run-id", run_id])
    assert done.exit_code == 0 and "nothing to run" in done.stderr
    assert tree(root) == before


@pytest.mark.parametrize("root", ["directory"], indirect=True)
def test_a_retry_does_not_run_again_what_was_promoted(root):
    Path("broken").write_text("yes")
    failing = ("--continue-on-fail", "--retry-attempts", "0")
    run_id = run("tasks.py@sums", "tasks.py@sometimes", "--model", "scripted/good", *failing, code=1)
    ies(summarize, "--run-id", run_id, code=1)
    ies(promote, "--run-id", run_id, "--with-logs")
    Path("broken").write_text("")
    before = tree(root)
    refused = CliRunner().invoke(run_local, ["--run-id", run_id])
    assert refused.exit_code == 2 and "tasks.py@sums with scripted/good: it has completed" in refused.stderr
    assert tree(root) == before
    assert run("tasks.py@sometimes", "--model", "scripted/good", *failing[:1], "--run-id", run_id) == run_id
    assert "Finished: 2 success." in ies(status, "check", "--run-id", run_id)
    run("--run-id", run_id, "--force")
    rows = json.loads(ies(status, "check", "--run-id", run_id, "--json"))["rows"]
    assert {(row["task"], row["state"], row["superseded"]) for row in rows} == {
        ("sums", "success", 1),
        ("sometimes", "success", 0),
    }


@pytest.mark.parametrize("root", ["directory"], indirect=True)
def test_two_files_with_a_task_of_one_name_are_two_rows_and_two_results(root):
    """A baseline and its variant: each is retried, counted and promoted for itself."""
    plain = TASKS.replace("def sums", "def unused").replace("def sometimes", "def sums")
    Path("variant.py").write_text(plain.replace("range(3)", "range(4)"))
    Path("broken").write_text("yes")
    words = ("tasks.py@sums", "variant.py@sums", "--model", "scripted/good", "--fail-on-error", "--retry-attempts", "0")
    run_id = run(*words, code=1)

    def rows():
        found = json.loads(ies(status, "check", "--run-id", run_id, "--json"))["rows"]
        return [(row["file"], row["state"], row["superseded"]) for row in found]

    assert rows() == [("tasks.py", "success", 0), ("variant.py", "error", 0)]
    assert "sums variant.py" in ies(status, "check", "--run-id", run_id)
    Path("broken").write_text("")
    run("--run-id", run_id)
    assert [row[:2] for row in rows()] == [("tasks.py", "success"), ("variant.py", "success")]
    done = json.loads(ies(summarize, "--run-id", run_id, "--json"))
    assert [result["outcome"] for result in done["results"]] == ["written", "written"], done
    ies(promote, "--run-id", run_id)
    assert sum(key.startswith("logs/stage/") and key.endswith(".dashboard.json") for key in tree(root)) == 2
    ies(report, "--run-id", run_id)
    assert b"variant.py" in root.get(layout.report(run_id)).body


@pytest.mark.parametrize("root", ["directory"], indirect=True)  # what it reads and refuses is the same in a bucket
def test_a_retry_that_is_another_run_is_refused_with_the_difference(root):
    run_id = run("tasks.py@sums", "tasks.py@sometimes", "--model", "scripted/good")
    other = CliRunner().invoke(run_local, ["tasks.py@sums", "--model", "scripted/wrong", "--run-id", run_id])
    assert other.exit_code == 2 and "scripted/wrong is not part of it" in other.stderr
    limited = CliRunner().invoke(
        run_local, ["tasks.py@sums", "--model", "scripted/good", "--limit", "2", "--run-id", run_id]
    )
    assert limited.exit_code == 2 and "not part of it" in limited.stderr
    assert run("tasks.py@sums", "--model", "scripted/good", "--run-id", run_id) == run_id, "a subset is allowed"
    stored = json.loads(root.get(layout.manifest(run_id)).body)
    stored["versions"]["inspect-ai"] = "0.3.285.dev1"
    root.put(layout.manifest(run_id), json.dumps(stored).encode())
    upgraded = CliRunner().invoke(run_local, ["--run-id", run_id])
    assert upgraded.exit_code == 2 and "it was run with Inspect 0.3.285.dev1, and" in upgraded.stderr
    assert run("--run-id", run_id, "--force") == run_id


@pytest.mark.parametrize("root", ["directory"], indirect=True)
def test_an_error_that_the_options_allow_is_no_failure(root):
    Path("broken").write_text("yes")
    run_id = run("tasks.py@sometimes", "--model", "scripted/good", "--fail-on-error", "0.5")
    seen = json.loads(ies(status, "check", "--run-id", run_id, "--json"))
    assert [(row["state"], row["completed"], row["errored"], row["total"]) for row in seen["rows"]] == [
        ("partial", 2, 1, 3)
    ]
    assert seen["headline"].startswith("Finished: 1 partial. 1 sample ") and run_id not in seen["headline"]
    before = [key for key in tree(root) if key.endswith(".eval")]
    run("--run-id", run_id)
    assert [key for key in tree(root) if key.endswith(".eval")] == before
    assert len(ies(log, "pull", "--run-id", run_id, "--failed", "--to", "here").split()) == 1


@pytest.mark.parametrize("root", ["directory"], indirect=True)
@pytest.mark.parametrize(("broken", "code"), [("", 0), ("yes", 1)])
def test_an_eval_set_that_stumbles_is_judged_by_its_logs(root, broken, code):
    """Somebody has put a dashboard file beside the logs of a run that goes on: `eval_set` takes it for a log and raises."""
    meddle = (
        f"open([*glob.glob('logs/working/*')][0] + '/{logmaker.name_of('x', 1)}.dashboard.json', 'w').write('{{}}')"
    )
    Path("tasks.py").write_text(
        "import glob\n" + TASKS.replace("if state.sample_id == 1 and", f"{meddle}\n        if state.sample_id == 1 and")
    )
    Path("broken").write_text(broken)
    words = ["tasks.py@sometimes", "--model", "scripted/good", "--retry-attempts", "0", "--continue-on-fail"]
    done = CliRunner().invoke(run_local, [*words, "--display", "none"], catch_exceptions=False)
    assert "warning: Inspect's eval_set ended with ValueError: " in done.stderr and ".dashboard.json" in done.stderr
    assert done.exit_code == code, done.stderr
    assert [info.key for info in root.list("logs/working/") if info.key.endswith(".eval")]


@pytest.mark.parametrize("root", ["directory"], indirect=True)
def test_an_interrupt_is_no_failure(root):
    run_id = run("tasks.py@interrupted", "--model", "scripted/good", code=130)
    assert [row["state"] for row in json.loads(ies(status, "check", "--run-id", run_id, "--json"))["rows"]] == [
        "cancelled"
    ]
    Path("tasks.py").write_text(
        Path("tasks.py").read_text().replace("os.kill(os.getpid(), signal.SIGINT)", "return 1 / 0")
    )
    run("--run-id", run_id, "--retry-attempts", "0", code=1)


def test_a_run_that_somebody_owns_is_left_alone(root):
    from evalops.logs import local_run

    run_id = run("tasks.py@sums", "--model", "scripted/good")
    with local_run.alive(root, run_id, local_run.last_seen(root, run_id)):
        busy = CliRunner().invoke(run_local, ["--run-id", run_id])
        assert busy.exit_code == 2 and "is running it" in busy.stderr
        assert "It has not ended yet: last sign of life" in ies(status, "check", "--run-id", run_id)
        before = tree(root)
        early = CliRunner().invoke(summarize, ["--run-id", run_id])
        assert early.exit_code == 2 and f"{run_id} is still running (last sign of life" in early.stderr
        assert tree(root) == before
    run("--run-id", run_id)


def test_a_dead_log_is_said_to_be_dead_and_a_retry_completes_it(root, tmp_path):
    run_id = run("tasks.py@sums", "--model", "scripted/good")
    key = next(key for key in tree(root) if key.endswith(".eval"))
    local = tmp_path / "x.eval"
    root.download(key, local)
    root.upload(logmaker.started(local), key)
    seen = json.loads(ies(status, "check", "--run-id", run_id, "--json"))
    assert [row["state"] for row in seen["rows"]] == ["dead"]
    assert f"`ies run local --run-id {run_id}`" in seen["headline"]
    run("--run-id", run_id)
    assert [row["state"] for row in json.loads(ies(status, "check", "--run-id", run_id, "--json"))["rows"]] == [
        "success"
    ]


def test_a_log_that_cannot_be_read_is_put_aside_by_a_retry(root):
    run_id = run("tasks.py@sums", "--model", "scripted/good")
    bad = layout.working(run_id) + "2026-11-29T10-00-00-00-00_sums_bad.eval"
    root.put(bad, b"broken")
    assert "unreadable" in ies(status, "check", "--run-id", run_id)
    run("--run-id", run_id)
    assert root.get(bad + ".unreadable").body == b"broken" and not root.exists(bad)


def test_list_and_logs_and_pull_and_report(root):
    assert "no logs under the root" in CliRunner().invoke(status, ["list"]).stderr
    first, second = run("tasks.py@sums", "--model", "scripted/good"), run("tasks.py@sums", "--model", "scripted/wrong")
    listed = json.loads(ies(status, "list", "--json"))
    assert [item["run_id"] for item in listed["runs"]] == sorted([first, second], reverse=True)
    assert len(json.loads(ies(status, "list", "-n", "1", "--json"))["runs"]) == 1
    by_dir = json.loads(ies(status, "logs", "--log-dir", places.of_run(first, root).url, "--json"))
    assert [row["state"] for row in by_dir["rows"]] == ["success"]
    pulled = ies(log, "pull", "--run-id", first, "--to", "here").split()
    assert [Path(path).read_bytes()[:2] for path in pulled] == [b"PK"]
    assert ies(log, "pull", "--run-id", first, "--failed", "--to", "here") == ""
    assert ies(report, "--run-id", second, "--compare", first).strip() == root.url(layout.report(second))
    assert b"Compared with" in root.get(layout.report(second)).body


def test_promote_says_what_it_would_do_and_does_not(root):
    run_id = run("tasks.py@sums", "--model", "scripted/good")
    ies(summarize, "--run-id", run_id)
    before = tree(root)
    said = ies(promote, "--run-id", run_id, "--dry-run")
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["copy", "write", "delete", "delete"]
    assert tree(root) == before


def test_another_staged_run_needs_replace(root):
    first, second = (run("tasks.py@sums", "--model", "scripted/good") for _ in range(2))
    for run_id in (first, second):
        ies(summarize, "--run-id", run_id)
    ies(promote, "--run-id", first)
    refused = CliRunner().invoke(promote, ["--run-id", second])
    assert refused.exit_code == 1 and first in refused.stderr and "--replace" in refused.stderr
    ies(promote, "--run-id", second, "--replace")
    assert [f"/{second}/" in key for key in dashboard_reader.newest(list(tree(root))).values()] == [True]


def test_publish_is_quiet_when_there_is_nothing_to_do_and_says_once_what_a_person_must_decide(root, monkeypatch):
    monkeypatch.setattr(publishing, "SETTLED", publishing.timedelta(seconds=-60))
    Path("broken").write_text("yes")
    good = run("tasks.py@sums", "--model", "scripted/good")
    bad = run("tasks.py@sometimes", "--model", "scripted/good", "--retry-attempts", "0", code=1)
    first = CliRunner().invoke(publish, [])
    assert first.exit_code == 1
    assert [line for line in first.stdout.splitlines() if good in line and "promoted" in line]
    assert [line for line in first.stderr.splitlines() if bad in line and "not published" in line]
    for _ in range(2):
        again = CliRunner().invoke(publish, [])
        assert (again.exit_code, again.output) == (0, "")
    assert not root.exists(layout.PUBLISH_LOCK)
    newer = run("tasks.py@sums", "--model", "scripted/good")
    blocked = CliRunner().invoke(publish, [])
    assert blocked.exit_code == 1 and f"{good} is in stage already" in blocked.stderr
    ies(publish, "--again", "--replace", code=1)
    assert all(f"/{newer}/" in key for key in dashboard_reader.newest(list(tree(root))).values())


def test_two_who_publish_never_overlap(root):
    run("tasks.py@sums", "--model", "scripted/good")
    with publishing.lock(root):
        second = CliRunner().invoke(publish, [])
        assert (second.exit_code, second.output) == (0, "")
        with pytest.raises(publishing.Busy, match="is publishing"), publishing.lock(root):
            pass
    later = publishing.now() + 2 * publishing.LOCKED_FOR
    root.create(layout.PUBLISH_LOCK, publishing.Lock(owner="dead", until=publishing.now()).to_bytes())
    with publishing.lock(root, lambda: later):
        assert b"dead" not in root.get(layout.PUBLISH_LOCK).body


@pytest.mark.parametrize("root", ["directory"], indirect=True)  # what it reads and refuses is the same in a bucket
def test_an_unknown_model_prints_the_entry_to_fill_in(root, monkeypatch):
    run_id = run("tasks.py@sums", "--model", "scripted/good")
    monkeypatch.setattr("evalops.logs.metadata.MODELS", Path("none.yaml"))
    Path("none.yaml").write_text("models: {}")
    done = CliRunner().invoke(summarize, ["--run-id", run_id])
    assert done.exit_code == 1
    assert "scripted/good:\n    name: good" in done.stderr and "--model-metadata" in done.stderr


@pytest.mark.parametrize("root", ["directory"], indirect=True)  # what it reads and refuses is the same in a bucket
def test_bad_input_is_one_sentence(root):
    for command, words, said in (
        (status, ["check", "--run-id", "nonsense"], "is not a run id"),
        (summarize, [], "--run-id or --log-dir"),
        (summarize, ["--run-id", "2026-01-01-00-00-00-00000000"], "There are no logs"),
        (status, ["logs", "--log-dir", "s3:nothing"], "names no bucket"),
    ):
        done = CliRunner().invoke(command, words)
        assert done.exit_code == 2 and said in done.stderr, (words, done.stderr)
    assert "No logs and no plan" in ies(status, "check", "--run-id", "2026-01-01-00-00-00-00000000")
