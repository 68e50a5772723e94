"""The weather of chaos runs: each kind touches the calls that it is about, while it holds, and no others."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
SENT = json.dumps({"QueueUrl": "q", "Entries": [{"Id": "1", "MessageBody": "b"}]}).encode()
CONTROL = "/bucket/fleet/control.json"


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Fair at first; nobody waits."""
    monkeypatch.syspath_prepend(str(TESTS / "chaos"))
    monkeypatch.syspath_prepend(str(TESTS))
    import weather as module

    monkeypatch.setattr(module, "SLOW_S", (0.0, 0.0))
    made = module.Weather(1, "http://127.0.0.1:9")
    made._old[CONTROL] = ("old tag", b"old")
    yield made
    sys.modules.pop("weather", None)


def calls(weather: Any) -> dict[tuple[str, str], list[Any]]:
    """What becomes of a hundred calls of each sort."""
    sorts = {
        ("sqs", "ReceiveMessage"): b"{}",
        ("sqs", "SendMessageBatch"): SENT,
        ("s3", "GET"): b"",
        ("s3", "PUT"): b"",
        ("ec2", "DescribeInstances"): b"",
    }
    path = {"GET": CONTROL, "PUT": "/bucket/fleet/events/000001.jsonl"}
    return {
        (service, operation): [
            weather.decide(service, operation, body, {":path": path.get(operation, "/")}) for _ in range(100)
        ]
        for (service, operation), body in sorts.items()
    }


@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        ("sqs errors", {("sqs", "ReceiveMessage"), ("sqs", "SendMessageBatch")}),
        ("sqs outage", {("sqs", "ReceiveMessage"), ("sqs", "SendMessageBatch")}),
        ("sqs duplicates", {("sqs", "SendMessageBatch")}),
        ("sqs delays", {("sqs", "SendMessageBatch")}),
        ("s3 errors", {("s3", "GET"), ("s3", "PUT")}),
        ("s3 lost answers", {("s3", "PUT")}),
        ("s3 old reads", {("s3", "GET")}),
        ("s3 slow", set()),
    ],
)
def test_each_kind_touches_what_it_is_about(weather: Any, kind: str, touched: set[tuple[str, str]]) -> None:
    assert not any(any(verdicts) for verdicts in calls(weather).values())
    weather.begin(kind)
    assert not weather.fair
    assert {sort for sort, verdicts in calls(weather).items() if any(verdicts)} == touched
    assert weather.met[kind] > 0
    weather.clear()
    assert not any(any(verdicts) for verdicts in calls(weather).values())


@pytest.mark.parametrize(
    ("ahead_s", "refused"),
    [
        (0, {}),
        (600, {"sqs": "not yet current"}),
        (-600, {"sqs": "expired"}),
        (3600, {"sqs": "not yet current", "s3": "Skewed"}),
    ],
)
def test_a_call_whose_time_is_off_is_refused_as_by_aws(weather: Any, ahead_s: int, refused: dict[str, str]) -> None:
    said = f"{datetime.now(UTC) + timedelta(seconds=ahead_s):%Y%m%dT%H%M%SZ}"
    for service in ("sqs", "s3", "ec2"):
        verdict = weather.decide(service, "GET", b"", {":path": "/", "X-Amz-Date": said})
        assert (verdict is not None) == (service in refused)
        assert verdict is None or refused[service].encode() in verdict[1]
    assert weather.met["clock jump"] == len(refused)


def test_a_delayed_message_is_the_same_message_later(weather: Any) -> None:
    weather.begin("sqs delays")
    (change, *_) = filter(None, calls(weather)["sqs", "SendMessageBatch"])
    (entry,) = json.loads(change.body)["Entries"]
    assert (entry["MessageBody"], entry["DelaySeconds"] > 0) == ("b", True)


def test_an_old_read_has_its_old_tag(weather: Any) -> None:
    weather.begin("s3 old reads")
    replies = list(filter(None, calls(weather)["s3", "GET"]))
    assert {(reply.status, reply.headers["ETag"], reply.body) for reply in replies} == {(200, "old tag", b"old")}
    known = [weather.decide("s3", "GET", b"", {":path": CONTROL, "If-None-Match": "old tag"}) for _ in range(50)]
    assert {reply.status for reply in known if reply} == {304}
