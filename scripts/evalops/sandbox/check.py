"""Whether this machine can run Inspect's sandboxes: facts gathered from Docker and the kernel, then judged. The judging is pure."""

import ipaddress
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalops.sandbox.docker import DockerError, docker, lines

ENGINE_NEEDED = (24, 0, 6)
COMPOSE_NEEDED = (2, 21, 0)
"""What Inspect 0.3.285 refuses to work below."""

DISK_NEEDED = 20 * 10**9
NETWORKS_NEEDED = 64
"""Each sample with a network of its own takes one; Docker's own pools end after about 30."""

WATCHES_NEEDED = 65_536
INSTANCES_NEEDED = 512

_DEFAULT_POOLS = [("172.17.0.0/12", 16, 15), ("192.168.0.0/16", 20, 16)]


@dataclass(frozen=True)
class Facts:
    """What was found; None where it could not be found out. Sizes in bytes."""

    engine: str | None = None
    compose: str | None = None
    engine_error: str = ""
    compose_error: str = ""
    driver: str | None = None
    disk_free: int | None = None
    networks_used: int | None = None
    networks_most: int | None = None
    watches: int | None = None
    instances: int | None = None


@dataclass(frozen=True)
class Finding:
    """One judged fact. `ok` None: not known. `help`: what to do, "" when nothing."""

    what: str
    found: str
    needed: str
    ok: bool | None
    help: str = ""


def version(text: str | None) -> tuple[int, ...]:
    """The numbers of a version, () without any."""
    return tuple(int(number) for number in re.findall(r"\d+", text or "")[:3])


def judge(facts: Facts) -> list[Finding]:
    """The findings, in the order in which a person would mend them."""
    return [
        _version("Docker Engine", facts.engine, ENGINE_NEEDED, facts.engine_error),
        _version("Docker Compose", facts.compose, COMPOSE_NEEDED, facts.compose_error),
        _driver(facts),
        _least(
            "free disk",
            facts.disk_free,
            DISK_NEEDED,
            "remove unused images (`docker image prune`) or enlarge the disk",
            gigabytes=True,
        ),
        _pools(facts),
        _least("inotify watches", facts.watches, WATCHES_NEEDED, "sysctl fs.inotify.max_user_watches=524288"),
        _least("inotify instances", facts.instances, INSTANCES_NEEDED, "sysctl fs.inotify.max_user_instances=8192"),
    ]


def _version(what: str, found: str | None, needed: tuple[int, ...], error: str) -> Finding:
    wanted = ".".join(map(str, needed))
    if found is None:
        return Finding(what, "none", f">= {wanted}", False, error or f"install {what} {wanted} or later")
    good = version(found) >= needed
    return Finding(what, found, f">= {wanted}", good, "" if good else f"upgrade {what} to {wanted} or later")


def _driver(facts: Facts) -> Finding:
    if facts.driver is None:
        return Finding("storage driver", "-", "not vfs", None)
    good = facts.driver != "vfs"
    help_ = "" if good else "vfs copies each image for each container: put /var/lib/docker on a real volume"
    return Finding("storage driver", facts.driver, "not vfs", good, help_)


def _least(what: str, found: int | None, needed: int, help_: str, *, gigabytes: bool = False) -> Finding:
    def shown(count: int) -> str:
        return f"{count / 1e9:.1f} GB" if gigabytes else str(count)

    if found is None:
        return Finding(what, "-", f">= {shown(needed)}", None)
    return Finding(what, shown(found), f">= {shown(needed)}", found >= needed, "" if found >= needed else help_)


def _pools(facts: Facts) -> Finding:
    if facts.networks_most is None or facts.networks_used is None:
        return Finding("networks", "-", f">= {NETWORKS_NEEDED} free", None)
    free = facts.networks_most - facts.networks_used
    help_ = 'give the daemon /24 pools: "default-address-pools": [{"base": "10.128.0.0/9", "size": 24}] in /etc/docker/daemon.json'
    good = free >= NETWORKS_NEEDED
    return Finding(
        "networks", f"{free} free of {facts.networks_most}", f">= {NETWORKS_NEEDED} free", good, "" if good else help_
    )


def pool_size(pools: Any) -> int:
    """How many networks the daemon's address pools hold; Docker's own pools when it names none."""
    if not pools:
        return sum(count for _, _, count in _DEFAULT_POOLS)
    return sum(
        2 ** max(0, int(pool["Size"]) - ipaddress.ip_network(pool["Base"], strict=False).prefixlen) for pool in pools
    )


def gather() -> Facts:
    """Ask Docker and the kernel; never raises for what is not there."""
    values: dict[str, Any] = {
        "watches": _kernel("max_user_watches"),
        "instances": _kernel("max_user_instances"),
    }
    try:
        info = json.loads(docker("info", "--format", "{{json .}}"))
        if info.get("ServerErrors"):
            raise DockerError(
                f"the Docker daemon does not answer: {info['ServerErrors'][0]}; start it (`systemctl start docker`)"
            )
        values |= {"engine": info["ServerVersion"], "driver": info.get("Driver")}
        values["networks_most"] = pool_size(info.get("DefaultAddressPools"))
        values["networks_used"] = len(lines("network", "ls", "--quiet", "--filter", "driver=bridge"))
        values["disk_free"] = _free(info.get("DockerRootDir") or "/var/lib/docker")
    except (DockerError, ValueError, KeyError) as error:
        values["engine_error"] = str(error)
    try:
        values["compose"] = docker("compose", "version", "--short").strip()
    except DockerError:
        values["compose_error"] = "install the Compose plugin (Debian: docker-compose, elsewhere docker-compose-plugin)"
    return Facts(**values)


def _kernel(name: str) -> int | None:
    try:
        return int(Path(f"/proc/sys/fs/inotify/{name}").read_text())
    except (OSError, ValueError):
        return None


def _free(directory: str) -> int | None:
    path = Path(directory)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
