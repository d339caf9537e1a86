"""The recorded session of a newcomer, typed again: the same commands still say the same, up to figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.patience import PATIENCE_SECONDS

RECORD = ROOT / "docs" / "first-session.md"
pytestmark = [pytest.mark.full, pytest.mark.processes]


def recorded() -> list[tuple[str, str]]:
    """Each command of the session with what it printed."""
    session = re.search(r"^```console\n(.*?)^```$", RECORD.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert session
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session[1], re.MULTILINE)
    return [(command, said) for command, said in found]


def shape(said: str) -> list[str]:
    """Words in their order without figures, bars and rules; rows of figures count as one, and how lines break does not."""
    said = re.sub(r", and [\d.,]+ m?s\s+to\s+load\s+or\s+compile\s+the\s+planner", "", said)
    said = re.sub(r"^compil(ing|ed) the planner.*\n", "", said, flags=re.MULTILINE)
    said = re.sub(r"\b[0-9a-f]{16}\b|(?<![\w-])[\d.,]*\d(%|x| ms\b| s\b| MB\b| GB\b)?", "N", re.sub("[─-▟]", " ", said))
    words = said.split()
    return [word for at, word in enumerate(words) if word != "N" or words[at - 1 : at] != ["N"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the session runs: with the wheel of dist/, if one was made; else its `fcp` is the checkout's."""
    for wheel in (ROOT / "dist").glob("fcp_cli-*.whl"):
        (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    if not list(tmp_path.glob("*.whl")):
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        started = tmp_path / ".venv" / "bin" / "fcp"
        started.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m fcp_cli "$@"\n')
        started.chmod(0o755)
    return tmp_path


def test_a_newcomers_session_goes_from_the_wheel_to_a_report(folder: Path) -> None:
    path = os.pathsep.join((str(folder / ".venv" / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**kept, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"}
    commands = recorded() if list(folder.glob("*.whl")) else recorded()[2:]
    for command, said in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if said:
            assert shape(done.stdout) == shape(said), command
    assert (folder / "report.html").stat().st_size > 100_000
