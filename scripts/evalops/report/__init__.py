"""A run's report: one HTML file that needs nothing else.

`write` is what the commands and the controller at the end of a fleet call; `build` gathers, `stats` and `timeline` are pure, and
`template.html.j2` lays out. Everything that comes from a log or a message is escaped by the template.
"""

from evalops.report.build import write

__all__ = ["write"]
