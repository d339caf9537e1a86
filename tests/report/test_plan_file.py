from __future__ import annotations

import re
from pathlib import Path

import pytest

from fcp_cli.errors import PlanError
from fcp_cli.report.plan_tables import open_plan
from tests.report.edited_plans import Edit, change_column, edited


def test_a_plan_as_it_was_made_has_no_problems(example_plan: Path) -> None:
    file = open_plan(example_plan)
    assert [step.step for step in file.steps()] == [0, 1, 2, 3]
    assert file.problems == []


def test_an_edited_plan_is_shown_and_marked_as_edited(example_plan: Path, tmp_path: Path) -> None:
    file = open_plan(
        edited(example_plan, tmp_path / "edited.parquet", change_column("seconds", lambda seconds: seconds * 0.9))
    )
    assert len(list(file.steps())) == 4
    assert file.problems == [
        f"{file.path} was edited: its hash was {file.metadata.plan_hash[:12]}; see: fcp check {file.path}"
    ]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (change_column("ranks", lambda ranks: [rank + 100 for rank in ranks], step=1), r"rank 10\d of a job of 8"),
        (change_column("ranks", lambda ranks: [], step=1), "order 0: no ranks"),
        (
            change_column("lengths", lambda lengths: lengths[1:], step=1),
            "order 0: as many sequences as lengths are needed",
        ),
        (change_column("lengths", lambda lengths: [0] * len(lengths), step=1), r"sequence \d+ has 0 tokens"),
        (change_column("step_seconds", lambda _: 0.0, step=1), "it takes no time"),
        (change_column("step_bound_seconds", lambda _: float("nan"), step=1), "step_bound_seconds is nan"),
        (lambda rows: [{**row, "step": row["step"] + 9 * (row["step"] == 1)} for row in rows], ""),
        (change_column("start_seconds", lambda _: -1.0, step=1), r"order 0: start_seconds is -1\.0"),
    ],
)
def test_a_step_that_no_picture_can_hold_is_left_out_and_the_rest_is_shown(
    example_plan: Path, tmp_path: Path, edit: Edit, reason: str
) -> None:
    file = open_plan(edited(example_plan, tmp_path / "edited.parquet", edit))
    assert {step.step for step in file.steps()} >= {2, 3}
    assert 1 not in {step.step for step in file.steps()}
    with pytest.raises(PlanError, match=rf"has no displayable step 1.*{reason}.*; see: fcp check"):
        file.step(1)


def test_rows_in_another_order_do_not_pass_for_another_step(example_plan: Path, tmp_path: Path) -> None:
    file = open_plan(edited(example_plan, tmp_path / "edited.parquet", lambda rows: rows[::-1]))
    assert [step.step for step in file.steps()] == []
    (problem,) = file.problems[1:]
    assert re.search(r"skipped step 3: rows out of order: order \d+ in place 0, and 3 more$", problem)
    with pytest.raises(PlanError, match="has no displayable step 0"):
        file.step(0)


def test_a_large_file_is_not_read_whole_for_one_step(
    example_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(example_plan, tmp_path / "edited.parquet", change_column("seconds", lambda seconds: seconds * 0.9))
    monkeypatch.setattr("fcp_cli.report.plan_tables._QUICK_BYTES", 10)
    assert open_plan(path, quickly=True).problems == []
    assert len(open_plan(path).problems) == 1
