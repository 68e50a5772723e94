"""What worker and controller agree on: ids, key layout, wire types, failure categories, strict JSON.

Imported by both sides and by nothing below them: no AWS, no Inspect, no process, no clock is touched here.
"""

from typing import Final, Literal

SCHEMA: Final[Literal[1]] = 1
"""Version of every message, event and stored document. A reader ignores unknown fields of the same schema."""
