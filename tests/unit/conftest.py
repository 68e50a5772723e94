"""What several unit tests of AWS Batch need: its client with answers that are checked against the service's model."""

from collections.abc import Iterator

import pytest
from botocore.stub import Stubber

from evalworker import aws


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    """Stubs the one Batch client that the code under test gets; every prepared answer must have been asked for."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    aws.forget_clients()
    with Stubber(aws.client("batch", "us-east-1")) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()
    aws.forget_clients()
