"""Typed arguments survive the manifest; credentials never reach it."""

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalworker import inspect_internals
from evalworker.arguments import CannotDecode, CannotEncode, decode, encode, option_name
from evalworker.contract.jsonio import dumps
from evalworker.redact import looks_secret

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(datetime.timezone(datetime.timedelta(hours=2)))).map(
        lambda d: d.replace(fold=0)
    )
)
keys = st.text(max_size=8).filter(lambda key: not looks_secret(key)) | st.just("$type")
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


def through_json(arguments: dict[str, object]) -> dict[str, object]:
    return decode(json.loads(dumps(encode(arguments))))


def typed(value: object) -> object:
    """A value that tells 1, 1.0 and True apart."""
    if isinstance(value, dict):
        return ("dict", [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(item) for item in value])
    if isinstance(value, set):
        return ("set", sorted(map(repr, value)))
    return (type(value).__name__, repr(value))


@given(st.dictionaries(st.sampled_from(["task_args", "metadata", "limit", "tags"]), values))
def test_plain_values_round_trip(arguments: dict[str, object]) -> None:
    assert typed(through_json(arguments)) == typed(arguments)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s), max_leaves=8))
def test_json_values_stay_as_they_are(value: object) -> None:
    assert encode({"metadata": value}) == {"metadata": value}


def test_nan_survives() -> None:
    (value,) = through_json({"metadata": [float("nan")]})["metadata"]  # type: ignore[misc]
    assert value != value


def special_values() -> dict[str, object]:
    from inspect_ai.model import BatchConfig, CachePolicy, GenerateConfig, ImageOutput, ModelCost, ResponseSchema
    from inspect_ai.solver import SolverSpec
    from inspect_ai.util import AdaptiveConcurrency, CheckpointConfig, JSONSchema, SandboxEnvironmentSpec, TokenLimit
    from inspect_ai.util._checkpoint._triggers import TimeInterval, TokenInterval, TurnInterval

    schema = JSONSchema(type="object", properties={"password": JSONSchema(type="string")}, additionalProperties=False)
    approval = {"approvers": [{"name": "auto", "tools": "*", "params": {"decision": "approve"}}]}
    return {
        "limit": (4, 10),
        "solver": SolverSpec("file.py@solve", {"n": 1}, {"n": 1}),
        "token_limit": TokenLimit(tokens=1_000_000, type="(input*0.1)+output"),
        "sandbox": SandboxEnvironmentSpec("docker", "compose.yaml"),
        "sandbox_plain": SandboxEnvironmentSpec("local"),
        "checkpoint": CheckpointConfig(trigger=TokenInterval(every=500_000)),
        "checkpoint_turn": CheckpointConfig(trigger=TurnInterval(every=3), retention="retain"),
        "checkpoint_time": CheckpointConfig(trigger=TimeInterval(every=datetime.timedelta(minutes=15))),
        "checkpoint_default": CheckpointConfig(trigger=None),
        "adaptive_connections": AdaptiveConcurrency(min=4, start=20, max=80),
        "cache": CachePolicy(expiry="7D"),
        "batch": BatchConfig(size=10),
        "response_schema": ResponseSchema(name="answer", json_schema=schema),
        "modalities": ["audio", ImageOutput()],
        "logit_bias": {42: 10.0, 43: -10.0},
        "config": GenerateConfig(temperature=0.5, extra_headers={"X-Trace-Id": "abc"}),
        "prices": {"a/b": ModelCost(input=1, output=2, input_cache_write=0, input_cache_read=0)},
        "approval": inspect_internals.config_class("ApprovalPolicyConfig").model_validate(approval),
        "sentinel": inspect_internals.config_class("SentinelConfig").model_validate({"name": "w", "params": {"n": 1}}),
    }


@pytest.mark.parametrize("name", list(special_values()))
def test_each_special_type_round_trips(name: str) -> None:
    value = special_values()[name]
    (back,) = through_json({name: value}).values()
    assert back == value
    assert type(back) is type(value)
    assert encode({name: back}) == encode({name: value})


@pytest.mark.parametrize("reducers", [None, [], ["mean", "max"], ["at_least_2", "pass_at_3"], "mode"])
def test_epochs_keep_their_reducers(reducers: object) -> None:
    from inspect_ai import Epochs

    value = Epochs(3, reducers)  # type: ignore[arg-type]
    back = through_json({"epochs": value})["epochs"]
    assert back.epochs == 3  # type: ignore[attr-defined]
    assert inspect_internals.reducer_names(back) == inspect_internals.reducer_names(value)


def test_models_keep_name_config_server_and_arguments() -> None:
    from inspect_ai.model import GenerateConfig, Model, get_model

    def model(temperature: float) -> Model:
        config = GenerateConfig(temperature=temperature, max_retries=3)
        return get_model("mockllm/model", config=config, base_url="http://127.0.0.1:1", memoize=False, region="here")

    roles = {"grader": model(0.0), "critics": [model(1.0), "mockllm/other"]}
    back = through_json({"model_roles": roles})["model_roles"]
    assert str(back["grader"]) == "mockllm/model"  # type: ignore[index]
    assert back["grader"].config == roles["grader"].config  # type: ignore[index,union-attr]
    assert back["grader"].api.base_url == "http://127.0.0.1:1"  # type: ignore[index]
    assert back["grader"].model_args == {"region": "here"}  # type: ignore[index]
    assert back["critics"][1] == "mockllm/other"  # type: ignore[index]
    assert encode({"model_roles": back}) == encode({"model_roles": roles})


SECRET_NAMES = [
    "api_key",
    "apiKey",
    "X-API-Key",
    "OPENAI_API_KEY",
    "token",
    "github_token",
    "HF_TOKEN",
    "accessToken",
    "secret",
    "client_secret",
    "password",
    "db-password",
    "Authorization",
    "aws_secret_access_key",
    "AWS_ACCESS_KEY_ID",
    "private_key",
    "credentials",
    "bearer",
    "passphrase",
    "TOKEN_2",
    "Cookie",
]
OTHER_NAMES = [
    "max_tokens",
    "token_limit",
    "tokens",
    "reasoning_tokens",
    "eos_token",
    "pad_token_id",
    "stop_token",
    "answer_key",
    "key",
    "keys",
    "sort_key",
    "n_secrets",
    "secretary",
    "tokenizer",
    "password_policy",
    "token_budget",
    "author",
    "authority",
    "pattern",
    "compass",
    "use_password",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_credentials(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_only_resemble_them(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model_args": {"api_key": "marker"}}, "-M: 'api_key' looks like a credential"),
        ({"extra_headers": {"Authorization": "marker"}}, "--extra-headers: 'Authorization'"),
        ({"task_args": {"a": [{"b": {"password": "marker"}}]}}, "-T: 'password'"),
        ({"metadata": {1: "x", "token": "marker"}}, "--metadata: 'token'"),
        ({"extra_body": {"keys": {"secret": ["marker"]}}}, "--extra-body: 'secret'"),
        ({"model_base_url": "https://me:marker@host/v1"}, "--model-base-url: the URL holds a password"),
    ],
)
def test_credentials_are_refused_without_being_repeated(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(CannotEncode, match=text) as refused:
        encode(arguments)
    assert "marker" not in str(refused.value)
    assert "environment" in str(refused.value) or "leave it out" in str(refused.value)


def test_credentials_inside_models_and_configs_are_refused() -> None:
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.solver import SolverSpec

    with pytest.raises(CannotEncode, match="--model-role: 'service_token'"):
        encode({"model_roles": {"grader": get_model("mockllm/model", service_token="marker")}})
    with pytest.raises(CannotEncode, match="--model-spec: 'authorization'"):
        config = GenerateConfig(extra_headers={"authorization": "marker"})
        encode({"models": [get_model("mockllm/model", config=config)]})
    with pytest.raises(CannotEncode, match="-S: 'password'"):
        encode({"solver": SolverSpec("x", {"password": "marker"}, {})})


def test_flags_and_empty_values_are_no_credentials() -> None:
    arguments = {"task_args": {"password": True, "token": None, "secret": "", "credentials": {"kind": "none"}}}
    assert encode(arguments) == arguments


def test_what_cannot_be_encoded_names_the_option() -> None:
    with pytest.raises(CannotEncode, match=r"-T: a value of type object cannot be stored"):
        encode({"task_args": {"x": object()}})
    from inspect_ai.dataset import Sample

    with pytest.raises(CannotEncode, match=r"--metadata: a value of type Sample"):
        encode({"metadata": Sample(input="x")})


def test_a_type_of_a_later_version_is_named() -> None:
    with pytest.raises(CannotDecode, match="'limit' has a value of the unknown type 'Window'"):
        decode({"limit": {"$type": "Window", "value": 1}})


def test_option_names() -> None:
    assert option_name("task_args") == "-T"
    assert option_name("extra_headers") == "--extra-headers"
