"""Inside a job process: one attempt of one job, which is one `inspect_ai.eval_set` in its own log directory.

Started by `evalworker.process` as a fork of the warm server (or spawned, slower). It talks to the agent over a pipe of its own,
never stdout; what user code prints goes to the worker log. It decides nothing: it reports facts (`JobEnd`), the agent judges.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from evalworker import containers, holdings, preload_settings, redact
from evalworker.contract.documents import JobSpec
from evalworker.contract.failures import EXIT_CONFIG
from evalworker.contract.ids import sample_key
from evalworker.contract.jsonio import portable
from evalworker.contract.labels import project_mark
from evalworker.contract.messages import Hung, SampleCounts, SampleDone, fit
from evalworker.contract.wire import Part
from evalworker.processes import adopt_orphans, children, kill_tree

SAMPLE = b"s"
END = b"e"
LOOK = b"l"
"""First byte of what a job sends: a `sample_done` to be posted as it is, its `JobEnd`, its `JobLook`."""

END_FILE = "end.json"
"""Beside the log directory: the `JobEnd` of a job whose code has closed the pipe to the agent."""

SHARDS = "shards"
"""Beside the log directory: the logs that a merging job starts from, named by their jobs."""

EXIT_UNSAFE_FORK = 79
"""The server had more than one thread when it forked this job: the agent starts it again without forking."""

ABANDONED_GRACE_S = 20
"""How long a job may take to flush after its agent has died, before it ends itself."""


@dataclass(frozen=True)
class Order:
    """What a job process is told. Everything is plain data, because it crosses a pickle.

    `reopened`: the job has completed in an earlier round, and its errored samples are to run again all the same.
    `secrets`: names of the variables of `environment` whose values are hidden, beside those that look like it.
    """

    fleet_id: str
    round: int
    spec: JobSpec
    attempt: int
    instance_id: str
    arguments: dict[str, Any]
    model: Any
    path: list[str]
    log_dir: str
    share: int
    connections: int | None = None
    canary: bool = False
    reopened: bool = False
    hung_after_s: float = 1800.0
    on_hung: Literal["wait", "error"] = "wait"
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = ()
    forked: bool = True


class JobLook(Part):
    """What a running job is in. `wait` is a phrase for people, empty when no sample runs; `rate_limited` counts model calls.

    `moved`: a sample has begun or got on since the last look.
    """

    rate_limited: int = 0
    wait: str = ""
    moved: bool = False
    hung: list[Hung] = []


class JobEnd(Part):
    """What a job knows of its own end. `error_type` is empty where no exception ended the eval.

    `kept` counts the samples taken over from an earlier attempt's log; `unreported` those that only the comparison of stream
    and log sent. `cut_short`: a canary that ended with its first sample; `log_status` is then that sample's.
    """

    log_path: str | None = None
    log_status: str | None = None
    samples: SampleCounts = SampleCounts()
    digest: str | None = None
    metrics: dict[str, float | None] = {}
    error_type: str = ""
    error_message: str = ""
    error_status: int | None = None
    sample_errors: list[tuple[str, str, int | None]] = []
    kept: int = 0
    unreported: int = 0
    broken: int = 0
    rate_limited: int = 0
    cut_short: bool = False
    total_time_s: float | None = None


def main(order: Order, pipe: Connection, output: Connection) -> None:
    """The process's whole life; exits with 0, `EXIT_CONFIG` or `EXIT_UNSAFE_FORK`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in children of a background shell
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if order.forked and preload_settings.threads != 1:
        sys.exit(EXIT_UNSAFE_FORK)
    _settle(order, output)
    line = AgentLine(pipe, Path(order.log_dir).parent)
    with line:
        end, status = _run(order, line)
        body = end.model_dump_json().encode()
        if not line.send(END, body):
            Path(order.log_dir).with_name(END_FILE).write_bytes(body)
        if line.abandoned:
            containers.clean_up(line.folder, lambda _: None)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for child in children(os.getpid()):
        kill_tree(child)
    os._exit(status)  # user code may have left threads and exit handlers that never end


def _settle(order: Order, output: Connection) -> None:
    """Make a fork of the server look like a process started for this job alone."""
    os.setsid()
    adopt_orphans()
    with contextlib.suppress(OSError):  # the kernel shall take the job before the agent when memory runs out
        Path("/proc/self/oom_score_adj").write_text("500")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    preload_settings.restore()
    os.environ.update(order.environment)
    redact.learn_environment(order.secrets)
    os.environ["INSPECT_FLEET_JOB"] = order.spec.job_id
    os.chdir(order.path[0])
    sys.argv = ["inspect-fleet-job"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [*order.path, *(entry for entry in sys.path if entry not in order.path)]
    random.seed()  # all forks would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _end_abandoned(folder: Path) -> None:
    """Nobody is left to kill this job: end what it has started, daemons and sandboxes among them, then its own group.

    Args: folder: the attempt's.
    """
    for child in children(os.getpid()):
        kill_tree(child)
    containers.clean_up(folder, lambda _: None)
    os.killpg(os.getpid(), signal.SIGKILL)


def _identity(pipe: Connection) -> tuple[int, int]:
    """Which open file a descriptor stands for: user code that closes descriptors lets the number come to mean another one."""
    stat = os.fstat(pipe.fileno())
    return stat.st_dev, stat.st_ino


class AgentLine:
    """The pipe to the agent. Any thread sends; one thread of its own listens.

    The agent says `{"share": n, "connections": m}` (samples in flight, and model connections, from now on; null for Inspect's own)
    or `{"stop": true}` (end as after Ctrl-C). When the pipe closes the agent is dead: the job flushes what it has, as after Ctrl-C,
    and ends.
    """

    def __init__(self, pipe: Connection, folder: Path) -> None:
        """Args: folder: the attempt's own."""
        self._pipe = pipe
        self.folder = folder
        self.abandoned = False
        self._is = _identity(pipe)
        self._sending = threading.Lock()
        self._interruptible = False
        self._changing = threading.Lock()
        self.stopped = False
        self._said: dict[str, int] = {}
        self._followers: dict[str, Callable[[int], None]] = {}

    def __enter__(self) -> "AgentLine":
        threading.Thread(target=self._listen, daemon=True, name="agent-line").start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.close()

    def send(self, kind: bytes, body: bytes) -> bool:
        """Send one message; whether it went. A dead agent is noticed by the listener, not here."""
        with self._sending, contextlib.suppress(OSError):
            if _identity(self._pipe) == self._is:
                self._pipe.send_bytes(kind + body)
                return True
        return False

    def follow(self, what: str, changed: Callable[[int], None]) -> None:
        """Call `changed` with the number that the agent has named for `what`, if it has, and with each one from now on."""
        with self._changing:
            self._followers[what] = changed
            if what in self._said:
                changed(self._said[what])

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While this holds, being stopped means KeyboardInterrupt in the main thread."""
        with self._changing:
            if self.stopped:
                raise KeyboardInterrupt
            self._interruptible = True
        try:
            yield
        finally:
            with self._changing:
                self._interruptible = False

    def _listen(self) -> None:
        while True:
            try:
                said = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                self.abandoned = True
                self._stop()
                threading.Timer(ABANDONED_GRACE_S, _end_abandoned, [self.folder]).start()
                return
            if said.get("stop"):
                self._stop()
            for what in ("share", "connections"):
                if number := said.get(what):
                    self._hear(what, number)

    def _hear(self, what: str, number: int) -> None:
        with self._changing:
            self._said[what] = number
            if what in self._followers:
                self._followers[what](number)

    def _stop(self) -> None:
        with self._changing:
            first, self.stopped = not self.stopped, True
            if first and self._interruptible:
                os.kill(os.getpid(), signal.SIGINT)


def _run(order: Order, line: AgentLine) -> tuple[JobEnd, int]:
    """The eval and the comparison after it. Never raises: whatever happened is in the `JobEnd`."""
    from evalworker import inspect_internals, prices, streamer
    from evalworker.arguments import decode
    from evalworker.lookout import Lookout
    from evalworker.results import Origin, best_log

    spec = order.spec
    if spec.merges:
        from evalworker import merge_job

        return merge_job.run(order, line)
    origin = Origin(order.fleet_id, order.round, spec.job_id, order.attempt, spec.name, spec.model, order.instance_id)

    def post(done: SampleDone) -> None:
        line.send(SAMPLE, fit(done).encode("ascii"))

    def tell(look: JobLook) -> None:
        line.send(LOOK, look.model_dump_json().encode())

    log_dir = Path(order.log_dir)
    before = best_log(log_dir)
    streaming = streamer.Streaming(origin, post, None, canary=order.canary)
    streaming.selection = spec.shard.ids if spec.shard else None
    failure: BaseException | None = None
    try:
        if order.reopened:
            from evalworker.reopen import reopen

            reopen(log_dir)
        arguments = decode(order.arguments)
        ceiling = arguments.get("max_samples")
        arguments |= {
            "tasks": [spec.task],
            "task_args": spec.task_args,
            "model": decode({"model": order.model})["model"],
            "log_dir": order.log_dir,
            "max_samples": min(order.share, ceiling or order.share),
        } | selection_of(spec)
        prices.introduce(prices.read(arguments.get(prices.ARGUMENT)))
        streaming.last_try = tries_allowed(arguments)
        share = Share(streaming, inspect_internals.set_sample_limit, arguments["max_samples"], ceiling)

        def task_started() -> None:
            share.apply()
            holdings.prune(log_dir)  # this try's log has all that it takes over, and Inspect reads the others no more

        streaming.on_task = task_started
        line.follow("share", share.change)
        if order.connections is not None:
            most = arguments.get("max_connections")
            arguments["max_connections"] = min(order.connections, most or order.connections)
            first = arguments["max_connections"]
            connections = Share(streaming, inspect_internals.set_connection_limit, first, most)
            streaming.on_sample = connections.apply  # Inspect makes a model's limiter with its first call
            line.follow("connections", connections.change)
        streamer.start(streaming)
        inspect_internals.name_sandbox_projects(
            project_mark(order.fleet_id, spec.job_id), log_dir.with_name(containers.RECORD)
        )
        from inspect_ai import eval_set

        with Lookout(streaming, tell, order.hung_after_s, order.on_hung), line.interruptible():
            eval_set(**arguments)
    except BaseException as error:
        failure = error
    finally:
        streamer.start(None)
    end, status = _report(order, streaming, failure, before, post)
    return end, status


def selection_of(spec: JobSpec) -> dict[str, Any]:
    """What a shard tells `eval_set` instead of the run's own selection, which its ids come from; nothing for a whole task."""
    if spec.shard is None:
        return {}
    from evalworker import inspect_internals

    inspect_internals.select_fast(spec.shard.ids)
    return {"sample_id": inspect_internals.exact_selection(spec.shard.ids), "limit": None, "sample_shuffle": None}


def tries_allowed(arguments: dict[str, Any]) -> int | None:
    """How often `eval_set` runs the task at the most; None where an errored sample is never tried again.

    With immediate retries (the default) the first try comes before `retry_attempts` more; without, it is one of them.
    """
    if arguments.get("fail_on_error") is False:
        return None
    attempts = arguments.get("retry_attempts")
    attempts = 10 if attempts is None else int(attempts)
    return max(1, attempts) if arguments.get("retry_immediate") is False else attempts + 1


class Share:
    """How many samples this job has in flight, or how many model connections: what the agent last said, and never more than the user's
    own `--max-samples` or `--max-connections`.

    The agent's word comes at any time, Inspect's limiters are there only from the start of a task (or a first call) on: so the limit is
    set when the word comes and again then, each time in the thread of the event loop.
    """

    def __init__(self, streaming: Any, set_limit: Callable[[int], int], first: int, ceiling: int | None) -> None:
        self._streaming = streaming
        self._set_limit = set_limit
        self._ceiling = ceiling
        self._wanted = first

    def change(self, share: int) -> None:
        """Called by the listener's thread."""
        self._wanted = min(share, self._ceiling or share)
        if self._streaming.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._streaming.loop.call_soon_threadsafe(self.apply)

    def apply(self) -> None:
        """Called in the event loop's thread."""
        self._set_limit(self._wanted)


def _report(order: Order, streaming: Any, failure: BaseException | None, before: Any, post: Any) -> tuple[JobEnd, int]:
    """Read the stored log, send what the stream lacks, and say how it ended."""
    from evalworker.contract.failures import exception_type
    from evalworker.results import best_log, sample_done

    log = best_log(Path(order.log_dir))
    error_type, error_message, error_status = "", "", None
    if streaming.refused_key is not None:
        error_type, error_message, error_status = streaming.refused_key
    elif failure is not None and not isinstance(failure, KeyboardInterrupt):
        error_type, error_message = type(failure).__name__, str(failure) or repr(failure)
        error_status = getattr(failure, "status_code", None)
    elif log is not None and log.header.status == "error" and log.header.error is not None and not streaming.errors:
        error_type = exception_type(log.header.error.traceback, log.header.error.message)
        error_message = log.header.error.message
    facts: dict[str, Any] = {
        "error_type": error_type,
        "error_message": portable(redact.text(error_message)[:4096]),
        "error_status": error_status if isinstance(error_status, int) else None,
        "broken": streaming.broken,
        "rate_limited": streaming.rate_limited,
        "samples": SampleCounts(total=order.spec.samples),
    }
    if streaming.wrong_selection:
        return JobEnd(
            **facts | {"error_type": "PrerequisiteError", "error_message": streaming.wrong_selection}
        ), EXIT_CONFIG
    if log is None:
        return JobEnd(**facts), EXIT_CONFIG if error_type else 1
    started = log.header.status in ("started", "cancelled")
    unreported = 0
    for summary in log.summaries:
        final = summary.error is None or not started
        if final and streaming.said.get(sample_key(summary.id, summary.epoch), "") != summary.uuid:
            with contextlib.suppress(ValueError):  # no message can hold it: the controller reads it in the log
                post(sample_done(summary, streaming.origin))
                unreported += 1
    carried = {sample_key(s.id, s.epoch) for s in before.completed} if before is not None else set()
    facts |= {
        "log_path": str(log.path),
        "log_status": log.header.status,
        "samples": log.counts(order.spec.samples),
        "digest": log.digest,
        "metrics": log.metrics,
        "sample_errors": [portable(redact.json_values(list(error))) for error in list(streaming.errors.values())[:20]],
        "kept": len(carried & {sample_key(s.id, s.epoch) for s in log.completed}),
        "unreported": unreported,
    }
    ran = before is None or log.path != before.path
    if order.spec.shard is not None and ran and _left_to_the_merge(log, order.spec):
        facts["log_status"] = "success"
    if streaming.cut_short:
        facts |= {"cut_short": True, "log_status": "error" if streaming.errors else "success"}
    return JobEnd(**facts), 0


def _left_to_the_merge(log: Any, spec: JobSpec) -> bool:
    """Whether a shard has run all of its samples, and only their errors make its log an error.

    How many errors are too many is asked of the whole task: its merge asks.
    """
    threshold = log.header.eval.config.fail_on_error
    numeric = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    return numeric and log.header.status == "error" and log.header.error is None and len(log.summaries) >= spec.samples
