from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.model import Work, group_seconds
from fcp_cli.planning.bounds import abreast_bound_seconds, area_bound_seconds, longest_sequence_bound_seconds
from fcp_cli.planning.problem import Problem
from tests.planning.examples import example_problem


def longest_by_hand(work: Work, problem: Problem) -> float:
    longest = 0.0
    for i, tokens in enumerate(work.tokens):
        feasible = [d for d in range(1, problem.num_ranks + 1) if tokens <= problem.tokens_per_rank * d]
        seconds = [
            group_seconds(
                problem.profile,
                work.take(np.array([i])),
                degree=d,
                crosses_nodes=d > problem.ranks_per_node,
            ).item()
            for d in feasible
        ]
        longest = max(longest, min(seconds))
    return longest


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 16 * 16384), min_size=1, max_size=80),
    eta=st.floats(0, 1),
    vision_seconds=st.floats(0, 20),
)
def test_the_longest_sequence_bound_is_exact(lengths: list[int], eta: float, vision_seconds: float) -> None:
    problem = example_problem()
    tokens = np.array(lengths, dtype=np.int64)
    factor = np.where(np.arange(len(tokens)) % 2, 1 + eta, 1.0)
    work = Work(
        attention_seconds=6.451e-9 * factor * tokens.astype(float) ** 2,
        linear_seconds=2.838e-4 * tokens + vision_seconds * (np.arange(len(tokens)) % 3 == 0),
        tokens=tokens,
    )
    assert longest_sequence_bound_seconds(work, problem) == pytest.approx(longest_by_hand(work, problem), rel=1e-12)


def test_the_area_bound_charges_one_microbatch_per_budget_of_tokens() -> None:
    problem = example_problem(num_ranks=2, tokens_per_rank=100)
    work = Work(
        attention_seconds=np.array([1.0, 2.0]), linear_seconds=np.array([3.0, 4.0]), tokens=np.array([250, 250])
    )
    assert area_bound_seconds(work, problem) == pytest.approx(10.0 / 2 + 0.1 * 2.5)


def test_the_area_bound_charges_every_rank_one_microbatch() -> None:
    problem = example_problem(num_ranks=2, tokens_per_rank=100)
    work = Work(attention_seconds=np.array([1.0]), linear_seconds=np.array([3.0]), tokens=np.array([20]))
    assert area_bound_seconds(work, problem) == pytest.approx(4.0 / 2 + 0.1)


def test_sequences_that_only_fit_one_by_one_follow_each_other() -> None:
    problem = example_problem(num_ranks=2, ranks_per_node=2, tokens_per_rank=1000)
    lengths = np.array([1900, 1500, 1200, 100])
    work = Work(attention_seconds=1e-6 * lengths**2, linear_seconds=1e-3 * lengths, tokens=lengths)
    alone = [longest_by_hand(work.take(np.array([i])), problem) for i in range(3)]
    assert abreast_bound_seconds(work, problem) == pytest.approx(sum(alone))


def test_sequences_of_which_three_fit_side_by_side_take_a_third_of_their_times() -> None:
    problem = example_problem(num_ranks=4, ranks_per_node=4, tokens_per_rank=1000)
    lengths = np.full(9, 1100)
    work = Work(attention_seconds=1e-6 * lengths**2, linear_seconds=1e-3 * lengths, tokens=lengths)
    assert abreast_bound_seconds(work, problem) == pytest.approx(3 * longest_by_hand(work, problem))
