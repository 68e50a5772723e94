"""What shards cost: the merge of large logs against copying their bytes, and a task in two shards against two halves started by hand."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import bench_fleet
import fleet_tasks
import measure
from figures import Figure

SHARDS = 20
SHARD_BYTES = 50_000_000
SAMPLES = 5
"""Samples in each large shard."""

_MERGE = """
import json, resource, sys, time
from pathlib import Path
from evalworker import inspect_internals
from evalworker.merge import Whole, merge

folder, out, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
task = inspect_internals.live_task({"tasks": ["task.py@large"], "model": "none"})
shards = sorted(folder.glob("*.eval"))
started = time.monotonic()
merged = merge(shards, out, Whole(list(range(1, count + 1))), task)
took = time.monotonic() - started
assert not merged.missing and merged.header.status == "success", merged.missing[:3]
print(json.dumps({"s": took, "bytes": merged.path.stat().st_size, "kB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
"""


def bench_merge() -> list[Figure]:
    """Twenty shards of 50 MB: time in parts of copying the bytes, peak memory of the process with Inspect and the task in it."""
    with bench_fleet.scratch() as folder:
        shards, out = folder / "shards", folder / "out"
        shards.mkdir()
        out.mkdir()
        total = _large_shards(folder, shards)
        copied, merged = [], []
        for _ in range(3):
            copied.append(_copy(shards, out / "copy"))
            merged.append(_merge(folder, shards, out))
        took = min(each["s"] for each in merged)
    return [
        Figure(
            "merge of 20 shards of 50 MB",
            took,
            "s",
            8.0,
            min(copied),
            "copying their bytes",
            note=f"{total / 1e6:.0f} MB",
        ),
        Figure(
            "its peak memory, Inspect and the task among it", max(each["kB"] for each in merged) / 1000, "MB", 250.0
        ),
    ]


def _large_shards(folder: Path, shards: Path) -> int:
    """Logs whose samples are large after their scores, as transcripts are: one real log's sample with events of random text."""
    fleet_tasks.write(folder, "task", {"large": SHARDS * SAMPLES})
    words = [*bench_fleet.INSPECT, "eval", "task.py@large", "--model", "scripted/good", "--display", "none"]
    measure.command([*words, "--log-dir", "seed"], folder, os.environ)
    [seed] = (folder / "seed").glob("*.eval")
    import inspect_ai.log  # noqa: F401  teaches zipfile Inspect's packing

    with zipfile.ZipFile(seed) as whole:
        header = json.loads(whole.read("header.json"))
        summaries = json.loads(whole.read("summaries.json"))
        for number in range(SHARDS):
            own = summaries[number * SAMPLES : (number + 1) * SAMPLES]
            _large_shard(whole, shards / f"{number:02d}.eval", header, own)
    return sum(path.stat().st_size for path in shards.iterdir())


def _large_shard(whole: zipfile.ZipFile, path: Path, header: dict[str, Any], summaries: list[dict[str, Any]]) -> None:
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_ZSTANDARD) as shard:  # type: ignore[attr-defined]
        for summary in summaries:
            name = f"samples/{summary['id']}_epoch_1.json"
            text = os.urandom(SHARD_BYTES // SAMPLES // 2).hex()  # packs to its bytes, four bits to a digit
            body = json.loads(whole.read(name))
            body["attachments"] = {f"{n:032x}": text[n : n + 50_000] for n in range(0, len(text), 50_000)}
            more = os.urandom(SHARD_BYTES // SAMPLES // 2).hex()
            body["events"] = [
                *body["events"],
                *({"event": "info", "data": more[n : n + 9_000]} for n in range(0, len(more), 9_000)),
            ]
            shard.writestr(name, json.dumps(body, indent=2))
        ids = [summary["id"] for summary in summaries]
        spec = header["eval"] | {"dataset": header["eval"]["dataset"] | {"sample_ids": ids}}
        shard.writestr("summaries.json", json.dumps(summaries))
        shard.writestr("_journal/start.json", json.dumps({"version": 2, "eval": spec, "plan": header["plan"]}))
        shard.writestr("header.json", json.dumps(header | {"eval": spec}))


def _copy(shards: Path, target: Path) -> float:
    started = time.monotonic()
    with target.open("wb") as out:
        for path in sorted(shards.iterdir()):
            with path.open("rb") as source:
                shutil.copyfileobj(source, out, 1024 * 1024)
    took = time.monotonic() - started
    target.unlink()
    return took


def _merge(folder: Path, shards: Path, out: Path) -> dict[str, float]:
    words = [sys.executable, "-c", _MERGE, str(shards), str(out), str(SHARDS * SAMPLES)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=bench_fleet.PATIENCE_S, check=True)
    for path in out.glob("*.eval"):
        path.unlink()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


SAMPLES_OF_TWO_SLOTS = 2_000


def bench_two_slots() -> list[Figure]:
    """2,000 trivial samples in two shards, merge included, against two `inspect eval` of 1,000 each, started by hand together."""
    return _two_slots("2,000 trivial samples on two slots", 1.15, 10)


def bench_two_slots_with_latency() -> list[Figure]:
    """The same with a model that takes a second, and a hundred connections in all."""
    return _two_slots("2,000 samples of 1 s on two slots", 1.05, 50, "-M", "latency=1")


def _two_slots(what: str, bound: float, connections: int, *pace: str) -> list[Figure]:
    with bench_fleet.scratch() as folder:
        file = fleet_tasks.write(folder, "many", {"many": SAMPLES_OF_TWO_SLOTS, "first": 1})
        limits = ["--max-connections", str(connections), "--max-samples", str(connections)]
        before = _halves(folder, file, "before", [*pace, *limits])
        slots = ["--slots", "2", "--concurrency-per-worker", str(2 * connections)]
        fleet = bench_fleet.run_fleet(folder, f"{file}@many", "--model", bench_fleet.MODEL, *pace, *limits, *slots)
        after = _halves(folder, file, "after", [*pace, *limits])
        one = measure.command([*bench_fleet.cold_eval(f"{file}@first"), "--log-dir", "one"], folder, os.environ)
        ends = {event.get("shard", "merge"): bench_fleet.seconds_of(event["ts"]) for event in fleet.of("job_done")}
        if set(ends) != {"1/2", "2/2", "merge"}:
            raise RuntimeError(f"two shards and a merge were meant, not {sorted(ends)}")
        plain, wall = (before.wall_s + after.wall_s) / 2, ends["merge"] - fleet.warm_at
        cpu = bench_fleet.own_cpu(fleet.done[-1], fleet.warm)
        against = "two `inspect eval` of half of it at once, their start included"
        return [
            Figure(f"{what}, merge included", wall, "s", bound, plain, against, note="from the warm worker on"),
            Figure(
                f"{what}: the merge", ends["merge"] - max(ends["1/2"], ends["2/2"]), "s", note="after the last shard"
            ),
            Figure(what, wall, "s", None, plain - one.wall_s, "the same without their start"),
            Figure(f"{what}, CPU", cpu, "CPU s", None, (before.cpu_s + after.cpu_s) / 2, against),
            Figure(
                f"{what}, CPU",
                cpu,
                "CPU s",
                None,
                (before.cpu_s + after.cpu_s) / 2 - 2 * one.cpu_s,
                "without their start",
            ),
        ]


def _halves(folder: Path, file: str, name: str, limits: list[str]) -> measure.Spent:
    half = SAMPLES_OF_TWO_SLOTS // 2
    words = [*bench_fleet.INSPECT, "eval", f"{file}@many", *bench_fleet.PLAIN, *limits]
    both = [
        [*words, "--limit", f"{first}-{first + half - 1}", "--log-dir", f"{name}-{first}"] for first in (1, half + 1)
    ]
    return measure.commands(both, folder, bench_fleet.environment(), at_once=2)
