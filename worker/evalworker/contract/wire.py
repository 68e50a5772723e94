"""What all wire types share: the schema number, unknown fields ignored, one way to text and back.

A message or document that cannot be read raises `Unreadable`, which carries the text for whoever keeps it aside.
"""

from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalworker.contract import SCHEMA
from evalworker.contract.jsonio import dumps


class Unreadable(ValueError):
    """Text that is no message or document of ours; `text` is what came, the message says what is wrong with it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason)
        self.text = text


def now() -> datetime:
    """The current time, aware and UTC."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A time as events show it: UTC with milliseconds, `2026-11-29T14:05:33.120Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Part(BaseModel):
    """A part of a message or document."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Wire(BaseModel):
    """A message or document that crosses from one process to another."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True, protected_namespaces=())

    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, schema first."""
        return self.model_dump(mode="json", by_alias=True)

    def to_json(self) -> str:
        """One line of strict JSON."""
        return dumps(self.to_dict())

    def to_bytes(self) -> bytes:
        """The same as bytes."""
        return self.to_json().encode("ascii")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read one; raises Unreadable."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            raise Unreadable(describe(error), shown) from None


def describe(error: ValidationError) -> str:
    """A validation error in one line, without the input (it may be long, or hostile)."""
    parts = (f"{'.'.join(str(step) for step in item['loc']) or 'text'}: {item['msg']}" for item in error.errors()[:3])
    return "; ".join(parts)
