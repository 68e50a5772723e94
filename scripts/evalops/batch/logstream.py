"""Follows what a container prints, as CloudWatch Logs has it: one stream for each attempt of a job.

A stream exists only once its container has started, an empty page is not its end, its tokens go on for ever, and several lines share a
millisecond: so the end is a repeated token, and a page that is read again skips what was shown.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from botocore.exceptions import ClientError

PAGES = 20
"""Pages read at one look: what comes after them is read at the next."""

TAIL = 20
"""Lines shown of a failed job that nobody has followed."""


@dataclass(frozen=True)
class Line:
    """One line and when the container printed it."""

    at: datetime
    text: str


@dataclass
class LogStream:
    """One stream, read from its head. `state`: `waiting` (there is none yet), `open`, `gone` (its lines have expired or were removed)."""

    group: str
    name: str
    state: Literal["waiting", "open", "gone"] = "waiting"
    _token: str | None = None
    _last: int = -1
    _at_last: int = 0
    _skip: int = 0
    _unread: list[Line] = field(default_factory=list)

    def poll(self, client: Any) -> list[Line]:
        """The lines that have come since the last look. Raises botocore's errors but those of a stream that is not there.

        What was read before an error comes with the next look.
        """
        self._read(client)
        lines, self._unread = self._unread, []
        return lines

    def _read(self, client: Any) -> None:
        for _ in range(PAGES):
            try:
                answer = client.get_log_events(**self._request())
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                if code == "ResourceNotFoundException":
                    self.state = "gone" if self.state != "waiting" else "waiting"
                    return
                if code == "InvalidParameterException" and self._token is not None:
                    self._from_last_line()
                    continue
                raise
            self.state = "open"
            self._unread += [line for event in answer["events"] if (line := self._take(event)) is not None]
            token = answer["nextForwardToken"]
            if token == self._token:
                break
            self._token = token

    def _request(self) -> dict[str, Any]:
        where = {"logGroupName": self.group, "logStreamName": self.name, "startFromHead": True}
        if self._token is not None:
            return where | {"nextToken": self._token}
        return where | ({"startTime": self._last} if self._last >= 0 else {})

    def _from_last_line(self) -> None:
        """A token lives for a day: go on from the last line's time, without those of its lines that were shown."""
        self._token, self._skip = None, self._at_last

    def _take(self, event: dict[str, Any]) -> Line | None:
        moment = int(event["timestamp"])
        if self._skip and moment == self._last:
            self._skip -= 1
            return None
        if moment == self._last:
            self._at_last += 1
        else:
            self._last, self._at_last, self._skip = moment, 1, 0
        return Line(datetime.fromtimestamp(moment / 1000, UTC), event["message"])


def tail(client: Any, group: str, name: str, count: int = TAIL) -> list[Line]:
    """The last lines of a stream; [] when there is none. Raises botocore's other errors."""
    try:
        answer = client.get_log_events(logGroupName=group, logStreamName=name, startFromHead=False, limit=count)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") == "ResourceNotFoundException":
            return []
        raise
    return [
        Line(datetime.fromtimestamp(event["timestamp"] / 1000, UTC), event["message"]) for event in answer["events"]
    ]
