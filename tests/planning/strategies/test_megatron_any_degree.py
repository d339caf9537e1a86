"""The cases are those that the pull request's own tests print, of its scheduler without knowledge of the network."""

from __future__ import annotations

import pytest

from fcp_cli.planning.strategies.megatron_packing import DOUBLINGS, EVERY, Degrees, packed_rounds

both_readings = pytest.mark.parametrize("degrees", [DOUBLINGS, EVERY], ids=["doublings", "every"])


def _groups(
    lengths: list[int], degrees: Degrees, *, num_ranks: int, tokens_per_rank: int
) -> list[list[tuple[int, list[int]]]]:
    rounds = packed_rounds(lengths, max_tokens_per_rank=tokens_per_rank, num_ranks=num_ranks, degrees=degrees)
    return [[(group.degree, group.sequences) for group in groups] for groups in rounds]


@both_readings
@pytest.mark.parametrize("degree", range(1, 17))
def test_a_sequence_runs_on_any_degree_that_it_needs(degrees: Degrees, degree: int) -> None:
    assert _groups([128 * degree], degrees, num_ranks=degree, tokens_per_rank=128) == [[(degree, [0])]]


@both_readings
def test_five_ranks_and_a_tail_of_three_fill_eight(degrees: Degrees) -> None:
    assert _groups([2304, 1408], degrees, num_ranks=8, tokens_per_rank=512) == [[(5, [0]), (3, [1])]]


def test_two_ranks_that_no_doubling_can_take_put_three_sequences_on_one_group_of_eight() -> None:
    assert _groups([8193] * 3, DOUBLINGS, num_ranks=8, tokens_per_rank=4096) == [[(8, [0, 1, 2])]]


def test_groups_that_may_grow_by_one_rank_take_them() -> None:
    assert _groups([8193] * 3, EVERY, num_ranks=8, tokens_per_rank=4096) == [[(4, [0]), (4, [1])], [(8, [2])]]
