"""What the documentation's pages tell readers to type.

A command starts with "$ " in a fenced block marked `console`, and goes on in the next line after a backslash. A block
below the comment `<!-- run -->` is executed by the tests; `<!-- run: COMMAND -->` executes a command that readers do
not see, such as one that puts a file in place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"^<!-- run: (?P<hidden>.+?) -->$|^<!-- run -->\n+(?=^ *```console\n(?P<body>.*?)^ *```$)", re.MULTILINE | re.DOTALL
)


def executed(page: Path) -> list[str]:
    """Return the commands of a page that its tests run, in order."""
    commands: list[str] = []
    for found in _RUN.finditer(page.read_text(encoding="utf-8")):
        commands += [found["hidden"]] if found["hidden"] else _typed(found["body"])
    return commands


def fcp_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words behind `fcp` of every command line in the page's fenced blocks."""
    for fence in _FENCE.finditer(page.read_text(encoding="utf-8")):
        # A changed command of a diff counts, too.
        body = (
            fence["body"] if fence["kind"] != "diff" else re.sub(r"^\+(?=fcp |    )", "$ ", fence["body"], flags=re.M)
        )
        for command in _typed(body):
            yield from _fcp_words(command)


def _typed(body: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", body)
    return [line.strip()[2:] for line in joined.splitlines() if line.strip().startswith("$ ")]


def _fcp_words(command: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;<>"):
            if words[:1] == ["fcp"]:
                yield words[1:]
            words = []
        else:
            words.append(word)
