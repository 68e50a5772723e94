"""The one JSON writer: strict, so that any reader can read what a model or a log put into it.

NaN and the infinities are not JSON and become null; lone surrogates (a model's broken output), which neither `jq` nor
pydantic reads even escaped, become the text `\\udXXX`; keys keep their order. Both the event stream and the stored documents
go through here.
"""

import json
import math
import re
from typing import Any

_ESCAPE = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|(?P<lone>ud[89a-f]..)|.)")
"""One escape of a JSON text: a whole surrogate pair, half of one, or another."""


def dumps(value: Any) -> str:
    """One line of strict JSON (ASCII, no blanks). Raises TypeError for what JSON cannot hold."""
    try:
        line = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        line = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    if "\\ud" not in line:
        return line
    return _ESCAPE.sub(lambda found: f"\\\\{found['lone']}" if found["lone"] else found[0], line)


def dump_bytes(value: Any) -> bytes:
    """The same as bytes."""
    return dumps(value).encode("ascii")


def canonical(value: Any) -> str:
    """JSON whose text depends on the value alone (sorted keys): what ids and digests are made of."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":"), sort_keys=True)


def portable(value: Any) -> Any:
    """A copy that any JSON reader can hold: plain types, finite numbers, no lone surrogates (written out as `\\udXXX`).

    For what a model, a scorer or a task produced. What is no JSON value becomes its text, bounded.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {str(portable(str(key))): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [portable(item) for item in value]
    return portable(repr(value)[:1024])


def finite(value: Any) -> Any:
    """A copy in which each number that JSON cannot hold is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
