"""The compiled packers of the static degrees pack as the plain ones do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.planning.compiled.core import Sequences
from fcp_cli.planning.compiled.static_schedules import even_count, even_packs, full_packs, level_packs, longest_first
from fcp_cli.planning.drafts import first_fit_decreasing, spread_evenly
from fcp_cli.planning.kernel_inputs import planner_inputs
from tests.planning.test_solver import a_problem


def of_lengths(lengths: list[int]) -> Sequences:
    tokens = np.array(lengths, dtype=np.int64)
    work = tokens.astype(np.float64)
    return Sequences(attention=np.zeros_like(work), linear=work, work=work, tokens=tokens)


lists_of_lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@pytest.mark.lengthy
@pytest.mark.boundscheck
@settings(max_examples=50)
@given(lengths=lists_of_lengths, group_tokens=st.integers(1000, 4000))
def test_full_packs_are_first_fit_decreasing(lengths: list[int], group_tokens: int) -> None:
    sequences = of_lengths(lengths)
    pack_of, packs = full_packs(group_tokens, longest_first(sequences), sequences)
    expected = first_fit_decreasing(sequences.tokens, group_tokens)
    assert pack_of.tolist() == expected.tolist()
    assert packs == expected.max() + 1


@pytest.mark.boundscheck
@settings(max_examples=50)
@given(lengths=lists_of_lengths, packs=st.integers(1, 20), group_tokens=st.integers(1000, 4000))
def test_even_packs_have_like_tokens_or_are_refused(lengths: list[int], packs: int, group_tokens: int) -> None:
    sequences = of_lengths(lengths)
    pack_of, found = even_packs(packs, group_tokens, longest_first(sequences), sequences)
    expected = spread_evenly(sequences.tokens, packs)
    if np.bincount(expected, weights=sequences.tokens).max() > group_tokens:
        assert found == 0
    else:
        assert pack_of.tolist() == expected.tolist()
        assert found == len(np.unique(expected))


def test_every_group_gets_the_same_number_of_even_packs() -> None:
    assert [even_count(packs, 4) for packs in (1, 4, 5)] == [4, 4, 8]


@pytest.mark.lengthy
@pytest.mark.boundscheck
@settings(max_examples=50)
@given(lengths=lists_of_lengths, groups=st.integers(1, 6), waves=st.booleans())
def test_level_packs_stay_within_budget_and_group_and_leave_no_group_that_could_give_work_away(
    lengths: list[int], groups: int, waves: bool
) -> None:
    degree, budget = 2, 1000
    sequences = of_lengths(lengths)
    machine = planner_inputs(a_problem("iteration", num_ranks=degree * groups, ranks_per_node=degree, budget=budget))
    packs = level_packs(degree, waves, degree * budget, sequences, machine)

    assert np.bincount(packs.of, weights=sequences.tokens, minlength=packs.number).max() <= degree * budget
    assert np.bincount(packs.of, minlength=packs.number).min() > 0
    load = np.bincount(packs.group_of[packs.of], weights=sequences.work, minlength=groups)
    of_busiest = sequences.work[packs.group_of[packs.of] == load.argmax()]
    assert load.max() <= load.mean() * 1.0001 or (load.min() + of_busiest >= load.max()).all()
