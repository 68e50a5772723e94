"""The `docker` command line for `ies sandbox`. Each call has a time limit, and its failure is one sentence."""

import subprocess
from collections.abc import Sequence

SHORT_S = 30.0
LONG_S = 3600.0


class DockerError(RuntimeError):
    """Docker did not do what was asked; the text is one sentence, `output` what it said."""

    def __init__(self, sentence: str, output: str = "") -> None:
        super().__init__(sentence)
        self.output = output


def docker(*words: str, timeout_s: float = SHORT_S) -> str:
    """Run `docker …`; returns what it printed. Raises DockerError."""
    command = ["docker", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except FileNotFoundError:
        raise DockerError(
            "there is no `docker` on this machine: install Docker Engine and its Compose plugin"
        ) from None
    except subprocess.TimeoutExpired:
        raise DockerError(f"`docker {' '.join(words[:2])}` did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
        raise DockerError(f"`docker {' '.join(words[:3])}` failed: {last}", said)
    return done.stdout


def lines(*words: str) -> list[str]:
    """The lines that `docker …` printed."""
    return [line.strip() for line in docker(*words).splitlines() if line.strip()]


def remove(kind: str, names: Sequence[str]) -> None:
    """Remove containers, networks or volumes; what is gone already is fine."""
    force = {
        "container": ["rm", "--force", "--volumes"],
        "network": ["network", "rm"],
        "volume": ["volume", "rm", "--force"],
    }
    for name in names:
        try:
            docker(*force[kind], name, timeout_s=120)
        except DockerError as error:
            if "no such" not in error.output.lower() and "not found" not in error.output.lower():
                raise
