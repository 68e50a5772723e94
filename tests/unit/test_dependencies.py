"""The packages' dependencies point one way, as docs/design.md says in its section 2."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGS = {("fleet.assemble", "ec2.backend")}
"""Where a fleet's backend is chosen: the one import against the direction, made when a fleet has that backend."""


def imports(package: Path) -> Iterator[tuple[str, str]]:
    """(module, imported module) of all imports in a package, wherever they stand; both without the package's name, own ones alone."""
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                first, _, rest = name.partition(".")
                yield module, (rest if first == package.name else f"{first}:{rest}")


def test_no_circle_of_packages_in_evalops() -> None:
    needs: dict[str, set[str]] = {}
    for module, name in imports(ROOT / "scripts" / "evalops"):
        if ":" in name or any(module == user and name.startswith(used) for user, used in PLUGS):
            continue
        mine, other = module.split(".")[0], name.split(".")[0]
        if mine != other:
            needs.setdefault(mine, set()).add(other)
    assert {"commands", "fleet", "logs"} <= needs.keys()
    while needs:  # take away what nothing that is left needs
        needed = set().union(*needs.values())
        free = needs.keys() - needed
        assert free, f"these packages need each other in a circle: {needs}"
        for package in free:
            del needs[package]


@pytest.mark.parametrize("user, used", PLUGS)
def test_the_exceptions_are_still_used(user: str, used: str) -> None:
    assert (user, used) in set(imports(ROOT / "scripts" / "evalops"))


def test_a_worker_knows_nothing_of_the_operators_machine() -> None:
    found = {(module, name) for module, name in imports(ROOT / "worker" / "evalworker") if name.startswith("evalops:")}
    assert not found


def test_the_contract_depends_on_nothing_but_itself_and_pydantic() -> None:
    outside = set()
    for module, name in imports(ROOT / "worker" / "evalworker"):
        if module.startswith("contract.") and not name.startswith("contract"):
            outside.add(name.split(":")[0] if ":" in name else name)
    third_party = outside - sys.stdlib_module_names
    assert third_party == {"pydantic"}
