"""The compiled price of a pack is the cost model's to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.model import Work, group_seconds, window_work
from fcp_cli.cost.profile import Heads
from fcp_cli.planning.compiled import core
from fcp_cli.planning.kernel_inputs import in_batch_order, planner_inputs
from fcp_cli.planning.problem import Problem, work_on
from tests.planning.examples import example_problem

seconds = st.floats(0.0, 1e3)


@st.composite
def packs(draw: st.DrawFn) -> tuple[Problem, Work, int, bool]:
    """A problem, a pack, and the group that runs it."""
    degree, multiple = draw(st.integers(1, 2_000)), draw(st.sampled_from([None, 2, 16]))
    problem = example_problem(padding_multiple=multiple, num_ranks=max(16, degree))
    coefficients = replace(
        problem.profile.coefficients,
        ring_bytes_per_token=draw(st.floats(1.0, 1e7)),
        microbatch_seconds=draw(st.floats(0.0, 1.0)),
        ring_hop_seconds=draw(st.floats(0.0, 1.0)),
        exposed_ring_share=draw(st.floats(0.0, 1.0)),
        chunk_seconds_per_token=draw(st.floats(0.0, 1e-3)),
        last_hop_seconds=draw(st.floats(0.0, 1.0)),
        host_microbatch_seconds=draw(st.sampled_from([0.0, 1.0, 100.0, 1000.0])),
        host_hop_seconds=draw(st.floats(0.0, 1.0)),
        host_last_hop_seconds=draw(st.floats(0.0, 1.0)),
        host_halo_message_seconds=draw(st.floats(0.0, 1.0)),
    )
    coefficients = replace(
        coefficients,
        last_hop_bytes_per_token=draw(st.floats(0.0, 1.0)) * coefficients.ring_bytes_per_token,
        halo_bytes_per_token=draw(st.sampled_from([0.0, 1e5])),
        halo_message_seconds=draw(st.floats(0.0, 1.0)),
        window_seconds_per_token2=draw(st.floats(0.0, 1e-6)),
        window_tokens=float(draw(st.sampled_from([1, 128, 1024, 1 << 40]))),
    )
    speeds = st.floats(1e6, 1e12)
    bandwidth = replace(problem.profile.bandwidth, intra_node=draw(speeds), inter_node=draw(speeds))
    heads = Heads(
        query_heads=32,
        key_value_heads=draw(st.sampled_from([1, 4, 8])),
        exchange_bytes_per_token=draw(st.floats(1.0, 1e7)),
        key_value_exchange_bytes_per_token=draw(st.floats(1.0, 1e7)),
        exchange_seconds=draw(st.floats(0.0, 1.0)),
        host_exchange_seconds=draw(st.floats(0.0, 1.0)),
    )
    profile = replace(problem.profile, coefficients=coefficients, bandwidth=bandwidth, heads=heads)
    problem = replace(problem, profile=profile, attention=draw(st.sampled_from([None, "ulysses", "2d"])))
    work = Work(
        attention_seconds=np.array([draw(seconds)]),
        linear_seconds=np.array([draw(seconds)]),
        # A batch's work is padded for single ranks from the start, see `batches.batch_of`.
        tokens=np.array([draw(st.integers(1, degree * problem.tokens_per_rank // (multiple or 1))) * (multiple or 1)]),
    )
    if coefficients.halo_bytes_per_token:
        work = replace(work, windows=window_work(work.tokens, coefficients))
    return problem, work, degree, draw(st.booleans())


def across_of(crosses: bool) -> int:
    """Ranks of the group on each node, times some number; 0 inside a node."""
    return int(crosses) and 4


def quickest_on_arrays(problem: Problem, padded: Work, degree: int, crosses: bool) -> float:
    """Seconds of the quickest way to run a pack, by `group_seconds`."""
    across = across_of(crosses)
    assert problem.profile.heads is not None
    splits = problem.profile.heads.degrees(
        problem.num_ranks if problem.attention == "ulysses" else problem.ranks_per_node
    )

    def seconds(heads_degree: int) -> float:
        return float(
            group_seconds(
                problem.profile,
                padded,
                degree=degree,
                crosses_nodes=crosses,
                heads_degree=heads_degree,
                sets_cross_nodes=heads_degree > problem.ranks_per_node or across % heads_degree != 0,
            )[0]
        )

    if problem.attention is None or degree == 1:
        return seconds(1)
    if problem.attention == "ulysses":
        return seconds(degree) if degree in splits else np.inf
    return min(seconds(u) for u in (1, *splits) if degree % u == 0 and (across == 0 or across % u == 0))


@pytest.mark.lengthy
@settings(max_examples=200)
@given(pack=packs())
def test_the_compiled_price_of_a_pack_is_the_cost_models_to_the_last_bit(pack: tuple[Problem, Work, int, bool]) -> None:
    problem, work, degree, crosses = pack
    machine, padded = planner_inputs(problem), work_on(work, degree, problem)

    load = core.sequence_load(0, in_batch_order(padded), machine)

    expected = quickest_on_arrays(problem, padded, degree, crosses)
    assert core.pack_seconds(load, degree, across_of(crosses), machine) == expected


@pytest.mark.lengthy
@settings(max_examples=200)
@given(pack=packs())
def test_the_compiled_search_pads_as_the_cost_model_does(pack: tuple[Problem, Work, int, bool]) -> None:
    problem, work, degree, _crosses = pack

    load, expected = (
        core.padded_load(0, degree, in_batch_order(work), planner_inputs(problem)),
        work_on(work, degree, problem),
    )

    assert load.tokens == expected.tokens[0]
    assert load.attention == expected.attention_seconds[0]
    # Padding tokens in windows are added in another order.
    assert load.linear == pytest.approx(expected.unhidden_seconds[0], rel=4 * np.finfo(np.float64).eps)
