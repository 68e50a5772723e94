"""Types of parameters that several commands take: each refuses bad input with one sentence."""

from datetime import timedelta
from typing import Any

import click

from evalops.fleet.request import deadline_of
from evalworker.contract.ids import BadId, check_run_id


class RunId(click.ParamType[str]):
    """A run id in any of its forms."""

    name = "RUN_ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check it."""
        try:
            return check_run_id(value)
        except BadId as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType[timedelta]):
    """A duration such as 90m, 12h or 2d."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Parse it."""
        if isinstance(value, timedelta):
            return value
        try:
            return deadline_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
