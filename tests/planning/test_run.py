from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import Interrupted, UsageError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning import make_plan as making
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import PlanResult, make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from tests.planning.examples import example_problem, long_tail


def make(path: Path, *, solver: str = "static", **options: Any) -> PlanResult:
    """A plan of 12 steps, as `static` makes it where nothing else is said."""
    settings = BatchSettings(global_batch_size=40, seed=3, epochs=2)
    inputs = PlanInputs(
        table=long_tail(), problem=example_problem(), settings=settings, request=PlanRequest(solver=solver)
    )
    return make_plan(path, inputs, **options)


def test_summary_and_metadata_are_those_of_the_file(tmp_path: Path) -> None:
    seen: list[int] = []
    result = make(tmp_path / "plan.parquet", on_step=lambda step: seen.append(step.step))
    reader = PlanReader(tmp_path / "plan.parquet")
    steps = list(reader.steps())
    assert reader.metadata == result.metadata
    assert seen == [step.step for step in steps] == list(range(12))
    assert result.summary.makespan_seconds == pytest.approx(sum(step.makespan_seconds for step in steps))
    assert result.summary.tokens == 2 * long_tail().length_tokens.sum()
    assert result.summary.microbatches == sum(not row.is_idle for step in steps for row in step.microbatches())
    busy = sum(step.busy_seconds(16).sum() for step in steps)
    assert result.summary.idle_fraction == pytest.approx(1 - busy / (16 * result.summary.makespan_seconds))


def test_the_solver_and_its_options_are_recorded(tmp_path: Path) -> None:
    metadata = make(tmp_path / "plan.parquet").metadata
    assert metadata.solver == "static"
    assert metadata.solver_options["degree"] in (8, 16)
    assert metadata.manifest.content_hash == long_tail().content_hash()


def test_an_interruption_before_anything_was_kept_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_JOURNAL_FROM_STEPS", 1)

    def interrupt(_: StepPlan) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"interrupted after step 1 of 12; no plan was written$"):
        make(tmp_path / "plan.parquet", on_step=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_solver_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--solver is 'magic'; it must be one of fcp"):
        make(tmp_path / "plan.parquet", solver="magic")
    assert list(tmp_path.iterdir()) == []
