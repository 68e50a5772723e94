"""What a person sees of a running fleet: one carriage-returned line on a terminal, plain lines elsewhere, a table at the end."""

from collections.abc import Container

from evalops import ui
from evalops.fleet.ledger import JobState, Ledger
from evalops.redrawn import RedrawnLine

REDRAW_EVERY_S = 0.2


class ProgressLine(RedrawnLine):
    """`[N/M] X done, …` on stderr, as design section 5 has it; silent when `quiet`."""

    redraw_every_s = REDRAW_EVERY_S

    def show(
        self,
        ledger: Ledger,
        workers: int,
        waiting_for: str | None = None,
        rate_limited: int = 0,
        *,
        force: bool = False,
    ) -> None:
        """Draw the line if it is time to."""
        if self._due(force):
            self._draw(line_of(ledger, workers, self._clock() - self._started, waiting_for, rate_limited))


def line_of(ledger: Ledger, workers: int, elapsed_s: float, waiting_for: str | None, rate_limited: int = 0) -> str:
    """The progress line's text: jobs ended of all, how they ended, samples, workers, time, rate-limited model calls."""
    ended = len(ledger.jobs) - len(ledger.open_jobs)
    samples = ledger.samples
    parts = [f"{ledger.count('completed')} done"]
    for status in ("failed", "cancelled"):
        if count := ledger.count(status):
            parts.append(f"{count} {status}")
    parts.append(f"{samples.completed}/{samples.total} samples")
    if samples.errored:
        parts.append(f"{samples.errored} errored")
    parts.append(f"{workers} worker{'' if workers == 1 else 's'}")
    parts.append(ui.seconds_text(elapsed_s) or "")
    if rate_limited:
        parts.append(f"{rate_limited} rate-limited call{'' if rate_limited == 1 else 's'}")
    if waiting_for:
        parts.append(waiting_for)
    return f"[{ended}/{len(ledger.jobs)}] " + ", ".join(parts)


def results_table(ledger: Ledger) -> None:
    """The table at the end, on stdout: a row per (task, model), in the order of the plan."""
    columns = ["task", "model", "status", "scores", "completed", "errored", "total", "time", "tokens", "cost"]
    right = ["completed", "errored", "total", "time", "tokens", "cost"]
    ui.table(columns, [_row(job, ledger.parts_of(job)) for job in ledger.wholes], right=right)


def _row(job: JobState, parts: list[JobState]) -> list[object]:
    done = job.done
    heard = [part for part in parts if part.heard]
    costs, tokens = [part.cost_usd for part in heard], sum(part.tokens for part in heard)
    cost = sum(cost for cost in costs if cost is not None) if costs and None not in costs else None
    if done is None:
        return [
            job.spec.name,
            job.spec.model,
            "open",
            None,
            None,
            None,
            job.spec.samples,
            None,
            tokens,
            ui.money_text(cost),
        ]
    status = done.status if done.status != "failed" else f"{done.status}: {done.failure_category}"
    return [
        job.spec.name,
        job.spec.model,
        status,
        scores_text(done.metrics),
        done.samples.completed,
        done.samples.errored,
        done.samples.total,
        ui.seconds_text(sum(part.spent_s for part in parts)),
        tokens,
        ui.money_text(cost),
    ]


def scores_text(metrics: dict[str, float | None]) -> str | None:
    """Scores for a table cell: `includes/accuracy 0.950 ±0.050`; standard errors stand beside what they belong to."""
    errors = {name: _error_of(name, metrics) for name in metrics}
    shown = []
    for name, value in metrics.items():
        if name not in errors.values():
            error = metrics.get(errors[name] or "")
            spread = "" if error is None else f" ±{error:.3f}"
            shown.append(f"{name} {'-' if value is None else format(value, '.3f')}{spread}")
    return ", ".join(shown[:4]) or None


def _error_of(name: str, metrics: Container[str]) -> str | None:
    """The name of a mean's standard error, if there is one. A scorer's name may hold anything, so it is looked for from the right."""
    parts = name.split("/")
    for at in range(len(parts) - 1, 0, -1):
        other = "/".join([*parts[:at], "stderr", *parts[at + 1 :]])
        if parts[at] in ("accuracy", "mean") and other in metrics:
            return other
    return None
