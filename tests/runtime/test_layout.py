"""Which member holds which tokens, and that each gets its fair share of the work; their calls are in test_masked_rings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.runtime.layout import CACHED_LAYOUTS, ZigZagLayout, shard_layout
from fcp_cli.util.masks import CAUSAL, prefix

packs = st.lists(st.integers(min_value=1, max_value=200), min_size=1, max_size=8).map(tuple)
degrees = st.integers(min_value=1, max_value=16)


@given(lengths=packs, degree=degrees)
def test_chunks_are_those_of_the_contract(lengths: tuple[int, ...], degree: int) -> None:
    """Member r holds chunks r and 2d-1-r of each sequence, front before back, sequence after sequence."""
    layout = ZigZagLayout(lengths, degree)
    for member in range(degree):
        expected: list[int] = []
        for number, length in enumerate(lengths):
            sizes = [length // (2 * degree) + (j < length % (2 * degree)) for j in range(2 * degree)]
            base = sum(lengths[:number])
            for chunk in (member, 2 * degree - 1 - member):
                start = base + sum(sizes[:chunk])
                expected.extend(range(start, start + sizes[chunk]))
            held = sizes[member], sizes[2 * degree - 1 - member]
            assert tuple(layout.runs(member).sizes[2 * number : 2 * number + 2]) == held
            assert layout.owned(member)[number] == sum(held)
        assert layout.index(member).tolist() == expected
        assert layout.tokens(member) == len(expected)
    assert layout.total_tokens == sum(lengths)
    assert layout.most_tokens == max(layout.tokens(member) for member in range(degree))


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_members_of_a_long_sequence_share_tokens_and_pairs_evenly(degree: int) -> None:
    layout = ZigZagLayout((4099,), degree)
    tokens = [layout.tokens(i) for i in range(degree)]
    pairs = [int((layout.position_ids(i) + 1).sum()) for i in range(degree)]
    assert max(tokens) - min(tokens) <= 1
    assert max(pairs) / (sum(pairs) / degree) < 1.002


def test_an_idle_rank_has_an_empty_layout() -> None:
    layout = ZigZagLayout((), 1)
    assert layout.tokens(0) == layout.most_tokens == 0
    assert layout.index(0).size == layout.position_ids(0).size == 0
    assert layout.hops(0, 0) == ()


def test_layouts_are_cached_and_the_cache_is_bounded() -> None:
    shard_layout.cache_clear()
    first = shard_layout((3, 4), 2)
    assert shard_layout((3, 4), 2) is first
    assert shard_layout((3, 4), 3) is not first
    for length in range(1, 2 * CACHED_LAYOUTS):
        shard_layout((length,), 2)
    assert shard_layout.cache_info().currsize == CACHED_LAYOUTS


@pytest.mark.parametrize("degree", [2, 4])
def test_every_layout_answers_for_all_members_what_its_class_promises(degree: int) -> None:
    """Members of a group that shares heads hold tokens, and only their ring has hops."""
    lengths, mask = (37, 5), prefix(3)
    for layout in (
        shard_layout(lengths, degree),
        shard_layout(lengths, degree, 1, (CAUSAL, mask)),
        shard_layout(lengths, degree, 2),
        shard_layout(lengths, degree, 2, (CAUSAL, mask)),
    ):
        held = np.concatenate([layout.index(member) for member in range(degree)])
        assert sorted(held.tolist()) == list(range(sum(lengths))), layout
        assert layout.total_tokens == sum(lengths), layout
        ring = layout.ring
        assert sum(ring.owned(member).sum() for member in range(ring.degree)) == sum(lengths), layout
        assert sum(ring.runs(member).sizes.sum() for member in range(ring.degree)) == sum(lengths), layout
        assert all(ring.hops(member, member) for member in range(ring.degree)), layout
