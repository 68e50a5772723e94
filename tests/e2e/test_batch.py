"""Runs on AWS Batch, end to end: the estate as Terraform applies it, the real worker image as jobs' containers, scripted models.

One project is submitted in several ways; the last tests follow one run through a killed container, a lost host, a termination, and
its end on this machine.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from docker_bench import docker
from image_fixtures import boxed
from terraform_bench import ROOT, Estate

import iam_calls

pytest_plugins = ("image_fixtures",)

BIN = Path(sys.executable).parent
WHO = "submitter"
PATIENCE_S = 150.0
"""For an event that must come: a container has to start on a machine that may be busy."""

METADATA = """
evaluations:
  waiting:
    title: Waiting
    description: samples that take their time
    path: slow.py
    arxiv: null
    group: Knowledge
    contributors: []
    tasks:
      - {name: slow, dataset_samples: 24}
"""


@dataclass
class Project:
    """A user's directory and shell: the code, the estate's account, the bucket."""

    folder: Path
    estate: Estate
    bucket: str
    runs: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return self.estate.environment(WHO) | {
            "S3_BUCKET_NAME": self.bucket,
            "INSPECT_FLEET_NAME": "default",
            "PATH": f"{BIN}:/usr/bin:/bin:/usr/local/bin",
            "MAKEFLAGS": f"VENV={BIN.parent}",
            "MAKELEVEL": "0",  # as a person types it, not from within another make
        }

    def start(self, *words: str) -> "Watched":
        return Watched(
            subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def ies(self, *words: str) -> "Watched":
        found = self.start(str(BIN / "ies"), *words)
        found.end()
        return found

    def logs(self, run_id: str) -> list[Path]:
        """The run's logs, fetched."""
        target = self.folder / "fetched" / run_id
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        s3 = self.estate.client("s3")
        for item in s3.list_objects_v2(Bucket=self.bucket, Prefix=f"logs/working/{run_id}/").get("Contents", []):
            if item["Key"].endswith(".eval") and ".buffer" not in item["Key"]:
                s3.download_file(self.bucket, item["Key"], str(target / Path(item["Key"]).name))
        return sorted(target.iterdir())


class Watched:
    """A running command whose remarks are read as they come."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.out = ""
        self._came = threading.Condition()
        self._readers = [threading.Thread(target=self._read_remarks), threading.Thread(target=self._read_results)]
        for reader in self._readers:
            reader.start()

    def _read_remarks(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()
        with self._came:
            self._came.notify_all()

    def _read_results(self) -> None:
        assert self.process.stdout is not None
        self.out = self.process.stdout.read()

    def wait_for(self, pattern: str, after: int = 0) -> "re.Match[str]":
        """The first remark that matches, of those from number `after` on."""

        def found() -> "re.Match[str] | None":
            return next((match for line in self.lines[after:] if (match := re.search(pattern, line))), None)

        with self._came:
            self._came.wait_for(lambda: found() or not self._readers[0].is_alive(), PATIENCE_S)
            match = found()
        assert match is not None, f"no {pattern!r} in:\n{self.said}"
        return match

    def end(self) -> int:
        """Wait for the end; the exit code."""
        try:
            code = self.process.wait(2 * PATIENCE_S)
        finally:
            self.process.kill()
        for reader in self._readers:
            reader.join()
        return code

    @property
    def code(self) -> int:
        found = self.process.returncode
        assert found is not None
        return found

    @property
    def said(self) -> str:
        return "\n".join([*self.lines, self.out])


@pytest.fixture(scope="module")
def project(applied: Estate, worker_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The user's project, and a bucket that is left as it was."""
    assert worker_image == "inspect-fleet-worker:test", "the image that emulator_override.tf names"
    folder = boxed(tmp_path_factory.mktemp("project")).parent
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "arithmetic.py", folder / "examples")
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "tests" / "tasks" / "slow.py", folder)
    (folder / "metadata.yaml").write_text(METADATA)
    config = applied.client("ssm").get_parameter(Name="/inspect-fleet/default/config")["Parameter"]["Value"]
    found = Project(folder, applied, json.loads(config)["bucket"])
    s3 = applied.client("s3")
    before = {item["Key"] for item in s3.list_objects_v2(Bucket=found.bucket).get("Contents", [])}
    yield found
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=found.bucket):
        for item in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]:
            if item["Key"] not in before:
                s3.delete_object(Bucket=found.bucket, Key=item["Key"], VersionId=item["VersionId"])
    docker(
        "rm",
        "--force",
        "--volumes",
        *docker("ps", "-aq", "--filter", "label=inspect-fleet-test-batch").split(),
        check=False,
    )


def test_two_tasks_and_two_models_with_a_sandbox(project: Project) -> None:
    tasks, models = "examples/arithmetic.py,boxed/boxed.py", "scripted/good,scripted/mixed"
    done = project.ies("run", "aws", f"--tasks={tasks}", f"--model={models}", "--limit=4", "--monitor")
    assert done.code == 0, done.said
    run_id, *table = done.out.splitlines()
    assert re.fullmatch(r"\d{4}(-\d\d){5}-[0-9a-f]{8}", run_id)
    rows = [line.split() for line in table if re.match(r"arithmetic|boxed", line)]
    assert [row[:3] for row in rows] == [
        [task, model, "success"] for task in ("arithmetic", "boxed") for model in ("scripted/good", "scripted/mixed")
    ]
    assert "accuracy 0.500" in table[3] and "accuracy 1.000" in table[4]
    job = done.wait_for(r"^job +(\S+)$")[1]
    assert f"/batch/home?region=us-east-1#jobs/detail/{job}" in done.said
    assert done.wait_for(r"log-group/\$252Finspect-fleet\$252Fdefault\$252Fbatch/log-events/job\$252F")
    assert done.wait_for(r"\| inspect-fleet: run .*, attempt 1: 4 jobs; logs in s3://")
    assert done.wait_for(r"^result  boxed  scripted/good  sample box  boxed_scorer C")
    assert sum(line.startswith("result  arithmetic") for line in done.lines) == 8
    assert done.wait_for(r"\[10/10 samples\]") and done.wait_for(r"^state   succeeded")
    project.runs |= {"finished": run_id, "job": job}


def test_the_commands_of_the_page(project: Project) -> None:
    """What stands in docs/batch.md: `make eval BACKEND=batch` with an array, and looking at it afterwards."""
    page = (ROOT / "docs" / "batch.md").read_text("utf-8")
    (block,) = re.findall(r"^<!-- run on Batch -->\n```sh\n(.*?)^```$", page, re.M | re.S)
    done = project.start("bash", "-euo", "pipefail", "-c", block)
    assert done.end() == 0, done.said
    run_id = done.wait_for(r"^run +(\S+)$")[1]
    assert done.wait_for(r"^job +\S+ \(array of 2\)$") and done.wait_for(r"^state .* succeeded")
    rows = re.findall(r"^arithmetic +scripted/(?:good|refuse) +success +3 ", done.out, re.M)
    assert len(rows) == 4, "of the monitor, of the status"
    assert len(project.logs(run_id)) == 2
    left = project.estate.client("s3").list_objects_v2(Bucket=project.bucket, Prefix=f"partial/{run_id}/")
    assert left["KeyCount"] == 0
    project.runs["array"] = run_id


def test_looking_at_what_has_ended_or_never_was(project: Project) -> None:
    finished = project.ies("batch", "monitor-job", project.runs["job"])
    assert finished.code == 0 and "Finished: 4 success" in finished.out, finished.said
    unknown = project.ies("batch", "monitor-job", "5b2152b4-7c28-4d95-9303-45ebe8b08a9b")
    assert unknown.code == 2 and "AWS Batch knows no job 5b2152b4-7c28-4d95-9303-45ebe8b08a9b" in unknown.lines[-1]
    listed = json.loads(project.ies("batch", "list", "--json").out)
    assert {entry["run"] for entry in listed["jobs"]} >= {project.runs["finished"], project.runs["array"]}
    again = project.ies("batch", "terminate-job", project.runs["finished"])
    assert again.code == 0 and "it had ended before" in again.said


def test_a_killed_container_fails_its_job(project: Project) -> None:
    words = ("--model=scripted/good", "-Tn=24", "-Tseconds=2", "--max-samples=1", "--log-shared=1", "--monitor")
    watched = project.start(str(BIN / "ies"), "run", "aws", "slow.py", *words)
    job = watched.wait_for(r"^job +(\S+)$")[1]
    watched.wait_for(r"^result  slow  scripted/good  sample 2 ")
    docker("kill", "--signal", "KILL", f"inspect-fleet-test-batch-{job}-1")
    assert watched.end() == 1, watched.said
    assert watched.wait_for(r"^state   failed: it was killed \(SIGKILL\) \(exit 137\)")
    assert re.search(r"^slow +scripted/good +dead ", watched.out, re.M)
    project.runs |= {"killed": watched.out.splitlines()[0], "failed job": job}


def test_looking_at_a_failed_job(project: Project) -> None:
    done = project.ies("batch", "monitor-job", project.runs["failed job"], "--json")
    assert done.code == 1
    (said,) = json.loads(done.out)["jobs"]
    assert (said["state"], said["why"], said["exit_code"]) == ("FAILED", "exit", 137)


def samples(path: Path) -> dict[int, str]:
    """The finished samples of a log by their executions."""
    from inspect_ai.log import read_eval_log_sample_summaries

    return {int(s.id): str(s.uuid) for s in read_eval_log_sample_summaries(str(path)) if s.completed and s.scores}


def test_a_resumed_run_survives_a_lost_host_and_is_terminated(project: Project) -> None:
    run_id = project.runs["killed"]
    watched = project.start(str(BIN / "ies"), "run", "aws", f"--run-id={run_id}", "--monitor")
    job = watched.wait_for(r"^job +(\S+)$")[1]
    kept = int(watched.wait_for(r"inspect-fleet: (\d+) samples of an earlier attempt are kept")[1])
    assert kept >= 2
    before = len(watched.lines)
    watched.wait_for(r"^result  slow  scripted/good  sample \d ", before)
    docker("rm", "--force", "--volumes", f"inspect-fleet-test-batch-{job}-1")
    watched.wait_for(r"^attempt 2: the one before ended \(Host EC2")
    before = len(watched.lines)
    again = int(watched.wait_for(r"inspect-fleet: (\d+) samples of an earlier attempt are kept", before)[1])
    assert again > kept
    watched.wait_for(r"^result  slow  scripted/good  sample \d+ ", before)  # its own log holds what was kept by then
    done = project.ies("batch", "terminate-job", run_id, "--reason", "seen enough")
    assert done.code == 0 and f"{job}  terminated: seen enough" in done.out, done.said
    assert watched.end() == 3, watched.said
    assert watched.wait_for(r"^state   terminated \(exit 130\)")
    assert watched.wait_for(rf"\| inspect-fleet: kept {again} of 24 samples from earlier attempts")
    project.runs["uuids"] = {key: uuid for log in project.logs(run_id) for key, uuid in samples(log).items()}
    assert len(project.runs["uuids"]) >= again


def test_the_same_run_is_finished_here(project: Project) -> None:
    run_id = project.runs["killed"]
    done = project.ies("run", "local", f"--run-id={run_id}", "--max-samples=12", "--display=none")
    assert done.code == 0, done.said
    finished = max((samples(log) for log in project.logs(run_id)), key=len)
    assert set(finished) == set(range(1, 25))
    before = project.runs["uuids"]
    assert {key: finished[key] for key in before} == before, "a finished sample ran again"
    status = json.loads(project.ies("status", "check", f"--run-id={run_id}", "--json").out)
    assert [(row["state"], row["completed"], row["total"]) for row in status["rows"]] == [("success", 24, 24)]


def test_it_goes_to_the_dashboard(project: Project) -> None:
    run_id = project.runs["killed"]
    done = project.ies("summarize", f"--run-id={run_id}", "--task-metadata=metadata.yaml")
    assert done.code == 0 and "written" in done.said, done.said
    promoted = project.ies("promote", f"--run-id={run_id}")
    assert promoted.code == 0, promoted.said
    keys = project.estate.client("s3").list_objects_v2(Bucket=project.bucket, Prefix="logs/stage/slow/scripted+good/")
    assert sorted(Path(item["Key"]).suffix for item in keys["Contents"]) == [".json", ".zip"]


def test_calls_are_in_the_map(project: Project) -> None:
    made = project.estate.emulator.calls()
    for who, role in ((WHO, "researcher"), ("batch_job", "batch_job")):
        calls = {call for name, call in made if name == who} - set(iam_calls.PROBES)
        assert calls - iam_calls.calls(role) == set(), f"of {role}, but not in the map"
        assert "s3:GetObject" in calls
