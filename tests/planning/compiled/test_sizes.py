"""Steps at the limits of the compiled arrays: no ring, slot, gap or wave is written where there is no room for it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.compiled.room_tree import make_tree, set_room
from fcp_cli.util.arrays import IntArray
from tests.planning.examples import example_problem, first_step, one_batch, table_of

SYNCS = pytest.mark.parametrize("sync", ["iteration", "microbatch"])
PRIMES = (2, 7, 61, 127, 509)


def planned(
    lengths: IntArray | list[int], sync: Sync, *, num_ranks: int, tokens_per_rank: int, ranks_per_node: int = 8
) -> StepPlan:
    problem = example_problem(sync, num_ranks=num_ranks, ranks_per_node=ranks_per_node, tokens_per_rank=tokens_per_rank)
    return first_step(one_batch(table_of(np.asarray(lengths).tolist()), problem))


@pytest.mark.boundscheck
@SYNCS
@settings(max_examples=25)
@given(data=st.data())
def test_many_ranks_with_tiny_budgets_get_a_legal_plan(sync: Sync, data: st.DataObject) -> None:
    num_ranks = data.draw(st.one_of(st.sampled_from(PRIMES), st.integers(1, 600)), label="num_ranks")
    tokens_per_rank = data.draw(st.sampled_from([1, 2, 16]), label="tokens_per_rank")
    most = num_ranks * tokens_per_rank
    kinds = {
        "any": st.integers(1, most),
        "single ranks": st.integers(1, tokens_per_rank),
        "the most": st.just(most),
        "just over half": st.just(most // 2 + 1),
        "mixed": st.sampled_from([1, tokens_per_rank, most]),
    }
    length = kinds[data.draw(st.sampled_from(sorted(kinds)), label="kind")]
    lengths = data.draw(st.lists(length, min_size=1, max_size=30), label="lengths")
    ranks_per_node = data.draw(st.sampled_from([1, 2, 7, 8, 64]), label="ranks_per_node")
    step = planned(lengths, sync, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, ranks_per_node=ranks_per_node)
    assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9)


@pytest.mark.boundscheck
@SYNCS
@pytest.mark.parametrize("num_ranks", PRIMES)
def test_a_step_of_the_longest_possible_sequences_runs_them_one_after_the_other(sync: Sync, num_ranks: int) -> None:
    step = planned([2 * num_ranks] * 40, sync, num_ranks=num_ranks, tokens_per_rank=2)
    assert len(step.ranks) == 40 * num_ranks


@pytest.mark.boundscheck
@SYNCS
def test_one_sequence_is_a_step(sync: Sync) -> None:
    assert len(planned([1], sync, num_ranks=1, tokens_per_rank=1)) == 1
    assert len(planned([1], sync, num_ranks=509, tokens_per_rank=1).sequences) == 1


@pytest.mark.lengthy
@pytest.mark.boundscheck
@SYNCS
def test_a_hundred_thousand_sequences_are_one_step(sync: Sync) -> None:
    lengths = np.full(100_000, 16)
    lengths[::10_000] = 3000
    step = planned(lengths, sync, num_ranks=509, tokens_per_rank=2048)
    assert len(step.sequences) == 100_000


@pytest.mark.lengthy
def test_more_ranks_in_rings_than_a_step_began_with_space_for_are_planned() -> None:
    # 4.5 million ranks of rings: more than the fixed array that once held them.
    step = planned([4096 * 16] * 1100, "iteration", num_ranks=4096, tokens_per_rank=16)
    assert len(step.ranks) == 1100 * 4096


@pytest.mark.boundscheck
def test_an_index_beyond_an_array_is_an_error_where_bounds_are_checked() -> None:
    if os.environ.get("NUMBA_BOUNDSCHECK") != "1":
        pytest.skip("only under NUMBA_BOUNDSCHECK=1")
    with pytest.raises(IndexError):
        set_room(make_tree(4), 99, 1.0, 1)
