#!/usr/bin/env bash
# The worker's Python environment: exactly what uv.lock says, compiled to bytecode. FLEET_WITHOUT names more packages to leave out.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

uv_home=$(mktemp -d)
trap 'rm -rf "$uv_home"' EXIT
python3 -m venv "$uv_home/venv"
try 3 "$uv_home/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "uv==$UV_VERSION" ||
    die "uv $UV_VERSION cannot be installed from PyPI: the build needs a way to the internet"

# The machine's own interpreter and certificates (a company's proxy is known to these alone).
export UV_PROJECT_ENVIRONMENT=$FLEET_HOME/venv UV_PYTHON=/usr/bin/python3 UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1
export UV_CACHE_DIR=$uv_home/cache UV_COMPILE_BYTECODE=1 UV_NO_PROGRESS=1 UV_LINK_MODE=copy
leave_out=()
left_out="debugpy ${FLEET_WITHOUT:-}" # debugpy serves `inspect eval --debug` alone.
for package in $left_out; do leave_out+=(--no-install-package "$package"); done
cd "$FLEET_SOURCE"
if [ "${1:-all}" = dependencies ]; then
    leave_out+=(--no-install-project)
fi
try 3 "$uv_home/venv/bin/uv" sync --quiet --frozen --no-dev --no-editable "${leave_out[@]}" ||
    die "the Python packages of uv.lock could not be installed"

# A run with this same lock needs no other environment.
install -m 644 uv.lock "$FLEET_HOME/venv/inspect-fleet.uv.lock"
echo "$left_out" >"$FLEET_HOME/venv/inspect-fleet.left-out"

# Runs bring environments of their own, which the worker installs.
install -m 755 "$uv_home/venv/bin/uv" /usr/local/bin/uv

# Tests of the packages themselves are never run on a worker.
find "$FLEET_HOME/venv" -depth -type d \( -path '*/numpy/*/tests' -o -path '*/pandas/tests' -o -path '*/pyarrow/tests' -o -path '*/networkx/*/tests' \) -exec rm -rf {} +
"$FLEET_HOME/venv/bin/python" -c 'import boto3, inspect_ai' || die "the installed environment does not import"
say "environment: $(du -sm "$FLEET_HOME/venv" | cut -f1) MB"
