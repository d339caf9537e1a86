"""The reference pages of the commands, written from the options that `fcp` itself reads.

MkDocs calls `on_files` before it reads the navigation. No page of a command is kept in the tree: none can grow stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fcp_cli.app import app

FOLDER = "reference/commands"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page per verb."""
    for name, text in pages().items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each verb's page, by the verb's name."""
    root: Any = typer.main.get_command(app)
    return {name: "\n".join(_page(name, command)) for name, command in root.commands.items()}


def _page(name: str, command: Any) -> Iterator[str]:
    yield from _command(f"fcp {name}", command, "#")
    for sub_name, sub_command in getattr(command, "commands", {}).items():
        yield from _command(f"fcp {name} {sub_name}", sub_command, "##")


def _command(title: str, command: Any, heading: str) -> Iterator[str]:
    yield f"{heading} {title}\n"
    yield f"{_plain(command.help)}\n"
    groups: dict[str, list[Any]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            groups.setdefault(_group(parameter), []).append(parameter)
    for group, parameters in groups.items():
        yield f"**{group}**\n"
        yield f"| {'Argument' if group == 'Arguments' else 'Option'} | Value | Meaning |"
        yield "|---|---|---|"
        yield from (f"| {_names(one)} | {_value(one)} | {_meaning(one)} |" for one in parameters)
        yield ""
    if command.epilog:
        yield f"{_plain(command.epilog)}\n"


def _group(parameter: Any) -> str:
    if not _is_option(parameter):
        return "Arguments"
    return parameter.rich_help_panel or "Options"


def _is_option(parameter: Any) -> bool:
    return any(name.startswith("-") for name in parameter.opts)


def _names(parameter: Any) -> str:
    if not _is_option(parameter):
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _value(parameter: Any) -> str:
    if not _is_option(parameter) or parameter.is_flag or parameter.count:
        return ""
    if parameter.metavar:
        return _code(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    return _code({"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}.get(getattr(kind, "__name__", ""), "TEXT"))


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def _meaning(parameter: Any) -> str:
    default = parameter.default
    shown = default not in (None, False, (), []) and not isinstance(default, bool) and "Default" not in parameter.help
    notes = [_plain(parameter.help).replace("|", r"\|")]
    if shown and _is_option(parameter) and not parameter.count:
        notes.append(f"Default: {default}.")
    if parameter.required:
        notes.append("Required.")
    return " ".join(notes)


def _plain(text: str | None) -> str:
    """Keep what Markdown would read as markup as it was written."""
    return (text or "").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
