"""The watch for a spot notice: EC2 gives two minutes, by the metadata service alone, and best effort.

Started by the agent on an instance. It decides nothing but when: the agent then leaves as after SIGTERM, with the reason `spot`.
"""

import json
import threading
import time
from collections.abc import Callable

from evalworker.imds import Imds, ImdsError

EVERY_S = 5.0
"""Between two looks: what EC2's documentation recommends."""

PATIENCE_S = 3.0
"""For one look; a service that is away for a moment is asked again at the next."""

PATHS = {
    "meta-data/spot/instance-action": "EC2 takes this spot instance back",
    "meta-data/events/recommendations/rebalance": "EC2 expects to take this spot instance back",
}


def look(imds: Imds) -> str | None:
    """Why this instance should go, None while it may stay. Raises ImdsError."""
    for path, meaning in PATHS.items():
        text = imds.get(path)
        if text is not None:
            return f"{meaning}: {_when(text)}"
    return None


def _when(text: str) -> str:
    try:
        said = json.loads(text)
        return " at ".join(str(said[name]) for name in ("action", "time", "noticeTime") if name in said)
    except (ValueError, TypeError):
        return text[:200]


def watch(leave: Callable[[str], None], log: Callable[[str], None], imds: Imds | None = None) -> threading.Thread:
    """Start the watch; calls `leave("spot")` once and ends. The thread is a daemon: it never holds the agent up."""
    client = imds or Imds(patience_s=PATIENCE_S)
    thread = threading.Thread(target=_watch, args=(client, leave, log), daemon=True, name="spot-notice")
    thread.start()
    return thread


def _watch(imds: Imds, leave: Callable[[str], None], log: Callable[[str], None]) -> None:
    silent = False
    while True:
        try:
            notice = look(imds)
            silent = False
            if notice is not None:
                log(notice)
                leave("spot")
                return
        except ImdsError as error:
            if not silent:
                log(f"no spot notice can be heard for now: {error}")
            silent = True
        time.sleep(EVERY_S)
