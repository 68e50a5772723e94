#!/usr/bin/env bash
# Sandbox images: pulls what images.txt names and builds what the tasks' Compose files build, so that workers find them.
#
# Registry login: a Docker config.json that the build has put into memory (never on the disk); it is gone afterwards.
# shellcheck source=packer/provision/lib.sh
. "${FLEET_SOURCE:-/tmp/inspect-fleet}/packer/provision/lib.sh"

registry=/dev/shm/inspect-fleet-registry.json
trap 'rm -f "$registry"' EXIT
list=$FLEET_SOURCE/sandboxes/images.txt
projects=$FLEET_SOURCE/sandboxes/projects
if [ ! -s "$list" ] && [ ! -d "$projects" ]; then
    say "no sandbox images asked for"
    exit 0
fi

if booted; then systemctl start docker.service; fi
up() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
for _ in $(seq 60); do up && break; sleep 0.5; done
up || die "the Docker engine did not start: $(journalctl -u docker -n 5 -o cat 2>/dev/null | tr '\n' ' ')"
[ "$(docker info --format '{{.Driver}}')" != vfs ] || die "Docker has fallen back to the vfs driver: each layer would be a full copy"

if [ -s "$registry" ]; then
    DOCKER_CONFIG=$(mktemp -d -p /dev/shm)
    export DOCKER_CONFIG
    trap 'rm -rf "$registry" "$DOCKER_CONFIG"' EXIT
    (umask 077 && cp "$registry" "$DOCKER_CONFIG/config.json")
fi

if [ -s "$list" ]; then
    while IFS= read -r image; do
        say "pulling $image"
        try 3 timeout 1200 docker pull --quiet "$image" </dev/null >/dev/null ||
            die "the image $image cannot be pulled: check its name, and the registry login (INSPECT_FLEET_REGISTRY_AUTH) if it is private"
    done <"$list"
fi
if [ -d "$projects" ]; then
    for project in "$projects"/*/; do
        name=$(cat "$project/name.txt")
        say "building the sandbox of $name"
        mkdir "$project/files" && tar -xf "$project/files.tar" -C "$project/files"
        (cd "$project/files" && timeout 3600 docker compose --file "$(cat ../compose.txt)" --project-name inspect-fleet-bake build </dev/null) ||
            die "the sandbox images of $name cannot be built"
        # What the Compose file only names is pulled now as well.
        (cd "$project/files" && try 3 timeout 1200 docker compose --file "$(cat ../compose.txt)" --project-name inspect-fleet-bake pull --quiet --ignore-buildable </dev/null) ||
            die "the sandbox images of $name cannot be pulled: check the registry login (INSPECT_FLEET_REGISTRY_AUTH) if they are private"
    done
fi
docker image ls --format 'inspect-fleet: image {{.Repository}}:{{.Tag}} {{.Size}}'
