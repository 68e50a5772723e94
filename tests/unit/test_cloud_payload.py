"""What an image is made from: equal for equal content, only what git sees, and hashes that say what has changed."""

import base64
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from evalops.cloud import image, payload, sandboxes
from evalops.cloud.payload import CloudError
from evalops.sandbox.images import Image


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout."""
    content = {
        "pyproject.toml": '[project]\nname = "x"\nversion = "1.2.3"\n',
        "uv.lock": "lock",
        "README.md": "",
        "LICENSE": "",
        ".gitignore": "__pycache__/\n",
        "packer/worker.pkr.hcl": "",
        "packer/versions.env": "# a comment\nUV_VERSION=1.0\nPLUGIN='>= 1, < 2'\n",
        "worker/evalworker/a.py": "a = 1\n",
        "worker/evalworker/__pycache__/a.pyc": "compiled",
        "worker/boot.sh": "#!/bin/bash\necho boot\nexit\n",
        "worker/README.md": "text",
        "scripts/evalops/b.py": "b = 1\n",
        "docs/page.md": "not in an image",
    }
    for name, text in content.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "worker/boot.sh").chmod(0o755)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-qm", "m")
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", tree, *arguments], check=True)


def members(tar: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {info.name: info for info in archive}


def test_the_archive_holds_what_git_sees_of_the_parts(tree: Path) -> None:
    (tree / "worker/evalworker/new.py").write_text("not added yet")
    (tree / "uv.lock").rename(tree / "moved.lock")
    (tree / "uv.lock").write_text("lock")
    found = members(payload.archive(tree, {"sandboxes/images.txt": b"x"}))
    assert sorted(found) == [
        "LICENSE", "README.md", "packer/versions.env", "packer/worker.pkr.hcl", "pyproject.toml", "sandboxes/images.txt",
        "scripts/evalops/b.py", "uv.lock", "worker/README.md", "worker/boot.sh", "worker/evalworker/a.py", "worker/evalworker/new.py",
    ]  # fmt: skip
    assert (found["worker/boot.sh"].mode, found["uv.lock"].mode) == (0o755, 0o644)


def test_equal_trees_give_equal_archives(tree: Path) -> None:
    before = payload.compressed(payload.archive(tree))
    (tree / "uv.lock").touch()
    assert payload.compressed(payload.archive(tree)) == before


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("uv.lock", {"lock"}),
        ("worker/evalworker/a.py", {"worker"}),
        ("scripts/evalops/b.py", {"worker"}),
        ("worker/boot.sh", {"scripts"}),
        ("packer/versions.env", {"scripts"}),
        ("worker/README.md", set()),
        ("docs/page.md", set()),
    ],
)
def test_a_change_shows_in_its_own_hash_alone(tree: Path, file: str, changed: set[str]) -> None:
    before = vars(payload.fingerprint(tree))
    (tree / file).write_text("something else")
    after = vars(payload.fingerprint(tree))
    assert {name for name in before if before[name] != after[name]} - {"commit"} == changed


def test_a_changed_tree_is_marked_in_the_commit(tree: Path) -> None:
    clean = payload.commit(tree)
    assert not clean.endswith("+")
    (tree / "docs/page.md").write_text("no part of an image")
    assert payload.commit(tree) == clean
    (tree / "uv.lock").write_text("changed")
    assert payload.commit(tree) == clean + "+"


def test_versions_are_read_as_the_shell_reads_them(tree: Path) -> None:
    assert payload.versions(tree) == {"UV_VERSION": "1.0", "PLUGIN": ">= 1, < 2"}


def test_the_boot_script_carries_the_archive_behind_itself(tree: Path) -> None:
    script, _, packed = payload.boot_script(tree).partition(f"\n{payload.PAYLOAD_MARK}\n".encode())
    assert script.startswith(b"#!/bin/bash") and script.endswith(b"exit")
    assert "worker/evalworker/a.py" in members(__import__("gzip").decompress(base64.decodebytes(packed)))
    env = members(__import__("gzip").decompress(base64.decodebytes(packed)))
    assert "image.env" in env


def test_the_images_env_is_shell(tree: Path) -> None:
    text = payload.image_env(payload.fingerprint(tree)).decode()
    said = subprocess.run(
        ["sh", "-euc", f"{text}\necho $INSPECT_FLEET_IMAGE_VERSION"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "1.2.3\n"


def test_a_folder_without_git_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match="git in"):
        payload.files(tmp_path)


@pytest.mark.parametrize("text", ["x", "[]", '{"auth": {}}', "1"])
def test_a_registry_login_must_be_a_docker_config(text: str) -> None:
    with pytest.raises(CloudError, match=r"must be a Docker config\.json") as caught:
        payload.registry_auth(text)
    assert text not in str(caught.value) or len(text) < 3  # what was given may be a secret
    assert payload.registry_auth(None) == payload.registry_auth("") == b""
    good = json.dumps({"auths": {"registry.example.com": {"auth": "x"}}})
    assert payload.registry_auth(good) == good.encode()


def test_named_images_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "images"
    file.write_text("# ours\nregistry.example.com/a/b:1.0   # why\n\nubuntu@sha256:00\n")
    assert sandboxes.named_images(file) == ["registry.example.com/a/b:1.0", "ubuntu@sha256:00"]
    file.write_text("fine\n$(reboot)\n")
    with pytest.raises(CloudError, match=r"line 2: '\$\(reboot\)' is no image reference"):
        sandboxes.named_images(file)
    with pytest.raises(CloudError, match="No such file"):
        sandboxes.named_images(tmp_path / "missing")


def test_named_images_are_read_as_the_list_of_sandbox_images_says_them(tmp_path: Path) -> None:
    file = tmp_path / "images.json"

    def write(*images: Image) -> None:
        file.write_text(json.dumps({"images": [image.as_json() for image in images]}) + "\n")

    pulled = Image("docker.io/agent:1", compose="/t/compose.yaml", service="default", tasks=["t"])
    write(pulled, Image("ubuntu"))
    assert sandboxes.named_images(file) == ["docker.io/agent:1", "ubuntu"]
    assert sandboxes.collect([], file) == {"sandboxes/images.txt": b"docker.io/agent:1\nubuntu\n"}
    write(pulled, Image(None, "/t/boxed", tasks=["boxed"]), Image("mine:1", "/t/other", tasks=["a", "boxed"]))
    with pytest.raises(CloudError, match=r"\(/t/boxed/Dockerfile, mine:1\): give its tasks by --tasks \(a, boxed\)"):
        sandboxes.named_images(file)
    write(Image("$(reboot)"))
    with pytest.raises(CloudError, match=r"image 1: '\$\(reboot\)' is no image reference"):
        sandboxes.named_images(file)
    for text in ("{", "{}", '{"images": [1]}', '{"images": [{"nam": "x"}]}', '{"images": 1}'):
        file.write_text(text)
        with pytest.raises(CloudError, match="not what `ies sandbox images --json` prints"):
            sandboxes.named_images(file)


def test_the_sandboxes_of_tasks_are_collected(tmp_path: Path) -> None:
    for folder in ("built", "pulled"):
        (tmp_path / folder).mkdir()
    (tmp_path / "built/Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "built/run").write_text("#!/bin/sh")
    (tmp_path / "built/run").chmod(0o755)
    (tmp_path / "pulled/compose.yaml").write_text("services: {default: {image: 'a/b:1'}, other: {image: 'c:2'}}\n")
    (tmp_path / "tasks.py").write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "@task\ndef built():\n    return Task(sandbox=('docker', 'built/Dockerfile'))\n"
        "@task\ndef pulled():\n"
        "    return Task(dataset=[Sample(input='x', sandbox=('docker', 'pulled/compose.yaml'))] * 2, sandbox='local')\n"
        "@task\ndef bare():\n    return Task(sandbox='docker')\n"
        "@task\ndef none():\n    return Task()\n"
    )
    images = tmp_path / "images"
    images.write_text("mine:1\n")
    found = sandboxes.collect([str(tmp_path / "tasks.py")], images)
    names = found.pop("sandboxes/images.txt").decode().split()
    assert sorted(names) == ["a/b:1", "aisiuk/inspect-tool-support", "c:2", "mine:1"]
    prefix = "sandboxes/projects/000"
    assert found[f"{prefix}/name.txt"] == b"built"
    assert found[f"{prefix}/compose.txt"] == b"inspect-fleet.compose.yaml"
    context = members(found[f"{prefix}/files.tar"])
    modes = {name: info.mode for name, info in context.items()}
    assert modes == {"Dockerfile": 0o644, "inspect-fleet.compose.yaml": 0o644, "run": 0o755}
    assert sandboxes.summary(found) == "built"


def test_a_task_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from inspect_ai import task\n@task\ndef bad():\n    raise RuntimeError('no data')\n"
    )
    with pytest.raises(CloudError, match=r"cannot be loaded: RuntimeError: no data"):
        sandboxes.collect([str(tmp_path / "bad.py")], None)


def test_the_digest_goes_where_terraform_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "terraform.tfvars"
    digest = "sha256:" + "0" * 64
    assert not image.write_digest(file, digest)
    file.write_text('region = "x"\nbatch = {\n  image_digest = null\n}\n')
    assert image.write_digest(file, digest)
    assert file.read_text() == f'region = "x"\nbatch = {{\n  image_digest = "{digest}"\n}}\n'
    assert image.write_digest(file, "sha256:" + "1" * 64)
    assert file.read_text().count("sha256:1") == 1
