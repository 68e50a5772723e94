"""The command trees: what holds for every command below them."""

import click
from click.testing import CliRunner

from evalops.cli import LazyGroup


def test_ctrl_c_is_130_in_any_command() -> None:
    """As a signal's end is told everywhere; 1 would mean that jobs had failed."""

    @click.command()
    def wait() -> None:
        raise KeyboardInterrupt

    inner = LazyGroup("run", commands={"wait": wait})
    ended = CliRunner().invoke(LazyGroup("ct", commands={"run": inner}), ["run", "wait"])
    assert (ended.exit_code, ended.output.strip()) == (130, "interrupted")
