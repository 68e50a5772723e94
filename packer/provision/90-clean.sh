#!/usr/bin/env bash
# Takes out of the machine what belongs to this machine alone: keys, ids, logs, history, caches. The last step of an AMI.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

if booted; then
    systemctl stop --quiet docker.service docker.socket containerd.service 2>/dev/null || true
    # From here on this machine's journal stays in memory.
    install -d /run/systemd/journald.conf.d
    printf '[Journal]\nStorage=volatile\n' >/run/systemd/journald.conf.d/inspect-fleet.conf
    systemctl restart systemd-journald.service
fi
say "size by part (MB): $(du -sm /opt/inspect-fleet/venv /usr /var/lib/docker 2>/dev/null | awk '{printf "%s %s, ", $2, $1}')"
apt-get -qq clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/*-old /root/.cache /home/*/.cache
! command -v cloud-init >/dev/null || cloud-init clean --logs --seed
rm -f /etc/ssh/ssh_host_* /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
rm -f /root/.bash_history /home/*/.bash_history /root/.wget-hsts /var/lib/systemd/random-seed /var/lib/systemd/credential.secret
rm -rf /var/lib/dhcp/* /var/lib/systemd/timers/* /var/tmp/* /var/log/journal/*
# Empty means: make one at the first boot. Two workers with one id would share DHCP leases and journal names.
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id
find /var/log -type f -exec truncate --size 0 {} +
find /tmp -mindepth 1 -maxdepth 1 ! -name "$(basename "$0")" -exec rm -rf {} +
sync
