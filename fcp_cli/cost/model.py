"""Predicted seconds of a pack on a group of degree d (Eq. 8-10 of the FCP paper with the degree written out).

attention = sum_k (1 + eta_k) (alpha1 length_k^2 + alphaw pairs_k) / d + chunk_seconds_per_token * tokens * (r - 1) / d
linear    = sum_k alpha2 length_k / d + vision_k / d
ring      = 0 if r = 1 else alpha3 c * tokens * (r - 1) / d / bandwidth + ring_hop_seconds * (r - 1) + last_hop_seconds
home      = 0 if r = 1 else last_hop_bytes_per_token c * tokens / d / bandwidth + last_hop_seconds
exposed   = s (ring - home) + home,     s = exposed_ring_share
exchange  = (q + c k) * tokens / d * (u - 1) / u / (share bandwidth) + exchange_seconds * (u - 1)
T         = microbatch_seconds + linear + max(attention, ring - exposed) + exposed + exchange

Of a sequence of L tokens, pairs = L^2 - max(L - w, 0)^2 lie within windows of w tokens, in the units of alpha1.
Where the profile has halo_bytes_per_token b, rings carry the other layers alone, and these take beside all that

windows   = sum_k (1 + eta_k) alphaw pairs_k / d
halos     = 0 if r = 1 else b c * sum_k min(length_k, 2 (w - 1)) * (r - 1)/d / bandwidth + halo_message_seconds * m
m         = min(2 R, r + 1),     R = ceil(2 r (w - 1) / the least length)

since of a sequence, members of a ring get 2 (r - 1)/r (w - 1) rows on the mean where its chunks, 1 / (2 r) of it, are
as long as that, and nobody more than in a ring; what is further away than a chunk comes in R rounds of two messages, of
which no member sees more than r + 1. No kernel of other layers runs meanwhile, and what those with windows could hide
of it is little where it is long: nothing hides halos.

The degree is d = u r: sets of u ranks split the heads, and r sets form a ring. q and k are the exchange's bytes per
token of queries and of keys, c = max(1, u / key_value_heads): where the set has more ranks than there are key/value
heads, some hold the same. With s = 0, its default, attention may hide the whole ring but its last hop; with s = 1 it
hides nothing; nothing hides exchanges. A rank runs r - 1 kernels more over the tokens / d of its share of the heads, on
shorter chunks, and adds up what they return: hence the second term of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.profile import Coefficients, CostProfile, Heads
from fcp_cli.manifest.table import LengthTable

Index: TypeAlias = IntArray | int | slice | tuple[slice | EllipsisType | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowWork:
    """What sequences (or packs) take in layers with windows, before any division by the degree.

    Attributes:
        seconds: [n] alphaw (1 + eta) pairs: attention.
        halo_tokens: [n] int64, summed over sequences.
        shortest_tokens: [n] int64, of any sequence.
    """

    seconds: FloatArray
    halo_tokens: IntArray
    shortest_tokens: IntArray

    def take(self, index: Index) -> WindowWork:
        """Return those of some of the sequences, or of one."""
        return WindowWork(
            seconds=self.seconds[index],
            halo_tokens=self.halo_tokens[index],
            shortest_tokens=self.shortest_tokens[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds that sequences (or packs) would take on one rank, before any division by the degree.

    Attributes:
        attention_seconds: [n] alpha1 (1 + eta) length^2.
        linear_seconds: [n] alpha2 length plus the vision encoder's terms.
        tokens: [n] int64.
        windows: of layers whose halos travel; None where there are none: attention in windows is part of the other.
    """

    attention_seconds: FloatArray
    linear_seconds: FloatArray
    tokens: IntArray
    windows: WindowWork | None = None

    @property
    def unhidden_seconds(self) -> FloatArray:
        """What hides no ring: the linear seconds, and attention in windows whose halos travel."""
        return self.linear_seconds if self.windows is None else self.linear_seconds + self.windows.seconds

    @property
    def total_seconds(self) -> FloatArray:
        return self.attention_seconds + self.unhidden_seconds

    def take(self, index: Index) -> Work:
        """Return the work of some of the sequences, or of one."""
        return Work(
            attention_seconds=self.attention_seconds[index],
            linear_seconds=self.linear_seconds[index],
            tokens=self.tokens[index],
            windows=self.windows and self.windows.take(index),
        )

    def packed(self, first: IntArray) -> Work:
        """Add up the work of packs, which lie back to back and begin at `first`; none of them is empty."""
        windows = self.windows
        return Work(
            attention_seconds=np.add.reduceat(self.attention_seconds, first),
            linear_seconds=np.add.reduceat(self.linear_seconds, first),
            tokens=np.add.reduceat(self.tokens, first),
            windows=windows
            and WindowWork(
                seconds=np.add.reduceat(windows.seconds, first),
                halo_tokens=np.add.reduceat(windows.halo_tokens, first),
                shortest_tokens=np.minimum.reduceat(windows.shortest_tokens, first),
            ),
        )


def joined(works: Sequence[Work], join: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]) -> Work:
    """Put work under one profile together, each of its arrays by `join`: `np.concatenate`, or how they are stacked."""
    windows = [work.windows for work in works if work.windows is not None]
    return Work(
        attention_seconds=join([work.attention_seconds for work in works]),
        linear_seconds=join([work.linear_seconds for work in works]),
        tokens=join([work.tokens for work in works]),
        windows=WindowWork(
            seconds=join([one.seconds for one in windows]),
            halo_tokens=join([one.halo_tokens for one in windows]),
            shortest_tokens=join([one.shortest_tokens for one in windows]),
        )
        if windows
        else None,
    )


def sequence_work(table: LengthTable, profile: CostProfile) -> Work:
    """Return the work of every sequence of a table."""
    work = causal_work(table.length_tokens, profile.coefficients)
    attention, windows = work.attention_seconds, work.windows
    if table.eta is not None:
        attention = attention * (1.0 + table.eta)
        windows = windows and replace(windows, seconds=windows.seconds * (1.0 + table.eta))
    linear = _with_vision(work.linear_seconds, table, profile)
    return Work(attention_seconds=attention, linear_seconds=linear, tokens=table.length_tokens, windows=windows)


def causal_work(length_tokens: IntArray, coefficients: Coefficients) -> Work:
    """Return the work of causal sequences of text."""
    length = length_tokens.astype(np.float64)
    return Work(
        attention_seconds=attention_seconds(
            replace(coefficients, window_seconds_per_token2=0.0) if coefficients.halo_bytes_per_token else coefficients,
            length,
        ),
        linear_seconds=coefficients.linear_seconds_per_token * length,
        tokens=length_tokens,
        windows=window_work(length_tokens, coefficients) if coefficients.halo_bytes_per_token else None,
    )


def window_work(length_tokens: IntArray, coefficients: Coefficients) -> WindowWork:
    """Return the work of causal sequences in layers whose halos travel."""
    pairs = windowed_pairs(length_tokens.astype(np.float64), coefficients.window_tokens)
    return WindowWork(
        seconds=coefficients.window_seconds_per_token2 * pairs,
        halo_tokens=np.minimum(length_tokens, 2 * reach_tokens(coefficients)),
        shortest_tokens=length_tokens,
    )


def token_in_window_seconds(coefficients: Coefficients) -> float:
    """Return what one more token of a causal sequence takes in windows, all of them full."""
    return 2.0 * coefficients.window_seconds_per_token2 * coefficients.window_tokens


def reach_tokens(coefficients: Coefficients) -> int:
    """Return how many tokens before its own each one looks back at in a layer with a window."""
    return max(int(coefficients.window_tokens) - 1, 0)


def attention_seconds(coefficients: Coefficients, lengths: FloatArray) -> FloatArray:
    """Return the seconds that attention takes for causal sequences of these lengths on one rank, windows among it."""
    seconds = coefficients.attention_seconds_per_token2 * lengths * lengths
    if coefficients.window_seconds_per_token2:
        pairs = windowed_pairs(lengths, coefficients.window_tokens)
        seconds = seconds + coefficients.window_seconds_per_token2 * pairs
    return seconds


def windowed_pairs(lengths: FloatArray, window_tokens: float) -> FloatArray:
    """Return twice the pairs of tokens of causal sequences that lie within windows; L^2 where all do."""
    return lengths * lengths - np.square(np.maximum(lengths - window_tokens, 0.0))


def vision_seconds(table: LengthTable, profile: CostProfile) -> FloatArray:
    """Return [n] the seconds that a vision encoder takes for each sequence on one rank."""
    return _with_vision(np.zeros(len(table)), table, profile)


def _with_vision(seconds: FloatArray, table: LengthTable, profile: CostProfile) -> FloatArray:
    c = profile.coefficients
    if table.vision_patches is not None:
        seconds = seconds + c.vision_seconds_per_patch * table.vision_patches
    if table.vision_patch_pairs is not None:
        seconds = seconds + c.vision_seconds_per_patch2 * table.vision_patch_pairs
    return seconds


def encoder_seconds(work: Work, profile: CostProfile) -> FloatArray:
    """Return the part of the linear seconds that the tokens do not explain: the vision encoder's."""
    return np.maximum(work.linear_seconds - profile.coefficients.linear_seconds_per_token * work.tokens, 0.0)


def group_seconds(
    profile: CostProfile,
    work: Work,
    *,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
    sets_cross_nodes: npt.ArrayLike = False,
) -> FloatArray:
    """Predict the seconds of packs on groups; all arguments broadcast.

    Args:
        profile: coefficients and bandwidths.
        work: of the packs, on one rank.
        degree: ranks of the group, >= 1.
        crosses_nodes: whether the group's ranks lie on more than one node.
        heads_degree: ranks of a set that splits the heads; it divides the degree, and is 1 without `profile.heads`.
        sets_cross_nodes: whether a set's ranks lie on more than one node.

    The order of the operations here and in what it calls is part of the definition: the planner's kernels repeat it bit
    by bit, and plan hashes depend on the last bit.
    """
    c = profile.coefficients
    d, tokens = np.asarray(degree, dtype=np.float64), work.tokens
    attention = attention_part(
        profile, attention_seconds=work.attention_seconds, tokens=tokens, degree=d, heads_degree=heads_degree
    )
    place = {"tokens": tokens, "degree": d, "crosses_nodes": crosses_nodes, "heads_degree": heads_degree}
    ring, home = ring_seconds(profile, **place), last_hop_seconds(profile, **place)
    other = c.microbatch_seconds + work.unhidden_seconds / d
    seconds = overlapped_seconds(other, attention, ring, c.exposed_ring_share, home)
    if profile.heads is not None:
        seconds = seconds + exchange_seconds(
            profile, tokens=tokens, degree=d, heads_degree=heads_degree, sets_cross_nodes=sets_cross_nodes
        )
    if work.windows is not None:
        seconds = seconds + halo_seconds(
            profile, work.windows, degree=d, crosses_nodes=crosses_nodes, heads_degree=heads_degree
        )
    return seconds


def halo_seconds(
    profile: CostProfile,
    windows: WindowWork,
    *,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
) -> FloatArray:
    """Predict the seconds in which halos of packs travel; 0 without a ring. All arguments broadcast."""
    c, d = profile.coefficients, np.asarray(degree, dtype=np.float64)
    sets = d / np.asarray(heads_degree)
    moved = key_copies(profile, heads_degree) * windows.halo_tokens
    travelling = c.halo_bytes_per_token * moved * (sets - 1.0) / d / _bandwidth(profile, crosses_nodes)
    messages = halo_messages(sets, windows.shortest_tokens, reach_tokens(c))
    return np.asarray(travelling + c.halo_message_seconds * messages)


def halo_messages(sets: npt.ArrayLike, shortest_tokens: npt.ArrayLike, reach: int) -> FloatArray:
    """Return how many messages a halo takes: rounds up the ring, and down it, until all rows have come.

    Args:
        sets: members of the ring.
        shortest_tokens: of the pack's sequences.
        reach: rows before its own that a token looks back at.
    """
    r = np.asarray(sets, dtype=np.float64)
    rounds = np.ceil(2.0 * r * reach / np.asarray(shortest_tokens))
    return np.where(r > 1.0, np.minimum(2.0 * rounds, r + 1.0), 0.0)


def attention_part(
    profile: CostProfile,
    *,
    attention_seconds: npt.ArrayLike,
    tokens: npt.ArrayLike,
    degree: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
) -> FloatArray:
    """Predict what attention takes of a pack on each rank of its group, chunks included. All arguments broadcast."""
    d = np.asarray(degree, dtype=np.float64)
    hops = d / np.asarray(heads_degree) - 1.0
    chunks = profile.coefficients.chunk_seconds_per_token * np.asarray(tokens) * hops / d
    return np.asarray(np.asarray(attention_seconds) / d + chunks)


def overlapped_seconds(
    other: FloatArray,
    attention: FloatArray,
    ring: FloatArray,
    exposed_ring_share: float,
    last_hop: FloatArray | float = 0.0,
) -> FloatArray:
    """Add a ring to computation: attention hides all of it but the exposed share and the last hop, nothing else any."""
    exposed = exposed_ring_share * (ring - last_hop) + last_hop
    return np.asarray(other + np.maximum(attention, ring - exposed) + exposed, dtype=np.float64)


def ring_seconds(
    profile: CostProfile,
    *,
    tokens: npt.ArrayLike,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
) -> FloatArray:
    """Predict the seconds of a pack's ring, hidden or not; 0 without a ring. All arguments broadcast."""
    c = profile.coefficients
    d = np.asarray(degree, dtype=np.float64)
    hops = d / np.asarray(heads_degree) - 1.0
    moved = key_copies(profile, heads_degree) * np.asarray(tokens)
    ring = c.ring_bytes_per_token * moved * hops / d / _bandwidth(profile, crosses_nodes) + c.ring_hop_seconds * hops
    return np.asarray(ring + np.where(hops > 0, c.last_hop_seconds, 0.0))


def last_hop_seconds(
    profile: CostProfile,
    *,
    tokens: npt.ArrayLike,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
) -> FloatArray:
    """Predict the part of `ring_seconds` in which gradients travel home, with no kernel beside it. All broadcast."""
    c = profile.coefficients
    d = np.asarray(degree, dtype=np.float64)
    moved = key_copies(profile, heads_degree) * np.asarray(tokens)
    home = c.last_hop_bytes_per_token * moved / d / _bandwidth(profile, crosses_nodes) + c.last_hop_seconds
    return np.where(d > np.asarray(heads_degree), home, 0.0)


def exchange_seconds(
    profile: CostProfile,
    *,
    tokens: npt.ArrayLike,
    degree: npt.ArrayLike,
    heads_degree: npt.ArrayLike,
    sets_cross_nodes: npt.ArrayLike,
) -> FloatArray:
    """Predict the seconds in which the ranks of each set exchange tokens for heads, and back. Arguments broadcast."""
    assert profile.heads is not None, "a profile without the block `heads` knows rings alone"
    bandwidth = _bandwidth(profile, sets_cross_nodes) * profile.heads.bandwidth_share
    u = np.asarray(heads_degree, dtype=np.float64)
    size = exchanged_bytes_per_token(profile.heads, u)
    return np.asarray(size * np.asarray(tokens) / degree / bandwidth + profile.heads.exchange_seconds * (u - 1.0))


def exchanged_bytes_per_token(heads: Heads, heads_degree: npt.ArrayLike) -> FloatArray:
    """Return what a rank sends per token that it holds where so many ranks share the heads."""
    u = np.asarray(heads_degree, dtype=np.float64)
    key_value = np.maximum(1.0, u / heads.key_value_heads) * heads.key_value_exchange_bytes_per_token
    return np.asarray((heads.exchange_bytes_per_token + key_value) * (u - 1.0) / u)


def _bandwidth(profile: CostProfile, crosses_nodes: npt.ArrayLike) -> FloatArray:
    return np.where(crosses_nodes, profile.bandwidth.inter_node, profile.bandwidth.intra_node)


def key_copies(profile: CostProfile, heads_degree: npt.ArrayLike) -> FloatArray:
    """Return how many ranks of a set hold the same key/value head."""
    key_value_heads = np.inf if profile.heads is None else profile.heads.key_value_heads
    return np.maximum(1.0, np.asarray(heads_degree, dtype=np.float64) / key_value_heads)
