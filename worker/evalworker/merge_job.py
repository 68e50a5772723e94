"""Inside a job process: the job that merges the logs of a task's shards, which the agent has brought beside its log directory.

It loads the task as a shard does, because results need the live scorers and metrics. Called by `evalworker.job`; reports facts as any job.
"""

from pathlib import Path

from evalworker import inspect_internals, redact
from evalworker.arguments import decode
from evalworker.contract.failures import EXIT_CONFIG
from evalworker.contract.jsonio import portable
from evalworker.contract.messages import SampleCounts
from evalworker.job import SHARDS, AgentLine, JobEnd, Order
from evalworker.merge import Merged, Whole, merge
from evalworker.results import StoredLog

SELECTION = ("limit", "sample_id", "sample_shuffle")
"""Arguments that shards are given otherwise: in the merged log they are the run's own."""


def run(order: Order, line: AgentLine) -> tuple[JobEnd, int]:
    """Merge, and say what came out. Never raises: whatever happened is in the `JobEnd`."""
    spec, folder = order.spec, Path(order.log_dir).with_name("merged")
    sources = [
        path for each in spec.merges if (path := Path(order.log_dir).with_name(SHARDS) / f"{each}.eval").exists()
    ]
    try:
        with line.interruptible():
            arguments = decode(order.arguments)
            whole = Whole(spec.ids, spec.epochs, {name: arguments.get(name) for name in SELECTION})
            call = arguments | {
                "tasks": [spec.task],
                "task_args": spec.task_args,
                "model": decode({"model": order.model})["model"],
            }
            folder.mkdir()
            merged = merge(sources, folder, whole, inspect_internals.live_task(call))
    except BaseException as error:
        text = portable(redact.text(str(error) or repr(error))[:4096])
        counts = SampleCounts(total=spec.samples)
        return JobEnd(error_type=type(error).__name__, error_message=text, samples=counts), EXIT_CONFIG
    return _end(merged, whole), 0


def _end(merged: Merged, whole: Whole) -> JobEnd:
    """The merged log as any job's end. Its samples have been streamed by the shards, so there is nothing to compare."""
    log = StoredLog(merged.path, merged.header, merged.summaries)
    counts = log.counts(whole.total)
    return JobEnd(
        log_path=str(merged.path),
        log_status=merged.header.status,
        samples=counts,
        metrics=log.metrics,
        **_why(merged, counts),
    )


def _why(merged: Merged, counts: SampleCounts) -> dict[str, str]:
    """Why the merged log is an error, as an exception would say it; nothing for one that succeeded."""
    if (gap := merged.header.error) is not None:
        return {"error_type": "SamplesMissing", "error_message": portable(gap.message)}
    example = next((summary.error for summary in merged.summaries if summary.error), None)
    if merged.header.status != "error" or example is None:
        return {}
    text = f"{counts.errored} of {counts.total} samples errored, for example {example}"
    return {"error_type": "TooManyErrors", "error_message": portable(redact.text(text)[:4096])}
