"""For all tests: property tests never judge the time that something took, because a machine may be busy; and every session
records the AWS calls of the project's code and fails if one is not in terraform/iam-calls.json.

With INSPECT_FLEET_CALLS=DIR the record is kept there, and `tests/iam_calls.py DIR` compares that of a whole suite the other way
round.
"""

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent))

import aws_calls
import iam_calls

settings.register_profile("fleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fleet")


def pytest_configure(config: pytest.Config) -> None:
    """Record from the start; processes of pytest-xdist share the directory of the one that started them."""
    if "INSPECT_FLEET_CALLS" not in os.environ:
        os.environ["INSPECT_FLEET_CALLS"] = tempfile.mkdtemp(prefix="inspect-fleet-calls-")
    aws_calls.install(Path(os.environ["INSPECT_FLEET_CALLS"]))


@pytest.fixture(scope="session", autouse=True)
def public_tasks_hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inspect does not find the public tasks of `inspect_evals`, here and in every process that a test starts.

    Each process that runs an eval imports all that registers itself with Inspect, in case there is a hook in it, and the import of
    all public tasks takes 2 s of CPU: half of what a small fleet costs. `importlib.metadata` takes the first distribution of a
    name, so one of the same name and version without entry points stands before the real one. What is given is its directory;
    a test that needs the tasks uses `public_tasks`.
    """
    folder = tmp_path_factory.mktemp("hidden")
    version = importlib.metadata.version("inspect-evals")
    empty = folder / f"inspect_evals-{version}.dist-info"
    empty.mkdir()
    (empty / "METADATA").write_text(f"Metadata-Version: 2.1\nName: inspect-evals\nVersion: {version}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def public_tasks(public_tasks_hidden: Path) -> Iterator[None]:
    """Inspect finds the public tasks again, here and in processes that a test starts."""
    from inspect_ai._util.entrypoints import clear_entry_points_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [entry for entry in sys.path if entry != str(public_tasks_hidden)])
        left = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != str(public_tasks_hidden)]
        patch.setenv("PYTHONPATH", os.pathsep.join(left))
        clear_entry_points_state()
        yield
    clear_entry_points_state()


TOGETHER = {
    "estate": ("test_batch", "test_ec2_boots", "test_terraform_apply", "test_terraform_wrong_input"),
    "image": ("test_image_boot", "test_packer_build"),
}
"""Modules that share something that is made once: one applied estate, one AMI build. In parallel, they go to one process."""


ALONE = (
    *("test_ec2_fleet", "test_fleet_guards", "test_faults", "test_user_code", "test_docs_commands"),
    *("test_ec2_storm", "test_storm"),
)
"""Modules of long tests that share nothing: in parallel, each test goes to the process that is free."""

FIRST = (
    *("test_faults", "test_fleet_guards", "test_docs_commands", "test_fleet_shards", "test_fleet_heals"),
    *("test_log_commands", "test_ec2_pool", "test_fleet", "test_fleet_failures", "test_fleet_s3", "test_user_code"),
)
"""The modules that take longest, so that none of them is left when all others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


class Scheduling(LoadFileScheduling):
    """By file, as `--dist loadfile`, but modules that belong together stay together, and long tests that share nothing are alone."""

    def _split_scope(self, nodeid: str) -> str:
        module = Path(nodeid.split("::")[0]).stem
        if module in ALONE:
            return nodeid
        return next((group for group, modules in TOGETHER.items() if module in modules), module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """All parallel runs of this suite are scheduled so."""
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compare; only in the process that ends last."""
    if hasattr(session.config, "workerinput"):
        return
    missing = iam_calls.missing(aws_calls.recorded(Path(os.environ["INSPECT_FLEET_CALLS"])))
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nAWS calls that terraform/iam-calls.json does not have for any of their roles:", file=sys.stderr)
        for line in missing:
            print(f"  {line}", file=sys.stderr)
