"""`evalops.logs.cost` and `metadata`: tokens, prices, and the entries that are missing."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evalops.logs import cost
from evalops.logs.metadata import (
    Evaluations,
    MetadataError,
    ModelMetadata,
    Models,
    model_template,
    official_tasks,
    task_template,
)

PRICE = cost.Price(3.0, 15.0, 0.3, 3.75)


def _usage(input_, output, total, read=None, write=None):
    return {
        "input_tokens": input_, "output_tokens": output, "total_tokens": total,
        "input_tokens_cache_read": read, "input_tokens_cache_write": write,
    }  # fmt: skip


def test_each_kind_of_token_has_its_own_price():
    parts = cost.parts(_usage(1_000_000, 2_000_000, 10_000_000, 3_000_000, 4_000_000), PRICE)
    assert parts == pytest.approx({"input_cost": 3, "output_cost": 30, "cache_read_cost": 0.9, "cache_write_cost": 15})


def test_cached_tokens_that_are_counted_as_input_too_are_paid_once():
    assert cost.tokens(_usage(100, 10, 110, read=40)) == cost.Tokens(60, 10, 40, 0)
    assert cost.tokens(_usage(60, 10, 110, read=40)) == cost.Tokens(60, 10, 40, 0)


def test_without_own_prices_the_cache_costs_as_much_as_input():
    parts = cost.parts(_usage(0, 0, 2, 1, 1), cost.Price(2.0, 1.0))
    assert parts["cache_read_cost"] == parts["cache_write_cost"] == 2.0 / cost.MTOK


def test_an_unknown_price_is_none_and_a_free_model_is_zero():
    prices = {"a": PRICE, "free": cost.Price(0, 0)}.get
    used = _usage(100, 10, 110)
    assert cost.total({"a": used, "grader": used}, prices) is None
    assert cost.total({"free": used}, prices) == 0
    assert cost.total({"free": used, "unused": _usage(0, 0, 0)}, prices) == 0


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_token_is_lost_or_doubled(fresh, output, read, write):
    usage = _usage(fresh, output, fresh + output + read + write, read, write)
    assert cost.tokens(usage).total == usage["total_tokens"]


def test_every_checked_in_model_is_complete_and_priced_sensibly():
    models = Models()
    sonnet = models.get("openrouter/anthropic/claude-3.5-sonnet:beta")
    assert sonnet is not None and sonnet.price == cost.Price(3, 15, 0.3, 3.75)
    for name, entry in models._entries.items():
        assert "/" in name
        assert (
            entry.api_cached_input_mtok_price_usd <= entry.api_input_mtok_price_usd <= entry.api_output_mtok_price_usd
        )
        assert entry.knowledge_cutoff_date <= entry.release_date


def test_a_users_entry_comes_before_the_checked_in_one(tmp_path):
    entry = Models().get("openai/gpt-4o").model_dump(mode="json") | {"api_input_mtok_price_usd": 99, "aliases": []}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"models": {"openai/gpt-4o": entry, "mine/model": entry}}))
    models = Models([path])
    assert models.price("openai/gpt-4o").input == models.price("mine/model").input == 99


@pytest.mark.parametrize("name", ["a/b", "x:y/z", "a/b: {c}", "- x/y", "null/1"])
def test_the_template_for_an_unknown_model_is_yaml_that_names_it(name):
    entry = yaml.safe_load(model_template(name))["models"][name]
    assert set(entry) >= set(ModelMetadata.model_fields) - {"aliases", "api_cache_write_mtok_price_usd"}


@pytest.mark.parametrize("name", ["mine", "a: b", "null", "12"])
def test_the_template_for_an_unknown_task_is_yaml_that_names_it(name):
    assert yaml.safe_load(task_template(name))["evaluations"][name]["tasks"][0]["name"] == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models: [1]", "no `models:` mapping"),
        ("}{", "is not YAML"),
        ("models: {a/b: {name: x}}", "model a/b: provider"),
        ("other: 1", "no `models:` mapping"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text, why):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(MetadataError, match=why) as caught:
        Models([path])
    assert str(path) in str(caught.value)


def test_missing_attributes_are_named(tmp_path):
    entry = Models().get("openai/gpt-4o").model_dump(mode="json") | {"attributes": {"accessibility": "x"}}
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"models": {"a/b": entry}}))
    with pytest.raises(MetadataError, match="lack country_of_origin, context_window_size_tokens"):
        Models([path])


def test_evaluations_of_the_installed_package_are_known_to_its_own_tasks_alone():
    assert official_tasks()["gsm8k"].path == "src/inspect_evals/gsm8k"
    evaluation, entry = Evaluations().find("gsm8k", official=True)
    assert (evaluation.group, entry.dataset_samples, entry.human_baseline.score) == ("Mathematics", 1319, 0.89)
    assert Evaluations().find("gsm8k", official=False) is None
    assert Evaluations().find("arithmetic", official=False) is not None
    assert Evaluations().find("no_such_task", official=True) is None
