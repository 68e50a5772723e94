"""`ies run aws` and `ies batch` against moto's Batch without containers: what is submitted, what is refused, what is shown."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from click.testing import CliRunner, Result
from moto import mock_aws

from evalops.cli import ies
from evalops.infra.estate import parameter
from evalworker import aws
from evalworker.contract import layout
from evalworker.contract.documents import BatchRun, Manifest

REGION, BUCKET, NAME = "us-east-1", "bucket-of-batch", "default"
QUEUES = {"spot": f"inspect-fleet-{NAME}-spot", "on-demand": f"inspect-fleet-{NAME}-on-demand"}
EXAMPLES = Path(__file__).parents[2] / "examples"


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": REGION}


@dataclass
class Account:
    """An estate with Batch. `before`: jobs of earlier tests."""

    content: dict[str, Any]
    pristine: dict[str, Any] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name=REGION)

    def runs_keys(self) -> set[str]:
        found = self.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {item["Key"] for item in found if item["Key"].startswith("20")}

    def listed(self) -> list[dict[str, Any]]:
        batch, every = self.client("batch"), [{"name": "JOB_NAME", "values": ["*"]}]
        return [
            job for queue in QUEUES.values() for job in batch.list_jobs(jobQueue=queue, filters=every)["jobSummaryList"]
        ]

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of this test."""
        ids = [job["jobId"] for job in self.listed() if job["jobId"] not in self.before]
        return list(self.client("batch").describe_jobs(jobs=ids)["jobs"]) if ids else []

    def publish(self, **changes: Any) -> None:
        self.content |= changes
        self.client("ssm").put_parameter(
            Name=parameter(NAME), Value=json.dumps(self.content), Type="String", Overwrite=True
        )

    def stored(self, run_id: str) -> tuple[Manifest, BatchRun]:
        s3 = self.client("s3")
        manifest, run = (
            s3.get_object(Bucket=BUCKET, Key=key(run_id))["Body"].read() for key in (layout.manifest, layout.batch)
        )
        return Manifest.from_json(manifest), BatchRun.from_json(run)


@pytest.fixture(scope="module")
def world() -> Iterator[Account]:
    """An account with an estate, made once."""
    with pytest.MonkeyPatch.context() as patch, mock_aws(config={"batch": {"use_docker": False}}):
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield make()


@pytest.fixture
def account(world: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    """A user's directory with the examples, and the account as if nothing had happened yet."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("S3_BUCKET_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic.py").write_text((EXAMPLES / "arithmetic.py").read_text())
    aws.forget_clients()
    for key in world.runs_keys():
        world.client("s3").delete_object(Bucket=BUCKET, Key=key)
    world.before = {job["jobId"] for job in world.listed()}
    yield world
    world.publish(**world.pristine)
    aws.forget_clients()


def make() -> Account:
    """What Terraform makes, as far as Batch needs it."""
    found = Account({})
    iam, batch, ec2 = (found.client(service) for service in ("iam", "batch", "ec2"))
    found.client("s3").create_bucket(Bucket=BUCKET)
    role = iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    profile = iam.create_instance_profile(InstanceProfileName="p")["InstanceProfile"]["Arn"]
    network = ec2.describe_subnets()["Subnets"][0]
    group = ec2.create_security_group(GroupName="g", Description="g", VpcId=network["VpcId"])["GroupId"]
    hosts = {"type": "EC2", "minvCpus": 0, "maxvCpus": 4, "instanceTypes": ["m5.large"], "instanceRole": profile}
    hosts |= {"subnets": [network["SubnetId"]], "securityGroupIds": [group]}
    for kind, queue in QUEUES.items():
        made = batch.create_compute_environment(
            computeEnvironmentName=kind, type="MANAGED", computeResources=hosts, serviceRole=role
        )
        order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
        batch.create_job_queue(jobQueueName=queue, state="ENABLED", priority=1, computeEnvironmentOrder=order)
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    batch.register_job_definition(
        jobDefinitionName="worker", type="container", containerProperties={"image": "i", "resourceRequirements": needs}
    )
    secret = f"/inspect-fleet/{NAME}/secrets/OPENAI_API_KEY"
    found.client("ssm").put_parameter(Name=secret, Value="unset", Type="SecureString")
    nobody = {
        "launch_templates": {},
        "images": {},
        "instance_types": {},
        "subnets": [],
        "role": "r",
        "max_lifetime_minutes": 1,
    }
    found.publish(
        schema=1, name=NAME, account="123456789012", region=REGION, bucket=BUCKET, lanes={}, topic="t", metrics="m", repository="r",
        secrets={"OPENAI_API_KEY": secret}, workers=nobody,
        batch={"queues": QUEUES, "job_definition": "worker", "log_group": "/g", "image": "i"},
    )  # fmt: skip
    found.pristine = dict(found.content)
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(ies, list(words))


SUBMIT = ("run", "aws", "arithmetic.py", "--model", "scripted/good", "--limit", "3")


def test_a_submission(account: Account) -> None:
    done = run(
        *SUBMIT, "--on-demand", "--vcpus", "3", "--memory", "4096", "--job-timeout", "2h", "--model", "scripted/mixed"
    )
    assert done.exit_code == 0, done.output
    run_id = done.stdout.strip()
    manifest, stored = account.stored(run_id)
    assert (manifest.backend, [job.model for job in manifest.jobs]) == ("batch", ["scripted/good", "scripted/mixed"])
    assert manifest.code is not None and manifest.worker is not None
    assert manifest.arguments["display"] == "plain" and manifest.arguments["log_shared"] == 60
    (job,) = account.jobs()
    assert job["jobId"] == stored.rounds[0].submissions[0].job_id
    assert job["jobName"] == f"arithmetic-scripted-good-and-1-more-{run_id}-r1"
    assert job["jobQueue"].endswith(QUEUES["on-demand"])
    assert job["container"]["command"][4:] == [f"s3://{BUCKET}/{run_id}/manifest.json", "--round", "1"]
    said = done.stderr
    for link in (
        f"#jobs/detail/{job['jobId']}",
        "#logsV2:log-groups/log-group/$252Fg",
        f"ies batch monitor-job {run_id}",
    ):
        assert link in said


def test_a_launch_record(account: Account) -> None:
    done = run(*SUBMIT, "--json", "--array", "--model", "scripted/mixed")
    said = json.loads(done.stdout)
    assert (said["type"], said["jobs"][0]["size"], said["queue"]) == ("launch", 2, QUEUES["spot"])
    assert said["log_dir"] == f"s3://{BUCKET}/logs/working/{said['run_id']}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--queue", "fast"), f"--queue fast: the estate {NAME} has no such queue, only {QUEUES['spot']} (spot), {QUEUES['on-demand']}"),
        (("--queue", "spot", "--spot"), "--queue and --spot exclude each other"),
        (("--runnable-timeout", "1h"), "--runnable-timeout needs --monitor"),
        (("--job-timeout", "30s"), "--job-timeout: Batch takes 60 seconds at the least"),
        (("--secret", "MISSING_KEY"), "--secret MISSING_KEY: the estate has no such key: add it to secret_names and run `make apply`"),
        (("--model", "openai/gpt-4o"), "openai/gpt-4o needs OPENAI_API_KEY, and /inspect-fleet/default/secrets/OPENAI_API_KEY has no"),
        (("nothing.py",), "nothing.py: there is no such file in"),
        (("--run-id", "2026-11-29-14-05-33-1a2b3c4d"), "there is no run 2026-11-29-14-05-33-1a2b3c4d under s3://bucket-of-batch"),
        (("-M", "api_key=sk-12345"), "api_key"),
        (("--shards", "3"), "No such option"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_sent(account: Account, words: tuple[str, ...], sentence: str) -> None:
    done = run(*SUBMIT, *words)
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr.splitlines()[-1]
    assert account.jobs() == [] and account.runs_keys() == set()


def test_a_name_of_300_characters(account: Account) -> None:
    name = "t" * 300
    text = (EXAMPLES / "arithmetic.py").read_text().replace("def arithmetic(", f"def {name}(")
    Path("long.py").write_text(text)
    done = run("run", "aws", "long.py", "--model", "scripted/good", "--limit", "1")
    assert done.exit_code == 0, done.output
    (job,) = account.jobs()
    assert len(job["jobName"]) <= 128 and job["jobName"].endswith(f"{done.stdout.strip()}-r1")


def test_a_manifest_that_is_too_large(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalops.batch.request.LARGEST_MANIFEST", 1000)
    done = run(*SUBMIT)
    assert done.exit_code == 2 and "the run's manifest has" in done.stderr.splitlines()[-1]
    assert account.jobs() == [] and account.runs_keys() == set()


def test_no_permission_names_the_action(account: Account) -> None:
    said = "User: arn:aws:iam::1:user/ada is not authorized to perform: batch:SubmitJob on resource: arn:aws:batch:q"
    with Stubber(aws.client("batch", REGION)) as stub:
        stub.add_client_error("submit_job", "AccessDeniedException", said, http_status_code=403)
        done = run(*SUBMIT)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"Error: AWS Batch took no job (batch:SubmitJob to {QUEUES['spot']}): access denied"
    )
    assert "not authorized to perform: batch:SubmitJob" in done.stderr
    assert account.jobs() == [] and account.runs_keys() == set()


def test_no_image_and_no_batch(account: Account) -> None:
    account.publish(batch=account.content["batch"] | {"image": None})
    assert "no worker image was pushed for Batch: `make image`, `make push-image`" in run(*SUBMIT).stderr
    account.publish(batch=None)
    for words in (SUBMIT, ("batch", "list"), ("batch", "monitor-job", "x")):
        done = run(*words)
        assert done.exit_code == 2 and "was made without Batch: set batch.enabled and run `make apply`" in done.stderr


def test_no_aws_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arithmetic.py").write_text((EXAMPLES / "arithmetic.py").read_text())
    for words in (SUBMIT, ("batch", "terminate-job", "x")):
        done = run(*words)
        assert done.exit_code == 2, done.output
        assert done.stderr.splitlines()[-1].startswith("Error: AWS cannot be used: ")
        assert "Traceback" not in done.stderr


def test_a_run_that_is_there_is_not_run_twice(account: Account) -> None:
    run_id = run(*SUBMIT).stdout.strip()
    job = account.jobs()[0]["jobId"]
    required = {"jobArn": "a", "jobQueue": "q", "startedAt": 1, "jobDefinition": "d", "jobName": "n"}
    for words in (("run", "aws", "--run-id", run_id), ("run", "local", "--run-id", run_id)):
        with Stubber(aws.client("batch", REGION)) as stub, pytest.MonkeyPatch.context() as patch:
            patch.setenv("S3_BUCKET_NAME", BUCKET)
            stub.add_response(
                "describe_jobs", {"jobs": [required | {"jobId": job, "status": "RUNNABLE"}]}, {"jobs": [job]}
            )
            done = run(*words)
        assert done.exit_code == 2, done.output
        assert f"its Batch job {job} is there: waiting for a host" in done.stderr
    assert len(account.jobs()) == 1


def test_a_run_is_submitted_again(account: Account) -> None:
    run_id = run(*SUBMIT).stdout.strip()
    done = run("run", "aws", "--run-id", run_id)
    assert done.exit_code == 0 and done.stdout.strip() == run_id, done.output
    _, stored = account.stored(run_id)
    assert [round_.number for round_ in stored.rounds] == [1, 2] and len(account.jobs()) == 2
    other = run("run", "aws", "--run-id", run_id, "arithmetic.py", "--model", "scripted/refuse", "--limit", "3")
    assert other.exit_code == 2 and f"the run {run_id} does not hold arithmetic with scripted/refuse" in other.stderr
    for words in (("--limit", "2"), ("--package", "tabulate"), ("--require-clean",)):
        changed = run("run", "aws", "--run-id", run_id, *words)
        assert changed.exit_code == 2 and f"to change {words[0]}, repeat the whole command" in changed.stderr
    models = run("run", "aws", "--run-id", run_id, "--model", "scripted/refuse")
    assert models.exit_code == 2 and f"the run {run_id} has other models" in models.stderr


def test_a_resume_keeps_the_shape_of_the_run(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ("--array", "--on-demand", "--vcpus", "3", "--memory", "4096", "--job-timeout", "2h")
    run_id = run(*SUBMIT, "--model", "scripted/mixed", *shape).stdout.strip()
    monkeypatch.setenv("INSPECT_EVAL_MODEL", "scripted/refuse")  # a habit of the shell, no wish for this run
    done = run("run", "aws", "--run-id", run_id)
    assert done.exit_code == 0, done.output
    first, second = account.stored(run_id)[1].rounds
    assert f"ies batch monitor-job {second.submissions[0].job_id}:INDEX    (0 to 1) shows a child's log" in done.stderr
    fields = ("queue", "array", "vcpus", "memory", "timeout_s")
    assert [getattr(second, name) for name in fields] == [QUEUES["on-demand"], True, 3, 4096, 7200.0]
    assert second.submissions[0].size == 2
    queued = next(job for job in account.jobs() if job["jobId"] == second.submissions[0].job_id)
    assert queued["jobQueue"].endswith(QUEUES["on-demand"]) and queued["timeout"] == {"attemptDurationSeconds": 7200}
    done = run("run", "aws", "--run-id", run_id, "--no-array", "--spot", "--vcpus", "1")
    assert done.exit_code == 0, done.output
    third = account.stored(run_id)[1].rounds[2]
    assert [getattr(third, name) for name in fields] == [QUEUES["spot"], False, 1, 4096, 7200.0]
    assert first.submissions[0].size == 2 and third.submissions[0].size is None


def test_list_monitor_and_terminate(account: Account) -> None:
    run_id = run(*SUBMIT).stdout.strip()
    job = account.jobs()[0]["jobId"]
    listed = json.loads(run("batch", "list", "--json", "-n", "1").stdout)
    assert [(entry["job"], entry["run"], entry["queue"]) for entry in listed["jobs"]] == [(job, run_id, QUEUES["spot"])]
    assert run_id in run("batch", "list").stdout
    others = json.loads(run("batch", "list", "--queue", "on-demand", "--json").stdout)["jobs"]
    assert run_id not in {entry["run"] for entry in others}
    assert "--queue x: the estate has" in run("batch", "list", "--queue", "x").stderr
    done = run("batch", "monitor-job", run_id, "--json")
    said = json.loads(done.stdout)
    assert (done.exit_code, said["jobs"][0]["state"], said["run_id"]) == (1, "SUCCEEDED", run_id)  # it left no log here
    assert [row["state"] for row in said["results"]["rows"]] == ["waiting"]
    over = run("batch", "terminate-job", job)
    assert over.exit_code == 0 and "it had ended before: nothing to terminate" in over.stderr


def test_ctrl_c_leaves_the_job_running(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    run_id = run(*SUBMIT).stdout.strip()
    monkeypatch.setattr("evalops.monitor.monitor.Monitor.run", interrupted)
    done = run("batch", "monitor-job", run_id)
    assert done.exit_code == 4
    assert (
        f"the job goes on without this command: ies batch monitor-job {run_id}, or ies batch terminate-job {run_id}"
        in done.stderr
    )


@pytest.mark.parametrize("text", ["nonsense", "2026-11-29-14-05-33-1a2b3c4d", "5b2152b4-7c28-4d95-9303-45ebe8b08a9b"])
@pytest.mark.parametrize("command", ["monitor-job", "terminate-job"])
def test_what_nobody_knows(account: Account, command: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalops.monitor.monitor.EVERY_S", 0)
    monkeypatch.setattr("evalops.batch.terminate.EVERY_S", 0)
    with Stubber(aws.client("batch", REGION)) as stub:
        for number in range(3):
            stub.add_response("describe_jobs", {"jobs": []})
            if command == "terminate-job" and number == 0:
                stub.add_response("terminate_job", {})
        done = run("batch", command, text)
    assert done.exit_code == 2 and text in done.stderr.splitlines()[-1], done.output
    assert "see `ies batch list`" in done.stderr or "has no job on AWS Batch" in done.stderr
