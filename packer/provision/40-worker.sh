#!/usr/bin/env bash
# The worker itself: boot.sh, the systemd units, what the image says of itself, the tokenizer cache.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

worker=$FLEET_SOURCE/worker
install -m 755 "$worker/boot.sh" "$FLEET_HOME/boot.sh"
install -m 755 "$worker/entrypoint.py" "$FLEET_HOME/entrypoint.py"
[ ! -e "$FLEET_SOURCE/image.env" ] || install -m 644 "$FLEET_SOURCE/image.env" "$FLEET_HOME/image.env"

# Tokenizers are fetched from a server that may be slow or blocked: filled here, and only missed when that fails.
export TIKTOKEN_CACHE_DIR=/var/cache/inspect-fleet/tiktoken
install -d "$TIKTOKEN_CACHE_DIR"
if ! timeout 60 "$FLEET_HOME/venv/bin/python" -c 'import tiktoken; tiktoken.get_encoding("o200k_base")' 2>/dev/null; then
    say "the tokenizer o200k_base could not be fetched: workers fetch it when they first need it"
fi
chown -R inspect-fleet:inspect-fleet /var/cache/inspect-fleet

command -v systemctl >/dev/null || exit 0 # an image without systemd
units=(
    inspect-fleet-metadata.service
    inspect-fleet-worker.service
    inspect-fleet-deadman.service
    inspect-fleet-deadman.timer
)
for unit in "${units[@]}"; do install -m 644 "$worker/$unit" "/etc/systemd/system/$unit"; done
systemctl enable --quiet inspect-fleet-metadata.service inspect-fleet-worker.service inspect-fleet-deadman.timer docker.service

# A machine whose user data failed is of no use: it ends at once instead of idling until its longest lifetime.
install -d /etc/systemd/system/cloud-final.service.d
printf '[Unit]\nOnFailure=poweroff.target\n' >/etc/systemd/system/cloud-final.service.d/inspect-fleet.conf
# The network is up without cloud-init's help, so that the agent need not wait for it.
install -D -m 644 "$FLEET_SOURCE/packer/files/cloud-init.cfg" /etc/cloud/cloud.cfg.d/90-inspect-fleet.cfg
install -D -m 644 "$FLEET_SOURCE/packer/files/network" /etc/systemd/network/90-inspect-fleet.network
systemctl enable --quiet systemd-networkd.service 2>/dev/null || true
