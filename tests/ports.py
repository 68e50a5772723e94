"""A port for a server that takes one as an option and binds it itself, seconds later."""

import random
import socket
from pathlib import Path

SPAN = 16_000


def free_port() -> int:
    """A port of loopback on which nobody listens, from below the range of which the kernel gives away.

    A port that was got by binding 0 and given back may be given to anybody before its server has come up: to another server that
    binds 0, or to a connection.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, first - SPAN), first)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
