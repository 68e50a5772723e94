"""The dashboard's file for one log, and whether the log may have one. Pure.

The file holds no status, no error and no invalidation, and one bad file breaks the dashboard's page for all: so the gate is here.
A refusal has a kind; `--force KIND` overrides those kinds that still give a file which the dashboard can read.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalops.logs import cost
from evalops.logs.facts import Facts
from evalops.logs.metadata import (
    EvaluationMetadata,
    Evaluations,
    Models,
    TaskEntry,
    model_template,
    official_tasks,
    task_template,
)
from evalworker.contract import layout
from evalworker.contract.ids import BadId
from evalworker.contract.jsonio import dump_bytes, finite

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog

SCHEMA_VERSION = "1.1"
PACKAGE = "inspect_evals/"
MAX_ERROR_RATE = 0.05
"""Share of errored samples above which scores say more about the errors than about the model."""

FORCIBLE = {
    "status": "the eval did not end with success",
    "errors": "more samples errored than --max-error-rate allows",
    "partial": "samples are missing",
    "limited": "only a part of the dataset was run",
    "non-finite": "a metric is not a finite number (it is left out)",
    "invalidated": "somebody has marked the log as invalid",
    "task-name": "a task of one's own that is named like one of inspect_evals",
}
"""Kinds that `--force` overrides, and what they stand for."""

FINAL = {
    "unreadable": "the log cannot be read",
    "storage": "the store did not do what was asked; try again",
    "no-results": "there are no results",
    "no-scores": "no score has a metric",
    "all-errored": "every sample errored",
    "unknown-model": "no metadata for the model",
    "unknown-task": "no metadata for the task",
    "model-name": "the model has no provider",
    "task-version": "the task's version holds no number",
}
"""Kinds that nothing overrides: what came out could not be shown, or would be a lie."""


@dataclass(frozen=True)
class Refusal:
    """Why a log gets no dashboard file. `help`: what to do, perhaps many lines."""

    kind: str
    text: str
    help: str = ""


@dataclass(frozen=True)
class Ready:
    """A dashboard file's content, and what was overridden or left out for it."""

    body: bytes
    document: dict[str, Any]
    remarks: tuple[str, ...]


def refusals(facts: Facts, max_error_rate: float = MAX_ERROR_RATE) -> list[Refusal]:
    """What speaks against publishing a log, from its facts alone; [] when nothing does."""
    if facts.status == "unreadable":
        return [Refusal("unreadable", facts.reason or "it cannot be read")]
    if facts.completed == 0 and facts.errored:
        return [Refusal("all-errored", f"all {facts.errored} samples errored{_first_line(facts.error)}")]
    found = []
    if facts.status != "success":
        found.append(Refusal("status", f"its status is {facts.status}{_first_line(facts.error)}"))
    if not facts.has_results:
        return [*found, Refusal("no-results", "it has no results")]
    if not any(score.metrics for score in facts.scores):
        return [*found, Refusal("no-scores", "none of its scores has a metric")]
    found += _of_samples(facts, max_error_rate)
    if facts.limited:
        found.append(Refusal("limited", f"the run was {facts.limited}"))
    bad = [f"{score.name}/{metric.name} is {metric.text}" for score, metric in _non_finite(facts)]
    if bad:
        found.append(Refusal("non-finite", f"{', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}"))
    if facts.invalidated:
        found.append(Refusal("invalidated", "it was marked as invalid"))
    return found


def _of_samples(facts: Facts, max_error_rate: float) -> list[Refusal]:
    total, completed, errored = facts.total or 0, facts.completed or 0, facts.errored or 0
    found = []
    if total and errored / total > max_error_rate:
        text = f"{errored} of {total} samples errored ({errored / total:.0%}, allowed are {max_error_rate:.0%})"
        found.append(Refusal("errors", text))
    if completed + errored < total:
        found.append(Refusal("partial", f"{total - completed - errored} of {total} samples are missing"))
    return found


def _non_finite(facts: Facts) -> list[tuple[Any, Any]]:
    return [(score, metric) for score in facts.scores for metric in score.metrics if metric.value is None]


def _first_line(error: str | None) -> str:
    return f" ({' '.join(error.split())[:160]})" if error else ""


def build(
    log: "EvalLog",
    facts: Facts,
    location: str,
    models: Models,
    evaluations: Evaluations,
    *,
    forced: Collection[str] = (),
) -> Ready | list[Refusal]:
    """The dashboard file of a log that passed `refusals`, or what metadata lacks for it.

    Args:
        log: the header.
        location: URL of the `.eval`.
        forced: the kinds that the user overrides; what is named here must have been asked for.
    """
    own_name = log.eval.task
    official = own_name.startswith(PACKAGE)
    name = own_name.rsplit("/", 1)[-1]
    missing, remarks = [], []
    model = models.get(log.eval.model)
    if model is None:
        missing.append(
            Refusal("unknown-model", f"nothing is known of the model {log.eval.model}", model_template(log.eval.model))
        )
    known = evaluations.find(name, official=official)
    if known is None:
        missing.append(Refusal("unknown-task", f"nothing is known of the task {own_name}", task_template(name)))
    if not official and name in official_tasks() and "task-name" not in forced:
        text = f"{own_name} would appear as {PACKAGE}{name}, which is a task of inspect_evals; rename it"
        missing.append(Refusal("task-name", text))
    version = dashboard_version(log.eval.task_version)
    if version is None:
        missing.append(Refusal("task-version", f"the dashboard cannot read the task version {log.eval.task_version!r}"))
    try:
        layout.promoted_pair("stage", name, log.eval.model)
    except BadId as error:
        missing.append(Refusal("model-name", str(error)))
    if missing or model is None or known is None or version is None:
        return missing
    document = _document(log, location, known, model.dashboard(), version)
    document["cost_estimates"] = cost_estimates(facts, models)
    unpriced = [used for used, usage in facts.usage.items() if cost.tokens(usage).total and models.price(used) is None]
    if unpriced:  # graders are priced too, so an unknown one would make the cost a lie
        return [
            Refusal("unknown-model", f"nothing is known of the model {used}, which was used too", model_template(used))
            for used in unpriced
        ]
    if version != log.eval.task_version:
        remarks.append(f"task version {log.eval.task_version} is written as {version}")
    if not official:
        remarks.append(f"appears as {PACKAGE}{name}")
    return Ready(dump_bytes(document), document, tuple(remarks))


def dashboard_version(version: int | str) -> int | None:
    """A task version as the dashboard's reader takes it: a number. `3-D` is comparability version 3; None for one without."""
    if isinstance(version, int):
        return version
    found = re.match(r"\d+", version)
    return int(found[0]) if found else None


def cost_estimates(facts: Facts, models: Models) -> dict[str, Any]:
    """What the tokens cost, each model by its own entry; USD."""
    per_model = {
        model: cost.parts(usage, price)
        for model, usage in facts.usage.items()
        if (price := models.price(model)) is not None
    }
    return {"total": sum(sum(parts.values()) for parts in per_model.values()), "per_model_estimates": per_model}


def _document(
    log: "EvalLog", location: str, known: tuple[EvaluationMetadata, TaskEntry], model: dict[str, Any], version: int
) -> dict[str, Any]:
    """All keys of schema 1.1 but the costs, in plain strict JSON values."""
    assert log.results is not None
    evaluation, task = known
    spec = finite(log.eval.model_dump(mode="json"))
    original = log.eval.task
    if version != log.eval.task_version:
        spec["metadata"] = {"full_task_version": log.eval.task_version} | (spec["metadata"] or {})
    spec["task"], spec["task_version"] = PACKAGE + original.rsplit("/", 1)[-1], version
    if spec["task"] != original:
        spec["metadata"] = {"original_task": original} | (spec["metadata"] or {})
    results = log.results.model_dump(mode="json")
    results["scores"] = [kept for score in results["scores"] if (kept := _readable(score))["metrics"]]
    return {
        "schema_version": SCHEMA_VERSION,
        "location": location,
        "eval": spec,
        "plan": finite(log.plan.model_dump(mode="json")),
        "results": finite(results),
        "stats": finite(log.stats.model_dump(mode="json")),
        "reductions": [],
        "eval_metadata": evaluation.model_dump(mode="json", exclude={"tasks"})
        | {"tasks": [entry.model_dump(mode="json") for entry in evaluation.tasks]},
        "task_metadata": task.model_dump(mode="json"),
        "model_metadata": model,
    }


def _readable(score: dict[str, Any]) -> dict[str, Any]:
    """A score without the metrics that are no finite numbers: one of them breaks the dashboard's page."""
    metrics = {
        name: metric
        for name, metric in score["metrics"].items()
        if isinstance(metric["value"], int | float) and finite(metric["value"]) is not None
    }
    return score | {"metrics": metrics}
