"""The files of the checkout that an image is made from: one archive, its hashes, and the boot script of a stock machine.

Called by the builds of AMI and container image. The archive depends on content alone (no times, no owners), so that equal trees
give equal hashes and Docker's layer cache holds. Only files that git sees go in.
"""

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PARTS = ("pyproject.toml", "uv.lock", "README.md", "LICENSE", "packer", "worker", "scripts/evalops")
"""What of the checkout goes into an image."""

PAYLOAD_MARK = "#PAYLOAD#"
"""The line of boot.sh after which the archive follows."""


class CloudError(Exception):
    """An image cannot be made or found; the text is one sentence. `exit_code` is the command's."""

    def __init__(self, sentence: str, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@cache
def checkout() -> Path:
    """The root of the checkout that this package runs from; raises CloudError for an installed package without one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "packer" / "worker.pkr.hcl").is_file() or not (root / "uv.lock").is_file():
        raise CloudError(f"images are built from a checkout of Inspect Fleet, but {root} is none: clone the repository")
    return root


def versions(root: Path) -> dict[str, str]:
    """The names and values of packer/versions.env."""
    found = {}
    for line in (root / "packer" / "versions.env").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name] = value.strip("'\"")
    return found


def _git(root: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True).stdout
    except FileNotFoundError:
        raise CloudError("git is not installed, and only files that git sees go into an image: install git") from None
    except subprocess.CalledProcessError as error:
        raise CloudError(f"git in {root}: {error.stderr.decode(errors='replace').strip()}") from None


def files(root: Path) -> list[Path]:
    """What goes into an image, relative to `root`, sorted; tracked or new, never ignored."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS)
    paths = {Path(name) for name in listed.decode().split("\0") if name}
    return sorted(path for path in paths if (root / path).is_file())


def commit(root: Path) -> str:
    """The commit that is checked out, with `+` if the files of images differ from it; `unknown` without git."""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
        return head + ("+" if _git(root, "status", "--porcelain", "--", *PARTS).strip() else "")
    except CloudError:
        return "unknown"


def digest(content: dict[str, bytes]) -> str:
    """Sixteen hex digits that change with any name or content."""
    total = hashlib.sha256()
    for name in sorted(content):
        total.update(f"{name}\0{len(content[name])}\0".encode())
        total.update(content[name])
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Fingerprint:
    """What an image is made of, as hashes; an image carries them as tags, so that a stale one can be told.

    Attributes:
        version: the project's.
        commit: see `commit`.
        lock: of uv.lock.
        worker: of the Python packages.
        scripts: of packer/ and of what lies beside the worker package.
        sandboxes: of the sandbox images that are baked in; `none` without any.
    """

    version: str
    commit: str
    lock: str
    worker: str
    scripts: str
    sandboxes: str = "none"

    def tags(self) -> dict[str, str]:
        """As tags of an AMI and labels of a container image."""
        return {f"inspect-fleet-{name}": value for name, value in vars(self).items()}


def fingerprint(root: Path, sandboxes: dict[str, bytes] | None = None) -> Fingerprint:
    """The fingerprint of the working tree, and of the sandboxes that are to be baked in."""
    content = {path.as_posix(): (root / path).read_bytes() for path in files(root)}
    packages = {name for name in content if name.startswith(("worker/evalworker/", "scripts/evalops/"))}
    scripts = {name for name in content if name.startswith(("packer/", "worker/"))} - packages
    return Fingerprint(
        version=tomllib.loads(content["pyproject.toml"].decode())["project"]["version"],
        commit=commit(root),
        lock=digest({"uv.lock": content["uv.lock"]}),
        worker=digest({name: content[name] for name in packages}),
        scripts=digest({name: content[name] for name in scripts if not name.endswith(".md")}),
        sandboxes=digest(sandboxes) if sandboxes else "none",
    )


def archive(root: Path, more: dict[str, bytes] | None = None) -> bytes:
    """A tar of `files` and of `more` (by path), equal for equal content."""
    entries: dict[str, tuple[bytes, int]] = {}
    for path in files(root):
        mode = 0o755 if (root / path).stat().st_mode & 0o100 else 0o644
        entries[path.as_posix()] = ((root / path).read_bytes(), mode)
    return tar_of(entries | {name: (content, 0o644) for name, content in (more or {}).items()})


def tar_of(entries: dict[str, tuple[bytes, int]]) -> bytes:
    """A tar of (content, mode) by name, without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, (content, mode) in sorted(entries.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def compressed(tar: bytes) -> bytes:
    """The archive as .tar.gz, without a time in its header."""
    return gzip.compress(tar, compresslevel=6, mtime=0)


def image_env(print_: Fingerprint) -> bytes:
    """What an image says of itself, in /opt/inspect-fleet/image.env."""
    lines = [f"INSPECT_FLEET_IMAGE_{name.upper()}={value}" for name, value in vars(print_).items()]
    return ("\n".join(lines) + "\n").encode()


def boot_script(root: Path) -> bytes:
    """boot.sh for machines that boot the stock image, with everything that it installs behind it; stored as worker/boot.sh."""
    script = (root / "worker" / "boot.sh").read_text()
    tar = compressed(archive(root, {"image.env": image_env(fingerprint(root))}))
    return f"{script}{PAYLOAD_MARK}\n".encode() + base64.encodebytes(tar)


def registry_auth(text: str | None) -> bytes:
    """The Docker config.json to log in with, from INSPECT_FLEET_REGISTRY_AUTH; empty without one. Raises CloudError."""
    if not text:
        return b""
    try:
        if "auths" not in json.loads(text):
            raise ValueError
    except (ValueError, TypeError):
        raise CloudError(
            'INSPECT_FLEET_REGISTRY_AUTH must be a Docker config.json, such as {"auths": {"registry.example.com": {"auth": "…"}}}'
        ) from None
    return text.encode()
