"""Prices: read in one sentence's worth of errors, matched to the run's models, made known to Inspect."""

from pathlib import Path

import click
import pytest
from inspect_ai.model import ModelCost, get_model_info, set_model_cost

from evalops.fleet import preflight, request
from evalops.ui import EXIT_USAGE
from evalworker import prices
from evalworker.arguments import decode, encode
from evalworker.contract.documents import Guards

PRICE = {"input": 2.5, "output": 10, "input_cache_write": 3, "input_cache_read": 0.25}


def written(folder: Path, text: str) -> str:
    path = folder / "prices.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_in_inspects_format_survives_the_manifest(tmp_path: Path) -> None:
    file = written(
        tmp_path, "openai/gpt-4o:\n  input: 2.5\n  output: 10\n  input_cache_write: 3\n  input_cache_read: 0.25\n"
    )
    found = prices.read(file)
    assert found == {"openai/gpt-4o": ModelCost(**PRICE)}
    assert decode(encode({prices.ARGUMENT: found})) == {prices.ARGUMENT: found}
    assert (prices.read(None), prices.read(found)) == ({}, found)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", r"cannot be read: The config is not a valid object"),
        ("m/a: {input: 1}\n", r"the price of m/a cannot be read \(output: Field required"),
        ("m/a: cheap\n", r"the price of m/a cannot be read"),
        ("m/a: [\n", r"prices\.yaml cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(prices.BadPrices, match=sentence):
        prices.read(written(tmp_path, text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(prices.BadPrices, match=r"--model-cost-config nowhere\.yaml cannot be read: .*does not exist"):
        prices.read("nowhere.yaml")


def test_models_without_a_price_are_named_once_in_order() -> None:
    known = {"m/a": ModelCost(**PRICE)}
    assert prices.unpriced(["m/c", "m/a", "openai/gpt-4o", "m/b", "m/c"], known) == ["m/c", "openai/gpt-4o", "m/b"]


def test_models_of_roles() -> None:
    assert prices.role_models({"grader": "m/a", "panel": ["m/b", "m/c"]}) == ["m/a", "m/b", "m/c"]
    assert prices.role_models(None) == []


def test_inspect_takes_the_price_of_a_model_that_it_did_not_know() -> None:
    name = "scripted/wrong"
    prices.introduce({name: ModelCost(**PRICE)})
    set_model_cost(name, ModelCost(**PRICE))
    info = get_model_info(name)
    assert info is not None
    assert info.cost == ModelCost(**PRICE)
    assert prices.unpriced([name], {}) == []


def test_an_introduction_leaves_what_inspect_knows_alone() -> None:
    before = get_model_info("openai/gpt-4o")
    prices.introduce({"openai/gpt-4o": ModelCost(**PRICE)})
    assert get_model_info("openai/gpt-4o") == before
    assert before is not None


def test_a_budget_is_refused_without_every_price() -> None:
    arguments = {prices.ARGUMENT: {"m/a": ModelCost(**PRICE)}, "model_roles": {"grader": "m/g"}}
    with pytest.raises(
        click.ClickException, match=r"--budget needs the price of m/b, m/g: add it to a file"
    ) as refused:
        preflight.check_prices(["m/a", "m/b", "none/none"], arguments)
    assert refused.value.exit_code == EXIT_USAGE
    preflight.check_prices(["m/a", "none/none"], {prices.ARGUMENT: {"m/a": ModelCost(**PRICE)}})


def test_workers_look_more_often_while_money_is_counted() -> None:
    usual = request.limits_of(request.Request(), "local")
    counted = request.limits_of(request.Request(guards=Guards(token_budget=1)), "local")
    assert counted.control_s < usual.control_s
    assert counted.model_copy(update={"control_s": usual.control_s}) == usual
