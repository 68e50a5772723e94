"""The class around python-terraform, on a program that answers as told."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_terraform import Fake, configuration, diagnostic, fake_terraform, lines

from evalops.infra.terraform import Change, Terraform, TerraformError, explain, progress_line

__all__ = ["configuration", "fake_terraform"]  # fixtures


def test_plan_maps_exit_codes_and_reports_each_change(fake: Fake, directory: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    change = {"type": "planned_change", "change": {"resource": {"addr": "aws_vpc.this[0]"}, "action": "create"}}
    fake.answer({"plan": {"out": lines({"type": "version"}, change), "code": 2}})
    terraform = Terraform(directory, heard.append)
    assert terraform.plan(tmp_path / "p") is Change.CHANGES
    assert heard == ["will make aws_vpc.this[0]"]
    fake.answer({})
    assert terraform.plan(tmp_path / "p", destroy=True) is Change.NONE
    out = f"-out={tmp_path / 'p'}"
    common = ["plan", out, "-detailed-exitcode", "-lock-timeout=60s", "-input=false", "-no-color", "-json"]
    assert [call["argv"] for call in fake.calls] == [common, [*common, "-destroy"]]
    assert {(call["automation"], call["cwd"]) for call in fake.calls} == {("1", str(directory))}
    assert "TF_IN_AUTOMATION" not in os.environ


def test_apply_takes_a_plan_file_and_never_asks(fake: Fake, directory: Path) -> None:
    heard: list[str] = []
    done = {
        "type": "apply_complete",
        "hook": {"resource": {"addr": "aws_sqs_queue.jobs"}, "action": "create", "elapsed_seconds": 25},
    }
    fake.answer({"apply": {"out": lines(done)}})
    Terraform(directory, heard.append).apply(Path("/plans/one"))
    assert fake.calls[0]["argv"] == ["apply", "-lock-timeout=60s", "-input=false", "-no-color", "-json", "/plans/one"]
    assert heard == ["made aws_sqs_queue.jobs (25 s)"]


def test_init_keeps_the_backend(fake: Fake, directory: Path) -> None:
    Terraform(directory).init()
    assert fake.calls[0]["argv"] == ["init", "-input=false", "-no-color", "-lock-timeout=60s"]


def test_outputs_leave_out_what_is_sensitive(fake: Fake, directory: Path) -> None:
    values = {"bucket": {"value": "b", "sensitive": False}, "key": {"value": "sk-secret", "sensitive": True}}
    fake.answer({"output": {"out": json.dumps(values)}})
    assert Terraform(directory).outputs() == {"bucket": "b"}


def test_an_error_in_the_stream_is_one_sentence(fake: Fake, directory: Path) -> None:
    fake.answer(
        {"plan": {"out": lines(diagnostic("Unsupported thing", "It is not\nsupported.", address="aws_x.y")), "code": 1}}
    )
    with pytest.raises(TerraformError) as caught:
        Terraform(directory).plan(Path("/p"))
    assert str(caught.value) == "Unsupported thing (aws_x.y): It is not supported"


def test_a_crash_without_json_is_told(fake: Fake, directory: Path) -> None:
    fake.answer({"apply": {"err": "panic: something\n", "code": 11}})
    with pytest.raises(TerraformError, match="panic: something"):
        Terraform(directory).apply(Path("/p"))


def test_no_terraform_on_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(TerraformError) as caught:
        Terraform(directory).check()
    assert str(caught.value).startswith("terraform is not on PATH: install version 1.11 or newer")


@pytest.mark.parametrize(
    ("version", "fits"), [("1.5.7", False), ("1.10.5", False), ("1.11.0", True), ("2.0.0-beta1", True)]
)
def test_version(fake: Fake, directory: Path, version: str, fits: bool) -> None:
    fake.answer({"version": {"out": json.dumps({"terraform_version": version})}})
    if fits:
        assert Terraform(directory).check() == version
        return
    with pytest.raises(TerraformError) as caught:
        Terraform(directory).check()
    assert str(caught.value).startswith(f"terraform {version} is too old: install 1.11 or newer")


def test_a_directory_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(TerraformError, match="there is no Terraform configuration in"):
        Terraform(tmp_path).check()


LOCK = """Error message: resource temporarily unavailable
Lock Info:
  ID:        7c9f2e7e-1111-2222-3333-444455556666
  Path:      terraform.tfstate
  Operation: OperationTypeApply
  Who:       ada@laptop
  Version:   1.11.4
  Created:   2026-11-29 14:05:33.12 +0000 UTC
"""


@pytest.mark.parametrize(
    ("summary", "detail", "said"),
    [
        ("Error acquiring the state lock", LOCK, "the state is locked by ada@laptop since 2026-11-29 14:05:33.12: wait"),
        ("No valid credential sources found", "Please see …", "there are no AWS credentials: renew them"),
        ("Retrieving AWS account details", "api error ExpiredToken: The security token …", "the AWS credentials have expired"),
        ("x", "https response error StatusCode: 403, api error InvalidClientTokenId: …", "AWS does not know the credentials"),
        (
            "creating S3 Bucket (our-logs)",
            "BucketAlreadyExists: The requested bucket name is not available",
            "the bucket name our-logs is taken: set bucket_name",
        ),
        ("Inconsistent dependency lock file", "…", "the configuration is not initialised here: run `make init`"),
        (
            "Invalid value for variable",
            "lanes must be a whole number.\n\nThis was checked by the validation rule at variables.tf:9.",
            "lanes must be a whole number",
        ),
    ],
)  # fmt: skip
def test_known_failures(summary: str, detail: str, said: str) -> None:
    told = explain({"summary": summary, "detail": detail})
    assert told.startswith(said)
    assert "\n" not in told


def test_bucket_taken_as_the_provider_says_it() -> None:
    summary = "creating S3 Bucket (our-logs): operation error S3: CreateBucket, StatusCode: 409, BucketAlreadyExists: "
    assert explain({"summary": summary, "detail": ""}).startswith("the bucket name our-logs is taken")


@pytest.mark.parametrize(
    "message",
    [
        {"type": "version", "terraform": "1.11.4"},
        {"type": "refresh_start", "hook": {"resource": {"addr": "a"}}},
        {"type": "planned_change", "change": {"resource": {"addr": "data.x"}, "action": "read"}},
        {"@message": "no type"},
    ],
)
def test_what_needs_no_line(message: dict[str, Any]) -> None:
    assert progress_line(message) is None


def test_an_empty_state_file_is_left_to_terraform(fake: Fake, directory: Path) -> None:
    (directory / "terraform.tfstate").touch()  # what Terraform leaves while its first run holds the lock
    assert Terraform(directory).check() == "1.11.4"
