"""`fcp demo`: its words without extras, its folder, and the job that it paces."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fcp_cli.cli import demo_show as show
from fcp_cli.cli import paced
from fcp_cli.cli.app import app
from fcp_cli.cli.demo_show import RANKS, Demo, prepare
from fcp_cli.errors import RunError, UsageError
from fcp_cli.plan.file import PlanReader
from tests.pages import ROOT
from tests.patience import PATIENCE_SECONDS


def demo_of(folder: Path) -> tuple[Demo, io.StringIO]:
    text = io.StringIO()
    return Demo(folder=folder, console=Console(file=text, width=80, color_system=None)), text


@pytest.mark.lengthy
def test_without_extras_a_demo_draws_both_plans_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ("torch", "transformers", "vl_convert")
    monkeypatch.setattr(show, "find_spec", lambda name: None if name in missing else find_spec(name))
    demo, text = demo_of(tmp_path / "demo")
    demo.show()
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line[:3].strip().isdecimal() and "━" in line]
    assert len(rows) == 2 * RANKS
    static, ours = rows[:RANKS], rows[RANKS:]
    assert max(map(len, ours)) < max(map(len, static)) == 80  # on one scale, the longer step is as wide as the terminal
    assert {
        name: bool(list(PlanReader(tmp_path / "demo" / f"{name}-16.parquet").steps())) for name in ("static", "fcp")
    }
    assert demo.figures["missing"] == ["torch", "finetune", "report"]
    assert demo.figures["predicted_speedup"] > 1.2
    assert demo.passed
    assert "wall time" not in "".join(lines[: lines.index("Skipped, since its libraries are not installed here")])
    assert sum("pip install" in line or line.startswith("  install") for line in lines) == 3


def test_a_demo_replaces_its_own_folder_and_no_other(tmp_path: Path) -> None:
    prepare(tmp_path / "new")
    (tmp_path / "new" / "old.parquet").touch()
    prepare(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".fcp-demo"]
    (tmp_path / "mine").mkdir()
    prepare(tmp_path / "mine")  # it was empty
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "thesis.txt").touch()
    with pytest.raises(UsageError, match=r"--output .*/texts holds other files; name a folder for the demo alone"):
        prepare(tmp_path / "texts")
    with pytest.raises(UsageError, match=r"--output .*/thesis.txt is a file; name a folder for the demo alone"):
        prepare(tmp_path / "texts" / "thesis.txt")
    assert (tmp_path / "texts" / "thesis.txt").is_file()


@pytest.mark.parametrize(("difference", "status"), [(9e-13, 0), (1.1e-12, 1)])
def test_gradients_that_differ_end_a_demo_with_status_1(
    monkeypatch: pytest.MonkeyPatch, difference: float, status: int
) -> None:
    monkeypatch.setattr(Demo, "show", lambda demo: demo.figures.update(gradient_difference=difference))
    assert CliRunner().invoke(app, ["demo"]).exit_code == status


class Ranks:
    """The process that forks the ranks: it ends with a status, or not within its time."""

    pid = 1 << 30

    def __init__(self, status: int | None) -> None:
        self.status = status

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None and timeout is not None:
            raise subprocess.TimeoutExpired("ranks", timeout)
        return self.status or 0


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (1, "one of 16 paced ranks failed; its message is above"),
        (None, "16 paced ranks took over 120 s: the machine is too busy"),
    ],
)
def test_paced_ranks_that_fail_or_hang_end_the_demo_with_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int | None, message: str
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **settings: Ranks(status))
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    with pytest.raises(RunError, match=message):
        paced.run({}, num_ranks=16)
    assert killed == [Ranks.pid]


def test_settings_that_were_exported_for_another_job_do_not_reach_a_demo() -> None:
    exported = {"PATH": "/bin", "FCP_PLAN": "mine.parquet", "FCP_LAUNCH_STEPS": "9"}
    assert paced.without_settings(exported) == {"PATH": "/bin"}


@pytest.mark.full
@pytest.mark.hf
@pytest.mark.distributed
def test_a_whole_demo_measures_what_it_predicts_and_proves_its_gradients(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fcp_cli", "demo", "--json"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 80
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["predicted_speedup"] > 1.2
    assert figures["measured_speedup"] > 1.0  # the machine may be busy
    assert 0 < figures["gradient_difference"] < 1e-12
    assert figures["training_speedup"] > 1.0
    assert figures["loss_difference"] < 1e-4
    assert (tmp_path / figures["page"]).stat().st_size > 100_000
