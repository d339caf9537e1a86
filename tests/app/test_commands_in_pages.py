"""What the pages tell readers to type: every `fcp` line parses, and the marked blocks run, in order, on small data."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pages import PAGES, ROOT, executed, fcp_lines

from fcp_cli.app import app

# Typed in a page at full size; small here. A flag in the page wins, so a page leaves out what is set here.
SMALL = {"FCP_PROFILE_FRESH": "1"}
SECONDS = 900  # for one command, on a machine that is busy with something else


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fcp_command_of_a_page_is_one_that_fcp_takes(page: Path) -> None:
    wrong = {" ".join(words): problem for words in fcp_lines(page) if (problem := _problem(words))}
    assert wrong == {}


def _problem(words: list[str]) -> str | None:
    """Return what a command line's options and arguments are refused for, without running it."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    name, rest = "fcp", words
    try:
        while True:
            context = command.make_context(name, list(rest), parent=context)
            rest = [*getattr(context, "_protected_args", []), *context.args]
            if not hasattr(command, "commands") or not rest or rest[0] not in command.commands:
                return f"{rest[0]} is no command" if hasattr(command, "commands") and rest else None
            name, rest = rest[0], rest[1:]
            command = command.commands[name]
    except SystemExit:
        return None
    except Exception as error:
        return str(getattr(error, "message", error)) or type(error).__name__
