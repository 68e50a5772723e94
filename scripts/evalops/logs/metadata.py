"""What is known of models and evaluations: release dates, prices, titles. Read from YAML and from the installed `inspect_evals`.

Called by status (prices), summarize and the report. The checked-in files are `evalops/data/models.yaml` and `tasks.yaml`; a user's own
files come after them and win. An entry that is missing is an error that prints the entry to fill in.
"""

import functools
import importlib.util
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalops.logs.cost import Price
from evalworker.contract.wire import describe

DATA = Path(__file__).parent.parent / "data"
MODELS, TASKS = DATA / "models.yaml", DATA / "tasks.yaml"


class MetadataError(ValueError):
    """A metadata file that cannot be used, or an entry that is missing; the text is for the user."""


class ModelMetadata(BaseModel):
    """A model as the dashboard shows it; field names are the dashboard's. Prices in USD for a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    provider: str
    family: str
    release_date: date
    knowledge_cutoff_date: date
    training_flops: str | None = "Unknown"
    api_provider: str
    api_endpoint: str
    api_input_mtok_price_usd: float = Field(ge=0, allow_inf_nan=False)
    api_cached_input_mtok_price_usd: float = Field(ge=0, allow_inf_nan=False)
    api_output_mtok_price_usd: float = Field(ge=0, allow_inf_nan=False)
    api_cache_write_mtok_price_usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    attributes: dict[str, str | int]
    aliases: tuple[str, ...] = ()

    @property
    def price(self) -> Price:
        """Its prices."""
        return Price(
            self.api_input_mtok_price_usd,
            self.api_output_mtok_price_usd,
            self.api_cached_input_mtok_price_usd,
            self.api_cache_write_mtok_price_usd,
        )

    def dashboard(self) -> dict[str, Any]:
        """The fields that the dashboard knows, as JSON values."""
        return self.model_dump(mode="json", exclude={"aliases", "api_cache_write_mtok_price_usd"})


_ATTRIBUTES = ("accessibility", "country_of_origin", "context_window_size_tokens")
"""Attributes without which the dashboard's page breaks."""


class Baseline(BaseModel):
    """What people reach on a task."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    metric: str
    score: float
    source: str


class TaskEntry(BaseModel):
    """One task of an evaluation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    dataset_samples: int
    human_baseline: Baseline | None = None


class EvaluationMetadata(BaseModel):
    """An evaluation as the dashboard shows it; field names are the dashboard's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    title: str
    description: str
    path: str
    arxiv: str | None = None
    group: str
    contributors: list[str]
    tasks: list[TaskEntry]
    tags: list[str] | None = None


class Models:
    """The models of the checked-in file and of the user's, by Inspect's model name."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._entries: dict[str, ModelMetadata] = {}
        for path in (MODELS, *files):
            for name, entry in _mapping(path, "models").items():
                model = _valid(ModelMetadata, entry, f"{path}: model {name}")
                missing = [key for key in _ATTRIBUTES if key not in model.attributes]
                if missing:
                    raise MetadataError(f"{path}: model {name}: attributes lack {', '.join(missing)}")
                for known in (name, *model.aliases):
                    self._entries[known] = model

    def get(self, model: str) -> ModelMetadata | None:
        """The entry of a model by its full name (`openai/gpt-4o`) or an alias of it; None when there is none."""
        return self._entries.get(model)

    def price(self, model: str) -> Price | None:
        """Its prices, None when they are not known."""
        entry = self.get(model)
        return entry.price if entry else None


def model_template(model: str) -> str:
    """The YAML entry that a user fills in for a model that nobody knows."""
    provider, _, name = model.rpartition("/")
    return f"""models:
  {_scalar(model)}:
    name: {_scalar(name or model)}
    provider: {_scalar((provider.split("/")[0] or "FILL IN").capitalize())}
    family: FILL IN
    release_date: YYYY-MM-DD
    knowledge_cutoff_date: YYYY-MM-DD
    training_flops: Unknown
    api_provider: FILL IN
    api_endpoint: FILL IN
    api_input_mtok_price_usd: FILL IN
    api_cached_input_mtok_price_usd: FILL IN  # as much as input where reads of the cache are not cheaper
    api_output_mtok_price_usd: FILL IN
    # api_cache_write_mtok_price_usd: 3.75    # only where writing to the cache has its own price
    attributes:
      accessibility: closed-source             # or open-weights
      country_of_origin: FILL IN
      context_window_size_tokens: FILL IN
"""


class Evaluations:
    """Evaluations of the installed `inspect_evals`, of the checked-in file and of the user's; the last wins."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._own: dict[str, EvaluationMetadata] = {}
        for path in (TASKS, *files):
            for name, entry in _mapping(path, "evaluations", optional=True).items():
                self._own[name] = _valid(EvaluationMetadata, entry, f"{path}: evaluation {name}")

    def find(self, task: str, *, official: bool) -> tuple[EvaluationMetadata, TaskEntry] | None:
        """The evaluation that has this task (its bare name) and its entry there.

        `official`: the log's task came from `inspect_evals`, so that its own metadata may be used.
        """
        for evaluation in self._own.values():
            for entry in evaluation.tasks:
                if entry.name == task:
                    return evaluation, entry
        if not official:
            return None
        evaluation_of = official_tasks().get(task)
        if evaluation_of is None:
            return None
        return evaluation_of, next(entry for entry in evaluation_of.tasks if entry.name == task)


@functools.cache
def official_tasks() -> dict[str, EvaluationMetadata]:
    """Task name → evaluation, from each `eval.yaml` of the installed `inspect_evals` ({} without it).

    The package itself is not imported: it takes seconds and may need what is not installed.
    """
    spec = importlib.util.find_spec("inspect_evals")
    found: dict[str, EvaluationMetadata] = {}
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*/eval.yaml")):
            entry = _official(path)
            if entry is not None:
                found.update({task.name: entry for task in entry.tasks})
    return found


def _official(path: Path) -> EvaluationMetadata | None:
    raw = yaml.load(path.read_text("utf-8"), Loader=_LOADER)  # noqa: S506 - a safe loader, the fast one where it exists
    raw["path"] = f"src/inspect_evals/{path.parent.name}"
    raw["description"] = str(raw.get("description", "")).strip()
    raw["tasks"] = [task for task in raw.get("tasks", []) if task.get("dataset_samples") is not None]
    try:
        return EvaluationMetadata.model_validate(raw)
    except ValidationError:
        return None  # a newer layout of one evaluation hides that one alone


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def task_template(task: str) -> str:
    """The YAML entry that a user fills in for a task that nobody knows."""
    name = _scalar(task)
    return f"""evaluations:
  {name}:
    title: FILL IN
    description: FILL IN
    path: FILL IN                  # of its source, within its repository
    arxiv: null
    group: FILL IN                 # Coding, Knowledge, Reasoning, Safeguards, …
    contributors: [FILL IN]
    tasks:
      - name: {name}
        dataset_samples: FILL IN   # a number
"""


def _scalar(text: str) -> str:
    """A text as YAML writes it on one line."""
    return yaml.safe_dump(text, width=10_000).splitlines()[0]


def _mapping(path: Path, key: str, *, optional: bool = False) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text("utf-8"), Loader=_LOADER)  # noqa: S506 - as above
    except OSError as error:
        raise MetadataError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise MetadataError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    entries = document.get(key) if isinstance(document, dict) else None
    if entries is None and (optional or (isinstance(document, dict) and "evaluations" in document)):
        return {}
    if not isinstance(entries, dict):
        raise MetadataError(f"{path} holds no `{key}:` mapping; see docs/publish.md for an example")
    return entries


def _valid(kind: Any, entry: Any, where: str) -> Any:
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        raise MetadataError(f"{where}: {describe(error)}") from None
