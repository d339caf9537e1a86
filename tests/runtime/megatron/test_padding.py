"""What a rank really holds with rings of equal chunks, and whether its plan has counted that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fcp_cli.integrations.megatron.data import TOKENS, Samples, load_shard, padding_report
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import padding_multiple
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from tests.planning.examples import example_problem, table_of

pytestmark = pytest.mark.torch

BUDGET = 96
LENGTHS = [383, 250, 111, 97, *[1 + 7 * n % 61 for n in range(36)]]


def planned(path: Path, *, padded_for: int | None, sync: Sync = "iteration") -> PlanReader:
    """A plan on four ranks that counts the padding for so many tensor-parallel devices, or none."""
    make_plan(
        path,
        PlanInputs(
            table=table_of(LENGTHS),
            problem=example_problem(
                sync,
                num_ranks=4,
                tokens_per_rank=BUDGET,
                padding_multiple=None if padded_for is None else padding_multiple(padded_for),
            ),
            settings=BatchSettings(global_batch_size=len(LENGTHS), shuffle=False),
            request=PlanRequest(solver="fcp-paper"),
        ),
    )
    return PlanReader(path)


def most_held(reader: PlanReader, *, tensor_parallel: int) -> int:
    """Tokens of the largest shard that Megatron's ranks would load."""
    items = [{TOKENS: torch.zeros(length, dtype=torch.int64)} for length in LENGTHS]
    samples = Samples(dataset=items, collate=lambda shards: shards[0], consumed=0)
    return max(
        int(load_shard(row, samples, rank=rank, multiple=tensor_parallel, even_chunks=True).positions.shape[0])
        for step in reader.steps()
        for row in step.microbatches()
        for rank in row.ranks
    )


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_with_a_padded_plan_no_rank_holds_more_than_its_budget(
    tmp_path: Path, sync: Sync, tensor_parallel: int
) -> None:
    reader = planned(tmp_path / "plan.parquet", padded_for=tensor_parallel, sync=sync)
    assert most_held(reader, tensor_parallel=tensor_parallel) <= BUDGET
    assert "padding, which the plan counts" in padding_report(
        reader.path, reader.metadata, tensor_parallel=tensor_parallel
    )
    assert most_held(reader, tensor_parallel=1) <= BUDGET, "less padding than was planned for fits, too"


def test_a_plan_that_does_not_count_the_padding_may_not_hold_it_and_names_the_flag(tmp_path: Path) -> None:
    reader = planned(tmp_path / "plan.parquet", padded_for=None)
    assert most_held(reader, tensor_parallel=2) > BUDGET
    report = padding_report(reader.path, reader.metadata, tensor_parallel=2)
    assert report.endswith(
        "% padding, which the plan does not count ('fcp plan --padded-rings --tensor-parallel 2' does)"
    )
    padded_for_one = planned(tmp_path / "one.parquet", padded_for=1)
    report = padding_report(padded_for_one.path, padded_for_one.metadata, tensor_parallel=2)
    assert "which the plan does not count" in report
