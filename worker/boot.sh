#!/usr/bin/env bash
# What happens around the agent on an instance. Run as root; talks to the metadata service in the group that may.
#
#   boot.sh           on a stock Debian: install the worker (the files come with `ct cloud boot-script`), start its unit
#   boot.sh start     before the agent: set the switch that ends the machine at its fleet's deadline
#   boot.sh ended     after the agent: upload the log, whatever happened; if it never came up, tell the fleet why
#
# Nothing here needs Python packages or the AWS command line: it must work when the installation itself has failed.
set -euo pipefail

run=/run/inspect-fleet
log=/var/log/inspect-fleet/boot.log
work=/var/lib/inspect-fleet/work
metadata=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
metadata=${metadata%/}
token_wait_s=120 # for the network at boot
mkdir -p "$run" "$(dirname "$log")"

say() { echo "$(date -u +%FT%T.%3NZ) inspect-fleet: $*" | tee -a "$log" >&2; }

in_group() { setpriv --regid inspect-fleet --clear-groups "$@"; }

# Sets $token, once for all calls of this process: what a $(…) sets is lost with its subshell, so whoever asks calls this before.
know_token() {
    [ -z "${token:-}" ] || return 0
    local end=$((SECONDS + token_wait_s))
    while ! token=$(in_group curl -fsS --max-time 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' "$metadata/latest/api/token" 2>/dev/null) || [ -z "$token" ]; do
        [ "$SECONDS" -lt "$end" ] || { say "the metadata service has not answered for $token_wait_s s"; return 1; }
        sleep 0.3
    done
}

# imds PATH: one value, empty where there is none. After know_token.
imds() {
    # -f: what is not there (404) prints nothing
    in_group curl -fsS --retry 3 --max-time 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/$1" 2>/dev/null || true
}

tag() { imds "meta-data/tags/instance/$1"; }

# signed SERVICE CURL-ARGUMENTS…: a request with the instance's role; keys go by standard input, never into a process list.
signed() {
    local service=$1 credentials
    shift
    credentials=$(imds "meta-data/iam/security-credentials/$(imds meta-data/iam/security-credentials/)")
    field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1" <<<"$credentials"; }
    curl -fsS --retry 5 --max-time 60 --config - "$@" <<CURL
aws-sigv4 = "aws:amz:$region:$service"
user = "$(field AccessKeyId):$(field SecretAccessKey)"
header = "x-amz-security-token: $(field Token)"
CURL
}

know_fleet() {
    know_token || return 1
    instance=$(imds meta-data/instance-id)
    region=$(imds meta-data/placement/region)
    fleet=$(tag fleet-id)
    lane=$(tag lane)
    bucket=$(tag inspect-fleet-bucket)
    s3=${AWS_ENDPOINT_URL_S3:-${AWS_ENDPOINT_URL:-https://s3.$region.amazonaws.com}}/$bucket
}

# The switch is a timer of its own: `shutdown -P` in the user data runs later and would replace an earlier `shutdown -P`.
start() {
    local deadline left
    know_token
    deadline=$(tag fleet-deadline)
    [ -n "$deadline" ] || { say "this instance has no tag fleet-deadline: it is no worker of a fleet"; return 1; }
    left=$(($(date -d "$deadline" +%s) - $(date +%s)))
    [ "$left" -gt 0 ] || { say "the fleet's deadline $deadline is past"; return 1; }
    systemctl stop --quiet inspect-fleet-deadline.timer 2>/dev/null || true
    systemd-run --quiet --no-block --unit=inspect-fleet-deadline --on-active="$left" --timer-property=AccuracySec=1s \
        --timer-property=DefaultDependencies=no --property=DefaultDependencies=no systemctl poweroff
    echo "$deadline" >"$run/deadline"
    say "ends at the latest at $deadline, in $left s"
}

# A message of evalworker.contract.messages.BootstrapFailed, under 32 KiB.
failure_message() {
    python3 - "$fleet" "$instance" "$log" <<'PY'
import datetime, json, sys
fleet, instance, log = sys.argv[1:]
with open(log, errors="replace") as file:
    lines = [line.rstrip("\n")[:500] for line in file.readlines()[-30:]]
now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
print(json.dumps({"schema": 1, "type": "bootstrap_failed", "fleet_id": fleet, "instance_id": instance, "ts": now, "lines": lines}))
PY
}

report() {
    know_fleet || return 1
    if [ -z "$bucket" ] || [ -z "$fleet" ]; then
        say "no tags say where to send the log"
        return 1
    fi
    { cat "$log"; cat "$work/worker.log" 2>/dev/null || true; } >"$run/all.log"
    signed s3 -X PUT --data-binary "@$run/all.log" -H 'Content-Type: text/plain' "$s3/$fleet/workers/$instance.log" >/dev/null || say "the log could not be uploaded"
    [ ! -e "$work/online" ] || return 0
    failure_message >"$run/failure.json"
    events=$(signed s3 "$s3/lanes/$lane.json" | python3 -c 'import json, sys; print(json.load(sys.stdin)["events"])')
    signed sqs "${AWS_ENDPOINT_URL_SQS:-${AWS_ENDPOINT_URL:-$events}}" -d Action=SendMessage -d Version=2012-11-05 \
        --data-urlencode "QueueUrl=$events" --data-urlencode "MessageBody@$run/failure.json" >/dev/null || say "the fleet could not be told"
}

ended() {
    say "the worker has ended: ${SERVICE_RESULT:-unknown} (${EXIT_CODE:-} ${EXIT_STATUS:-})"
    [ ! -s /var/log/cloud-init-output.log ] || tail -n 100 /var/log/cloud-init-output.log >>"$log"
    # What the agent said last may still be in journald's queue.
    timeout 10 journalctl --sync 2>/dev/null || true
    journalctl -b -u inspect-fleet-worker.service -o cat -n 400 --no-pager >>"$log" 2>/dev/null || true
    report || say "the end of this worker could not be reported"
}

install_worker() {
    trap '[ $? -eq 0 ] || ended; rm -rf /tmp/inspect-fleet' EXIT
    exec > >(tee -a "$log") 2>&1
    mkdir -p /tmp/inspect-fleet
    sed '1,/^#PAYLOAD#$/d' "$0" | base64 -d | tar -xz -C /tmp/inspect-fleet
    local script
    for script in /tmp/inspect-fleet/packer/provision/[1-4]*.sh; do
        say "running $(basename "$script")"
        bash "$script"
    done
    systemctl daemon-reload
    systemctl start --no-block docker.service inspect-fleet-metadata.service inspect-fleet-worker.service
}

case ${1:-install} in
    start) start ;;
    ended) ended ;;
    install) install_worker ;;
    *) say "boot.sh: $1 is none of start, ended, install"; exit 2 ;;
esac
exit
