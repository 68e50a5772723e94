# shellcheck shell=bash
# What the provisioning scripts share. Each sources this file first; it changes nothing by itself.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

FLEET_SOURCE=${FLEET_SOURCE:-/tmp/inspect-fleet} # the files of the checkout that the image is made from
# shellcheck disable=SC2034 # used by the scripts
FLEET_HOME=/opt/inspect-fleet
# shellcheck source=packer/versions.env
. "$FLEET_SOURCE/packer/versions.env"

say() { echo "inspect-fleet: $*"; }

# The last line of a failing script says what to do; `ct cloud build-ami` shows it.
die() {
    echo "inspect-fleet: $*" >&2
    exit 1
}

# Whether a systemd is there to be told, rather than a container's build.
booted() { [ -d /run/systemd/system ]; }

# apt-get that waits for another one's lock (unattended upgrades at first boot), but not for ever; it talks only when it fails.
apt() {
    local log
    log=$(mktemp)
    # Without a network a name would be looked up for minutes.
    if RES_OPTIONS="timeout:3 attempts:2" apt-get -qq -o DPkg::Lock::Timeout=180 -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@" >"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 12 "$log"
        rm -f "$log"
        return 1
    fi
}

# try N COMMAND…: run it up to N times, with longer and longer pauses.
try() {
    local tries=$1 turn
    shift
    for turn in $(seq "$tries"); do
        "$@" && return
        [ "$turn" = "$tries" ] || sleep $((turn * 3))
    done
    return 1
}
