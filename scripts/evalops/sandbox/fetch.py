"""Pulling and building images before they are needed, one after the other: registries limit how fast anonymous users may ask."""

import random
import time
from collections.abc import Callable

from evalops.sandbox.docker import LONG_S, DockerError, docker
from evalops.sandbox.images import Image

TRIES = 4
FIRST_PAUSE_S = 15.0
"""Before the second try; doubled at each, with jitter of up to half."""

_PASSING = (
    "toomanyrequests",
    "too many requests",
    "timeout",
    "timed out",
    "connection reset",
    "eof",
    "503",
    "502",
    "tls handshake",
)


def have(image: Image) -> bool:
    """Whether the image is here already; what is built without a name never is."""
    if image.name is None:
        return False
    try:
        docker("image", "inspect", "--format", "{{.Id}}", image.name)
    except DockerError:
        return False
    return True


def fetch(image: Image, said: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Pull or build one image, with pauses when the registry asks for them. Raises DockerError."""
    for turn in range(TRIES):
        try:
            docker(*command(image), timeout_s=LONG_S)
            return
        except DockerError as error:
            passing = any(text in error.output.lower() for text in _PASSING)
            if not passing or turn == TRIES - 1:
                raise
            pause = FIRST_PAUSE_S * 2**turn * random.uniform(1, 1.5)  # noqa: S311
            said(f"{image.label}: {str(error).rsplit(': ', 1)[-1]}; again in {pause:.0f} s")
            sleep(pause)


def command(image: Image) -> list[str]:
    """Docker's words for it."""
    if not image.built:
        assert image.name is not None
        return ["pull", "--quiet", image.name]
    if image.compose and image.service:
        return ["compose", "--file", image.compose, "build", image.service]
    assert image.context is not None
    dockerfile = ["--file", f"{image.context}/{image.dockerfile}"] if image.dockerfile else []
    return ["build", "--quiet", *dockerfile, *(["--tag", image.name] if image.name else []), image.context]
