"""What rings in equal chunks, such as MindSpeed's, make of sequences that do not have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fcp_cli.integrations.megatron.data import LocalShard, Samples, load_shard
from tests.runtime.plans import microbatch

pytestmark = pytest.mark.torch

LENGTHS = (7, 30, 1, 12)
SAMPLES = Samples(
    dataset=[{"tokens": torch.arange(1, length + 1)} for length in LENGTHS],
    collate=lambda items: {name: tensor.unsqueeze(0) for name, tensor in items[0].items()},
    consumed=0,
)


def shards(degree: int, sequences: tuple[int, ...]) -> list[LocalShard]:
    row = replace(microbatch([LENGTHS[at] for at in sequences], range(degree)), sequences=sequences)
    return [load_shard(row, SAMPLES, rank=rank, even_chunks=True) for rank in range(degree)]


@pytest.mark.parametrize(("degree", "padded"), [(1, [8, 30, 2, 12]), (2, [8, 32, 4, 12]), (3, [12, 30, 6, 12])])
def test_each_sequence_is_padded_to_a_multiple_of_twice_the_degree_and_no_further(
    degree: int, padded: list[int]
) -> None:
    found = shards(degree, (0, 1, 2, 3))
    assert list(found[0].layout.lengths) == padded
    assert {len(shard.positions) for shard in found} == {sum(padded) // degree}
    assert sum(int(shard.is_planned.sum()) for shard in found) == sum(LENGTHS)


def test_an_idle_rank_holds_two_tokens_that_count_for_nothing() -> None:
    (shard,) = shards(1, ())
    assert len(shard.positions) == 2
    assert not shard.is_planned.any() and not shard.batch["tokens"].any()
