"""Rings over sequences with masks, all members in one process: results, kernel calls, and who has how much to do."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.layout import Hop, MaskedLayout, RingLayout, Rows, Segments, ZigZagLayout, shard_layout
from fcp_cli.util.masks import CAUSAL, Mask, chunk_pairs, full, prefix, segments
from tests.masks import Masked, all_masked, seen
from tests.runtime.emulation import (
    GatheringCpuKernel,
    require_error_of_one_device,
    require_exact,
    run_emulated,
    use_kernel,
)
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import Example, make_example

pytestmark = pytest.mark.torch

IMAGES = segments([(0, 3), (20, 41), (41, 50), (77, 101)])
PACKS: dict[str, list[Masked]] = {
    "full": [Masked(full(), 101)],
    "one-token": [Masked(full(), 1)],
    "prefix": [Masked(prefix(37), 101)],
    "short-prefix": [Masked(prefix(5), 97)],
    "segments": [Masked(IMAGES, 101)],
    "small-segments": [Masked(segments([(i, i + 2) for i in range(1, 90, 5)]), 97)],
    "pairs": [Masked(chunk_pairs([7, 1, 13, 5, 5, 5, 5]), 82)],
    "mixed": [
        Masked(CAUSAL, 37),
        Masked(full(), 13),
        Masked(prefix(30), 41),
        Masked(CAUSAL, 1),
        Masked(chunk_pairs([3] * 5), 30),
        Masked(segments([(2, 9)]), 55),
    ],
}
few_packs = st.lists(all_masked(longest=40), min_size=1, max_size=4)


def lengths_of(pack: list[Masked]) -> tuple[int, ...]:
    return tuple(one.length for one in pack)


def masks_of(pack: list[Masked]) -> tuple[Mask, ...]:
    return tuple(one.mask for one in pack)


def example_of(name: str, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64) -> Example:
    pack = PACKS[name]
    return make_example(lengths_of(pack), heads, head_dim=8, masks=masks_of(pack), dtype=dtype)


@pytest.mark.parametrize("name", PACKS)
def test_any_degree_computes_what_one_process_does_in_fp64(name: str) -> None:
    for degree in range(1, 9):
        require_exact(example_of(name), degree)


@pytest.mark.parametrize(("shared", "ring"), [(2, 1), (2, 2), (4, 2)])
def test_sets_that_share_heads_follow_masks_around_their_ring(shared: int, ring: int) -> None:
    require_exact(example_of("mixed", (8, 2)), shared * ring, shared)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_calls_of_all_sequences_together_give_the_same(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(monkeypatch, GatheringCpuKernel())
    require_exact(example_of("mixed", (3, 1)), degree)


def test_the_npu_operator_needs_no_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(monkeypatch, NpuKernel(FakeNpu(head_major=True)))
    require_exact(example_of("mixed", dtype=torch.float32), 3, dtype=torch.float32)


@pytest.mark.parametrize("name", ["segments", "pairs", "mixed"])
def test_in_bf16_a_masked_ring_adds_less_error_than_one_device_has(name: str) -> None:
    example = example_of(name, dtype=torch.bfloat16)
    for degree in (3, 8):
        require_error_of_one_device(run_emulated(example, degree, torch.bfloat16), example)


@given(pack=few_packs, degree=st.integers(1, 7), packed=st.booleans())
def test_the_calls_visit_every_pair_that_is_seen_once_and_positions_are_those_of_the_masks(
    pack: list[Masked], degree: int, packed: bool
) -> None:
    layout = MaskedLayout(lengths_of(pack), degree, masks_of(pack))
    visited = np.zeros((layout.total_tokens, layout.total_tokens), dtype=np.int64)
    for member, source in product(range(degree), repeat=2):
        for hop in layout.hops(member, source, packed=packed):
            queries, keys = (
                layout.index(place)[_positions(rows)] for place, rows in ((member, hop.q_rows), (source, hop.k_rows))
            )
            assert len(set(queries.tolist())) == len(queries)
            assert len(set(keys.tolist())) == len(keys)
            _visit(visited, queries, keys, hop.segments)
    positions = np.concatenate([one.mask.position_ids(one.length) for one in pack])
    for member in range(degree):
        assert layout.position_ids(member).tolist() == positions[layout.index(member)].tolist()
        assert layout.tokens(member) == len(layout.index(member))
    expected = np.zeros_like(visited)
    start = 0
    for one in pack:
        expected[start : start + one.length, start : start + one.length] = seen(one)
        start += one.length
    assert np.array_equal(visited, expected)


def _visit(visited: np.ndarray, queries: np.ndarray, keys: np.ndarray, segments: Segments) -> None:
    assert all(segments.q_lengths)
    assert all(segments.k_lengths)
    assert not segments.causal or segments.q_lengths == segments.k_lengths
    assert (sum(segments.q_lengths), sum(segments.k_lengths)) == (len(queries), len(keys))
    q_parts = np.split(queries, np.cumsum(segments.q_lengths)[:-1])
    k_parts = np.split(keys, np.cumsum(segments.k_lengths)[:-1])
    for q_part, k_part in zip(q_parts, k_parts, strict=True):
        pairs = np.ones((len(q_part), len(k_part)), dtype=np.int64)
        visited[np.ix_(q_part, k_part)] += np.tril(pairs) if segments.causal else pairs


def _positions(rows: Rows) -> np.ndarray:
    if rows.span is not None:
        return np.arange(*rows.span)
    assert rows.positions is not None
    return rows.positions


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple), degree=st.integers(1, 7))
def test_causal_sequences_of_a_masked_layout_lie_and_are_called_as_they_always_are(
    lengths: tuple[int, ...], degree: int
) -> None:
    plain, masked = ZigZagLayout(lengths, degree), MaskedLayout(lengths, degree, (CAUSAL,) * len(lengths))
    for member in range(degree):
        assert masked.index(member).tolist() == plain.index(member).tolist()
        assert masked.position_ids(member).tolist() == plain.position_ids(member).tolist()
        for source, packed in product(range(degree), (False, True)):
            assert _calls(masked, member, source, packed) == _calls(plain, member, source, packed)


def _calls(layout: RingLayout, member: int, source: int, packed: bool) -> list[object]:
    return [
        (_positions(hop.q_rows).tolist(), _positions(hop.k_rows).tolist(), hop.segments.q_lengths, hop.segments.causal)
        for hop in layout.hops(member, source, packed=packed)
    ]


def test_a_pack_without_masks_has_the_layout_that_it_always_had() -> None:
    assert type(shard_layout((7, 9), 2, 1, (CAUSAL, CAUSAL))) is ZigZagLayout
    assert type(shard_layout((7, 9), 2, 1, (CAUSAL, full()))) is MaskedLayout


# The most calls of a member with its own keys, and with those of another, at degree 4.
@pytest.mark.parametrize(
    ("mask", "own", "others"),
    [
        (full(), 1, 1),
        (prefix(1000), 2, 2),
        (prefix(100), 2, 1),
        (segments([(i, i + 64) for i in range(100, 3900, 100)]), 2, 2),
        (chunk_pairs([128] * 16), 3, 2),
        (chunk_pairs([100] * 20 + [48]), 5, 5),
    ],
    ids=["full", "prefix", "short-prefix", "images", "even-pairs", "pairs"],
)
def test_masks_take_few_calls_however_many_segments_they_have(mask: Mask, own: int, others: int) -> None:
    layout = MaskedLayout((4096,), 4, (mask,))
    counts = {pair: len(layout.hops(*pair)) for pair in product(range(4), repeat=2)}
    assert max(count for (member, source), count in counts.items() if member == source) == own
    assert max(count for (member, source), count in counts.items() if member != source) == others


def test_hops_of_which_nothing_is_seen_are_skipped() -> None:
    """Chunks so large that a member's queries see none of what another holds."""
    layout = MaskedLayout((8,), 4, (chunk_pairs([1, 1, 1, 1]),))
    counts = [[len(layout.hops(member, source)) for source in range(4)] for member in range(4)]
    assert [sum(row) for row in counts] == [1, 2, 3, 4]
    assert counts[0][1:] == [0, 0, 0]


def pairs_of(layout: RingLayout, member: int) -> int:
    """How many pairs of a query and a key a member computes."""
    return sum(
        pairs for source in range(layout.degree) for hop in layout.hops(member, source) for pairs in _segment_pairs(hop)
    )


def _segment_pairs(hop: Hop) -> list[int]:
    lengths = zip(hop.segments.q_lengths, hop.segments.k_lengths, strict=True)
    return [q * (q + 1) // 2 if hop.segments.causal else q * k for q, k in lengths]


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (full(), 0.001),
        (prefix(2000), 0.002),
        (prefix(4000), 0.002),
        (prefix(255), 0.03),
        (segments([(700, 2000), (2400, 3000), (3000, 3900)]), 0.004),
        (segments([(i, i + 250) for i in range(0, 3900, 260)]), 0.005),
        (chunk_pairs([128] * 16), 0.001),
    ],
    ids=["full", "prefix", "long-prefix", "short-prefix", "large-images", "images", "pairs"],
)
def test_members_have_equally_much_to_do(mask: Mask, most: float) -> None:
    for degree in (2, 3, 8):
        layout = MaskedLayout((4096,), degree, (mask,))
        pairs = [pairs_of(layout, member) for member in range(degree)]
        assert sum(pairs) == mask.pairs(4096)
        assert max(pairs) / (sum(pairs) / degree) - 1 <= most, degree
        tokens = [layout.tokens(member) for member in range(degree)]
        assert max(tokens) - min(tokens) <= len(mask.cuts(4096)) - 1
