"""What we rely on in SQS, asked of two independent emulators through `evalworker.queues`; where they differ, it says so."""

import threading
import time
import uuid
from typing import Any

import pytest
from botocore.stub import Stubber
from emulators import Emulator

from evalops.embedded import create_lane_queues
from evalworker import aws
from evalworker.queues import BATCH_BYTES, TRIES, Queue, QueueError, SendFailed, in_batches


def make_queue(emulator: Emulator, **attributes: str) -> Queue:
    client = aws.sqs(emulator.lane("test"))
    return Queue(client, client.create_queue(QueueName=f"q-{uuid.uuid4().hex}", Attributes=attributes)["QueueUrl"])


def receive_one(queue: Queue, wait_s: int = 10) -> Any:
    found = queue.receive(1, wait_s)
    assert found, "no message came"
    return found[0]


@pytest.fixture
def queue(emulator: Emulator) -> Queue:
    return make_queue(emulator, VisibilityTimeout="30")


def receive_all(queue: Queue) -> list[str]:
    found: list[str] = []
    while batch := queue.receive(10, 0):
        found += [message.body for message in batch]
        assert queue.delete([message.receipt for message in batch]) == set()
    return found


def test_more_than_ten_messages_arrive_once_each(queue: Queue) -> None:
    bodies = [f'{{"n":{index}}}' for index in range(23)]
    queue.send(bodies)
    assert queue.counts().visible == 23
    assert sorted(receive_all(queue)) == sorted(bodies)
    assert queue.counts().total == 0


def test_batches_stay_below_the_limit_of_a_call(queue: Queue) -> None:
    bodies = [str(index) + "x" * 60_000 for index in range(9)]
    queue.send(bodies)
    assert sorted(receive_all(queue)) == sorted(bodies)


def test_a_message_that_is_larger_than_the_limit_is_refused_and_named(emulator: Emulator) -> None:
    queue = make_queue(emulator, MaximumMessageSize="1024")
    with pytest.raises(QueueError) as caught:
        queue.send(["x" * 2000])
    assert isinstance(caught.value, SendFailed)
    assert caught.value.unsent == ["x" * 2000]


def test_any_unicode_comes_back(queue: Queue) -> None:
    body = '{"a":"\\ud83d\\ude00 é\\u0000 <&>"}'
    queue.send([body])
    assert receive_one(queue).body == body


def test_a_received_message_is_hidden_and_counted(queue: Queue) -> None:
    queue.send(["a"])
    message = receive_one(queue)
    assert message.receive_count == 1
    assert queue.receive(10, 0) == []
    counts = queue.counts()
    assert (counts.visible, counts.in_flight, counts.total) == (0, 1, 1)


def test_given_back_it_is_delivered_again_with_a_higher_count(queue: Queue) -> None:
    queue.send(["a"])
    first = receive_one(queue)
    assert queue.extend([first.receipt], 0) == set()
    again = receive_one(queue)
    assert (again.body, again.receive_count) == ("a", 2)


def test_visibility_ends_and_extension_prolongs_it(emulator: Emulator) -> None:
    queue = make_queue(emulator, VisibilityTimeout="4")
    queue.send(["short", "long"])
    got = {message.body: message for message in queue.receive(10, 2)}
    assert set(got) == {"short", "long"}
    assert queue.extend([got["long"].receipt], 60) == set()
    assert receive_one(queue).body == "short"  # comes back after its time
    assert queue.receive(10, 0) == []  # and the other one does not


def test_a_stale_handle_is_an_answer_and_not_an_error(emulator: Emulator, queue: Queue) -> None:
    queue.send(["a"])
    old = receive_one(queue)
    queue.extend([old.receipt], 0)
    new = receive_one(queue)
    stale = queue.delete([old.receipt])
    # AWS and moto let the old handle delete a message that another worker has; ministack refuses. Both must be survived.
    assert stale == ({old.receipt} if emulator.name == "ministack" else set())
    queue.delete([new.receipt])
    assert queue.counts().total == 0


def test_handles_of_a_deleted_message_and_made_up_ones_are_stale(queue: Queue) -> None:
    queue.send(["a", "b"])
    gone, kept = queue.receive(10, 2)
    queue.delete([gone.receipt])
    assert queue.extend([gone.receipt, kept.receipt, "made-up"], 60) == {gone.receipt, "made-up"}
    assert "made-up" in queue.delete(["made-up", kept.receipt])
    assert queue.counts().total == 0


def test_more_than_ten_receipts(queue: Queue) -> None:
    queue.send([str(index) for index in range(13)])
    messages = [message for _ in range(2) for message in queue.receive(10, 0)]
    receipts = [message.receipt for message in messages]
    assert len(receipts) == 13
    assert queue.extend(receipts, 60) == set()
    assert queue.delete([*receipts, receipts[0]]) == set()  # one given twice is sent once
    assert queue.counts().total == 0


def test_a_dead_letter_after_its_last_receive(emulator: Emulator) -> None:
    client = aws.sqs(emulator.lane("test"))
    jobs, events, dead = (Queue(client, url) for url in create_lane_queues(client, f"lane-{uuid.uuid4().hex}", 30))
    jobs.send(["poison"])
    for count in range(1, 21):
        message = receive_one(jobs)
        assert message.receive_count == count
        jobs.extend([message.receipt], 0)
    assert jobs.receive(1, 0) == []
    assert receive_one(dead).body == "poison"
    assert events.counts().total == 0


def test_a_long_poll_ends_when_a_message_comes(queue: Queue) -> None:
    got: list[Any] = []
    poll = threading.Thread(target=lambda: got.extend(queue.receive(1, 20)))
    poll.start()
    time.sleep(0.5)  # so that it does wait
    assert got == []
    queue.send(["a"])
    poll.join(15)
    assert [message.body for message in got] == ["a"]
    assert not poll.is_alive()


def test_a_delayed_message_comes_later(queue: Queue) -> None:
    queue.send(["later"], delay_s=4)
    assert queue.receive(1, 0) == []
    assert queue.counts().delayed == 1
    assert receive_one(queue).body == "later"


def test_a_missing_queue_is_one_sentence(emulator: Emulator, queue: Queue) -> None:
    lost = Queue(aws.sqs(emulator.lane("test")), f"{queue.url}-lost")
    for call in (lost.counts, lost.receive, lambda: lost.delete(["x"]), lambda: lost.extend(["x"], 1)):
        with pytest.raises(QueueError, match=r"cannot use the queue q-.*-lost: .*NonExistentQueue") as caught:
            call()
        assert not caught.value.retryable


class Stubbed:
    """A queue whose answers are given one by one: what no emulator does."""

    def __init__(self, emulator: Emulator) -> None:
        self.client = emulator.client("sqs", parameter_validation=False)
        self.stub = Stubber(self.client)
        self.pauses: list[float] = []
        self.queue = Queue(self.client, "https://sqs.us-east-1.amazonaws.com/1/q", sleep=self.pauses.append)

    def answers(self, operation: str, failed: dict[str, tuple[str, bool]], ok: list[str], **expected: Any) -> None:
        more = {"MessageId": "m", "MD5OfMessageBody": "x"} if operation == "send_message_batch" else {}
        answer = {
            "Successful": [{"Id": id_, **more} for id_ in ok],
            "Failed": [{"Id": id_, "Code": code, "SenderFault": fault} for id_, (code, fault) in failed.items()],
        }
        self.stub.add_response(operation, answer, expected or None)


@pytest.fixture
def stubbed(ministack: Emulator) -> Any:
    made = Stubbed(ministack)
    with made.stub:
        yield made
    made.stub.assert_no_pending_responses()


def test_failed_entries_of_a_successful_send_are_sent_again_alone(stubbed: Stubbed) -> None:
    url = stubbed.queue.url
    stubbed.answers("send_message_batch", {"1": ("InternalError", False)}, ["0", "2"])
    only = {"QueueUrl": url, "Entries": [{"Id": "1", "MessageBody": "b"}]}
    stubbed.answers("send_message_batch", {"1": ("InternalError", False)}, [], **only)
    stubbed.answers("send_message_batch", {}, ["1"], **only)
    stubbed.queue.send(["a", "b", "c"])
    assert len(stubbed.pauses) == 2


def test_what_the_sender_did_wrong_is_not_sent_again(stubbed: Stubbed) -> None:
    stubbed.answers("send_message_batch", {"1": ("InvalidMessageContents", True), "2": ("InternalError", False)}, ["0"])
    stubbed.answers("send_message_batch", {}, ["2"])
    with pytest.raises(SendFailed, match="1 of 3 messages were not taken by q: InvalidMessageContents") as caught:
        stubbed.queue.send(["a", "b", "c"])
    assert caught.value.unsent == ["b"]


def test_sending_again_is_bounded(stubbed: Stubbed) -> None:
    for _ in range(TRIES):
        stubbed.answers("send_message_batch", {"0": ("InternalError", False)}, [])
    with pytest.raises(SendFailed) as caught:
        stubbed.queue.send(["a"])
    assert caught.value.unsent == ["a"]
    assert len(stubbed.pauses) == TRIES - 1


def test_a_call_that_fails_leaves_the_rest_unsent(stubbed: Stubbed) -> None:
    stubbed.answers("send_message_batch", {}, [str(index) for index in range(10)])
    stubbed.stub.add_client_error("send_message_batch", "AccessDenied", "no", 403)
    with pytest.raises(SendFailed, match="cannot use the queue q: access denied") as caught:
        stubbed.queue.send([str(index) for index in range(15)])
    assert caught.value.unsent == [str(index) for index in range(10, 15)]


@pytest.mark.parametrize("operation", ["delete_message_batch", "change_message_visibility_batch"])
def test_failed_receipts_are_tried_again_and_stale_ones_reported(stubbed: Stubbed, operation: str) -> None:
    call = (
        stubbed.queue.delete if operation.startswith("delete") else lambda receipts: stubbed.queue.extend(receipts, 5)
    )
    stubbed.answers(operation, {"0": ("ReceiptHandleIsInvalid", True), "1": ("InternalError", False)}, ["2"])
    stubbed.answers(operation, {}, ["1"])
    assert call(["r0", "r1", "r2"]) == {"r0"}


def test_a_receipt_that_sqs_fails_to_serve_is_not_called_stale(stubbed: Stubbed) -> None:
    for _ in range(TRIES):
        stubbed.answers("change_message_visibility_batch", {"0": ("InternalError", False)}, [])
    assert stubbed.queue.extend(["r0"], 5) == set()


def test_no_call_carries_more_bytes_than_sqs_takes() -> None:
    bodies = ["é" * 50_000, "x" * 200_000, "y" * BATCH_BYTES, "z"] + ["s"] * 25
    batches = list(in_batches(bodies))
    assert [body for batch in batches for body in batch] == bodies
    assert all(len(batch) <= 10 and sum(len(body.encode()) for body in batch) <= BATCH_BYTES for batch in batches)
