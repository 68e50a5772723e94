"""Reading, summarising and listing logs on a store that takes 30 ms for each answer, beside Inspect's own reading."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "fixtures"))

import logmaker
from figures import Figure
from slow_s3 import Relay, slow_s3

LOGS = 1000
SAMPLES = 60
COMPARED = 40
"""Logs that Inspect reads too: it makes a client for each, which takes a second and some memory, so 1,000 would take long."""

RUNS = 10_000
BIG_BYTES = 10**9
BUCKET = "bench-logs"

RUN = "2026-11-29-14-05-33-1a2b3c4d"
OTHER = "2026-11-29-14-05-33-5e6f7a8b"
PREFIX = f"logs/working/{RUN}/"


def _make_logs(folder: Path, count: int) -> list[bytes]:
    """A few different logs of some 60 samples; they are stored under many names."""
    text = "a sentence that a model might have written about the question, number {} of many; "
    made = []
    for number in range(count):
        samples = [
            logmaker.sample(i, explanation="".join(text.format(i * 7919 + j * 31 + number) for j in range(40)))
            for i in range(1, SAMPLES + 1)
        ]
        path = logmaker.make(
            folder, number=number + 1, task=f"inspect_evals/task{number}", total=SAMPLES, samples=samples
        )
        made.append(path.read_bytes())
    return made


def _store(client: Any, objects: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: client.put_object(Bucket=BUCKET, Key=item[0], Body=item[1]), objects.items()))


def bench_status_of_1000_logs() -> list[Figure]:
    """`ies status check`, cold and again, against `read_eval_log_headers` of the same logs."""
    import inspect_ai.log  # noqa: F401 - both sides have it in memory

    from evalops.logs import places
    from evalops.logs.metadata import Models
    from evalops.logs.survey import survey

    with tempfile.TemporaryDirectory() as folder, slow_s3(BUCKET) as (relay, client):
        made = _make_logs(Path(folder), 20)
        objects = {f"{PREFIX}{logmaker.name_of('t', number)}": made[number % len(made)] for number in range(LOGS)}
        _store(client, objects)
        prices = Models().price
        place = places.of_run(RUN)

        def look(where: places.Place, count: int = LOGS) -> tuple[float, int, int]:
            relay.traffic.reset()
            start = time.monotonic()
            assert len(survey(where, prices).directory.logs) == count
            return time.monotonic() - start, relay.traffic.total, relay.traffic.received

        cold, requests, received = look(place)
        again, few, few_bytes = look(place)
        changed = next(iter(objects))
        client.put_object(Bucket=BUCKET, Key=changed, Body=made[-1])
        _, after_change, _ = look(place)
        some = {key.replace(RUN, OTHER): body for key, body in list(objects.items())[:COMPARED]}
        _store(client, some)
        ours, _, _ = look(places.of_run(OTHER), COMPARED)
        theirs, their_requests, their_bytes = _inspect_reads(relay, [f"s3://{BUCKET}/{key}" for key in some])
    log_kb = len(made[0]) / 1000
    return [
        Figure("status of 1,000 logs", cold, "s", note=f"logs of {log_kb:.0f} kB"),
        Figure(f"status of {COMPARED} logs", ours, "s", 1.0, theirs, "Inspect's read_eval_log_headers"),
        Figure("status: requests a log", requests / LOGS, "", 4.0, note=f"Inspect: {their_requests / COMPARED:.1f}"),
        Figure(
            "status: kB a log",
            received / LOGS / 1000,
            "kB",
            150.0,
            note=f"Inspect: {their_bytes / COMPARED / 1000:.0f}",
        ),
        Figure("status again, nothing changed", again, "s", 0.5, cold, "the first time"),
        Figure(
            "status again: requests", few, "", 10.0, note=f"{few_bytes / 1000:.0f} kB: the listing and small documents"
        ),
        Figure("status again after one log changed: more requests", after_change - few, "", 4.0),
    ]


def _inspect_reads(relay: Relay, urls: list[str]) -> tuple[float, int, int]:
    from inspect_ai.log import read_eval_log_headers_async

    relay.traffic.reset()
    start = time.monotonic()
    headers = asyncio.run(read_eval_log_headers_async(list(urls)))
    assert len(headers) == len(urls)
    return time.monotonic() - start, relay.traffic.total, relay.traffic.received


def _big_log(path: Path) -> None:
    """A log of 1 GB: real members, and samples of 50 MB that do not pack."""
    small = logmaker.make(path.parent / "small", number=1, total=20)
    piece = os.urandom(10**6).hex().encode()[: 10**6]
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        kept = [info for info in source.infolist() if not info.filename.startswith("samples/")]
        target.writestr(kept[0].filename, source.read(kept[0].filename))
        for number in range(1, 21):
            with target.open(f"samples/{number}_epoch_1.json", "w") as out:
                for _ in range(BIG_BYTES // 20 // len(piece)):
                    out.write(piece)
        for info in kept[1:]:
            target.writestr(info.filename, source.read(info.filename), zipfile.ZIP_DEFLATED)
    small.unlink()


_SUMMARISE = """
import json, resource, sys
from click.testing import CliRunner
from evalops.commands.summarize import summarize
done = CliRunner().invoke(summarize, ["--run-id", sys.argv[1], "--json"])
print(json.dumps({"said": done.output, "code": done.exit_code, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def bench_summarize_of_1_gb() -> list[Figure]:
    """`ies summarize` of a run with one log of 1 GB."""
    with tempfile.TemporaryDirectory() as folder, slow_s3(BUCKET, large=True) as (relay, client):
        path = Path(folder, logmaker.name_of("gsm8k", 1))
        _big_log(path)
        size = path.stat().st_size
        key = PREFIX + path.name
        client.upload_file(str(path), BUCKET, key)
        path.unlink()
        relay.traffic.reset()
        start = time.monotonic()
        child = subprocess.run([sys.executable, "-c", _SUMMARISE, RUN], capture_output=True, text=True, check=True)
        took = time.monotonic() - start
        answer = json.loads(child.stdout.splitlines()[-1])
        assert '"outcome":"written"' in answer["said"], answer
        beside = relay.traffic.received - size
        zipped = client.head_object(Bucket=BUCKET, Key=f"{key}.zip")["ContentLength"]
        assert zipped > size
    return [
        Figure("summarize of a 1 GB log", took, "s"),
        Figure("summarize: read apart from the zip", 100 * beside / size, "%", 1.0, note=f"{beside / 1000:.0f} kB"),
        Figure("summarize: memory", answer["rss"] / 1e6, "MB", 300.0),
    ]


def bench_list_of_10000_runs() -> list[Figure]:
    """`ies status list`: the newest 20 of 10,000 runs."""
    from evalops.logs import places, runs

    with tempfile.TemporaryDirectory() as folder, slow_s3(BUCKET) as (relay, client):
        body = logmaker.make(Path(folder)).read_bytes()
        stamps = [
            f"2026-{1 + i // 840:02d}-{1 + i // 30 % 28:02d}-{i % 24:02d}-{i % 60:02d}-00-{i:08x}" for i in range(RUNS)
        ]
        _store(client, {f"logs/working/{run}/{logmaker.name_of('t', 1)}": body for run in stamps})
        relay.traffic.reset()
        start = time.monotonic()
        found = runs.newest(places.root(), 20)
        listed = time.monotonic() - start
        pages, methods = relay.traffic.total, dict(relay.traffic.requests)
        assert (found.total, len(found.shown)) == (RUNS, 20)
        relay.traffic.reset()
        start = time.monotonic()
        runs.look_at(found.shown)
        shown, reads = time.monotonic() - start, relay.traffic.total
    return [
        Figure("list of 10,000 runs", listed, "s"),
        Figure("list: requests", pages, "", RUNS / 1000, note=f"pages of one delimited listing; {methods}"),
        Figure("list: looking at the 20 that are shown", shown, "s", note=f"{reads} requests"),
    ]


def main() -> None:
    """All figures of this file, as lines."""
    for bench in (bench_status_of_1000_logs, bench_summarize_of_1_gb, bench_list_of_10000_runs):
        for figure in bench():
            print(json.dumps(figure.to_dict()))


if __name__ == "__main__":
    main()
