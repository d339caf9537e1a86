"""The reference pages of the commands, written from the options that `fcp` itself reads.

MkDocs calls `on_files` before it reads the navigation. No page of a command is kept in the tree: none can grow stale.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.hooks.reference import CommandEntry, OptionEntry, command_entries

FOLDER = "reference/commands"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page per verb, and one for the options of `fcp` itself."""
    for name, text in pages().items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each verb's page, by the verb's name; that of `fcp` itself is `fcp`."""
    written: dict[str, str] = {}
    for entry in command_entries():
        page = entry.words[0] if entry.words else "fcp"
        written[page] = written.get(page, "") + "\n".join(_command(entry)) + "\n"
    return written


def _command(entry: CommandEntry) -> Iterator[str]:
    name = " ".join(("fcp", *entry.words))
    yield f"{'##' if len(entry.words) > 1 else '#'} {name}\n"
    yield f"```text\n{name} {entry.usage}\n```\n"
    yield f"{_plain(entry.help)}\n"
    if entry.examples:
        yield "\n".join(("```console", *(f"$ {line}" for line in entry.examples), "```\n"))
    groups: dict[str, list[OptionEntry]] = {}
    for option in entry.options:
        groups.setdefault(option.group or "Options", []).append(option)
    folds = any(option.rare for option in entry.options)
    if folds:
        yield f"`{name} --help` shows the options in bold, `{name} --help-all` all of them.\n"
    for group, options in groups.items():
        rows = [(_names(one, bold=folds and not one.rare), one.default, one.help) for one in options]
        yield from _table((group, "Default", "Meaning"), rows)
    yield from _other_ways(entry)


def _other_ways(entry: CommandEntry) -> Iterator[str]:
    """Yield a folded table of the environment variables and the keys of fcp.yaml."""
    rows = [
        (_code(option.flags[0]), _code(option.environment), _code(option.config_key) if option.config_key else "")
        for option in entry.options
        if option.environment
    ]
    if rows:
        yield '??? note "Environment and fcp.yaml"\n'
        yield from (f"    {line}" for line in _table(("Option", "Variable", "Key of fcp.yaml"), rows))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell if cell.startswith(('<code>', '<b>')) else _cell(cell) for cell in row)} |"
    yield ""


def _names(option: OptionEntry, *, bold: bool) -> str:
    """Return the spellings as code, the value behind the last; an argument is its metavar."""
    names = ", ".join(_code(flag) for flag in option.flags)
    shown = " ".join(part for part in (names, _code(option.metavar) if option.metavar else "") if part)
    return f"<b>{shown}</b>" if bold and option.flags else shown


def _code(text: str) -> str:
    """Return HTML, since a bar between backticks would end the cell."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return _plain(text).replace("|", r"\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Keep what Markdown would read as markup as it was written."""
    return text.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
