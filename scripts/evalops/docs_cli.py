"""Writes docs/cli.md from the commands themselves: `python -m evalops.docs_cli` prints the page, `make docs` stores it.

Our own options are given in full. Inspect's are named with the first sentence of their help: they mean what Inspect says.
"""

import re
import sys
from collections.abc import Iterable, Iterator

import click

from evalops.cli import ct, ies
from evalops.inspect_options import InspectCommand, inspect_params, task_params

HEAD = """\
# Commands

`ct` and `ies` are one program under two names; each command below lists every name it goes by. This page is generated
from the commands (`make docs`): what `--help` says and what stands here are the same words.
"""

INSPECT_HEAD = """\
## Inspect's options

Commands that run tasks take these options of `inspect eval-set` under Inspect's own names and with Inspect's own meaning,
environment variables included. `inspect eval-set --help` describes them in full; this is the first sentence of each.
"""

Named = tuple[str, click.Command]


def commands(group: click.Group, path: str) -> Iterator[Named]:
    """All commands below a group that are no groups, with the words that call them, in the order of `--help`."""
    ctx = click.Context(group, info_name=path)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def page() -> str:
    """The whole page, as Markdown."""
    names: dict[int, list[str]] = {}
    found: dict[int, click.Command] = {}
    for name, command in [*commands(ct, "ct"), *commands(ies, "ies")]:
        names.setdefault(id(command), []).append(name)
        found[id(command)] = command
    parts = [HEAD, *(_section(names[key], command) for key, command in found.items())]
    if any(isinstance(command, InspectCommand) for command in found.values()):
        parts.append(INSPECT_HEAD + "\n" + _inspect_table(found.values()))
    return "\n".join(parts)


def _section(names: list[str], command: click.Command) -> str:
    ctx = click.Context(command, info_name=names[0])
    params = [*(task_params() if isinstance(command, InspectCommand) else []), *command.params]
    arguments = " ".join(param.make_metavar(ctx) for param in params if isinstance(param, click.Argument))
    lines = [f"## {' · '.join(f'`{name}`' for name in names)}", ""]
    lines += ["```", f"{names[0]} [OPTIONS] {arguments}".rstrip(), "```", "", _prose(command.help or ""), ""]
    rows = [record for param in params if (record := param.get_help_record(ctx)) is not None and record[1]]
    if rows:
        lines += ["| option | meaning |", "|---|---|", *(_row(*record) for record in rows), ""]
    if isinstance(command, InspectCommand):
        lines += ["It also takes [Inspect's options](#inspects-options).", ""]
    return "\n".join(lines)


def _inspect_table(found: Iterable[click.Command]) -> str:
    """Each of Inspect's options that a command takes, and the commands of one process where they take more."""
    everywhere = _records(in_process=False)
    lines = ["| option | meaning |", "|---|---|", *(_row(*record) for record in everywhere), ""]
    if any(isinstance(command, InspectCommand) and command.in_process for command in found):
        more = [record for record in _records(in_process=True) if record not in everywhere]
        lines += ["Commands that run in this process take also:", ""]
        lines += ["| option | meaning |", "|---|---|", *(_row(*record) for record in more), ""]
    return "\n".join(lines)


def _records(*, in_process: bool) -> list[tuple[str, str]]:
    records = []
    for param in inspect_params(in_process):
        if not isinstance(param, click.Option) or param.hidden:
            continue
        names = ", ".join(param.opts) + "".join(f" / {name}" for name in param.secondary_opts)
        records.append((names, first_sentence(param.help or "")))
    return records


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence (not one of "e.g."), on one line."""
    line = " ".join(text.split())
    found = re.match(r".*?(?<!e\.g)(?<!i\.e)\.(?=\s|$)", line)
    return found[0] if found else line


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.replace("\b", "")))


def _row(names: str, meaning: str) -> str:
    cell = " ".join(meaning.split()).replace("|", r"\|").replace("<", "&lt;")
    return f"| `{names.replace('|', chr(92) + '|')}` | {cell} |"


if __name__ == "__main__":
    sys.stdout.write(page().rstrip("\n") + "\n")
