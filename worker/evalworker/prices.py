"""Model prices as `--model-cost-config` gives them: read once on the operator's machine, stored with the run, made known in each job.

Inspect computes a sample's cost from them (`ModelUsage.total_cost`); nothing here multiplies. Inspect takes prices only for models that it
knows, so a job introduces the others to it first.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from evalworker import inspect_internals
from evalworker.contract.wire import describe

if TYPE_CHECKING:
    from inspect_ai.model import ModelCost

ARGUMENT = "model_cost_config"
"""`eval_set`'s keyword argument: a file's name, or prices by model."""

FORMAT = "input, output, input_cache_write and input_cache_read, in dollars per million tokens"

Prices = dict[str, "ModelCost"]


class BadPrices(ValueError):
    """A price file that cannot be used; the text is one sentence."""


def read(given: "str | Prices | None") -> Prices:
    """The prices that the argument stands for. Raises BadPrices."""
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    try:
        found = inspect_internals.read_config(given)
    except Exception as error:
        raise BadPrices(f"--model-cost-config {given} cannot be read: {inspect_internals.plain(str(error))}") from error
    if not isinstance(found, dict):
        raise BadPrices(f"--model-cost-config {given} holds no prices: each model has {FORMAT}")
    return {str(model): _price(given, str(model), price) for model, price in found.items()}


def resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    """`eval_set`'s arguments with the prices in the place of the name of their file. Raises BadPrices."""
    found = read(arguments.get(ARGUMENT))
    return arguments | {ARGUMENT: found} if found else dict(arguments)


def _price(file: str, model: str, price: Any) -> "ModelCost":
    from inspect_ai.model import ModelCost

    try:
        return ModelCost.model_validate(price)
    except ValidationError as error:
        raise BadPrices(
            f"--model-cost-config {file}: the price of {model} cannot be read ({describe(error)}): give {FORMAT}"
        ) from None


def unpriced(models: Iterable[str], prices: Prices) -> list[str]:
    """The models that have a price neither here nor in Inspect's own model data. Loads no provider."""
    missing = []
    for model in dict.fromkeys(models):
        info = None if model in prices else inspect_internals.known_model(model)
        if model not in prices and (info is None or info.cost is None):
            missing.append(model)
    return missing


def introduce(prices: Prices) -> None:
    """Make each priced model known to this process's Inspect, which refuses a price for one that it has never heard of."""
    from inspect_ai.model import ModelInfo, get_model_info, set_model_info

    for model in prices:
        if get_model_info(model) is None:
            set_model_info(model, ModelInfo())


def role_models(roles: dict[str, Any] | None) -> list[str]:
    """The names of the models that play roles, of `eval_set`'s `model_roles`."""
    found: list[str] = []
    for value in (roles or {}).values():
        found += [str(model) for model in (value if isinstance(value, list | tuple) else [value])]
    return found
