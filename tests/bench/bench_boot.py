"""How fast a worker is there: imports with and without bytecode, the agent's start, and the boot of the AMI in a container.

The boot needs root, Docker and what the end-to-end tests need; where these are missing it says so in one line and gives no figure. On EC2
the machine's own part (firmware, kernel, disk) comes before what is measured here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure
from measure import command

HERE = Path(__file__).resolve().parent
E2E = HERE.parent / "e2e"
ROOT = HERE.parents[1]
BOOTS = 3
"""Boots that are measured; the fastest counts, because whatever else runs on the machine only adds."""


def bench_imports() -> list[Figure]:
    """What compiled bytecode saves a worker: the agent's imports and the fork server's."""
    figures = []
    for name, code in (("agent", "import evalworker.agent"), ("fork server", "import inspect_ai, evalworker.job")):
        figures.append(_import(name, code))
    return figures


def _import(name: str, code: str) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        words = [sys.executable, "-P", "-c", code]
        command(words, Path(folder), plain)  # fills caches of files on both sides
        without = plain | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": folder}
        compiled = min(command(words, Path(folder), plain).cpu_s for _ in range(3))
        return Figure(
            f"import of the {name}",
            compiled,
            "CPU s",
            0.7,
            command(words, Path(folder), without).cpu_s,
            "without bytecode",
        )


def bench_boot() -> list[Figure]:
    """The AMI as a container: from its start to `worker_online`, by part."""
    if os.getuid() != 0 or shutil.which("packer") is None or shutil.which("dockerd") is None:
        print("boot: needs root, packer and dockerd (.ci/run installs them)")
        return []
    sys.path.insert(0, str(E2E))
    import image_fixtures

    image = image_fixtures.kept()
    boots = [_boot(image) for _ in range(BOOTS)]
    best = min(boots, key=lambda boot: boot["worker_online"])
    size = int(
        subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, check=True
        ).stdout
    )
    figures = [
        Figure(f"boot: {part}", moment, "s", note="after the start of the container") for part, moment in best.items()
    ]
    figures[list(best).index("worker_online")] = Figure(
        "boot: worker_online", best["worker_online"], "s", 5.0, note=f"fastest of {BOOTS}"
    )
    return [*figures, Figure("AMI: files", size / 1e6, "MB")]


def _boot(image: str) -> dict[str, float]:
    import ec2_bench
    import fleet_on_s3
    import instance_bench

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "code").mkdir()
        shutil.copy(ROOT / "examples" / "arithmetic.py", folder / "code")
        with ec2_bench.moto_server(folder) as endpoint, fleet_on_s3.reaching(endpoint):
            run = fleet_on_s3.submit(folder / "code", "arithmetic.py@arithmetic", "arithmetic", 20)
            metadata = instance_bench.Metadata("i-0123456789abcdef0", run.tags)
            with instance_bench.instance(image, metadata, endpoint) as instance:
                run.wait_for("attempt_done", 120)
                asked = {path: moment for moment, path in reversed(metadata.asked)}
                moments = {
                    "boot.sh runs": asked["meta-data/tags/instance/fleet-deadline"],
                    "the agent runs": asked["dynamic/instance-identity/document"],
                    "worker_online": run.when("worker_online"),
                    "first score": run.when("sample_done"),
                }
                return {part: moment - instance.started for part, moment in moments.items()}
