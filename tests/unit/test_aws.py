"""`evalworker.aws`: who gets which client, and what an error means. No network."""

import errno
import os
import subprocess
import sys
import threading
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
    UnauthorizedSSOTokenError,
)

from evalworker import aws
from evalworker.aws import ServiceError, explain
from evalworker.contract.documents import Lane
from evalworker.contract.failures import Category
from evalworker.contract.wire import now


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    aws.forget_clients()
    yield
    aws.forget_clients()


def lane(endpoint: str | None, region: str = "eu-west-2") -> Lane:
    return Lane(name="l", jobs="j", events="e", dead="d", region=region, endpoint=endpoint)


def credentials(client: Any) -> tuple[str, str] | None:
    found = client._request_signer._credentials
    return found and (found.access_key, found.secret_key)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_the_emulators_endpoint_is_used_on_loopback(host: str) -> None:
    client = aws.sqs(lane(f"http://{host}:4566"))
    assert client.meta.endpoint_url == f"http://{host}:4566"
    assert client.meta.region_name == "eu-west-2"
    assert credentials(client) == ("embedded", "embedded")


@pytest.mark.parametrize(
    "endpoint",
    [None, "http://10.0.0.1:4566", "http://127.0.0.1.evil.example", "http://localhost.example:1", "http://2130706433"],
)
def test_nowhere_else(endpoint: str | None) -> None:
    client = aws.sqs(lane(endpoint))
    assert client.meta.endpoint_url == "https://sqs.eu-west-2.amazonaws.com"
    assert credentials(client) is None


def test_the_users_endpoint_variable_is_for_all_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert aws.client("s3").meta.endpoint_url == "http://127.0.0.1:1"
    assert aws.sqs(lane(None)).meta.endpoint_url == "http://127.0.0.1:1"
    assert aws.sqs(lane("http://127.0.0.1:2")).meta.endpoint_url == "http://127.0.0.1:2"


def test_a_users_broken_configuration_does_not_stop_the_emulator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default\nno configuration")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:3128")
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    client = aws.sqs(lane("http://127.0.0.1:9"))
    assert client.meta.endpoint_url == "http://127.0.0.1:9"
    assert client._endpoint.http_session._proxy_config.proxy_url_for("http://127.0.0.1:9") is None
    with pytest.raises(ServiceError, match="cannot use AWS"):
        aws.client("s3")


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    aws.sqs(lane("http://127.0.0.1:9"))
    aws.sqs(lane(None))
    assert dict(os.environ) == before


def test_one_client_for_all_threads() -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(aws.sqs(lane("http://127.0.0.1:9")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(client) for client in found}) == 1
    assert aws.sqs(lane("http://127.0.0.1:8")) is not found[0]


def test_a_forked_child_makes_its_own() -> None:
    code = """
import os
from evalworker import aws
from evalworker.contract.documents import Lane
lane = Lane(name="l", jobs="j", events="e", dead="d", endpoint="http://127.0.0.1:9")
ours = aws.sqs(lane)
if os.fork() == 0:
    os._exit(3 if aws.sqs(lane) is not ours else 4)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
assert aws.sqs(lane) is ours
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_retries_and_timeouts_are_bounded() -> None:
    for client in (aws.client("s3", "eu-west-2"), aws.sqs(lane(None)), aws.sqs(lane("http://127.0.0.1:9"))):
        config = client.meta.config
        assert config.retries["mode"] == "standard"
        assert config.retries["total_max_attempts"] == 4
        assert config.read_timeout > 20  # the longest long poll
        assert config.connect_timeout <= 10


def test_no_region_is_one_sentence() -> None:
    with pytest.raises(ServiceError, match="set AWS_PROFILE or AWS_DEFAULT_REGION") as caught:
        aws.client("ec2")
    assert caught.value.category is Category.CONFIG


def answered(code: str, status: int, message: str = "", headers: dict[str, str] | None = None) -> ClientError:
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}, "RetryAttempts": 0}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": about}, "Op")  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("error", "category", "retryable", "renew", "text"),
    [
        (answered("ExpiredToken", 400), None, False, True, "have expired"),
        (answered("ExpiredTokenException", 403), None, False, True, "have expired"),
        (answered("InvalidAccessKeyId", 403), None, False, True, "no usable AWS credentials"),
        (NoCredentialsError(), None, False, True, "no usable AWS credentials"),
        (UnauthorizedSSOTokenError(), None, False, True, "have expired"),
        (answered("AccessDenied", 403, "no"), None, False, False, "access denied (AccessDenied: no)"),
        (answered("403", 403, "Forbidden"), None, False, False, "access denied"),
        (answered("RequestTimeTooSkewed", 403), Category.CLOCK, True, False, "clock is wrong"),
        (
            answered("InvalidSignatureException", 400, "Signature expired: x"),
            Category.CLOCK,
            True,
            False,
            "clock is wrong",
        ),
        (answered("SignatureDoesNotMatch", 403, "wrong key"), None, False, False, "access denied"),
        (answered("SlowDown", 503), None, True, False, "SlowDown"),
        (answered("ThrottlingException", 400), None, True, False, "ThrottlingException"),
        (answered("InternalError", 500, "sorry."), None, True, False, "InternalError: sorry"),
        (answered("MalformedXML", 400), None, False, False, "MalformedXML"),
        (ReadTimeoutError(endpoint_url="u"), None, True, False, "u"),
        (ConnectTimeoutError(endpoint_url="u"), None, True, False, "u"),
        (EndpointConnectionError(endpoint_url="u"), None, True, False, "u"),
        (IncompleteReadError(actual_bytes=1, expected_bytes=2), None, True, False, "1"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), None, True, False, "reset"),
        (PermissionError(errno.EACCES, "denied"), None, False, False, "denied"),
        (OSError(errno.ENOSPC, "full"), Category.DISK_FULL, False, False, "free some space"),
        (BotoCoreError(), None, False, False, "unspecified"),
    ],
)
def test_what_an_error_means(
    error: Exception, category: Category | None, retryable: bool, renew: bool, text: str
) -> None:
    fault = explain(error)
    assert (fault.category, fault.retryable, fault.credentials) == (category, retryable, renew)
    assert text in fault.text
    assert "\n" not in fault.text


@pytest.mark.parametrize(("minutes", "expected"), [(0, None), (4, None), (20, Category.CLOCK), (-20, Category.CLOCK)])
def test_a_bare_403_with_another_time_is_the_clock(minutes: int, expected: Category | None) -> None:
    date = format_datetime(now() + timedelta(minutes=minutes), usegmt=True)
    assert explain(answered("403", 403, "Forbidden", {"date": date})).category is expected


def test_what_a_transfer_wraps_is_found() -> None:
    try:
        try:
            raise answered("AccessDenied", 403)
        except ClientError as inner:
            raise RuntimeError(f"failed: {inner}") from None
    except RuntimeError as error:
        assert explain(error).code == "AccessDenied"


def test_an_error_is_one_sentence_with_a_category() -> None:
    error = ServiceError.of(answered("RequestTimeTooSkewed", 403, "too far"), "cannot do it")
    assert str(error).startswith("cannot do it: this machine's clock is wrong (RequestTimeTooSkewed: too far)")
    assert error.category is Category.CLOCK
    assert ServiceError("x").category is Category.NETWORK


def test_importing_it_needs_neither_inspect_nor_the_operators_side() -> None:
    """Nor boto3, which a local fleet's processes never use."""
    code = "import sys, evalworker.queues, evalworker.storage; print(*sorted(m.split('.')[0] for m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"inspect_ai", "evalops", "click", "jinja2", "rich", "ministack", "boto3"} & set(found)
