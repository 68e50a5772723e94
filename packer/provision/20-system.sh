#!/usr/bin/env bash
# The system around the worker: its user, Docker's settings, kernel limits, and the metadata service closed to containers.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

# Numbers that no image's own users have: the metadata rule knows the group by its number, also inside containers.
getent group inspect-fleet >/dev/null || groupadd --gid 58913 inspect-fleet
install -d -m 755 /etc/inspect-fleet "$FLEET_HOME" /var/log/inspect-fleet /var/lib/inspect-fleet /var/cache/inspect-fleet
id -u inspect-fleet >/dev/null 2>&1 ||
    useradd --uid 58913 --gid inspect-fleet --create-home --home-dir /var/lib/inspect-fleet/home --shell /usr/sbin/nologin inspect-fleet
usermod --append --groups docker inspect-fleet
chown inspect-fleet:inspect-fleet /var/lib/inspect-fleet /var/cache/inspect-fleet

files=$FLEET_SOURCE/packer/files
install -D -m 644 "$files/daemon.json" /etc/docker/daemon.json
install -D -m 644 "$files/sysctl.conf" /etc/sysctl.d/60-inspect-fleet.conf
install -m 644 "$files/metadata.nft" /etc/inspect-fleet/metadata.nft
if booted; then
    sysctl --quiet --load /etc/sysctl.d/60-inspect-fleet.conf 2>/dev/null || say "some kernel limits cannot be set here; they are set at boot"
    nft --check --file /etc/inspect-fleet/metadata.nft || die "the rules that close the metadata service are not accepted"
fi
