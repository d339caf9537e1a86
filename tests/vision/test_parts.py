"""Who of a group encodes which parts of a pack's images and videos."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.vision.parts import balanced_encoders


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60), st.integers(1, 9))
def test_no_member_encodes_more_than_its_share_and_one_part(work: list[float], members: int) -> None:
    loads = np.bincount(balanced_encoders(work, members), weights=work, minlength=members)
    assert loads.sum() == pytest.approx(sum(work))
    assert loads.max() <= (sum(work) / members + max(work) * (1 - 1 / members)) * (1 + 1e-9)


def least_possible(work: list[float], members: int) -> float:
    """Largest load of the best of all ways to share out."""
    loads = [
        sorted(np.bincount(way, weights=work, minlength=members)) for way in product(range(members), repeat=len(work))
    ]
    return float(min(load[-1] for load in loads))


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=7), st.integers(1, 3))
def test_few_parts_are_shared_out_nearly_as_evenly_as_can_be(work: list[float], members: int) -> None:
    loads = np.bincount(balanced_encoders(work, members), weights=work, minlength=members)
    assert loads.max() <= 1.125 * least_possible(work, members)


@given(st.integers(1, 400), st.integers(1, 9))
def test_parts_of_one_size_are_shared_out_to_the_last_one(parts: int, members: int) -> None:
    counts = np.bincount(balanced_encoders([1.0] * parts, members), minlength=members)
    assert counts.max() == -(-parts // members)
