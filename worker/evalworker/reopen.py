"""Makes of a shard's finished log one that Inspect goes on from, because the merge has found its errors too many in the whole.

A shard whose own errors were few enough has a log of status `success`, which `eval_set` would take for complete. Called by a job before its
eval; samples are copied as they are packed, only the status changes.
"""

import zipfile
from pathlib import Path

from inspect_ai.log import EvalLog, list_eval_logs

from evalworker import inspect_internals, zipmembers
from evalworker.results import read_log

HEADER = "header.json"


def reopen(log_dir: Path) -> list[Path]:
    """Give each log of this directory that succeeded in spite of errored samples the status `error`; which these were.

    A log that cannot be read is left alone, as Inspect leaves it. Raises OSError when the disk is full.
    """
    found = []
    for info in list_eval_logs(str(log_dir), recursive=False, formats=["eval"]):
        path = Path(info.name.removeprefix("file://"))
        try:
            log = read_log(path)
        except Exception:  # noqa: S112 - a killed attempt leaves logs broken in many ways
            continue
        if log.header.status == "success" and any(summary.error is not None for summary in log.summaries):
            _write_header(path, log.header.model_copy(update={"status": "error"}))
            found.append(path)
    return found


def _write_header(path: Path, header: EvalLog) -> None:
    beside = path.with_suffix(".reopened")
    with zipfile.ZipFile(path) as source, path.open("rb") as raw, zipfile.ZipFile(beside, "w") as target:
        members = zipmembers.members(source, "")
        for name, info in members.items():
            if name != HEADER:
                zipmembers.copy_member(raw, info, target)
        target.writestr(HEADER, inspect_internals.log_json(header), compress_type=members[HEADER].compress_type)
    beside.replace(path)
