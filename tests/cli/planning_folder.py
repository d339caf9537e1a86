"""Running `fcp` as it is typed, in a folder with a small dataset."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main

from fcp_cli.cli import app
from fcp_cli.util.console import verbosity
from tests.patience import PATIENCE_SECONDS
from tests.planning.examples import PROFILE

EIGHT_RANKS = ("--ranks", "8", "--ranks-per-node", "4", "--tokens-per-rank", "4096", "--global-batch-size", "24")

# A process builds its commands once; tests that run many in one would spend most of their time on that.
_built = cache(typer.main.get_command)


def fcp(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `fcp` in this process, which saves the imports of most of the tests."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(typer.main, "get_command", _built)
        patch.setattr(sys, "argv", ["fcp", *arguments])
        patch.setattr(verbosity, "level", 0)  # of this call: -q must not silence the next test
        for name, value in {"COLUMNS": "80", "NO_COLOR": "1", **env}.items():
            patch.setenv(name, value)
        try:
            app.main()
            status: Any = 0
        except SystemExit as stop:
            status = stop.code or 0
    out.flush()
    printed = out.buffer.getvalue().decode(errors="replace")  # -o - writes bytes there
    return subprocess.CompletedProcess(arguments, status, printed, err.getvalue())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Exit status and both streams of one run of `fcp`."""

    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.splitlines()[-1]


def typed(*arguments: object) -> Outcome:
    """Run `fcp` in this process and folder, 80 columns wide."""
    done = fcp(*map(str, arguments), cwd=Path.cwd())
    return Outcome(status=done.returncode, out=done.stdout, err=done.stderr)


def fcp_process(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `fcp` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fcp_cli", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def write_dataset(folder: Path, *, sequences: int = 96, profile: bool = True) -> Path:
    """`dataset.parquet`, most sequences short and some of 20,000 tokens, and `profile.yaml`."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.2, sequences).astype(np.int64).clip(1, 4000)
    lengths[::48] = 20_000
    pq.write_table(pa.table({"length": lengths}), folder / "dataset.parquet")
    if profile:
        (folder / "profile.yaml").write_text(PROFILE)
    return folder


def assert_one_error_line(result: subprocess.CompletedProcess[str], status: int) -> str:
    """The error; nothing on stdout, no traceback, the status as promised."""
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if not line.startswith("assumed ")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    return errors[0]
