#!/usr/bin/env bash
# uv with the arguments given: the one on PATH, or one of our own that is installed from PyPI into .cache/uv.
#
# Called by the Makefile and by .ci/run. Needs nothing but python3; changes nothing outside of the repository, except that
# root on a Debian machine whose python3 has neither pip nor ensurepip gets Debian's package python3-pip.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
own=$here/.cache/uv

say() { echo "uv.sh: $*" >&2; }

install_uv() {
    # --target is allowed where Debian calls its python3 "externally managed", and needs no venv.
    if ! python3 -m pip --version >/dev/null 2>&1; then
        if python3 -m ensurepip --version >/dev/null 2>&1; then
            python3 -m venv "$own.venv" >&2
            "$own.venv/bin/python" -m pip install --quiet --upgrade --root-user-action=ignore --target "$own" uv >&2
            return
        fi
        if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
            say "python3 has neither pip nor ensurepip: install uv, or pip for python3, and try again"
            exit 1
        fi
        say "python3 has neither pip nor ensurepip: installing Debian's python3-pip"
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends python3-pip >&2
    fi
    python3 -m pip install --quiet --upgrade --root-user-action=ignore --target "$own" uv >&2
}

# A name on PATH may be a shim whose program is gone: only one that answers counts.
if uv --version >/dev/null 2>&1; then
    uv=uv
else
    uv=$own/bin/uv
    if ! "$uv" --version >/dev/null 2>&1; then
        command -v python3 >/dev/null || { say "there is no python3 on PATH: install Python 3.11 or newer"; exit 1; }
        say "no uv on PATH: installing it into .cache/uv"
        install_uv
    fi
fi

export UV_PYTHON_DOWNLOADS=never # the machine's own interpreters alone
# A company's proxy is known to the machine's certificates alone; a bare machine has none, and uv brings its own.
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
exec "$uv" "$@"
