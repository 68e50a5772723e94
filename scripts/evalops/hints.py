"""The commands that commands print for what comes next: each works as it is printed, in the shell in which it is printed.

Commands on AWS find their estate, and with it the bucket, by themselves; those that only read the root need it in the environment.
"""

import os

SHIP_ANEW = "repeat the whole command with --run-id to ship what has changed"
"""For who has mended a task whose code was packed: its id alone resumes a run with the code that it has."""


def at_root(command: str, bucket: str | None) -> str:
    """A command that reads the root, for a run in this bucket (None: a directory): it is named where the environment does not do so."""
    named = bucket is None or os.environ.get("S3_BUCKET_NAME")
    return command if named else f"S3_BUCKET_NAME={bucket} {command}"


def unattended(run_id: str) -> str:
    """What can be done with a fleet that runs on without its controller."""
    return f"`ct fleet attach {run_id}` drives it on, `ct fleet stop {run_id}` ends it"


def resume(run_id: str, backend: str) -> str:
    """The command that runs again what of a run has not completed, where it began: `backend` is its manifest's."""
    begin = {"local": "ct run eval", "ec2": "ct run eval --ec2", "batch": "ies run aws"}[backend]
    return f"{begin} --run-id {run_id}"
