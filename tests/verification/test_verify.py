"""`fcp verify`: that it passes on good plans is little; that it fails on a broken runtime is the point."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from fcp_cli.cli.app import app
from fcp_cli.errors import PlanError, RunError
from fcp_cli.plan.metadata import planned_masks
from fcp_cli.runtime import gradients, loader, rows
from fcp_cli.runtime import loss as loss
from fcp_cli.util.masks import MaskKind, MaskRows
from fcp_cli.verification import verify as verify_module
from fcp_cli.verification.emulation import Meeting, ThreadWorld, run_ranks
from fcp_cli.verification.verify import verify
from tests.runtime.plans import Row, random_steps, write_plan

pytestmark = pytest.mark.torch

STEPS = [
    [Row([0, 1, 2], [300, 17]), Row([3], [40]), Row([0, 2], [90]), Row([1, 3], [1, 2, 3])],
    [Row([0, 1, 2, 3], [600]), Row([2], [10, 12])],
]


MASK_NUMBERS: dict[MaskKind, list[list[int]]] = {
    "full": [[]] * 6,
    "prefix": [[50], [], [7], [60], [1], [4]],
    "segments": [[3, 20, 21, 60], [], [0, 40], [8, 30], [], [2, 4]],
    "pairs": [[20, 20], [], [5, 5, 10], [30], [], [2, 3]],
}


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate even few ranks in this process, where its functions can be broken."""
    monkeypatch.setattr(verify_module, "MOST_PROCESSES", 0)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "plan.parquet", STEPS, num_ranks=4)


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_jobs")
def test_a_plan_for_few_ranks_is_replayed_by_processes(plan: Path) -> None:
    verification = verify(plan, num_steps=1, max_length=60)
    assert verification.passed
    assert verification.ranks_are == "processes"
    (step,) = verification.steps
    assert (step.microbatches, step.largest_degree, step.tokens) == (4, 3, 59 + 3 + 7 + 17 + 3)


@pytest.mark.usefixtures("on_threads")
def test_a_plan_whose_groups_share_heads_is_replayed_with_heads_that_they_can_share(tmp_path: Path) -> None:
    rows = [Row([0, 1, 2], [60, 17], heads_degree=3), Row([0, 1, 2, 3], [31], heads_degree=2), Row([3], [9])]
    plan = write_plan(tmp_path / "plan.parquet", [rows], num_ranks=4)
    assert verify(plan).passed


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("most", [40, 80])
def test_plans_of_masked_sequences_are_replayed_with_their_masks(tmp_path: Path, most: int) -> None:
    rows = [Row([0, 1, 2], [80, 17]), Row([3], [40]), Row([0, 2], [60]), Row([1, 3], [9, 10])]
    for kind, numbers in MASK_NUMBERS.items():
        offsets = np.cumsum([0, *map(len, numbers)])
        masks = MaskRows(kind, offsets, np.array([one for row in numbers for one in row]))
        plan = write_plan(
            tmp_path / "plan.parquet", [rows], num_ranks=4, rows=6, masked_sequences=6, masks=planned_masks(masks)
        )
        verification = verify(plan, max_length=most)
        assert verification.passed
        (step,) = verification.steps
        causal = verify(write_plan(tmp_path / "causal.parquet", [rows], num_ranks=4), max_length=most)
        assert abs(step.loss - causal.steps[0].loss) > 1e-6, kind


@pytest.mark.usefixtures("on_threads")
def test_lengths_are_scaled_by_one_factor_and_keep_a_token(plan: Path) -> None:
    verification = verify(plan, max_length=60)
    assert verification.passed
    assert (verification.scale, verification.longest_tokens) == (0.1, 59)
    assert [step.tokens for step in verification.steps] == [29 + 1 + 3 + 9 + 1 + 1 + 1, 59 + 1 + 1]


@pytest.mark.usefixtures("on_threads")
def test_short_lengths_stay_as_they_are(plan: Path) -> None:
    verification = verify(plan, first_step=1, max_length=600)
    assert (verification.scale, [step.step for step in verification.steps]) == (1.0, [1])


def test_many_ranks_are_threads(tmp_path: Path) -> None:
    steps = random_steps(24, 2, sync="microbatch", seed=2)
    plan = write_plan(tmp_path / "p", steps, num_ranks=24, sync="microbatch")
    verification = verify(plan)
    assert verification.passed
    assert verification.ranks_are == "threads"


def forgets_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions counted within the shard instead of within the sequence."""
    monkeypatch.setattr(loader, "_position_ids", lambda *given: torch.arange(len(given[-1]))[None])


def shifts_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that are off by one."""
    original = loss.next_token_labels
    monkeypatch.setattr(loader, "next_token_labels", lambda tokens: original(tokens).roll(1))


def forgets_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are not summed over ranks."""
    monkeypatch.setattr(gradients.PlainSync, "reduce", lambda sync: None)


def merges_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that gives the keys of other ranks too much weight, in the sixth digit."""
    original: Callable[..., None] = rows.merge

    def merge(*arguments: Any) -> None:
        *places, part, part_lse = arguments
        original(*places, part * (1 + 1e-6), part_lse)

    monkeypatch.setattr("fcp_cli.runtime.ring_passes.merge", merge)


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("break_it", [forgets_positions, shifts_labels, forgets_a_rank, merges_wrong])
def test_a_broken_runtime_fails(
    plan: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_it(monkeypatch)
    assert not verify(plan, num_steps=1, max_length=60).passed


@pytest.mark.usefixtures("on_threads")
def test_an_order_that_could_deadlock_fails(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(operations: object) -> None:
        raise RunError("deadlock: rank 1 waits forever")

    monkeypatch.setattr(verify_module, "check_order", fault)
    verification = verify(plan, num_steps=1, max_length=60)
    assert not verification.passed
    assert verification.order_fault == "deadlock: rank 1 waits forever"


def test_more_ranks_than_can_be_emulated_are_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", [[Row(range(513), [1000])]], num_ranks=513)
    with pytest.raises(RunError, match="has 513 ranks; up to 512 can be emulated"):
        verify(plan)


def test_steps_beyond_the_plan_are_refused(plan: Path) -> None:
    with pytest.raises(RunError, match="ends after step 1: there is none from step 2 on"):
        verify(plan, first_step=2)


def test_an_edited_plan_is_refused(plan: Path) -> None:
    table = pq.read_table(plan)
    pq.write_table(table.slice(0, len(table) - 1), plan)
    with pytest.raises(
        PlanError, match="was edited: its content does not match its plan hash; make it again with: fcp "
    ):
        verify(plan)


@pytest.mark.usefixtures("on_threads")
def test_the_command_prints_a_table_and_one_json_document(plan: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["verify", str(plan), "--max-length", "30"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert "4 ranks as threads" in shown.stdout
    assert "lengths scaled by 0.05 to at most 29 tokens" in shown.stdout.replace("\n", " ")
    assert "passed: differences up to 1e-12 are allowed" in shown.stdout
    assert max(map(len, shown.stdout.splitlines()[1:-1])) <= 80
    document = json.loads(runner.invoke(app, ["verify", "--plan", str(plan), "--max-length", "30", "--json"]).stdout)
    assert document["passed"] is True
    assert [step["step"] for step in document["steps"]] == [0, 1]


def test_two_plans_are_refused() -> None:
    shown = CliRunner().invoke(app, ["verify", "a.parquet", "--plan", "b.parquet"])
    assert "two plans are given, a.parquet and --plan b.parquet; give one" in str(shown.exception)


@pytest.mark.usefixtures("on_threads")
def test_the_command_fails_with_status_1_and_shows_where(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_positions(monkeypatch)
    shown = CliRunner().invoke(app, ["verify", "--plan", str(plan), "--max-length", "30"])
    assert shown.exit_code == 1
    assert "differs" in shown.stdout
    assert "FAILED" in shown.stdout


def test_threads_sum_and_broadcast_like_process_groups() -> None:
    def run(meeting: Meeting, rank: int) -> tuple[float, float]:
        world = ThreadWorld(meeting, rank)
        total, first = torch.tensor(float(rank)), torch.tensor(float(rank + 7))
        world.all_reduce_sum(total)
        world.broadcast(first)
        return float(total), float(first)

    assert run_ranks(5, run) == [(10.0, 7.0)] * 5


def test_a_failing_rank_releases_the_others_and_is_the_one_reported() -> None:
    def run(meeting: Meeting, rank: int) -> None:
        if rank == 3:
            raise RunError("rank 3 has no data")
        ThreadWorld(meeting, rank).all_reduce_sum(torch.zeros(1))

    with pytest.raises(RunError, match="rank 3 has no data"):
        run_ranks(4, run)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
