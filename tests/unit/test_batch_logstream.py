"""Following CloudWatch Logs: every way in which a stream is not simply there, each request checked against the service's model."""

from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from evalops.batch.logstream import PAGES, LogStream, tail

WHERE = {"logGroupName": "/g", "logStreamName": "s", "startFromHead": True}


@pytest.fixture
def stub() -> Any:
    client = botocore.session.Session().create_client(
        "logs", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def page(stub: Stubber, token: str, *events: tuple[int, str], given: dict[str, Any] | None = None) -> None:
    """The next answer: its events as (milliseconds, text), its token, and what must be asked for it."""
    answer = {
        "events": [{"timestamp": at, "message": text, "ingestionTime": at} for at, text in events],
        "nextForwardToken": token,
        "nextBackwardToken": "b/0",
    }
    stub.add_response("get_log_events", answer, WHERE | (given or {}))


def texts(stream: LogStream, stub: Stubber) -> list[str]:
    return [line.text for line in stream.poll(stub.client)]


def test_the_end_is_a_repeated_token(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    page(stub, "f/1", (1, "a"), (2, "b"))
    page(stub, "f/2", (3, "c"), given={"nextToken": "f/1"})
    page(stub, "f/2", given={"nextToken": "f/2"})
    assert texts(stream, stub) == ["a", "b", "c"]
    page(stub, "f/3", (4, "d"), given={"nextToken": "f/2"})
    page(stub, "f/3", given={"nextToken": "f/3"})
    assert texts(stream, stub) == ["d"]


def test_an_empty_page_is_not_the_end(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    page(stub, "f/1")
    page(stub, "f/2", given={"nextToken": "f/1"})
    page(stub, "f/3", (9, "late"), given={"nextToken": "f/2"})
    page(stub, "f/3", given={"nextToken": "f/3"})
    assert texts(stream, stub) == ["late"]


def test_tokens_that_never_end_leave_the_rest_for_the_next_look(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    for number in range(PAGES):
        page(stub, f"f/{number}", given={"nextToken": f"f/{number - 1}"} if number else None)
    assert texts(stream, stub) == []
    page(stub, "f/x", (1, "a"), given={"nextToken": f"f/{PAGES - 1}"})
    page(stub, "f/x", given={"nextToken": "f/x"})
    assert texts(stream, stub) == ["a"]


def test_no_stream_yet_then_one(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    stub.add_client_error("get_log_events", "ResourceNotFoundException", expected_params=WHERE)
    assert texts(stream, stub) == [] and stream.state == "waiting"
    page(stub, "f/1", (1, "a"))
    page(stub, "f/1", given={"nextToken": "f/1"})
    assert texts(stream, stub) == ["a"] and stream.state == "open"


def test_no_stream_ever(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    for _ in range(3):
        stub.add_client_error("get_log_events", "ResourceNotFoundException")
        assert texts(stream, stub) == []
    assert stream.state == "waiting"
    stub.add_client_error("get_log_events", "ResourceNotFoundException")
    assert tail(stub.client, "/g", "s") == []


def test_lines_that_have_expired(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    page(stub, "f/1", (1, "a"))
    page(stub, "f/1", given={"nextToken": "f/1"})
    assert texts(stream, stub) == ["a"]
    stub.add_client_error("get_log_events", "ResourceNotFoundException")
    assert texts(stream, stub) == [] and stream.state == "gone"


def test_equal_times_lose_no_line_and_show_none_twice(stub: Stubber) -> None:
    """A token lives for a day. What follows is read from the last line's time on, which others share."""
    stream = LogStream("/g", "s")
    page(stub, "f/1", (5, "a"), (7, "b"), (7, "c"))
    page(stub, "f/1", given={"nextToken": "f/1"})
    assert texts(stream, stub) == ["a", "b", "c"]
    expired = {"expected_params": WHERE | {"nextToken": "f/1"}}
    stub.add_client_error(
        "get_log_events", "InvalidParameterException", "The specified nextToken is invalid.", **expired
    )
    page(stub, "g/1", (7, "b"), (7, "c"), (7, "d"), (8, "e"), given={"startTime": 7})
    page(stub, "g/1", given={"nextToken": "g/1"})
    assert texts(stream, stub) == ["d", "e"]


def test_an_invalid_request_without_a_token_is_an_error(stub: Stubber) -> None:
    stub.add_client_error("get_log_events", "InvalidParameterException", "bad")
    with pytest.raises(ClientError, match="bad"):
        LogStream("/g", "s").poll(stub.client)


def test_expired_credentials_are_the_callers(stub: Stubber) -> None:
    stream = LogStream("/g", "s")
    page(stub, "f/1", (1, "a"))
    stub.add_client_error("get_log_events", "ExpiredTokenException", expected_params=WHERE | {"nextToken": "f/1"})
    with pytest.raises(ClientError):
        stream.poll(stub.client)
    page(stub, "f/2", (2, "b"), given={"nextToken": "f/1"})
    page(stub, "f/2", given={"nextToken": "f/2"})
    assert texts(stream, stub) == ["a", "b"], "what the broken look had read is shown, once"


def test_the_tail(stub: Stubber) -> None:
    stub.add_response(
        "get_log_events",
        {"events": [{"timestamp": 1000, "message": "the end"}], "nextForwardToken": "f", "nextBackwardToken": "b"},
        {"logGroupName": "/g", "logStreamName": "s", "startFromHead": False, "limit": 20},
    )
    (line,) = tail(stub.client, "/g", "s")
    assert (line.text, line.at) == ("the end", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
