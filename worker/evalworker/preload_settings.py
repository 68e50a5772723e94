"""How the agent tells the fork server's preload and its jobs what to do through the environment, without importing them."""

import os

SETTINGS = "INSPECT_FLEET_PRELOAD"
"""Environment variable with a JSON object: `path` (directories to import from first; the first is where jobs run), `tasks` (specs to
import ahead of the jobs), `environment` (variables of the jobs), `secrets` (names of those to be hidden), `report` (a file to write)."""

PLACE = "INSPECT_FLEET_WORKER"
"""Environment variable: the directory of the unpacked `evalworker` that the agent was started with (`evalworker.boot`)."""

threads = 1
"""Python threads of the fork server when it had imported everything. A fork forgets all but its own, so jobs look here."""


def restore() -> None:
    """Take out of this process's environment what is between the agent and us: what user code starts shall see the user's own."""
    os.environ.pop(SETTINGS, None)
    place = os.environ.pop(PLACE, None)
    if place is None:
        return
    left = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", place)]
    os.environ["PYTHONPATH"] = os.pathsep.join(left)
    if not left:
        del os.environ["PYTHONPATH"]
