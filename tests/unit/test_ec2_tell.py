"""What the estate's topic is told: a subject that SNS takes, no secret, and nothing that could end a fleet."""

from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from evalops.ec2 import tell
from evalworker import redact

TOPIC = "arn:aws:sns:us-east-1:123456789012:inspect-fleet"


class Sns:
    """Remembers what was published."""

    def __init__(self) -> None:
        self.published: list[dict[str, str]] = []

    def publish(self, **message: str) -> None:
        self.published.append(message)


def test_a_subject_is_one_short_line_of_ascii() -> None:
    assert tell.subject_of("fleet x\nhas ended: größer") == "fleet x has ended: gr??er"
    assert len(tell.subject_of("x" * 300)) == tell.SUBJECT_MOST - 1


def test_a_message_bears_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    sns = Sns()
    monkeypatch.setattr(tell.aws, "client", lambda *_: sns)
    monkeypatch.setattr(redact, "_process", redact.Redactor({"TOLD_API_KEY": "sk-told-marker-0123456789"}))
    tell.teller(TOPIC, "us-east-1", print)("fleet x has ended: stopped", "refused sk-told-marker-0123456789")
    (message,) = sns.published
    assert (message["TopicArn"], message["Subject"]) == (TOPIC, "fleet x has ended: stopped")
    assert "sk-told" not in str(message)


def test_a_message_that_cannot_be_sent_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise EndpointConnectionError(endpoint_url="https://sns")

    said: list[str] = []
    monkeypatch.setattr(tell.aws, "client", unreachable)
    tell.teller(TOPIC, "us-east-1", said.append)("fleet x has ended: complete", "")
    assert len(said) == 1
    assert said[0].startswith("the message 'fleet x has ended: complete' could not be sent to inspect-fleet: ")
