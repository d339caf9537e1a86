"""What the pages tell readers to type: every `fcp` line parses, and the marked blocks run, in order, on small data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fcp_cli.cli.app import app
from tests.forked_ranks import shared
from tests.pages import PAGES, ROOT, executed, fcp_lines
from tests.patience import PATIENCE_SECONDS

_COMMAND = typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fcp_command_of_a_page_is_one_that_fcp_takes(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would write into the home folder, for the shell that runs, if that is one that it knows.
    monkeypatch.setattr("typer.completion.install", lambda: ("bash", Path("nowhere")))
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    wrong = {" ".join(words): problem for words in fcp_lines(page) if (problem := _problem(words))}
    assert wrong == {}


def _problem(words: list[str]) -> str | None:
    """Return what a command line's options and arguments are refused for, without running it."""
    command: Any = _COMMAND
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
        return str(getattr(error, "message", "")) or repr(error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder but for `texts/`: 300 pieces of Python's own sources, 40 to 640 bytes each."""
    (tmp_path / "texts").mkdir()
    sources = (path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib"), "email").glob("*.py")))
    text = b"".join(sources).decode("ascii", "ignore")
    start = 0
    for index in range(300):
        size = 40 + index * 37 % 600
        (tmp_path / "texts" / f"piece-{index:03}.py").write_text(text[start : start + size], encoding="ascii")
        start += size
    return tmp_path


@pytest.mark.distributed
@pytest.mark.hf
@pytest.mark.timeout(3600)  # the tutorial starts a dozen commands, and the machine may be busy
@pytest.mark.parametrize(
    "page", [page for page in PAGES if executed(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_marked_commands_of_a_page_run_in_its_order(page: Path, folder: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    modules = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))  # what makes torchrun fork its ranks stays
    environment = {**os.environ, **shared(), "PATH": path, "PYTHONPATH": modules, "CHECKOUT": str(ROOT)}
    for command in executed(page):
        done = subprocess.run(
            ["bash", "-c", _small(command)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def _small(command: str) -> str:
    """Return a command that measures for seconds where the page has minutes, and trains a sixth of the page's steps."""
    command = re.sub(r"(--budget-minutes) [\d.]+", r"\1 0.1", command)
    return re.sub(r"(--steps?) (\d+)", lambda found: f"{found[1]} {-(-int(found[2]) // 6)}", command)
