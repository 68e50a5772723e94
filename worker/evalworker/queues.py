"""One SQS queue: batches in and out, every failed entry inside a successful answer looked at.

Called by the agent and the controller with the client of `evalworker.aws.sqs`. A stale receipt handle is an answer here,
not an error: another worker has the message. What a message means is not known here.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalworker.aws import Fault, ServiceError

BATCH = 10
"""Entries that SQS takes in one call."""

BATCH_BYTES = 256 * 1024
"""Bytes of all bodies in one call."""

TRIES = 6
"""Calls for an entry that keeps failing on SQS's side; botocore's own retries of whole calls come on top."""

FIRST_PAUSE_S = 0.2
"""Before the second try; doubled at each, with jitter of half."""

MAX_DELAY_S = 900
"""SQS's longest delay of a message."""


class QueueError(ServiceError):
    """A queue did not do what was asked; the text is one sentence."""


class SendFailed(QueueError):
    """Some messages could not be sent; `unsent` holds their bodies in order, and everything else was sent."""

    def __init__(self, sentence: str, fault: Fault | None = None, *, unsent: list[str]) -> None:
        super().__init__(sentence, fault)
        self.unsent = unsent


@dataclass(frozen=True)
class Received:
    """A message that is ours until its visibility ends. `receive_count` is 1 at the first delivery."""

    body: str
    receipt: str
    receive_count: int


@dataclass(frozen=True)
class Counts:
    """A queue's approximate numbers of messages."""

    visible: int
    in_flight: int
    delayed: int

    @property
    def total(self) -> int:
        """All that the queue holds."""
        return self.visible + self.in_flight + self.delayed


class Queue:
    """One queue. Holds no state but its client and URL; usable from several threads."""

    def __init__(self, client: Any, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """Args: client: boto3's SQS client. url: the queue's. sleep: held by tests."""
        self._client = client
        self.url = url
        self._sleep = sleep

    @property
    def name(self) -> str:
        """The queue's name, the last part of its URL."""
        return self.url.rsplit("/", 1)[-1]

    def send(self, bodies: list[str], delay_s: int = 0) -> None:
        """Send all bodies, in tens and under 256 KiB a call; `delay_s` (at most 900) is when they become visible.

        Raises SendFailed when some could not be sent; entries that SQS refuses for what they are (its sender faults) are
        not tried again.
        """
        delay = {"DelaySeconds": min(delay_s, MAX_DELAY_S)} if delay_s else {}
        refused: list[str] = []
        reasons: list[str] = []
        done = 0
        for batch in in_batches(bodies):
            try:
                refused_, failing = self._batch(
                    "send_message_batch", [{"MessageBody": body, **delay} for body in batch]
                )
                failed = refused_ | failing
            except (
                QueueError
            ) as error:  # the call itself: whether SQS took this batch is unknown, so it counts as unsent
                raise SendFailed(str(error), error.fault, unsent=refused + bodies[done:]) from error
            refused += [batch[index] for index in sorted(failed)]
            reasons += failed.values()
            done += len(batch)
        if refused:
            why = ", ".join(sorted(set(reasons)))
            raise SendFailed(
                f"{len(refused)} of {len(bodies)} messages were not taken by {self.name}: {why}", unsent=refused
            )

    def receive(self, max_messages: int = 1, wait_s: int = 20) -> list[Received]:
        """At most ten messages; waits up to `wait_s` (0 to 20) for the first. Raises QueueError."""
        answer = self._call(
            "receive_message",
            MaxNumberOfMessages=min(max_messages, BATCH),
            WaitTimeSeconds=wait_s,
            MessageSystemAttributeNames=["ApproximateReceiveCount"],
        )
        return [
            Received(
                message["Body"],
                message["ReceiptHandle"],
                int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            )
            for message in answer.get("Messages", [])
        ]

    def extend(self, receipts: Iterable[str], seconds: int) -> set[str]:
        """Keep messages ours for `seconds` from now; 0 gives them back at once. Returns the stale receipts.

        A stale receipt means that someone else has the message, or that it is gone. Raises QueueError when SQS cannot be
        reached: then nothing is known of them.
        """
        stale, _ = self._each("change_message_visibility_batch", receipts, VisibilityTimeout=seconds)
        return stale

    def delete(self, receipts: Iterable[str]) -> set[str]:
        """Delete messages. Returns the receipts that SQS did not take: stale, or failing however often it was asked.

        Raises QueueError when SQS cannot be reached.
        """
        stale, failing = self._each("delete_message_batch", receipts)
        return stale | failing

    def counts(self) -> Counts:
        """How many messages the queue holds, approximately. Raises QueueError."""
        names = [
            "ApproximateNumberOfMessages",
            "ApproximateNumberOfMessagesNotVisible",
            "ApproximateNumberOfMessagesDelayed",
        ]
        found = self._call("get_queue_attributes", AttributeNames=names)["Attributes"]
        return Counts(*(int(found.get(name, 0)) for name in names))

    def _each(self, operation: str, receipts: Iterable[str], **common: Any) -> tuple[set[str], set[str]]:
        """The receipts that SQS refused (stale), and those that it failed to serve however often it was asked."""
        refused: set[str] = set()
        failing: set[str] = set()
        unique = list(dict.fromkeys(receipts))
        for start in range(0, len(unique), BATCH):
            batch = unique[start : start + BATCH]
            no, never = self._batch(operation, [{"ReceiptHandle": receipt, **common} for receipt in batch])
            refused |= {batch[index] for index in no}
            failing |= {batch[index] for index in never}
        return refused, failing

    def _batch(self, operation: str, entries: list[dict[str, Any]]) -> tuple[dict[int, str], dict[int, str]]:
        """Call a batch operation until each entry went through or was given up.

        Returns {index: reason} of what SQS refused for what it is, and of what it failed to serve `TRIES` times.
        """
        open_ = {str(index): {"Id": str(index), **entry} for index, entry in enumerate(entries)}
        refused: dict[int, str] = {}
        for turn in range(TRIES):
            if turn:
                self._sleep(FIRST_PAUSE_S * 2 ** (turn - 1) * random.uniform(0.5, 1.5))  # noqa: S311
            failed = self._call(operation, Entries=list(open_.values())).get("Failed", [])
            refused |= {
                int(entry["Id"]): str(entry.get("Code", "refused")) for entry in failed if entry.get("SenderFault")
            }
            again = {entry["Id"]: str(entry.get("Code", "failed")) for entry in failed if not entry.get("SenderFault")}
            open_ = {id_: open_[id_] for id_ in again}
            if not open_:
                return refused, {}
        return refused, {int(id_): code for id_, code in again.items()}

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(QueueUrl=self.url, **arguments)
        except (ClientError, BotoCoreError) as error:
            raise QueueError.of(error, f"cannot use the queue {self.name}") from error
        return answer


def in_batches(bodies: list[str]) -> Iterator[list[str]]:
    """The bodies in order, in lists of at most ten and 256 KiB; a body that is larger alone stands alone."""
    batch: list[str] = []
    size = 0
    for body in bodies:
        length = len(body) if body.isascii() else len(body.encode("utf-8", "surrogatepass"))
        if batch and (len(batch) == BATCH or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += length
    if batch:
        yield batch
