"""What messages tell people to type: every `fcp` command in the sources of the package is one that fcp takes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.hooks.reference import CommandEntry, command_entries
from tests.syntax import nodes_of

PACKAGE = Path(__file__).parents[2] / "fcp_cli"
COMMANDS = {command.words: command for command in command_entries()}
# Inside quotes of either kind: 'fcp plan X' and `fcp plan X`; or at the end of a message behind "next: ".
_COMMAND = re.compile(r"(?:'|`|next: |run: )(fcp [a-z][^'`;)]*)")
_VALUE = "\0"  # what a message fills in


def commands_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        text = _text(node)
        if text is not None:
            yield from ((getattr(node, "lineno", 0), found[1]) for found in _COMMAND.finditer(text))


def _text(node: ast.AST) -> str | None:
    """The text of a string, with a mark for each value that it is formatted with."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def problem(command: str) -> str | None:
    """What is wrong with a command of a message; None where fcp takes it."""
    try:
        words = shlex.split(command.rstrip(". "))[1:]
    except ValueError:
        return None  # cut by a value
    meant = max((one for one in COMMANDS if tuple(words[: len(one)]) == one), key=len)
    if not meant:
        return None if words[0].startswith((_VALUE, "-")) else f"there is no command {words[0]}"
    known = {flag for option in COMMANDS[meant].options for flag in option.flags} | {"--help", "-q", "-v"}
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    unknown = [flag for flag in flags if _VALUE not in flag and flag not in known]
    return (
        f"fcp {' '.join(meant)} has no {', '.join(unknown)}"
        if unknown and not _passes_on(COMMANDS[meant], words)
        else None
    )


def _passes_on(command: CommandEntry, words: list[str]) -> bool:
    return command.words == ("launch",) and "--" in words


@pytest.mark.lengthy
def test_every_command_in_a_message_is_one_that_fcp_takes() -> None:
    found = [(path, line, command) for path in sorted(PACKAGE.rglob("*.py")) for line, command in commands_in(path)]
    assert len(found) > 60
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {command}: {why}"
        for path, line, command in found
        if (why := problem(command))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("fcp plan dataset.parquet --ranks 4", None),
        ("fcp plam dataset.parquet", "there is no command plam"),
        ("fcp plan --share config.json", "fcp plan has no --share"),
        ("fcp manifest build \0 --colum x", "fcp manifest build has no --colum"),
        ("fcp \0", None),
    ],
)
def test_a_command_that_fcp_does_not_take_is_found(command: str, why: Any) -> None:
    assert problem(command) == why
