"""Every command with its options as data, for the reference pages and the test of the command line's surface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
import typer.main

from fcp_cli.cli.app import app
from fcp_cli.cli.command import default_text, examples_of, help_section, metavar_of


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionEntry:
    """An option or argument.

    Attributes:
        name: of the field that holds its value.
        flags: every spelling, `--no-...` too; empty for an argument.
        metavar: placeholder of the value; empty for a switch.
        default: as the help shows it; empty if there is none to name.
        help: of the option.
        group: its heading in the help.
        rare: --help-all alone shows it.
        required: the command does not run without it.
        environment: the variable that sets it, if one does.
        config_key: its place in `fcp.yaml`, as "plan.ranks", if it has one.
    """

    name: str
    flags: tuple[str, ...]
    metavar: str
    default: str
    help: str
    group: str
    rare: bool
    required: bool
    environment: str | None
    config_key: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEntry:
    """A command.

    Attributes:
        words: as typed behind `fcp`, such as ("manifest", "build"); () is `fcp` itself.
        usage: arguments after those words.
        help: paragraphs of plain text.
        examples: whole command lines.
        options: in the order of the help.
    """

    words: tuple[str, ...]
    usage: str
    help: str
    examples: tuple[str, ...]
    options: tuple[OptionEntry, ...]


def command_entries() -> Iterator[CommandEntry]:
    """Yield `fcp`, its commands in the order of its help, and after each group the group's commands."""
    return _entries(typer.main.get_command(app), ())


def _entries(command: Any, words: tuple[str, ...]) -> Iterator[CommandEntry]:
    context = typer.Context(command, info_name="fcp")
    yield CommandEntry(
        words=words,
        usage=" ".join(command.collect_usage_pieces(context)),
        help=command.help or "",
        examples=tuple(examples_of(command)),
        options=tuple(_option_entry(parameter, words, context, rare=command.rare) for parameter in command.params),
    )
    for name, inner in getattr(command, "commands", {}).items():
        yield from _entries(inner, (*words, name))


def _option_entry(
    parameter: Any, words: tuple[str, ...], context: typer.Context, *, rare: frozenset[str]
) -> OptionEntry:
    # Neither the environment nor fcp.yaml sets arguments, and fcp's own options take part in reading both.
    settable = words and parameter.param_type_name == "option"
    long_flag = next((flag for flag in parameter.opts if flag.startswith("--")), "")
    return OptionEntry(
        name=parameter.name,
        flags=(*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else (),
        metavar=metavar_of(parameter),
        default=default_text(parameter, context),
        help=parameter.help or "",
        group=help_section(parameter),
        rare=parameter.name in rare,
        required=parameter.required,
        environment="_".join(("FCP", *words, parameter.name)).upper() if settable else parameter.envvar,
        config_key=".".join((*words, long_flag[2:])) if settable else None,
    )
