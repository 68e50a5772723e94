"""The template: accepted by Debian's Packer 1.6.6, and, with what only newer ones know, safe by its options."""

import os
import subprocess
from pathlib import Path
from typing import Any

import hcl2
import pytest

from evalops.cloud import packer, payload

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "CHECKPOINT_DISABLE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_this_is_the_oldest_packer_that_is_served() -> None:
    assert packer.find("1.6.6").version >= (1, 6, 6)


def test_the_template_is_valid_and_formatted() -> None:
    said = run("packer", "validate", str(ROOT / "packer"))
    assert said.returncode == 0, said.stdout + said.stderr
    assert run("packer", "fmt", "-check", str(ROOT / "packer")).returncode == 0
    assert run("packer", "fmt", "-check", str(ROOT / "packer" / "modern")).returncode == 0


def test_a_template_with_an_unknown_option_is_refused(tmp_path: Path) -> None:
    # what the test above would say of a mistake
    packer.stage(ROOT, tmp_path, modern=False)
    file = tmp_path / "worker.pkr.hcl"
    file.write_text(file.read_text().replace("ena_support", "ena_suport"))
    assert run("packer", "validate", str(tmp_path)).returncode != 0


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The staged template of a modern Packer, parsed."""
    folder = tmp_path_factory.mktemp("modern")
    packer.stage(ROOT, folder, modern=True)
    parsed: dict[str, Any] = {}
    for file in sorted(folder.glob("*.pkr.hcl")):
        for name, blocks in hcl2.loads(file.read_text()).items():
            parsed.setdefault(name, []).extend(blocks if isinstance(blocks, list) else [blocks])
    return parsed


def plain(value: Any) -> Any:
    """Without the quotes that some versions of python-hcl2 leave around names and texts, and without its notes."""
    if isinstance(value, str):
        return value.strip('"')
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items() if not k.startswith("__")}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def source(parsed: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plain(parsed["source"][0])["amazon-ebs"]["worker"]
    return found


def block(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    found = source(parsed)[name]
    return dict(found[0] if isinstance(found, list) else found)


def test_the_metadata_service_is_version_2_alone_for_building_and_for_the_image(modern: dict[str, Any]) -> None:
    assert source(modern)["imds_support"] == "v2.0"
    options = block(modern, "metadata_options")
    assert (options["http_tokens"], options["http_put_response_hop_limit"]) == ("required", 1)


def test_the_image_is_encrypted_and_deprecated_in_time(modern: dict[str, Any]) -> None:
    assert block(modern, "launch_block_device_mappings")["encrypted"] is True
    assert "8760h" in source(modern)["deprecate_at"]


def test_nobody_may_connect_unless_named(modern: dict[str, Any]) -> None:
    assert "var.ssh_from" in source(modern)["temporary_security_group_source_cidrs"]
    (default,) = [plain(v)["ssh_from"]["default"] for v in modern["variable"] if "ssh_from" in plain(v)]
    assert default == ["127.0.0.1/32"]
    text = (ROOT / "packer" / "worker.pkr.hcl").read_text()
    assert "0.0.0.0" not in text and "::/0" not in text


def test_everything_temporary_can_be_found_again(modern: dict[str, Any]) -> None:
    found = source(modern)
    assert "build_id" in found["temporary_key_pair_name"]
    for name in ("run_tags", "run_volume_tags", "snapshot_tags", "tags"):
        assert "run_tags" in str(found[name])


def test_the_plugin_has_a_lower_and_an_upper_bound(modern: dict[str, Any]) -> None:
    (block_,) = [plain(b) for b in modern["packer"]]
    plugins = block_["required_plugins"]
    amazon = (plugins[0] if isinstance(plugins, list) else plugins)["amazon"]
    assert amazon["version"] == payload.versions(ROOT)["PACKER_AMAZON_PLUGIN"]
    assert amazon["version"].count(",") == 1 and ">=" in amazon["version"] and "<" in amazon["version"]


def test_both_kinds_of_packer_get_the_same_template_but_for_the_modern_options(tmp_path: Path) -> None:
    texts = []
    for kind in (False, True):
        folder = tmp_path / str(kind)
        folder.mkdir()
        packer.stage(ROOT, folder, kind)
        texts.append((folder / "worker.pkr.hcl").read_text())
    assert texts[1].replace((ROOT / "packer" / "modern" / "options.hcl").read_text(), "") == texts[0]
