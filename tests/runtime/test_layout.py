"""Every token of a pack has exactly one place, and every member gets its fair share of the work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.masks import CAUSAL, prefix
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS, Hop, RingLayout, ZigZagLayout, shard_layout

packs = st.lists(st.integers(min_value=1, max_value=200), min_size=1, max_size=8).map(tuple)
degrees = st.integers(min_value=1, max_value=16)
# Every pair of tokens is looked at.
few_packs = st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=5).map(tuple)
few_degrees = st.integers(min_value=1, max_value=9)


@given(lengths=packs, degree=degrees)
def test_every_token_belongs_to_exactly_one_member(lengths: tuple[int, ...], degree: int) -> None:
    layout = ZigZagLayout(lengths, degree)
    owned = np.concatenate([layout.index(i) for i in range(degree)])
    assert sorted(owned.tolist()) == list(range(sum(lengths)))
    assert [len(layout.index(i)) for i in range(degree)] == [layout.tokens(i) for i in range(degree)]
    assert layout.total_tokens == sum(lengths)
    assert layout.most_tokens == max(layout.tokens(i) for i in range(degree))


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


@given(lengths=packs, degree=degrees)
def test_position_ids_restart_at_every_sequence(lengths: tuple[int, ...], degree: int) -> None:
    layout = ZigZagLayout(lengths, degree)
    within = np.concatenate([np.arange(length) for length in lengths])
    for member in range(degree):
        assert layout.position_ids(member).tolist() == within[layout.index(member)].tolist()


@given(lengths=few_packs, degree=few_degrees, packed=st.booleans())
def test_the_hops_visit_every_pair_of_a_query_and_an_earlier_key_once(
    lengths: tuple[int, ...], degree: int, packed: bool
) -> None:
    layout = ZigZagLayout(lengths, degree)
    seen = np.zeros((sum(lengths), sum(lengths)), dtype=np.int64)
    for member in range(degree):
        for source in range(degree):
            for q_rows, k_rows, causal in _calls(layout, member, source, packed):
                pairs = np.ones((len(q_rows), len(k_rows)), dtype=np.int64)
                seen[np.ix_(q_rows, k_rows)] += np.tril(pairs) if causal else pairs
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    expected = np.tril(sequence[:, None] == sequence[None, :]).astype(np.int64)
    assert np.array_equal(seen, expected)


def _calls(layout: RingLayout, member: int, source: int, packed: bool) -> list[tuple[np.ndarray, np.ndarray, bool]]:
    """Per segment: positions of its queries and keys in the pack, and whether it is causal."""
    hops = layout.hops(member, source, packed=packed)
    assert not packed or len(hops) <= 1
    return [call for hop in hops for call in _hop_calls(layout, member, source, hop, packed)]


def _hop_calls(
    layout: RingLayout, member: int, source: int, hop: Hop, packed: bool
) -> list[tuple[np.ndarray, np.ndarray, bool]]:
    queries = layout.index(member)[_positions(hop.q_rows.span, hop.q_rows.positions)]
    keys = layout.index(source)[_positions(hop.k_rows.span, hop.k_rows.positions)]
    segments = hop.segments
    assert packed or (hop.q_rows.span is not None and hop.k_rows.span is not None and len(segments.q_lengths) == 1)
    assert all(segments.q_lengths)
    assert all(segments.k_lengths)
    assert segments.causal == (member == source)
    assert not segments.causal or segments.q_lengths == segments.k_lengths
    assert (sum(segments.q_lengths), sum(segments.k_lengths)) == (len(queries), len(keys))
    q_cuts, k_cuts = np.cumsum(segments.q_lengths)[:-1], np.cumsum(segments.k_lengths)[:-1]
    parts = zip(np.split(queries, q_cuts), np.split(keys, k_cuts), strict=True)
    return [(q, k, segments.causal) for q, k in parts]


def _positions(span: tuple[int, int] | None, positions: np.ndarray | None) -> np.ndarray:
    assert (span is None) != (positions is None)
    if span is not None:
        return np.arange(*span)
    assert positions is not None
    return positions


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
