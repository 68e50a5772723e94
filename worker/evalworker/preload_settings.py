"""How the agent tells the fork server's preload what to do, without importing it."""

SETTINGS = "INSPECT_FLEET_PRELOAD"
"""Environment variable with a JSON object: `cwd`, `tasks` (specs to import ahead of the jobs), `report` (a file to write)."""
