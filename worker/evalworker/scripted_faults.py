"""What can be made to go wrong with a scripted model, and on which samples. Given as model arguments (`-M error=5`).

A fault's value says which samples it strikes: a number N (every sample whose input's hash is divisible by N: about one in N,
the same ones in every process and attempt; 1 strikes all), a text or a list of texts (inputs that contain one of them). With
`once:` before it (`once:1`, `once:Question 7.`) it strikes each such sample once and a retry heals it, in whatever process:
`state_dir` then names a directory for one marker file per sample and fault.
"""

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from evalworker.scripted_answers import digest

EXIT_CRASH: Final = 70
"""Exit status of a `crash`."""

_MEMORY_STEP_MB: Final = 16
_held: list[bytearray] = []


class RateLimitError(Exception):
    """A provider's 429; the name and `status_code` are those of the openai and anthropic packages."""

    status_code = 429


class AuthenticationError(Exception):
    """A provider's 401."""

    status_code = 401


class APITimeoutError(Exception):
    """A request that the provider did not answer in time; it has no status."""


@dataclass(frozen=True)
class Selector:
    """Which samples a fault strikes; `once` only the first time each is seen."""

    every: int | None = None
    texts: tuple[str, ...] = ()
    once: bool = False

    def __contains__(self, sample: str) -> bool:
        if self.every is not None:
            return int(digest(sample), 16) % self.every == 0
        return any(text in sample for text in self.texts)


def selector(value: Any) -> Selector:
    """A model argument's value as a selector; raises ValueError with one sentence."""
    items = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    once = bool(items) and items[0].startswith("once:")
    if once:
        items[0] = items[0].removeprefix("once:")
    if isinstance(value, bool) or not items or not all(items):
        raise ValueError(f"{value!r} selects no samples: give a number N, a part of the input, or a list of such parts")
    if len(items) == 1 and items[0].isdecimal():
        if int(items[0]) < 1:
            raise ValueError("a fault on every 0th sample is none: give a number from 1, or leave it out")
        return Selector(every=int(items[0]), once=once)
    return Selector(texts=tuple(items), once=once)


async def _rate_limit(_: int) -> None:
    raise RateLimitError("Error code: 429 - rate limit reached")


async def _auth(_: int) -> None:
    raise AuthenticationError("Error code: 401 - invalid key")


async def _timeout(_: int) -> None:
    raise APITimeoutError("Request timed out.")


async def _error(_: int) -> None:
    raise ValueError("scripted error")


async def _hang(_: int) -> None:
    await anyio.sleep_forever()


async def _crash(_: int) -> None:
    os._exit(EXIT_CRASH)


async def _kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _oom(memory_mb: int) -> None:
    for _step in range(0, memory_mb, _MEMORY_STEP_MB):
        block = bytearray(_MEMORY_STEP_MB << 20)
        block[::4096] = b"\1" * len(block[::4096])  # touched, or the kernel gives no page
        _held.append(block)
        await anyio.sleep(0)
    raise MemoryError(f"{memory_mb} MB were not the end of this process")


_FAULTS: dict[str, Callable[[int], Awaitable[None]]] = {
    "rate_limit": _rate_limit,
    "auth": _auth,
    "timeout": _timeout,
    "error": _error,
    "hang": _hang,
    "crash": _crash,
    "kill": _kill,
    "oom": _oom,
}

FAULTS: Final = tuple(_FAULTS)
"""rate_limit (429), auth (401), timeout (APITimeoutError), error (ValueError), hang (until cancelled), crash (exit status 70
without clean-up), kill (SIGKILL), oom (takes `memory_mb` more memory and keeps it, then raises MemoryError if it still lives)."""


class Faults:
    """The faults of one model.

    Args:
        chosen: fault name to its model argument's value.
        state_dir: directory of the `once:` markers; made when missing.
        memory_mb: what `oom` takes.
    """

    def __init__(self, chosen: dict[str, Any], state_dir: str | None = None, memory_mb: int = 1024) -> None:
        self._selectors = {name: selector(value) for name, value in chosen.items()}
        self._memory_mb = memory_mb
        self._state_dir = Path(state_dir) if state_dir else None
        if any(each.once for each in self._selectors.values()):
            if self._state_dir is None:
                raise ValueError("a fault with `once:` remembers what it has struck: give -M state_dir=DIRECTORY")
            self._state_dir.mkdir(parents=True, exist_ok=True)

    async def strike(self, sample: str) -> None:
        """Let what is due for this sample's input happen; returns if nothing is."""
        for name, chosen in self._selectors.items():
            if sample in chosen and not (chosen.once and self._seen(name, sample)):
                await _FAULTS[name](self._memory_mb)

    def _seen(self, fault: str, sample: str) -> bool:
        assert self._state_dir is not None
        try:
            (self._state_dir / f"{digest(sample)}-{fault}").touch(exist_ok=False)
        except FileExistsError:
            return True
        return False
