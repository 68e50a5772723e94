"""The command trees `ies` and `ct`: one set of commands under the two names that their users type.

Commands are imported when they are used: `ies --help` must not wait for Inspect.
"""

import importlib
from typing import Any

import click

from evalops.settings import load_env


class LazyGroup(click.Group):
    """A group whose commands are named by `module:attribute` and imported at their first use."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they were given."""
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._lazy[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C ends it with 130; click alone would say 1, which means that jobs failed."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from evalops.ui import EXIT_INTERRUPTED

            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by the sentences given here, without importing them."""
        rows = [(name, text) for name, (_, text) in self._lazy.items()]
        rows += [(name, command.get_short_help_str()) for name, command in self.commands.items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


RUN_FLEET = ("evalops.commands.run:run_eval", "Run an evaluation on a fleet of workers.")
CLOUD = ("evalops.commands.cloud:cloud", "Build and keep the worker AMI and the worker image.")
RUN_LOCAL = ("evalops.commands.run_local:run_local", "Run an evaluation in this process.")
RUN_AWS = ("evalops.commands.run_aws:run_aws", "Run an evaluation on AWS Batch.")
BATCH = ("evalops.commands.batch:batch", "Follow, terminate and list jobs of AWS Batch.")
FLEET = ("evalops.commands.fleet:fleet", "Watch and stop fleets.")
INFRA = {
    "infra": ("evalops.commands.infra:infra", "Plan, apply and check the AWS estate."),
    "secrets": ("evalops.commands.infra:secrets", "Store provider keys in the estate."),
}
LOGS = {
    "status": ("evalops.commands.status:status", "Check runs and their logs."),
    "summarize": ("evalops.commands.summarize:summarize", "Write the dashboard's files of a run."),
    "promote": ("evalops.commands.promote:promote", "Promote a run's files to the dashboard."),
    "publish": ("evalops.commands.publish:publish", "Summarise and promote what has finished."),
    "report": ("evalops.commands.report:report", "Write a run's HTML report."),
    "log": ("evalops.commands.log:log", "Fetch logs."),
    "view": ("evalops.commands.view:view", "Open logs in Inspect's viewer."),
    "sandbox": ("evalops.commands.sandbox:sandbox", "Check and prepare Docker for sandboxes."),
}


@click.group(cls=LazyGroup, lazy={"aws": RUN_AWS, "local": RUN_LOCAL, "fleet": RUN_FLEET})
def _ies_run() -> None:
    """Run evaluations."""


@click.group(cls=LazyGroup, lazy={"eval": RUN_FLEET})
def _ct_run() -> None:
    """Run evaluations."""


@click.group(cls=LazyGroup, lazy={**LOGS, **INFRA, "batch": BATCH, "fleet": FLEET})
@click.version_option(package_name="inspect-fleet")
def ies() -> None:
    """Run Inspect evaluations, follow them, and publish their results."""
    load_env()


@click.group(cls=LazyGroup, lazy={"fleet": FLEET, "cloud": CLOUD})
@click.version_option(package_name="inspect-fleet")
def ct() -> None:
    """Run Inspect evaluations on a fleet of workers."""
    load_env()


ies.add_command(_ies_run, "run")
ct.add_command(_ct_run, "run")
