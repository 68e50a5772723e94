"""Tells the estate's SNS topic of a fleet's end, of a stall, of a stop: whoever subscribed needs to watch nothing.

The controller calls it, and the reaper for a fleet without one. A message that cannot be sent is a remark, never a failure of the fleet.
"""

from collections.abc import Callable

from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws, redact

SUBJECT_MOST = 100
"""SNS's bound for a subject, which must be ASCII and one line."""


def subject_of(text: str) -> str:
    """A text as SNS takes it for a subject."""
    line = " ".join(text.encode("ascii", "replace").decode().split())
    return line if len(line) < SUBJECT_MOST else line[: SUBJECT_MOST - 4] + "..."


def teller(topic: str, region: str, note: Callable[[str], None]) -> Callable[[str, str], None]:
    """A function that sends (subject, text) to the topic and says by `note` when it cannot."""

    def tell(subject: str, text: str) -> None:
        try:
            body = redact.text(f"{subject}\n\n{text}\n")
            aws.client("sns", region).publish(TopicArn=topic, Subject=subject_of(redact.text(subject)), Message=body)
        except (ClientError, BotoCoreError, aws.ServiceError) as error:
            note(f"the message {subject!r} could not be sent to {topic.rsplit(':', 1)[-1]}: {aws.explain(error).text}")

    return tell
