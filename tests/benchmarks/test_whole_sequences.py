"""Sequences count as keepable only where the members of their ring stay even."""

from __future__ import annotations

import numpy as np

from benchmarks.whole_sequences import keepable


def test_short_sequences_can_stay_whole_beside_a_long_one_where_members_stay_even() -> None:
    lengths = np.array([20_000, *[500] * 8])
    kept = keepable(lengths, 4, slack=0.002, break_even_tokens=50_000)
    assert sorted(lengths[kept].tolist()) == [500] * 8, "two on each member"


def test_what_would_leave_members_uneven_is_split() -> None:
    assert not keepable(np.array([20_000, 500, 500, 500]), 4, slack=0.002, break_even_tokens=50_000).size
    lengths = np.array([8_000, 2_000, 1_000, 1_000])
    kept = keepable(lengths, 2, slack=0.002, break_even_tokens=1_000)
    assert lengths[kept].tolist() == [1_000, 1_000], "with the 2,000, tokens would be even and attention not"
