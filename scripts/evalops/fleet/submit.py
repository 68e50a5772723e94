"""From a submission to a controller that can run: a new fleet, a new round of an old one, or one whose controller has gone.

Everything that can fail before money is spent is checked here, in that order, and each failure is one sentence. Design, section 7.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from evalops import embedded, shipping
from evalops.fleet import lanes
from evalops.fleet.controller import Controller, Plan
from evalops.fleet.guards import over_budget
from evalops.fleet.ledger import Ledger
from evalops.fleet.stream import EventStream, Fenced
from evalops.fleet.view import ProgressLine
from evalops.fleet.workers import LocalPool, NoPool, Pool, default_slots
from evalops.settings import Settings
from evalops.ui import EXIT_USAGE, fail, note
from evalworker import aws, prices
from evalworker.aws import ServiceError
from evalworker.contract import layout
from evalworker.contract.documents import Control, Guards, JobSpec, Lane, Limits, Machines, Manifest
from evalworker.contract.ids import new_run_id
from evalworker.contract.wire import Unreadable, now
from evalworker.queues import Queue, QueueError
from evalworker.storage import Denied, Missing, Storage, StorageError, open_storage

LOCAL_LIMITS = Limits(visibility_s=15, heartbeat_s=5.0, control_s=1.0)
"""On one machine, looking is cheap: workers notice everything sooner than on AWS."""

BUDGETED_CONTROL_S = {"local": 0.2, "ec2": 2.0, "batch": 2.0}
"""How often workers look whether to stop when each sample costs money that is counted."""

LANE_WAIT_S = 15.0
"""Between two looks for a free lane."""

DEFAULT_WORKERS = 2
"""Workers at the most where nobody says."""

NO_MODEL = "none/none"
"""Inspect's name for no model at all."""

CLAIM_TRIES = 5
"""Readings of the stream by a new controller; the one before it can write a segment at most once after each."""

CONTROLLER_ALIVE_S = 60.0
"""A controller whose last sign of life is younger is taken for alive."""

LONGEST = timedelta(days=365)
"""No fleet means to live longer, and dates end."""


@dataclass(frozen=True)
class Request:
    """What a command asks for, beside what it says to Inspect.

    Attributes:
        workers: at the most, None for what the run began with. concurrency: samples in flight on each.
        slots: jobs at once on each, None for this machine's share.
        deadline: when the fleet ends whatever happens.
        hung_after_s, on_hung: see `Limits`. guards: see `Guards`.
        queues: of this machine, or one of the estate's lanes; wait: for a lane that becomes free.
    """

    workers: int | None = None
    concurrency: int = 10
    slots: int | None = None
    deadline: timedelta = timedelta(hours=12)
    job_timeout_s: float | None = None
    hung_after_s: float = 1800.0
    on_hung: Literal["wait", "error"] = "wait"
    guards: Guards = field(default_factory=Guards)
    queues: Literal["local", "estate"] = "local"
    wait: bool = False
    quiet: bool = False


def fleet_folder(fleet_id: str) -> Path:
    """Where the controller keeps a fleet's live files on its own disk."""
    return Path("logs", "fleet", fleet_id).absolute()


def open_root(settings: Settings) -> Storage:
    """The root's store, proved to be usable; ends with one sentence if it is not."""
    try:
        storage = open_storage(settings.root)
        storage.probe()
    except StorageError as error:
        fail(f"the root {settings.root} cannot be used: {error}")
    return storage


def read_manifest(storage: Storage, settings: Settings, fleet_id: str) -> Manifest:
    """A run's manifest; 403 and 404 are different sentences."""
    try:
        return Manifest.from_json(storage.get(layout.manifest(fleet_id)).body)
    except Missing:
        fail(f"there is no run {fleet_id} under {settings.root}: check the id and S3_BUCKET_NAME")
    except Denied as error:
        fail(f"the run {fleet_id} cannot be read: {error}")
    except Unreadable as error:
        fail(f"the manifest of {fleet_id} cannot be read by this version: {error}")


def start(
    settings: Settings,
    storage: Storage,
    request: Request,
    jobs: list[JobSpec],
    arguments: dict[str, Any],
    models: list[Any],
    environment: dict[str, str],
    shipped: dict[str, Any],
    machines: Machines | None = None,
) -> Controller:
    """A new fleet with its messages sent and its workers starting.

    Args:
        arguments, models: encoded for the manifest.
        shipped: the manifest's fields about code, environment and secrets, as `shipping.ship` gives them.
        machines: what EC2 workers are launched from; None for workers of this machine.
    """
    fleet_id = new_run_id()
    moment = now()
    manifest = Manifest(
        fleet_id=fleet_id,
        created=moment,
        backend="local" if machines is None else "ec2",
        jobs=jobs,
        arguments=arguments,
        models=models,
        environment=environment,
        git=git_state(Path.cwd()),
        owner=settings.owner,
        work_dir=str(fleet_folder(fleet_id) / "work") if machines is None else None,
        machines=machines,
        **shipped,
    )
    shipping.check_no_secret(manifest)
    control = Control(
        fleet_id=fleet_id,
        round=1,
        state="running",
        deadline=moment + request.deadline,
        beat=moment,
        controller=controller_name(),
        budgeted=budgeted(request.guards),
        limits=limits_of(request, manifest.backend),
        guards=request.guards,
    )
    storage.create(layout.manifest(fleet_id), manifest.to_bytes())
    etag = storage.create(layout.control(fleet_id), control.to_bytes())
    return _begin(settings, storage, request, manifest, control, etag, Ledger(jobs))


def resume(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, shipped: dict[str, Any]
) -> Controller | None:
    """A new round of a run that has ended: what has not completed runs again. None when everything has completed.

    `shipped`: the manifest's fields that change, as `shipping` gives them.
    A run that goes on without a controller is driven on instead; one whose queues are gone has ended without saying so.
    """
    stored = storage.get(layout.control(manifest.fleet_id))
    control = Control.from_json(stored.body)
    if control.state != "ended":
        refuse_if_driven(manifest.fleet_id, control)
        lane = lanes.find(storage, manifest.fleet_id)
        if lane is not None and _answers(lane):
            return attach(settings, storage, request, manifest)
        if manifest.machines is None:
            _end_workers(settings, manifest)
    ledger = Ledger(manifest.jobs, control.round)
    stream = EventStream(storage, manifest.fleet_id, fleet_folder(manifest.fleet_id) / "events.jsonl")
    for event in stream.restore():
        ledger.replay(event)
    stream.close()
    if not ledger.new_round(control.round + 1):
        return None
    request = replace(request, guards=inherited(request.guards, control.guards))
    if (spent := over_budget(request.guards, ledger.spend)) is not None:
        fail(f"{manifest.fleet_id}: {spent.reason}; resume it with a larger one")
    control = control.model_copy(
        update={
            "round": control.round + 1,
            "state": "running",
            "at_once": False,
            "deadline": now() + request.deadline,
            "beat": now(),
            "controller": controller_name(),
            "budgeted": budgeted(request.guards),
            "limits": limits_of(request, manifest.backend),
            "guards": request.guards,
        }
    )
    manifest = manifest.model_copy(update=shipped)
    shipping.check_no_secret(manifest)
    storage.put(layout.manifest(manifest.fleet_id), manifest.to_bytes())
    etag = storage.replace(layout.control(manifest.fleet_id), control.to_bytes(), stored.etag)
    return _begin(settings, storage, request, manifest, control, etag, ledger)


def _answers(lane: Lane) -> bool:
    """Whether a lane's queues can be reached: those of this machine end with it."""
    try:
        Queue(aws.sqs(lane), lane.events).counts()
    except QueueError:
        return False
    return True


def _end_workers(settings: Settings, manifest: Manifest) -> None:
    """End the workers of this machine that a dead controller and a dead queue have left behind."""
    if manifest.work_dir is not None:
        pool = LocalPool(settings.root, manifest.fleet_id, "", Path(manifest.work_dir), 1, os.environ)
        pool.adopt()
        pool.stop()


def attach(settings: Settings, storage: Storage, request: Request, manifest: Manifest) -> Controller:
    """Drive a fleet on whose controller has gone; refused while that one lives."""
    fleet_id = manifest.fleet_id
    stored = storage.get(layout.control(fleet_id))
    control = Control.from_json(stored.body)
    if control.state == "ended":
        fail(f"the fleet {fleet_id} has ended; --run-id {fleet_id} runs again what did not complete")
    refuse_if_driven(fleet_id, control)
    lane = lanes.find(storage, fleet_id)
    if lane is None:
        fail(f"the fleet {fleet_id} owns no lane any more; --run-id {fleet_id} runs again what did not complete")
    controller = _take_over(settings, storage, request, manifest, lane)
    alive = controller.pool.adopt()
    if control.state == "running" and alive == 0:
        controller.start_workers()
    elif control.state in ("stopping", "draining"):
        controller.go_on_stopping()
    return controller


PAST_DEADLINE = "its deadline passed while nobody drove it"


def close_abandoned(settings: Settings, storage: Storage, lane: Lane, why: str = PAST_DEADLINE) -> None:
    """Write the end of a fleet that is past its deadline (or dead) and has no controller, and release its lane.

    What its workers had said goes to its own segments first, so its summary is true.
    """
    assert lane.fleet_id is not None
    try:
        manifest = Manifest.from_json(storage.get(layout.manifest(lane.fleet_id)).body)
        control = Control.from_json(storage.get(layout.control(lane.fleet_id)).body)
    except (Missing, Unreadable) as error:
        note(f"the fleet {lane.fleet_id} has left no readable record ({error}): its lane {lane.name} is freed")
        lanes.release(storage, lane)
        return
    if control.state == "ended":  # killed between its last word and the release
        lanes.release(storage, lane)
        return
    pool = NoPool() if manifest.machines is None else None  # of a fleet on EC2, machines that still run are ended too
    controller = _take_over(settings, storage, Request(quiet=True), manifest, lane, pool)
    controller.close(why)


def _take_over(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, lane: Lane, pool: Pool | None = None
) -> Controller:
    """A controller in the state that the stored stream tells of, known to the workers as theirs.

    Its first act is a segment of its own: from then on a controller that was displaced while it slept cannot write any. If that one
    was faster by a segment, the stream is read again.
    """
    stored = storage.get(layout.control(manifest.fleet_id))
    control = Control.from_json(stored.body).model_copy(update={"beat": now(), "controller": controller_name()})
    etag = storage.replace(layout.control(manifest.fleet_id), control.to_bytes(), stored.etag)
    for turn in range(CLAIM_TRIES):
        ledger = Ledger(manifest.jobs, control.round)
        controller = _controller(settings, storage, request, manifest, control, etag, ledger, lane, pool)
        begun = False
        for event in controller.stream.restore():
            controller.ledger.replay(event)
            controller.watch.replay(event)
            if manifest.machines is not None:  # those of this machine are known by their processes
                controller.roster.replay(event, time.monotonic())
            begun = begun or (event["type"] == "fleet_start" and event["round"] == control.round)
        controller.watch.hold(control)
        if not begun:  # the controller was killed before its first segment
            controller.ledger.new_round(control.round)
            controller.stream.append(
                [_fleet_start(manifest, control, controller.ledger, workers_of(request, manifest))]
            )
        controller.stream.append([{"type": "attached", "controller": control.controller}])
        try:
            controller.stream.store()
            return controller
        except Fenced:
            controller.stream.close()
            if turn == CLAIM_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _begin(
    settings: Settings,
    storage: Storage,
    request: Request,
    manifest: Manifest,
    control: Control,
    etag: str,
    ledger: Ledger,
) -> Controller:
    """Take a lane, write `fleet_start`, send what is open, start the workers."""
    lane, control, etag = _lane(settings, storage, request, manifest, control, etag)
    controller = _controller(settings, storage, request, manifest, control, etag, ledger, lane)
    for event in controller.stream.restore():
        controller.watch.replay(event)
    workers = min(workers_of(request, manifest), len(ledger.open_jobs))
    controller.stream.append([_fleet_start(manifest, control, ledger, workers)])
    controller.stream.store()
    try:
        controller.start_workers()
        controller.send_open_jobs()
    except (ServiceError, OSError) as error:
        controller.close("it could not be started")
        fail(f"the fleet {manifest.fleet_id} could not be started: {error}")
    except KeyboardInterrupt:  # workers would run on with nobody to drive them
        controller.close("interrupted while it was started")
        raise
    return controller


def _controller(
    settings: Settings,
    storage: Storage,
    request: Request,
    manifest: Manifest,
    control: Control,
    etag: str,
    ledger: Ledger,
    lane: Lane,
    pool: Pool | None = None,
) -> Controller:
    folder = fleet_folder(manifest.fleet_id)
    view = ProgressLine(quiet=request.quiet)
    tell = None
    if manifest.machines is not None:
        from evalops.ec2 import backend

        tell = backend.teller(manifest.machines, view.note)
        pool = pool or backend.pool(manifest, manifest.machines, control, lane, storage, view.note)
    if pool is None:
        slots = request.slots or default_slots(min(workers_of(request, manifest), max(1, len(manifest.jobs))))
        work = Path(manifest.work_dir or folder / "work")
        pool = LocalPool(settings.root, manifest.fleet_id, lane.name, work, slots, os.environ)
    return Controller(
        manifest=manifest,
        control=control,
        control_etag=etag,
        storage=storage,
        lane=lane,
        ledger=ledger,
        stream=EventStream(storage, manifest.fleet_id, folder / "events.jsonl"),
        pool=pool,
        view=view,
        plan=Plan(workers=workers_of(request, manifest), replacements=max(10, workers_of(request, manifest))),
        tell=tell,
    )


def _lane(
    settings: Settings, storage: Storage, request: Request, manifest: Manifest, control: Control, etag: str
) -> tuple[Lane, Control, str]:
    """The fleet's queues: one of the estate's lanes, or a lane of this machine for this fleet alone.

    Who waits for a lane waits outside of his deadline: the control document comes back with what counts now.
    """
    if request.queues == "local":
        return _embedded_lane(settings, storage, manifest, control), control, etag
    key, told = layout.control(manifest.fleet_id), ""
    while True:
        try:
            lane = lanes.take(
                storage,
                manifest.fleet_id,
                manifest.owner,
                control.deadline,
                lambda lane: close_abandoned(settings, storage, lane),
            )
        except lanes.NoLane as error:
            if not request.wait:
                storage.put(key, control.model_copy(update={"state": "ended"}).to_bytes())
                fail(f"{error}; wait for one to end (--wait does), or stop one with ct fleet stop")
            if str(error) != told:
                told = str(error)
                note(f"waiting for a lane: {told}")
            time.sleep(LANE_WAIT_S)
            control = control.model_copy(update={"deadline": now() + request.deadline, "beat": now()})
            etag = storage.replace(key, control.to_bytes(), etag)
            continue
        return lane, control, etag


def _embedded_lane(settings: Settings, storage: Storage, manifest: Manifest, control: Control) -> Lane:
    """Queues on this machine for this fleet alone; they end with it."""
    log = fleet_folder(manifest.fleet_id) / "queues.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        served = embedded.start(settings.root, manifest.fleet_id, log, control.limits.visibility_s)
    except embedded.EmbeddedError as error:
        storage.put(layout.control(manifest.fleet_id), control.model_copy(update={"state": "ended"}).to_bytes())
        fail(f"the queues on this machine did not start: {error}")
    return lanes.register(storage, served.lane, manifest.fleet_id, manifest.owner, control.deadline)


def _fleet_start(manifest: Manifest, control: Control, ledger: Ledger, workers: int) -> dict[str, Any]:
    return {
        "type": "fleet_start",
        "expected": len(ledger.jobs),
        "workers": workers,
        "total_samples": sum(spec.samples for spec in manifest.jobs),
        "tasks": list(dict.fromkeys(spec.name for spec in manifest.jobs)),
        "models": list(dict.fromkeys(spec.model for spec in manifest.jobs)),
        "backend": manifest.backend,
        "resumed": control.round > 1,
        "round": control.round,
    }


def workers_of(request: Request, manifest: Manifest) -> int:
    """Workers at the most: what was asked for at the start, for who drives a fleet of machines on."""
    return request.workers or (manifest.machines.workers if manifest.machines else DEFAULT_WORKERS)


def limits_of(request: Request, backend: Literal["local", "ec2", "batch"]) -> Limits:
    """The workers' bounds. On this machine looking is cheap; elsewhere the defaults hold, which bound the number of AWS calls."""
    given = {
        "concurrency_per_worker": request.concurrency,
        "job_timeout_s": request.job_timeout_s,
        "hung_after_s": request.hung_after_s,
        "on_hung": request.on_hung,
    }
    if budgeted(request.guards):
        given["control_s"] = BUDGETED_CONTROL_S[backend]
    if backend == "local":
        return LOCAL_LIMITS.model_copy(update=given)
    return Limits().model_copy(update=given | {"slots": request.slots})


def budgeted(guards: Guards) -> bool:
    """Whether somebody has to count the money."""
    return guards.budget_usd is not None or guards.token_budget is not None


def inherited(guards: Guards, earlier: Guards) -> Guards:
    """A resume's guards: a budget belongs to the run, so one that is not given anew stays."""
    kept = {name: getattr(earlier, name) for name in ("budget_usd", "token_budget") if getattr(guards, name) is None}
    return guards.model_copy(update=kept)


def check_prices(models: Iterable[str], arguments: dict[str, Any]) -> None:
    """Refuse a budget that could not be counted: every model of the run, also those of roles, must have a price."""
    names = [*models, *prices.role_models(arguments.get("model_roles"))]
    missing = prices.unpriced((name for name in names if name != NO_MODEL), prices.read(arguments.get(prices.ARGUMENT)))
    if missing:
        fail(
            f"--budget needs the price of {', '.join(missing)}: add it to a file for --model-cost-config ({prices.FORMAT}), "
            "or use --token-budget"
        )


def controller_name() -> str:
    """Which process drives a fleet: `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def refuse_if_driven(fleet_id: str, control: Control) -> None:
    """One controller a fleet: a second one is refused with the name of the first."""
    if not controller_gone(control):
        age = (now() - control.beat).total_seconds()
        fail(f"the fleet {fleet_id} is driven by {control.controller} (last seen {age:.0f} s ago); stop that one first")


def controller_gone(control: Control) -> bool:
    """Whether nobody drives the fleet: its controller was of this machine and is no more, or has been silent for long."""
    return (
        not control.controller
        or _is_dead(control.controller)
        or (now() - control.beat).total_seconds() > CONTROLLER_ALIVE_S
    )


def _is_dead(controller: str) -> bool:
    """Whether a controller of this machine has gone; of another machine nothing is known."""
    host, _, pid = controller.rpartition(":")
    return host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and cleanness of the tree that is submitted, None outside of git."""

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=normal"))}


def check_same(manifest: Manifest, jobs: list[JobSpec]) -> None:
    """A run is resumed with its own tasks and models, all of them; anything else is refused with the difference."""
    known = {spec.job_id for spec in manifest.jobs}
    strange = [spec for spec in jobs if spec.job_id not in known]
    if strange:
        named = ", ".join(f"{spec.name} with {spec.model}" for spec in strange[:3])
        same_names = {(spec.name, spec.model) for spec in manifest.jobs}
        hint = " (same task and model, other arguments)" if (strange[0].name, strange[0].model) in same_names else ""
        fail(
            f"the run {manifest.fleet_id} does not hold {named}{hint}: resume it with its own arguments or start a new one",
            EXIT_USAGE,
        )
    missing = [spec for spec in manifest.jobs if spec.job_id not in {spec.job_id for spec in jobs}]
    if missing:
        fail(
            f"the run {manifest.fleet_id} also holds {missing[0].name} with {missing[0].model}: --run-id runs all that has not "
            "completed; name all tasks and models, or none",
            EXIT_USAGE,
        )


def check_not_running(storage: Storage, jobs: list[JobSpec], owner: str) -> None:
    """Refuse to pay twice: a fleet of the same owner that runs exactly these jobs is named instead of doubled."""
    wanted = {spec.job_id for spec in jobs}
    for lane, _ in lanes.lanes(storage):
        if lane.fleet_id is None or lane.owner != owner or lanes.expired(lane):
            continue
        try:
            manifest = Manifest.from_json(storage.get(layout.manifest(lane.fleet_id)).body)
            control = Control.from_json(storage.get(layout.control(lane.fleet_id)).body)
        except (Missing, Unreadable):
            continue
        if control.state == "running" and {spec.job_id for spec in manifest.jobs} == wanted:
            fail(
                f"the fleet {lane.fleet_id} is running the same jobs: watch it with `ct fleet status {lane.fleet_id}`, "
                "or add --new-fleet to run them again"
            )


def deadline_of(text: str) -> timedelta:
    """A duration such as `90m`, `12h` or `2d`; raises ValueError."""
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    if len(text) < 2 or text[-1] not in units:
        raise ValueError(f"{text!r} is no duration: write 90m, 12h or 2d")
    try:
        found = timedelta(**{units[text[-1]]: float(text[:-1])})
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no duration: write 90m, 12h or 2d") from None
    if found <= timedelta(0):
        raise ValueError(f"{text!r} is over before it begins")
    if found > LONGEST:
        raise ValueError(f"{text!r} is too long: {LONGEST.days} days at the most")
    return found
