"""The worker image: built by Docker from the checkout's archive, pushed to the estate's registry.

Called by `ct cloud build-image` and `push-image`, which `make image` and `make push-image` call. Docker itself is a subprocess whose
output the user sees.
"""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from evalops.cloud import payload
from evalops.cloud.payload import CloudError
from evalworker.aws import ServiceError

IMAGE = "inspect-fleet-worker"
"""The image's name on this machine."""

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def build(root: Path, base: str, tag: str) -> str:
    """Build the image and return its reference. Raises CloudError."""
    found = payload.fingerprint(root)
    tar = payload.archive(root, {"image.env": payload.image_env(found)})
    labels = [part for name, value in found.tags().items() for part in ("--label", f"{name}={value}")]
    command = [
        "docker",
        "build",
        "--file",
        "worker/Dockerfile",
        "--tag",
        f"{IMAGE}:{tag}",
        "--build-arg",
        f"BASE={base}",
    ]
    command += ["--build-arg", f"VERSION={found.version}", "--build-arg", f"COMMIT={found.commit}", *labels, "-"]
    _docker(command, tar, "the worker image was not built")
    return f"{IMAGE}:{tag}"


def push(ecr: Any, repository: str, tag: str, version: str) -> str:
    """Push the image to a registry and return its digest.

    Args:
        ecr: boto3's client.
        repository: the estate's, as `123456789012.dkr.ecr.REGION.amazonaws.com/NAME`.
        tag: of the image on this machine.
        version: its tag in the registry, which can never be used for another image.

    Raises:
        CloudError, ServiceError: one sentence.
    """
    registry, _, _ = repository.partition("/")
    try:
        answer = ecr.get_authorization_token()
    except (ClientError, BotoCoreError) as error:
        raise ServiceError.of(error, f"cannot ask for the login to {registry}") from error
    token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    user, _, password = token.partition(":")
    _docker(
        ["docker", "login", "--username", user, "--password-stdin", registry],
        password.encode(),
        f"cannot log in to {registry}",
    )
    target = f"{repository}:{version}"
    _docker(["docker", "tag", f"{IMAGE}:{tag}", target], b"", f"there is no image {IMAGE}:{tag}: run `make image`")
    _docker(["docker", "push", target], b"", f"cannot push to {repository}")
    asked = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", target], capture_output=True
    )
    digests = [d for d in json.loads(asked.stdout or b"[]") if d.startswith(f"{repository}@")]
    if not digests or not DIGEST.search(digests[0]):
        raise CloudError(f"Docker does not say which digest {target} has: look it up in the registry")
    return DIGEST.search(digests[0]).group(0)  # type: ignore[union-attr]


def write_digest(file: Path, digest: str) -> bool:
    """Put the digest into Terraform's variables, where `image_digest` stands already; whether it does."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return False
    changed, count = re.subn(r'(?m)^(\s*image_digest\s*=\s*)(null|"[^"]*")', rf'\g<1>"{digest}"', text)
    if count == 1:
        file.write_text(changed)
    return count == 1


def _docker(command: list[str], stdin: bytes, failed: str) -> None:
    try:
        done = subprocess.run(command, input=stdin)
    except FileNotFoundError:
        raise CloudError("docker is not installed: install Docker 24 or later") from None
    if done.returncode != 0:
        raise CloudError(f"{failed}: docker {command[1]} ended with {done.returncode}", 1)
