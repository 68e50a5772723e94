#!/usr/bin/env python3
"""runc for machines whose root lacks a capability: takes what is missing out of the container's description, then runs runc.

dockerd calls it as a runtime (`--add-runtime`); `docker run --privileged` asks for every capability that exists, and plain runc
ends with "unable to apply caps" where the bounding set has fewer. Nothing else of the description is touched.
"""

import json
import os
import sys
from pathlib import Path

# In the order of their numbers, as <linux/capability.h> has them.
CAPABILITIES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN
NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON
BPF CHECKPOINT_RESTORE
""".split()  # noqa: SIM905


def bounding_set() -> set[str]:
    """The capabilities that this process could ever have."""
    status = Path("/proc/self/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:")), 16)
    return {f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if mask >> number & 1}


def descriptions(arguments: list[str]) -> list[Path]:
    """The files that describe what is about to run: a bundle's config.json (`create`, `run`), a process file (`exec`)."""
    found = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else "".join(arguments[index + 1 : index + 2])
        if name in ("--bundle", "-b"):
            found.append(Path(value, "config.json"))
        elif name in ("--process", "-p"):
            found.append(Path(value))
    return [path for path in found if path.is_file()]


def main() -> None:
    """Mend the descriptions, become runc."""
    allowed = bounding_set()
    for path in descriptions(sys.argv[1:]):
        content = json.loads(path.read_text())
        sets = content.get("process", content).get("capabilities") or {}
        for kind, names in sets.items():
            sets[kind] = [name for name in names or [] if name in allowed]
        path.write_text(json.dumps(content))
    os.execvp("runc", ["runc", *sys.argv[1:]])


if __name__ == "__main__":
    main()
