#!/usr/bin/env bash
# Debian's packages: the Docker engine with Compose, Python, and what the scripts call.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

packages=(
    ca-certificates
    curl
    docker-cli
    docker-compose
    docker.io
    git # versions of task code in a log
    iproute2
    iptables
    nftables # closes the metadata service to containers
    procps
    python3
    python3-venv
    util-linux # setpriv
)

# Nothing may hold apt's lock or reboot a worker; an image is renewed by building another one.
for timer in apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service man-db.timer e2scrub_all.timer fstrim.timer dpkg-db-backup.timer; do
    if booted; then systemctl disable --now --quiet "$timer" 2>/dev/null || true; fi
    systemctl mask --quiet "$timer" 2>/dev/null || true
done

# Documentation is never read on a worker; these programs of containerd are for people and for older engines (48 MB).
cat >/etc/dpkg/dpkg.cfg.d/inspect-fleet <<'DPKG'
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
path-include=/usr/share/locale/locale.alias
path-exclude=/usr/bin/ctr
path-exclude=/usr/bin/containerd-shim
path-exclude=/usr/bin/containerd-shim-runc-v1
DPKG

# apt reports an unreachable archive as a warning and exits with 0: its Error-Mode turns that into a failure.
try 2 apt update --error-on=any || die "Debian's package archive cannot be reached: the build needs a way to the internet (subnet, NAT, security group)"
try 2 apt install --yes --no-install-recommends "${packages[@]}" || die "Debian's packages could not be installed"
apt-get -qq clean

at_least() { dpkg --compare-versions "$2" ge "$3" || die "$1 is $2, but Inspect's sandboxes need $3 or later"; }
at_least "Docker" "$(dpkg-query -f '${source:Upstream-Version}' -W docker.io)" "$DOCKER_AT_LEAST"
at_least "Compose" "$(dpkg-query -f '${source:Upstream-Version}' -W docker-compose)" "$COMPOSE_AT_LEAST"
say "packages: $(dpkg-query -f '${Package} ${Version}, ' -W docker.io docker-compose python3)"
