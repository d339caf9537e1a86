"""Values per token are put together from what ranks hold, and a rank that is wrong stops all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.step import collect, part_of
from fcp_cli.verification.emulation import Meeting, ThreadWorld, run_ranks
from tests.runtime.plans import microbatch

pytestmark = pytest.mark.torch

LENGTHS = (5, 2)
ROW = replace(microbatch(LENGTHS, (0, 1)), sequences=(7, 3))
VALUES = {7: torch.arange(5.0), 3: 10 + torch.arange(2.0)}


def collected(rank: int, meeting: Meeting, values: Tensor) -> dict[int, Tensor]:
    layout = shard_layout(LENGTHS, 2)
    return collect(ThreadWorld(meeting, rank), [(ROW, layout, rank, values)], torch.device("cpu"))


def part(rank: int) -> Tensor:
    return torch.cat([VALUES[7], VALUES[3]])[torch.from_numpy(shard_layout(LENGTHS, 2).index(rank))]


def test_every_rank_gets_whole_sequences_in_the_widest_type_that_any_has() -> None:
    kinds = (torch.float32, torch.float64)
    for found in run_ranks(2, lambda meeting, rank: collected(rank, meeting, part(rank).to(kinds[rank]))):
        assert {row: values.tolist() for row, values in found.items()} == {
            row: values.tolist() for row, values in VALUES.items()
        }
        assert {values.dtype for values in found.values()} == {torch.float64}


def test_a_rank_whose_values_do_not_fit_stops_all_of_them() -> None:
    def message(meeting: Meeting, rank: int) -> str:
        with pytest.raises(RunError) as raised:
            collected(rank, meeting, part(rank)[: 4 - 2 * rank])
        return str(raised.value)

    holds = [shard_layout(LENGTHS, 2).tokens(rank) for rank in range(2)]
    assert holds == [4, 3]
    assert run_ranks(2, message) == [
        "values of rank 1 are not one per token; its own message says which",
        "micro-batch 0 has values of the shape (2,), but this rank holds 3 of its tokens; give one value for each",
    ]


def test_experts_chosen_for_each_token_and_layer_are_handed_to_whoever_holds_the_token() -> None:
    """As routing replay needs them: Megatron's own goes by the place in a static shard."""
    routes = {
        row: torch.stack([values, -values]).T.long()[:, :, None].expand(-1, -1, 3) for row, values in VALUES.items()
    }
    layout = shard_layout(LENGTHS, 2)
    for rank in range(2):
        found = part_of(routes, ROW, layout, rank)
        assert found.shape == (1, layout.tokens(rank), 2, 3)
        assert found[0, :, 0, 0].tolist() == (-found[0, :, 1, 2]).tolist() == part(rank).tolist()
    short = replace(ROW, sequences=(3,), lengths=(2,), ranks=(0, 1, 2))
    idle = part_of(routes, short, shard_layout((2,), 3), 2)
    assert idle.dtype == torch.int64 and not idle.any()
    assert idle.shape[2:] == (2, 3)
