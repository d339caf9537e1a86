"""The example of a plain PyTorch loop: what changes, and that nothing else does."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.records import read_metrics
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.plans import Row, write_plan
from tests.runtime.workers.plain_loop_worker import run_in_fp64

pytestmark = pytest.mark.torch

EXAMPLE = ROOT / "examples" / "plain_pytorch"


def test_following_a_plan_changes_at_most_five_lines() -> None:
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert sum(line[0] == "+" for line in changes) <= 5
    assert sum(line[0] == "-" for line in changes) <= 5


@pytest.mark.distributed
def test_four_ranks_end_with_the_weights_of_one_process(tmp_path: Path) -> None:
    before = run_in_fp64(EXAMPLE / "before.py")
    steps_planned = planned_steps(before["tokens_of"])
    write_plan(tmp_path / "plan.parquet", steps_planned, num_ranks=4)
    torchrun(
        "-m",
        "tests.runtime.workers.plain_loop_worker",
        str(EXAMPLE / "after.py"),
        str(tmp_path / "after"),
        num_ranks=4,
        FCP_PLAN=str(tmp_path / "plan.parquet"),
        FCP_METRICS=str(tmp_path / "run" / "metrics.jsonl"),
    )
    run, *steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (run["num_ranks"], run["steps"], [step["step"] for step in steps]) == (4, 3, [0, 1, 2])
    assert all(3.0 < step["loss"] < 6.0 and step["learning_rate"] == 1e-3 for step in steps)
    for step, planned in zip(steps, steps_planned, strict=True):
        orders = [[found["order"] for found in rank["micro_batches"]] for rank in step["ranks"]]
        assert orders == [[order for order, row in enumerate(planned) if rank in row.ranks] for rank in range(4)]
        assert step["seconds"] >= step["ranks"][0]["busy_seconds"] > 0.0
    alone = before["model"].state_dict()
    for rank in range(4):
        weights = torch.load(tmp_path / f"after.{rank}")
        assert weights.keys() == alone.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[name], rtol=0.0, atol=1e-9, msg=f"rank {rank}: {name} differs")


def planned_steps(tokens_of: Callable[[int], Any]) -> list[list[Row]]:
    """The example's global batches, its lengths, on groups of degree 1 to 4."""
    lengths = [len(tokens_of(row)) for row in range(24)]
    groups = [
        [([0, 1, 2], 3), ([3], 2), ([1, 3], 2), ([0, 2], 1)],
        [([0, 1, 2, 3], 5), ([2], 1), ([0, 3], 2)],
        [([1, 2], 4), ([0, 1, 3], 4)],
    ]
    steps, taken = [], 0
    for step in groups:
        rows = []
        for ranks, count in step:
            rows.append(Row(ranks, lengths[taken : taken + count]))
            taken += count
        steps.append(rows)
    return steps
