from __future__ import annotations

from pathlib import Path

import pytest

from fcp_cli.errors import PlanError, UsageError
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file.parts import merge_parts, part_of_shard, part_of_steps
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.planning.batching.batches import BatchSettings
from fcp_cli.planning.dataset.run import make_plan
from fcp_cli.planning.settings.settings import PlanInputs
from tests.planning.examples import example_problem, long_tail

INPUTS = PlanInputs(
    table=long_tail(), problem=example_problem(), settings=BatchSettings(global_batch_size=20, epochs=2)
)
STEPS = 22


def plan_part(path: Path, part: str, inputs: PlanInputs = INPUTS) -> Path:
    parse = part_of_steps if ":" in part else part_of_shard
    make_plan(path, inputs, solver_name="static", part=parse(part, 0, STEPS))
    return path


def test_merged_parts_are_the_plan_of_a_single_process(tmp_path: Path) -> None:
    whole = make_plan(tmp_path / "whole.parquet", INPUTS, solver_name="static").metadata
    assert whole.steps == STEPS
    parts = [plan_part(tmp_path / f"{i}.parquet", f"{i}/3") for i in (2, 3, 1)]
    merged = merge_parts(parts, tmp_path / "merged.parquet")
    assert merged.plan_hash == whole.plan_hash
    assert PlanReader(tmp_path / "merged.parquet").content_hash() == whole.plan_hash
    assert not list(check_plan(tmp_path / "merged.parquet", manifest=long_tail()))


def test_a_part_is_sound_and_has_the_steps_of_the_whole_plan(tmp_path: Path) -> None:
    make_plan(tmp_path / "whole.parquet", INPUTS, solver_name="static")
    part = plan_part(tmp_path / "part.parquet", "9:15")
    assert not list(check_plan(part, manifest=long_tail()))
    due = [step.sequences.tolist() for step in PlanReader(tmp_path / "whole.parquet").steps()][9:15]
    assert [step.sequences.tolist() for step in PlanReader(part).steps()] == due
    assert PlanReader(part).metadata.end_step == 15


def test_parts_that_do_not_make_one_plan_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    first, last = plan_part(tmp_path / "a.parquet", "0:9"), plan_part(tmp_path / "b.parquet", "9:22")
    other = PlanInputs(table=long_tail(), problem=INPUTS.problem, settings=BatchSettings(global_batch_size=20, seed=1))
    for parts, message in (
        ([last], "steps 0 to 8 of 22 are in no part; add the one of --steps 0:9"),
        ([first], "steps 9 to 21 of 22 are in no part"),
        ([first, first, last], "has step 0, which another part has, too"),
        ([first, plan_part(tmp_path / "c.parquet", "9:11", other)], "is of another plan than"),
    ):
        with pytest.raises(PlanError, match=message):
            merge_parts(parts, tmp_path / "merged.parquet")
    make_plan(tmp_path / "whole.parquet", INPUTS, solver_name="static")
    with pytest.raises(PlanError, match="is a whole plan, not a part"):
        merge_parts([tmp_path / "whole.parquet"], tmp_path / "merged.parquet")
    assert not (tmp_path / "merged.parquet").exists()


def test_an_interrupted_part_resumes_at_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.errors import Interrupted
    from fcp_cli.planning.dataset import journal, run

    monkeypatch.setattr(run, "_JOURNAL_FROM_STEPS", 1)
    monkeypatch.setattr(journal, "_ROWS_PER_PART", 1)
    due = PlanReader(plan_part(tmp_path / "due.parquet", "9:15")).metadata.plan_hash

    def interrupt(step: object) -> None:
        if step.step == 12:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    path, part = tmp_path / "part.parquet", part_of_steps("9:15", 0, STEPS)
    with pytest.raises(Interrupted):
        make_plan(path, INPUTS, solver_name="static", part=part, on_step=interrupt)
    assert make_plan(path, INPUTS, solver_name="static", part=part, resume=True).metadata.plan_hash == due


@pytest.mark.parametrize("text", ["5:5", "7:3", "0:23", "a:3", "-1:4", "22:"])
def test_a_range_beyond_the_plan_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        part_of_steps(text, 0, STEPS)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/23", "x/2"])
def test_a_shard_that_is_none_of_the_parts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        part_of_shard(text, 0, STEPS)
