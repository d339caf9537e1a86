"""A plan for what a run has left, on other ranks: the same batches, no sequence lost or repeated, and a proof of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.errors import OverlongError, PlanError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import pack_rows, unpack_rows
from fcp_cli.planning.batches import BatchSettings, settings_of
from fcp_cli.planning.continuation import remaining_steps, resolve_continuation
from fcp_cli.planning.encoder_balance import set_aside
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runs.trained_run import TrainedRun
from fcp_cli.util.console import Assumptions
from tests.plan.plans import rewritten, small_plan
from tests.planning.examples import example_problem, long_tail

TABLE = long_tail(60)


def continued(
    plan: Path, first_step: int, *, num_ranks: int = 12, tokens_per_rank: int = 8704, table: LengthTable = TABLE
) -> Path:
    """A plan for the steps of `plan` from `first_step` on."""
    reader = PlanReader(plan)
    path = plan.with_name(f"{plan.stem}-from-{first_step}.parquet")
    make_plan(
        path,
        PlanInputs(
            table=table,
            problem=example_problem(reader.metadata.sync, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank),
            settings=settings_of(reader.metadata),
            remaining=remaining_steps(reader, first_step),
            request=PlanRequest(solver="fcp-paper"),
        ),
    )
    return path


def batches_of(plan: Path) -> dict[int, list[int]]:
    """The sequences of every step."""
    return {step.step: sorted(step.sequences.tolist()) for step in PlanReader(plan).steps()}


@pytest.mark.lengthy
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("first_step", [1, 3, 4, 7])  # 4 steps an epoch: inside the first, its end, inside the second
def test_what_is_left_keeps_its_batches_and_step_numbers(tmp_path: Path, sync: Any, first_step: int) -> None:
    plan = small_plan(tmp_path / "plan.parquet", sync, table=TABLE)
    rest = continued(plan, first_step)
    whole = batches_of(plan)
    assert batches_of(rest) == {step: rows for step, rows in whole.items() if step >= first_step}
    assert list(check_plan(rest, manifest=TABLE)) == []
    assert list(check_plan(rest)) == []
    metadata = PlanReader(rest).metadata
    assert (metadata.first_step, metadata.steps, metadata.end_step) == (first_step, 8 - first_step, 8)
    assert metadata.continues is not None
    assert metadata.continues.plan_hash == PlanReader(plan).metadata.plan_hash


def test_that_ranks_no_longer_encode_alone_is_said(tmp_path: Path) -> None:
    manifest, plan = tmp_path / "lengths.parquet", tmp_path / "plan.parquet"
    pq.write_table(pa.table({"length": TABLE.length_tokens, "vision_patches": TABLE.length_tokens}), manifest)
    table, assumptions = read_manifest(manifest), Assumptions()
    inputs = PlanInputs(
        table=table,
        problem=set_aside(example_problem("microbatch"), 2),
        settings=BatchSettings(global_batch_size=15),
        request=PlanRequest(solver="static"),
    )
    make_plan(plan, inputs)
    run = TrainedRun(plan=plan, first_step=1, manifest=manifest, length_column="length", model="")
    rest = resolve_continuation(PlanRequest(ranks=12), run, assumptions)
    assert (rest.problem.num_ranks, rest.problem.encoder_ranks, rest.problem.encoder_balance) == (12, None, "wave")
    assert assumptions.assumed["--encoder-ranks"] == "none (the run had 2; now all ranks encode)"


def test_a_continuation_can_be_continued(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet", table=TABLE)
    again = continued(continued(plan, 2), 3, num_ranks=16)
    assert batches_of(again) == {step: rows for step, rows in batches_of(plan).items() if step >= 3}
    assert list(check_plan(again, manifest=TABLE)) == []


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "settings",
    [
        {"overlong": "drop", "max_length": 20_000},
        {"overlong": "truncate", "max_length": 20_000},
        {"last_batch": "drop"},
        {"step_limit": 6},
    ],
)
def test_what_the_run_did_about_its_sequences_holds_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    plan = small_plan(tmp_path / "plan.parquet", table=TABLE, **settings)
    rest = continued(plan, 2)
    assert batches_of(rest) == {step: rows for step, rows in batches_of(plan).items() if step >= 2}
    assert list(check_plan(rest, manifest=TABLE)) == []


def test_a_sequence_that_was_trained_before_is_found(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet", table=TABLE)
    rest = continued(plan, 2)
    trained = batches_of(plan)[0][0]

    def repeat(columns: dict[str, list[Any]]) -> None:
        columns["sequences"][0][0] = trained

    findings = [str(finding) for finding in check_plan(rewritten(rest, edit=repeat))]
    assert f"step 2: sequence {trained} appears again in its epoch" in findings


def test_a_mask_that_hides_a_loss_is_found(tmp_path: Path) -> None:
    rest = continued(small_plan(tmp_path / "plan.parquet", table=TABLE), 2)
    continues = PlanReader(rest).metadata.continues
    assert continues is not None
    mask = unpack_rows(continues.trained, len(TABLE))
    mask[np.flatnonzero(mask)[0]] = False
    forged = rewritten(rest, continues=replace(continues, trained=pack_rows(mask)))
    assert [str(finding) for finding in check_plan(forged)] == [
        "it continues from step 2 with 39 sequences of the epoch trained, where 40 are due"
    ]


def test_the_continuation_is_under_the_hash(tmp_path: Path) -> None:
    rest = continued(small_plan(tmp_path / "plan.parquet", table=TABLE), 2)
    continues = PlanReader(rest).metadata.continues
    assert continues is not None
    forged = rewritten(rest, rehash=False, continues=replace(continues, plan_hash="0" * 64))
    assert "does not have the hash" in str(next(check_plan(forged)))


def test_a_plan_of_all_steps_keeps_the_metadata_and_the_hash_that_it_always_had(tmp_path: Path) -> None:
    metadata = PlanReader(small_plan(tmp_path / "plan.parquet", table=TABLE)).metadata
    assert b"continues" not in metadata.hashed_json()
    assert "continues" not in metadata.to_json()
    assert '"format": "fcp-plan/1"' in metadata.to_json()


def test_a_plan_that_continues_says_so_in_a_key_that_readers_must_know(tmp_path: Path) -> None:
    metadata = PlanReader(continued(small_plan(tmp_path / "plan.parquet", table=TABLE), 2)).metadata
    assert '"format": "fcp-plan/1"' in metadata.to_json()
    assert '"continues": {' in metadata.to_json()


def test_a_damaged_mask_is_one_line(tmp_path: Path) -> None:
    rest = continued(small_plan(tmp_path / "plan.parquet", table=TABLE), 2)
    continues = PlanReader(rest).metadata.continues
    assert continues is not None
    damaged = rewritten(rest, continues=replace(continues, trained="AAAA"))
    with pytest.raises(PlanError, match=r"the plan's metadata is damaged: continues.trained is no mask of 63 rows: .*"):
        PlanReader(damaged)


def test_ranks_too_few_for_what_is_left_are_told_how_many_it_takes(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet", table=TABLE)
    with pytest.raises(OverlongError) as error:
        continued(plan, 2, num_ranks=4, tokens_per_rank=8192)
    assert str(error.value) == (
        "lengths.parquet: row 62 (100000 tokens) is still to be trained, but 4 ranks of 8192 tokens hold at most "
        "32768; give --tokens-per-rank 25000, or at least 13 --ranks"
    )
    assert not list(tmp_path.glob("*from*"))
