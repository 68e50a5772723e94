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


def finite(value: Any) -> Any:
    """A copy in which each number that JSON cannot hold is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
