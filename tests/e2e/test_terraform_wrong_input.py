"""Wrong input to the real terraform and the real provider: one clear line each, and nothing is made."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aws_emulator
import pytest
from terraform_bench import Estate, copied

from evalops.infra.terraform import Terraform, TerraformError

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print('locked', flush=True); sys.stdin.read()"
)
"""Another run of Terraform, as far as the lock goes: in a process of its own, for such locks belong to processes."""

EXPIRED = (
    b'<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type><Code>ExpiredToken</Code>'
    b"<Message>The security token included in the request is expired</Message></Error><RequestId>1</RequestId></ErrorResponse>"
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, emulator: aws_emulator.Emulator) -> Estate:
    """An initialised configuration of its own, never applied."""
    estate = Estate(copied(tmp_path_factory.mktemp("wrong") / "terraform", emulated=True), emulator, who="wrong")
    assert estate.ies("infra", "init").returncode == 0
    return estate


def last_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"vpc_cidr": "10.83.0.0/33"}, "vpc_cidr must be an IPv4 network between /16 and /22, such as 10.83.0.0/16"),
        ({"lanes": 0}, "lanes must be a whole number from 1 to 16: each running fleet needs one"),
        ({"tags": {"cost centre": "evals"}}, "tags: a key may hold letters, digits and"),
        ({"instance_types": ["m7i.large", "m99x.large"]}, "instance_types: m99x.large not offered in us-east-1"),
        ({"bucket_name": "Our_Logs"}, "bucket_name must be 3 to 63 lower-case letters"),
        ({"lanes": "many"}, "Invalid value for"),
    ],
)
def test_values(empty: Estate, variables: dict[str, Any], said: str) -> None:
    empty.variables(**variables)
    done = empty.ies("infra", "plan")
    assert done.returncode == 2
    assert said in last_line(done.stderr)


def test_bucket_name_taken(empty: Estate) -> None:
    empty.variables(bucket_name="taken-by-somebody")
    empty.client("s3").create_bucket(Bucket="taken-by-somebody")
    done = empty.ies("infra", "apply", "--yes", TF_CLI_ARGS_plan="-target=aws_s3_bucket.this")
    empty.client("s3").delete_bucket(Bucket="taken-by-somebody")
    assert done.returncode == 2
    assert last_line(done.stderr).startswith(
        "Error: the bucket name taken-by-somebody is taken: set bucket_name to another"
    )


@pytest.fixture
def expired() -> Iterator[str]:
    """An AWS that says of every request that its token has expired."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(EXPIRED)))
            self.end_headers()
            self.wfile.write(EXPIRED)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_expired_credentials(empty: Estate, expired: str) -> None:
    empty.variables()
    done = empty.ies("infra", "plan", AWS_ENDPOINT_URL=expired)
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("Error: the AWS credentials have expired: renew them")
    doctor = empty.ies("infra", "doctor", AWS_ENDPOINT_URL=expired)
    assert doctor.returncode == 1 and "the AWS credentials have expired" in doctor.stdout


def test_locked_state(empty: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    empty.variables()
    for name, value in empty.environment().items():
        monkeypatch.setenv(name, value)
    info = {"ID": "7c9f", "Operation": "OperationTypeApply", "Who": "ada@laptop", "Version": "1.11.4"}
    info |= {"Created": "2026-11-29T14:05:33.12Z", "Path": "terraform.tfstate", "Info": ""}
    (empty.directory / ".terraform.tfstate.lock.info").write_text(json.dumps(info))
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(empty.directory / "terraform.tfstate")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert held.stdout and held.stdout.readline() == b"locked\n"
    try:
        with pytest.raises(TerraformError) as caught:
            Terraform(empty.directory, lock_timeout="0s").plan(empty.directory / "plan")
    finally:
        held.communicate()
    (empty.directory / ".terraform.tfstate.lock.info").unlink()
    assert str(caught.value).startswith("the state is locked by ada@laptop since 2026-11-29 14:05:33.12")
    assert "force-unlock 7c9f" in str(caught.value)


def test_no_terraform_on_path(empty: Estate, tmp_path: Path) -> None:
    done = empty.ies("infra", "plan", PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("Error: terraform is not on PATH: install version 1.11 or newer")


def test_too_old(empty: Estate, tmp_path: Path) -> None:
    old = tmp_path / "terraform"
    old.write_text('#!/bin/sh\necho \'{"terraform_version": "1.5.7"}\'\n')
    old.chmod(0o755)
    done = empty.ies("infra", "apply", "--yes", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("Error: terraform 1.5.7 is too old: install 1.11 or newer")


def test_not_initialised(empty: Estate, tmp_path: Path) -> None:
    bare = Estate(copied(tmp_path / "terraform", emulated=True), empty.emulator)
    done = bare.ies("infra", "plan")
    assert done.returncode == 2
    assert "run `make init`" in last_line(done.stderr)


def test_nothing_was_made(empty: Estate) -> None:
    """The provider looked at what there is and, once, at whether the bucket's name is free."""
    made = {call for who, call in empty.emulator.calls() if who == "wrong"}
    assert "sts:GetCallerIdentity" in made
    assert {call for call in made if not call.split(":")[1].startswith(("Get", "Describe", "List", "Head"))} <= {
        "s3:CreateBucket"
    }
    state = empty.directory / "terraform.tfstate"
    assert not state.exists() or not state.read_text().strip() or json.loads(state.read_text())["resources"] == []
