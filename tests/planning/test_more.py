"""More of anything never makes a plan slower by more than 0.5 %: no cliffs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import FAMILIES, HELD_OUT, example_profile, lengths
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.problem import Problem
from fcp_cli.util.arrays import IntArray
from tests.planning.examples import table_of


def _quicker_network(problem: Problem, intra: float, inter: float) -> Problem:
    network = problem.profile.bandwidth
    network = replace(network, intra_node=intra * network.intra_node, inter_node=inter * network.inter_node)
    return replace(problem, profile=replace(problem.profile, bandwidth=network))


def _more(problem: Problem) -> Mapping[str, Problem]:
    ranks, tokens = problem.num_ranks, problem.tokens_per_rank
    return {
        "a rank": replace(problem, num_ranks=ranks + 1),
        "a node": replace(problem, num_ranks=ranks + problem.ranks_per_node),
        "twice the ranks": replace(problem, num_ranks=2 * ranks),
        "a quarter more tokens": replace(problem, tokens_per_rank=tokens * 5 // 4),
        "twice the tokens": replace(problem, tokens_per_rank=2 * tokens),
        "a quicker network inside nodes": _quicker_network(problem, 2.0, 1.0),
        "a quicker network between nodes": _quicker_network(problem, 1.0, 2.0),
    }


def _seconds(problem: Problem, drawn: IntArray) -> float:
    batch = batch_of(table_of(drawn.tolist()), problem)
    return makespan_seconds(solver_of(problem).assign(batch), batch, problem)


_MOST_SLOWER: Final = 1.005


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=60)
@given(data=st.data())
def test_more_of_anything_does_not_make_a_plan_slower(sync: Sync, data: st.DataObject) -> None:
    ranks, budget = data.draw(st.sampled_from([2, 4, 6, 8, 12, 16, 24])), data.draw(st.sampled_from([4096, 16_384]))
    profile = example_profile()
    coefficients = replace(
        profile.coefficients,
        attention_seconds_per_token2=data.draw(st.sampled_from([6.451e-10, 6.451e-9, 6.451e-8]), label="attention"),
        microbatch_seconds=data.draw(st.sampled_from([0.01, 0.1, 1.0]), label="beta"),
    )
    problem = Problem(
        num_ranks=ranks,
        ranks_per_node=data.draw(st.sampled_from([2, 4, 8]), label="ranks_per_node"),
        tokens_per_rank=budget,
        sync=sync,
        profile=replace(profile, coefficients=coefficients),
    )
    family = data.draw(st.sampled_from([*FAMILIES, *HELD_OUT]), label="family")
    sequences = ranks * data.draw(st.sampled_from([1, 2, 4]), label="sequences a rank")
    drawn = lengths(family, sequences=sequences, seed=data.draw(st.integers(0, 9), label="seed"))
    drawn = np.minimum(drawn // data.draw(st.sampled_from([1, 2, 4]), label="shortened"), ranks * budget)
    name, more = data.draw(st.sampled_from(list(_more(problem).items())), label="more of")
    assert _seconds(more, drawn) <= _MOST_SLOWER * _seconds(problem, drawn), name
