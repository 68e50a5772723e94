"""`eval_set`'s keyword arguments as typed values, to and from the JSON of the manifest.

The operator's machine encodes what Inspect's command parsed, a job decodes it, and both hold the same values. Plain JSON stays
as it is; anything else is tagged with `$type`. Nothing that looks like a credential is ever encoded.
"""

import base64
import dataclasses
import datetime
import importlib
import math
import re
from typing import Any

from evalworker import inspect_internals
from evalworker.redact import looks_secret

JSON = Any
TAG = "$type"

OPTIONS = {
    "model_args": "-M",
    "models": "--model-spec",
    "model": "--model-spec",
    "model_roles": "--model-role",
    "task_args": "-T",
    "solver": "-S",
}
"""How the user spelled an argument where it is not `--` and its own name."""


class CannotEncode(ValueError):
    """A value that the manifest cannot or must not hold; the text is one sentence that names the option."""


class CannotDecode(ValueError):
    """A manifest's value that this version cannot read; the text is one sentence."""


_PYDANTIC = {
    "AdaptiveConcurrency": "inspect_ai.util",
    "ApprovalPolicyConfig": None,
    "BatchConfig": "inspect_ai.model",
    "CachePolicy": "inspect_ai.model",
    "GenerateConfig": "inspect_ai.model",
    "ImageOutput": "inspect_ai.model",
    "ModelCost": "inspect_ai.model",
    "ResponseSchema": "inspect_ai.model",
    "ReviewPolicyConfig": None,
    "SentinelConfig": None,
    "TokenLimit": "inspect_ai.util",
}
"""Inspect's pydantic types that an argument may have, and where their public name is (None: there is none)."""


def option_name(argument: str) -> str:
    """The option that sets a keyword argument of `eval_set`."""
    return OPTIONS.get(argument, "--" + argument.replace("_", "-"))


def encode(arguments: dict[str, Any]) -> dict[str, JSON]:
    """Typed arguments as plain JSON values. Raises CannotEncode for credentials and for what cannot be written."""
    return {name: _encode(value, option_name(name)) for name, value in arguments.items()}


def decode(arguments: dict[str, JSON]) -> dict[str, Any]:
    """The typed arguments that `encode` wrote. Raises CannotDecode."""
    return {name: _decode(value, name) for name, value in arguments.items()}


_URL_PASSWORD = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s:]*:[^/@\s]+@", re.IGNORECASE)


def _refuse_secret(name: str, value: Any, option: str) -> None:
    """A flag or an empty value is no credential, and what is inside of a mapping is looked at by itself."""
    if value is None or isinstance(value, bool | dict) or value in ("", []) or not looks_secret(name):
        return
    raise CannotEncode(
        f"{option}: {name!r} looks like a credential, and options are stored with the run: put it in the environment instead"
    )


def _encode(value: Any, option: str) -> JSON:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if isinstance(value, str):
        if _URL_PASSWORD.match(value):
            raise CannotEncode(f"{option}: the URL holds a password, and options are stored with the run: leave it out")
        return value
    if isinstance(value, list):
        return [_encode(item, option) for item in value]
    if isinstance(value, dict):
        return _encode_mapping(value, option)
    return _encode_builtin(value, option) or _encode_inspect(value, option)


def _encode_mapping(value: dict[Any, Any], option: str) -> JSON:
    for key, item in value.items():
        if isinstance(key, str):
            _refuse_secret(key, item, option)
    if all(isinstance(key, str) for key in value) and TAG not in value:
        return {key: _encode(item, option) for key, item in value.items()}
    items = [[_encode(key, option), _encode(item, option)] for key, item in value.items()]
    return {TAG: "map", "items": items}


def _encode_builtin(value: Any, option: str) -> JSON:
    """What YAML makes of an argument's text beside JSON's own types; None if it is none of these."""
    match value:
        case tuple():
            return {TAG: "tuple", "items": [_encode(item, option) for item in value]}
        case set():
            return {TAG: "set", "items": [_encode(item, option) for item in sorted(value, key=repr)]}
        case bytes():
            return {TAG: "bytes", "value": base64.b64encode(value).decode("ascii")}
        case datetime.datetime():
            return {TAG: "datetime", "value": value.isoformat()}
        case datetime.date():
            return {TAG: "date", "value": value.isoformat()}
    return None


def _encode_inspect(value: Any, option: str) -> JSON:
    kind = type(value).__name__
    if not type(value).__module__.startswith("inspect_ai."):
        raise CannotEncode(f"{option}: a value of type {kind} cannot be stored with the run: use plain values")
    if kind in _PYDANTIC:
        return {TAG: kind, "value": _encode(value.model_dump(mode="json", by_alias=True, exclude_unset=True), option)}
    match kind:
        case "Epochs":
            return {TAG: kind, "epochs": value.epochs, "reducers": inspect_internals.reducer_names(value)}
        case "SolverSpec":
            return {TAG: kind, **{k: _encode(v, option) for k, v in dataclasses.asdict(value).items()}}
        case "SandboxEnvironmentSpec" if value.config is None or isinstance(value.config, str):
            return {TAG: kind, "type": value.type, "config": value.config}
        case "CheckpointConfig":
            return {TAG: kind, "value": _encode(inspect_internals.checkpoint_to_json(value), option)}
        case "Model":
            return _encode_model(value, option)
    raise CannotEncode(f"{option}: a value of type {kind} cannot be stored with the run")


def _encode_model(model: Any, option: str) -> JSON:
    for name, item in model.model_args.items():
        _refuse_secret(name, item, option)
    return {
        TAG: "Model",
        "model": str(model),
        "config": _encode(model.config, option),
        "base_url": _encode(model.api.base_url, option),
        "args": _encode(dict(model.model_args), option),
    }


def _decode(value: JSON, name: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, name) for key, item in value.items()}
    kind, parts = value[TAG], {key: _decode(item, name) for key, item in value.items() if key != TAG}
    if kind in _BUILTINS:
        return _BUILTINS[kind](parts)
    try:
        return _decode_inspect(kind, parts)
    except KeyError as error:
        raise CannotDecode(f"the argument {name!r} has a value of the unknown type {kind!r}") from error


_BUILTINS: dict[str, Any] = {
    "float": lambda parts: float(parts["value"]),
    "map": lambda parts: dict(parts["items"]),
    "tuple": lambda parts: tuple(parts["items"]),
    "set": lambda parts: set(parts["items"]),
    "bytes": lambda parts: base64.b64decode(parts["value"]),
    "datetime": lambda parts: datetime.datetime.fromisoformat(parts["value"]),
    "date": lambda parts: datetime.date.fromisoformat(parts["value"]),
}


def _decode_inspect(kind: str, parts: dict[str, Any]) -> Any:
    match kind:
        case "Epochs":
            from inspect_ai import Epochs

            return Epochs(parts["epochs"], parts["reducers"])
        case "SolverSpec":
            from inspect_ai.solver import SolverSpec

            return SolverSpec(**parts)
        case "SandboxEnvironmentSpec":
            from inspect_ai.util import SandboxEnvironmentSpec

            return SandboxEnvironmentSpec(parts["type"], parts["config"])
        case "CheckpointConfig":
            return inspect_internals.checkpoint_from_json(parts["value"])
        case "Model":
            from inspect_ai.model import get_model

            # one object each, as Inspect makes them of --model-spec and --model-role: a shared one mixes up their usage
            return get_model(
                parts["model"], config=parts["config"], base_url=parts["base_url"], memoize=False, **parts["args"]
            )
    module = _PYDANTIC[kind]
    cls = getattr(importlib.import_module(module), kind) if module else inspect_internals.config_class(kind)
    return cls.model_validate(parts["value"])
