"""Gives an emulated EC2's instances their lives: something real runs for each running instance, and the two ends are tied.

What runs is the caller's: an agent as a process of this machine, or a whole machine as a container. Whatever ends by itself terminates
its instance; an instance that is terminated ends what runs for it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

LOOK_S = 0.5
"""Between two looks at EC2."""

GOING = ("shutting-down", "terminated", "stopping", "stopped")

Found = dict[str, Any]
"""An instance as DescribeInstances shows it."""


class Machine(Protocol):
    """What runs for an instance; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """How it ended, None while it runs."""

    def terminate(self) -> None:
        """Tell it to end, as EC2 tells an operating system; returns at once."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> Any:
        """Wait until it has ended and leave nothing of it."""


Kind = TypeVar("Kind", bound=Machine)


@dataclass
class Player(Generic[Kind]):
    """Plays the instances that `instances` lists. `start` begins the life of one, or says None: not now.

    `look` is told of each running instance at every look; what it raises, as what `start` raises, ends the play with an error.
    """

    instances: Callable[[], list[Found]]
    end_instance: Callable[[str], object]
    start: Callable[[Found], Kind | None]
    look: Callable[[Found, Kind], None] = lambda found, machine: None
    machines: dict[str, Kind] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _told: set[str] = field(default_factory=set)

    def play(self) -> None:
        """Until it is over."""
        while not self._over.wait(LOOK_S):
            for found in self.instances():
                self._step(found, found["InstanceId"], found["State"]["Name"])

    def _step(self, found: Found, name: str, state: str) -> None:
        machine = self.machines.get(name)
        if machine is None:
            if state == "running" and (made := self.start(found)) is not None:
                self.machines[name] = made
        elif state in GOING:
            if machine.poll() is None and name not in self._told:
                self._told.add(name)
                machine.terminate()
        elif machine.poll() is not None:
            self.end_instance(name)
        else:
            self.look(found, machine)

    def stop(self) -> None:
        """End the play, and what still runs."""
        self._over.set()

    def clear(self) -> None:
        """End what still runs; after the play."""
        for machine in self.machines.values():
            if machine.poll() is None:
                machine.kill()
            machine.wait()


@contextmanager
def playing(player: Player[Kind]) -> Iterator[Player[Kind]]:
    """Instances live while the block runs."""
    thread = threading.Thread(target=player.play, name="player", daemon=True)
    thread.start()
    try:
        yield player
    finally:
        player.stop()
        thread.join()
        player.clear()
