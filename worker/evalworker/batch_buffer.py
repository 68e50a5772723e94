"""What Inspect's shared buffer says of the samples of an unfinished log (`.buffer/<log>/manifest.json`, see `log_shared`). Pure.

Read by the container's side of a Batch job and by whoever watches one; imports neither Inspect nor AWS.
"""

import json
from collections.abc import Iterator
from typing import Any


def summaries_of(body: bytes) -> Iterator[dict[str, Any]]:
    """The sample summaries in a buffer's manifest; raises ValueError for what is none."""
    manifest = json.loads(body)
    entries = manifest.get("samples") if isinstance(manifest, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        summary = entry.get("summary") if isinstance(entry, dict) else None
        if isinstance(summary, dict) and "id" in summary and "epoch" in summary:
            yield summary


def finished(summary: dict[str, Any]) -> bool:
    """Whether a sample's summary is of one that came to its end, with or without an error.

    What a recovery found in the middle of a sample is called complete too, but has neither a time of completion nor a score.
    """
    return bool(summary.get("completed")) and (summary.get("completed_at") is not None or bool(summary.get("scores")))
