"""AWS Batch as containers: moto's API, with hosts that start a job's container as the ECS agent does.

moto itself prints a job's log when it has ended, kills without SIGTERM, loses exit statuses, retries and array indexes, and never ends an
array with a failure. Here a container runs in a network of its own in which only the emulator can be reached, gets half a minute
after its SIGTERM, and a container that vanishes is a lost host. Installed into the emulator's process.
"""

import fnmatch
import subprocess
import threading
import time
from datetime import datetime
from typing import Any

import docker_bench
import instance_bench
from docker_bench import docker
from moto.batch.models import Job
from moto.core.utils import unix_time_millis

LABEL = "inspect-fleet-test-batch"
STOP_S = 30
LOST = "Host EC2 (instance i-0a1b2c3d4e5f60718) terminated."

_details = Job._container_details
_describe = Job.describe


def install(port: int) -> None:
    """Replace what moto's Batch lacks; containers reach the emulator at 127.0.0.1:`port`."""
    Job.port = port  # type: ignore[attr-defined]
    Job.run = _run  # type: ignore[method-assign]
    Job.terminate = _terminate  # type: ignore[method-assign]
    Job._container_details = _container_details  # type: ignore[method-assign]
    Job.describe = _described  # type: ignore[method-assign]


def container_of(job_id: str, attempt: int = 1) -> str:
    """The name of the container of a job's attempt."""
    return f"{LABEL}-{job_id.replace(':', '-')}-{attempt}"


def _terminate(self: Any, reason: str) -> None:
    for job in (self, *(self._child_jobs or [])):
        if not job.job_stopped:
            job.stop, job.job_stopped_reason = True, reason


def _options(self: Any) -> dict[str, str]:
    return self.job_definition.container_properties["logConfiguration"]["options"]


def _container_details(self: Any) -> dict[str, Any]:
    found = _details(self) | {"logConfiguration": {"logDriver": "awslogs", "options": _options(self)}}
    if self.attempts and "exitCode" in self.attempts[-1]["container"]:
        found["exitCode"] = self.attempts[-1]["container"]["exitCode"]
    return found


def _described(self: Any) -> dict[str, Any]:
    found = _describe(self)
    if self.stop:
        found["isTerminated"] = True
    if self._child_jobs:
        states = {child.status for child in self._child_jobs}
        if states <= {"SUCCEEDED", "FAILED"}:
            self.status = found["status"] = "FAILED" if "FAILED" in states else "SUCCEEDED"
        elif states != {"SUBMITTED"}:
            self.status = found["status"] = "PENDING"
    return found


def _run(self: Any) -> None:
    """The job's life on one host after another."""
    self.status = "RUNNABLE"
    attempts = (self.job_definition.retry_strategy or {}).get("attempts", 1)
    try:
        for number in range(1, int(attempts) + 1):
            if self.stop:
                break
            code, reason = _attempt(self, number)
            self.attempts[-1] |= {"stoppedAt": int(time.time() * 1000), "statusReason": reason}
            if code is not None:
                self.attempts[-1]["container"]["exitCode"] = code
            if self.stop or not _again(self, reason, number, int(attempts)):
                if not self.stop:
                    self.job_stopped_reason = reason
                _end(self, code == 0 and not self.stop)
                return
            self.status = "RUNNABLE"
    except Exception as error:
        self.job_stopped_reason = f"the bench failed: {error}"
    _end(self, False)


def _again(self: Any, reason: str, number: int, attempts: int) -> bool:
    rules = (self.job_definition.retry_strategy or {}).get("evaluateOnExit", [])
    for rule in rules:
        if fnmatch.fnmatch(reason, rule.get("onStatusReason", "*")):
            return rule["action"].upper() == "RETRY" and number < attempts
    return False


def _end(self: Any, success: bool) -> None:
    self.job_stopped_at = datetime.now()  # noqa: DTZ005 - moto counts so
    self.job_stopped = True
    self.status = "SUCCEEDED" if success else "FAILED"


def _attempt(self: Any, number: int) -> tuple[int | None, str]:
    """One container; its exit status (None when it vanished) and Batch's reason."""
    name, group = container_of(self.job_id, number), _options(self)["awslogs-group"]
    stream = f"job/default/{name}"
    self.status = "STARTING"
    self.attempts.append(
        {"container": {"logStreamName": stream, "networkInterfaces": []}, "startedAt": int(time.time() * 1000)}
    )
    self.job_started_at = datetime.now()  # noqa: DTZ005 - moto counts so
    variables = {each["name"]: each["value"] for each in self._get_container_property("environment", [])}
    variables |= {
        "AWS_BATCH_JOB_ID": self.job_id,
        "AWS_BATCH_JOB_ATTEMPT": str(number),
        # what the ECS agent's credentials endpoint would give
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        "AWS_ACCESS_KEY_ID": "batch_job",
        "AWS_SECRET_ACCESS_KEY": "emulator",
    }
    if "index" in self.array_properties:
        variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(self.array_properties["index"])
    words = ["run", "--detach", "--name", name, "--label", LABEL, "--network", "none"]
    words += [part for key, value in variables.items() for part in ("--env", f"{key}={value}")]
    if self._get_container_property("privileged", False):
        words.append("--privileged")
    docker(*words, self.job_definition.container_properties["image"], *self._get_container_property("command", []))
    try:
        listener = instance_bench.listen_inside(docker_bench.pid(name), "127.0.0.1", self.port)
        relay = (listener, ("127.0.0.1", self.port))
        threading.Thread(target=instance_bench._relay, args=relay, daemon=True).start()
        self.log_stream_name, self.status = stream, "RUNNING"
        printed = threading.Thread(target=_print, args=(self, name, group, stream), daemon=True)
        printed.start()
        limit = self._get_attempt_duration()
        code, timed_out = _wait(self, name, time.monotonic() + limit if limit else None)
        printed.join(10)
        listener.close()
        if code is None:
            return None, LOST
        return code, "Job attempt duration exceeded timeout" if timed_out else "Essential container in task exited"
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def _wait(self: Any, name: str, limit: float | None) -> tuple[int | None, bool]:
    """Until the container has ended: its status, and whether its time was up."""
    waiting = subprocess.Popen(["docker", "wait", name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    told, timed_out = False, False
    while waiting.poll() is None:
        timed_out = timed_out or (limit is not None and time.monotonic() > limit)
        if (self.stop or timed_out) and not told:
            told = True
            subprocess.Popen(["docker", "stop", "--time", str(STOP_S), name], stdout=subprocess.DEVNULL)
        time.sleep(0.2)
    said = waiting.stdout.read().strip() if waiting.stdout else ""
    lost = not told and said in ("137", "") and _vanished(name)
    return (int(said) if said.isdigit() and not lost else None), timed_out


def _vanished(name: str) -> bool:
    """Whether a container was killed to be removed, which the engine marks before it kills: its host is lost then."""
    return docker("inspect", "--format", "{{.State.Status}}", name, check=False).strip() in ("", "removing")


def _print(self: Any, name: str, group: str, stream: str) -> None:
    """Each line of the container to CloudWatch at once."""
    self._log_backend.ensure_log_stream(group, stream)
    reading = subprocess.Popen(
        ["docker", "logs", "--follow", "--timestamps", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert reading.stdout is not None
    for line in reading.stdout:
        stamp, _, text = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
        try:
            at = datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00")
        except ValueError:
            continue
        event = {"timestamp": int(unix_time_millis(at.replace(tzinfo=None))), "message": text or " "}
        self._log_backend.put_log_events(group, stream, [event])
