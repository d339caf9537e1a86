"""The first line of a script's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcp_cli.runs.run_dir import RunPaths, write_record
from fcp_cli.runtime.metrics_message import run_record
from tests.launching.jobs import plan_metadata
from tests.planning.examples import PROFILE


@pytest.mark.parametrize("named", [None, "qwen3-8b"])
def test_a_scripts_model_is_the_one_that_was_named_and_never_that_of_the_plans_profile(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.delenv("FCP_MODEL", raising=False)
    if named is not None:
        monkeypatch.setenv("FCP_MODEL", named)
    record = run_record(Path("plan.parquet"), plan_metadata(cost_profile=PROFILE), first_step=0, device="cpu")
    assert record["model"] == named


def test_a_new_start_of_a_job_without_a_plan_keeps_the_profile_that_its_steps_were_planned_by(tmp_path: Path) -> None:
    paths = RunPaths(run_dir=tmp_path)
    paths.profile.write_text(PROFILE)

    write_record(tmp_path, paths.plan, plan_metadata(cost_profile=""))

    assert paths.profile.read_text() == PROFILE
