"""For all tests: property tests never judge the time that something took, because a machine may be busy; and every session
records the AWS calls of the project's code and fails if one is not in terraform/iam-calls.json.

With INSPECT_FLEET_CALLS=DIR the record is kept there, and `tests/iam_calls.py DIR` compares that of a whole suite the other way
round.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run in parallel (`--dist loadgroup`) and share something that is made once go to the same process."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "emulator" in fixtures and item.path.parent.name == "e2e":
            group = "estate"
        elif "built" in fixtures:
            group = "image"
        elif item.path.stem.endswith("storm"):
            group = item.nodeid  # each seed is a fleet of its own
        else:
            group = item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


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
