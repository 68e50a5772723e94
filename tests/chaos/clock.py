"""The wall clock of a tempest's processes, which may be set wrong while they run: `clock.c` is loaded into each of them.

Their monotonic clocks, the machine's own clock and what runs beside the fleet stay right.
"""

import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")

JUMPS_S = (600, 3 * 3600, -600, -3 * 3600)
"""How far the clock may jump. Less than a fleet's deadline: past it a fleet would end, and truthfully say so."""

WRONG_S = 5.0
"""How long it is wrong."""


@contextmanager
def library() -> Iterator[Path]:
    """The compiled library."""
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        built = Path(folder, "clock.so")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(SOURCE)], check=True)
        yield built


class Clock:
    """One fleet's clock. `environment` is what its processes need to have it."""

    def __init__(self, library: Path, place: Path) -> None:
        self._place = place
        place.write_bytes(struct.pack("l", 0))
        self.environment = {"LD_PRELOAD": str(library), "TEMPEST_CLOCK": str(place)}

    def set(self, off_s: int) -> None:
        """Let it be so many seconds ahead, at once and for all processes."""
        file = os.open(self._place, os.O_WRONLY)
        os.pwrite(file, struct.pack("l", off_s), 0)
        os.close(file)
