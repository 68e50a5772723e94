#!/usr/bin/env bash
# Start the Docker engine that the end-to-end tests use, unless one answers already. Called by `make e2e`; as root.
# The engine stays: its data is below /var/lib/docker, its log is /var/log/inspect-fleet-dockerd.log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
log=/var/log/inspect-fleet-dockerd.log

answers() { docker version >/dev/null 2>&1; }

answers && exit 0
for tool in dockerd docker python3 runc; do
    PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null || { echo "setup.sh: $tool is missing: apt-get install docker.io" >&2; exit 1; }
done
# A copy outside of the working tree: the engine outlives the checkout it was started from.
install -D -m 755 "$here/runc_lowcap.py" /usr/local/libexec/inspect-fleet-runc
# Packets of containers must fit the machine's own link, which may be smaller than Docker's default.
link=$(ip -o route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
mtu=$(cat "/sys/class/net/${link:-lo}/mtu")
setsid nohup env PATH="$PATH:/usr/sbin:/sbin" dockerd \
    --add-runtime lowcap=/usr/local/libexec/inspect-fleet-runc --default-runtime lowcap \
    --mtu "$((mtu < 1500 ? mtu : 1500))" --data-root /var/lib/docker >"$log" 2>&1 </dev/null &
for _ in $(seq 150); do
    answers && exit 0
    sleep 0.2
done
echo "setup.sh: dockerd did not answer within 30 s; the end of $log:" >&2
tail -n 20 "$log" >&2
exit 1
