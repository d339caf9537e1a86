"""Names that a launch does not find: a mistyped model, and a script or model that only the job's machines have."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fcp_cli.util import machine
from tests.cli.planning_folder import typed
from tests.cli.test_launch_cli import Fcp
from tests.launching.jobs import CPU
from tests.training.small_runs import write_manifest, write_small_plan


@pytest.fixture
def fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fcp:
    """Run `fcp launch ...` in this process, in a folder with plans and a script."""
    manifest = write_manifest(tmp_path)
    write_small_plan(tmp_path / "plan.parquet", manifest, steps=1, model="qwen3-tiny")
    write_small_plan(tmp_path / "plan8.parquet", manifest, steps=1, num_ranks=8)
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(machine, "find_machine", lambda device="auto": CPU)
    monkeypatch.chdir(tmp_path)
    return partial(typed, "launch")


@pytest.mark.parametrize("words", [("--dry-run",), ("--target", "slurm", "--dry-run"), ("--", "mine.py"), ()])
def test_a_mistyped_model_is_one_line_and_nothing_more(fcp: Fcp, words: tuple[str, ...]) -> None:
    result = fcp("--model", "qwen3-tinny", *words)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("error: unknown model 'qwen3-tinny'; nearest: qwen3-tiny, ")
    assert result.err.count("\n") == 1


def test_a_dry_run_warns_of_a_script_and_a_model_that_only_the_jobs_machines_have(fcp: Fcp) -> None:
    there = ("--plan", "plan8.parquet", "--model", "/models/mine", "--", "/srv/pretrain_gpt.py", "--lr", "1")
    for target in ((), ("--target", "slurm")):
        result = fcp("--dry-run", *target, *there)
        assert result.status == 0
        line = "warning: there is no script /srv/pretrain_gpt.py here; the machines of the job need it at this path\n"
        assert line in result.err
        assert "/srv/pretrain_gpt.py" in result.out
    assert fcp(*there).last_line.startswith("error: ")
    assert "there is no script" in fcp("--plan", "plan8.parquet", *there[4:]).last_line
