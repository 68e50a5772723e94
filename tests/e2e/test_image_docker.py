"""The worker image as Docker in Docker: sandboxes work inside and go away, see no metadata service; refusals are clear."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker_bench
import pytest
from docker_bench import docker
from image_fixtures import boxed

pytest_plugins = ("image_fixtures",)

METADATA = "169.254.169.254"
SERVE = "import http.server; http.server.HTTPServer(('', 80), http.server.SimpleHTTPRequestHandler).serve_forever()"


@pytest.fixture(scope="module")
def metadata_network(worker_image: str) -> Iterator[str]:
    """A network on which something answers at the metadata service's address."""
    with docker_bench.network("169.254.169.0/24", "--internal") as network:
        place = ("--network", network, "--ip", METADATA, "--workdir", "/srv", "--entrypoint", "python3")
        with docker_bench.container(*place, image=worker_image, command=("-c", SERVE)):
            yield network


@pytest.fixture(scope="module")
def worker(worker_image: str, metadata_network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running worker container with the task that has a sandbox in its directory."""
    folder = boxed(tmp_path_factory.mktemp("work"))
    arguments = (
        "--privileged",
        "--network",
        metadata_network,
        "--volume",
        f"{folder}:/work",
        "--env",
        "INSPECT_FLEET_DOCKER=yes",
    )
    with docker_bench.container(*arguments, image=worker_image, command=("sleep", "infinity")) as found:
        end = time.monotonic() + 60
        while not inside(found, "pgrep -x sleep || true").strip():
            assert time.monotonic() < end, docker("logs", found)
            time.sleep(0.2)
        yield found


def inside(container: str, script: str, *options: str) -> str:
    return docker("exec", *options, container, "bash", "-c", script)


NOTHING = (
    "docker ps -aq; docker network ls -q --filter type=custom; docker volume ls -q; docker image ls -q 'inspect-*'"
)


def test_the_engine_inside_is_a_real_one(worker: str) -> None:
    assert inside(worker, "docker info --format '{{.Driver}} {{.ServerVersion}}'").startswith("overlay2 26.")
    pools = inside(
        worker,
        "docker network create a >/dev/null; docker network inspect a --format '{{(index .IPAM.Config 0).Subnet}}'; docker network rm a",
    )
    assert pools.split()[0].endswith(".0/24")


def test_a_plain_eval_with_a_sandbox(worker: str) -> None:
    said = inside(worker, "inspect eval boxed.py --model mockllm/model --display plain --log-dir /tmp/logs")
    assert "accuracy      1.000" in said
    assert inside(worker, NOTHING) == ""


def test_the_same_as_a_job_of_a_local_fleet(worker: str) -> None:
    said = inside(worker, "cd /work && ct run eval boxed.py --model scripted/good --max-workers 1 2>&1; echo status $?")
    assert "status 0" in said, said
    logs = inside(worker, 'cd /work && cat logs/fleet/*/events.jsonl | grep \'"type":"result"\'')
    assert '"boxed_scorer":{"value":"C"' in logs, logs
    assert inside(worker, NOTHING) == ""


SLOW = """
rm -rf /tmp/slow && cp -r /work /tmp/slow && cd /tmp/slow && rm -rf logs
sed -i 's/"echo/"sleep 300; echo/' boxed.py
docker run -d --name bystander --label com.docker.compose.project=inspect-other-i0123456789abcdefabcdef $(docker build -q .) sleep infinity
"""
PROJECTS = "docker ps --format '{{.Label \"com.docker.compose.project\"}}' | grep -v other"


def test_containers_carry_the_jobs_id_and_a_killed_job_takes_them_along(worker: str) -> None:
    inside(worker, SLOW)
    command = "cd /tmp/slow && exec ct run eval boxed.py --model scripted/good --max-workers 1 >/tmp/slow.out 2>&1"
    docker("exec", "--detach", worker, "bash", "-c", command)
    project = wait_for(worker, PROJECTS)
    job = inside(worker, 'grep -o \'"job_id":"[0-9a-f]*\' /tmp/slow/logs/fleet/*/manifest.json').split('"')[-1].strip()
    assert project.startswith("inspect-boxed-i") and job in project
    # SIGKILL: Inspect can remove nothing
    inside(worker, "pkill -KILL -f '[m]ultiprocessing.forkserver' || true")
    left = f"docker ps -aq --filter label=com.docker.compose.project={project}"
    end = time.monotonic() + 60
    while inside(worker, left).strip():
        assert time.monotonic() < end, inside(worker, "cat /tmp/slow.out /tmp/slow/logs/fleet/*/work/*/worker.log")
        time.sleep(0.5)
    assert "bystander" in inside(worker, "docker ps --format '{{.Names}}'")
    inside(worker, "pkill -KILL -f '[c]t run eval|[e]valworker' || true")
    inside(worker, "docker rm -f $(docker ps -aq) >/dev/null; docker network prune -f; docker volume prune -af")


def wait_for(worker: str, script: str, timeout: float = 90) -> str:
    end = time.monotonic() + timeout
    while not (said := inside(worker, f"({script}) || true").strip()):
        assert time.monotonic() < end, f"{script}: nothing within {timeout} s; {inside(worker, 'cat /tmp/slow.out')}"
        time.sleep(0.3)
    return said.splitlines()[0]


def test_only_the_worker_reaches_the_metadata_address(worker: str) -> None:
    ask = f"curl -s -m 3 -o /dev/null -w '%{{http_code}}' http://{METADATA}/ || true"
    from_there = f"$(docker build -q /work) sh -c 'nc -w 3 {METADATA} 80 </dev/null' && echo reached || echo closed"
    in_a_box, on_the_host = f"docker run --rm {from_there}", f"docker run --rm --network host {from_there}"
    assert inside(worker, f"setpriv --regid inspect-fleet --clear-groups {ask}") == "200"
    assert inside(worker, ask) == "000"
    assert inside(worker, in_a_box).split() == ["closed"]
    assert inside(worker, on_the_host).split() == ["closed"]
    # and it is the rules that close it
    inside(worker, "nft delete table inet inspect_fleet")
    try:
        assert inside(worker, in_a_box).split() == ["reached"]
        assert inside(worker, on_the_host).split() == ["reached"]
    finally:
        inside(worker, "nft -f /etc/inspect-fleet/metadata.nft")


def run(image: str, *arguments: str, command: tuple[str, ...] = ("true",)) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["docker", "run", "--rm", *arguments, image, *command], capture_output=True, text=True, timeout=180
    )


def test_the_vfs_driver_is_refused(worker_image: str, tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"storage-driver": "vfs"}')
    done = run(worker_image, "--privileged", "--volume", f"{file}:/etc/docker/daemon.json:ro")
    assert done.returncode == 69
    assert (
        "has fallen back to the vfs driver, which copies whole images: mount a volume at /var/lib/docker" in done.stderr
    )


def test_an_engine_that_fails_shows_its_log(worker_image: str, tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"no-such-option": 1}')
    done = run(worker_image, "--privileged", "--volume", f"{file}:/etc/docker/daemon.json:ro")
    assert done.returncode == 69
    assert (
        "the Docker engine ended with status 1; the end of its log:" in done.stderr and "no-such-option" in done.stderr
    )


def test_without_privileges_there_is_a_mode_without_docker(worker_image: str) -> None:
    assert run(worker_image, "--env", "INSPECT_FLEET_DOCKER=yes").returncode == 69
    done = run(worker_image, "--env", "INSPECT_FLEET_DOCKER=no", command=("inspect", "--version"))
    assert (done.returncode, done.stderr) == (0, "")


def test_sigterm_ends_the_container_as_ctrl_c_ends_its_command(worker_image: str) -> None:
    code = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("flushed", flush=True)
    raise SystemExit(7)
"""
    with docker_bench.container(image=worker_image, command=("python", "-c", code)) as found:
        while "ready" not in docker("logs", found):
            time.sleep(0.1)
        docker("stop", "--time", "20", found)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", found).strip() == "7"
        assert "flushed" in docker("logs", found)


def test_it_says_of_what_it_is_made(worker_image: str) -> None:
    labels = docker("inspect", "--format", "{{json .Config.Labels}}", worker_image)
    for name in ("org.opencontainers.image.version", "org.opencontainers.image.revision", "inspect-fleet-lock"):
        assert f'"{name}":"' in labels
    assert docker("inspect", "--format", "{{json .Config.Volumes}}", worker_image).strip() == '{"/var/lib/docker":{}}'
