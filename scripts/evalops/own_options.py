"""The names of our own options, as data: the commands that run something and the test against collisions share it.

An option of ours must never take a name that `inspect eval-set` has, or scripts written for Inspect would change their meaning.
`--json` and `--detach` are Inspect's on purpose and mean the same here.
"""

SHARED_WITH_INSPECT = frozenset({"--json", "--detach"})
"""Names of Inspect's that our commands define themselves, with Inspect's meaning."""

OWN_OPTIONS = frozenset(
    {
        "--local",
        "--ec2",
        "--max-workers",
        "--concurrency-per-worker",
        "--slots",
        "--run-id",
        "--new-fleet",
        "--estimate",
        "--yes",
        "--spot",
        "--on-demand",
        "--on-demand-base",
        "--spot-only",
        "--instance-type",
        "--ami",
        "--deadline",
        "--budget",
        "--token-budget",
        "--canary",
        "--max-failed-share",
        "--stall-after",
        "--job-timeout",
        "--on-hung",
        "--hung-after",
        "--require-clean",
        "--package",
        "--secret",
        "--ship-code",
        "--wait",
        "--shard-size",
        "--shards",
        "--fleet-connections",
        "--force",
        "--monitor",
        "--array",
        "--vcpus",
        "--memory",
        "--queue",
        "--queues",
        "--runnable-timeout",
        "--task",
        "--tasks",
        "--models",
    }
)
"""Every option of our own on a command that also takes Inspect's."""
