"""Predicted seconds of a pack on a group of degree d (Eq. 8-10 of the FCP paper with the degree written out).

attention = sum_k (1 + eta_k) (alpha1 length_k^2 + alphaw pairs_k) / d + chunk_seconds_per_token * tokens * (r - 1) / d
linear    = sum_k alpha2 length_k / d + vision_k / d
ring      = 0 if r = 1 else alpha3 c * tokens * (r - 1) / d / bandwidth + ring_hop_seconds * (r - 1) + last_hop_seconds
home      = 0 if r = 1 else last_hop_bytes_per_token c * tokens / d / bandwidth + last_hop_seconds
exposed   = s (ring - home) + home,     s = exposed_ring_share
exchange  = (q + c k) * tokens / d * (u - 1) / u / (share bandwidth) + exchange_seconds * (u - 1)
T         = microbatch_seconds + linear + max(attention, ring - exposed) + exposed + exchange

Of a sequence of L tokens, pairs = L^2 - max(L - w, 0)^2 lie within windows of w tokens, in the units of alpha1.

The degree is d = u r: sets of u ranks split the heads, and r sets form a ring. q and k are the exchange's bytes per
token of queries and of keys, c = max(1, u / key_value_heads): where the set has more ranks than there are key/value
heads, some hold the same. With s = 0, its default, attention may hide the whole ring but its last hop; with s = 1 it
hides nothing; nothing hides exchanges. A rank runs r - 1 kernels more over the tokens / d of its share of the heads, on
shorter chunks, and adds up what they return: hence the second term of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.profile import Coefficients, CostProfile, Heads
from fcp_cli.manifest.table import LengthTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds that sequences (or packs) would take on one rank, before any division by the degree.

    Attributes:
        attention_seconds: [n] alpha1 (1 + eta) length^2.
        linear_seconds: [n] alpha2 length plus the vision encoder's terms.
        tokens: [n] int64.
    """

    attention_seconds: FloatArray
    linear_seconds: FloatArray
    tokens: IntArray

    @property
    def total_seconds(self) -> FloatArray:
        return self.attention_seconds + self.linear_seconds

    def take(self, index: IntArray | int) -> Work:
        """Return the work of some of the sequences, or of one."""
        return Work(
            attention_seconds=self.attention_seconds[index],
            linear_seconds=self.linear_seconds[index],
            tokens=self.tokens[index],
        )


def sequence_work(table: LengthTable, profile: CostProfile) -> Work:
    """Return the work of every sequence of a table."""
    c = profile.coefficients
    length = table.length_tokens.astype(np.float64)
    attention = attention_seconds(c, length)
    if table.eta is not None:
        attention = attention * (1.0 + table.eta)
    linear = _with_vision(c.linear_seconds_per_token * length, table, profile)
    return Work(attention_seconds=attention, linear_seconds=linear, tokens=table.length_tokens)


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
    *,
    attention_seconds: npt.ArrayLike,
    linear_seconds: npt.ArrayLike,
    tokens: npt.ArrayLike,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
    sets_cross_nodes: npt.ArrayLike = False,
) -> FloatArray:
    """Predict the seconds of packs on groups; all arguments broadcast.

    Args:
        profile: coefficients and bandwidths.
        attention_seconds: attention work of the pack on one rank.
        linear_seconds: linear and vision work of the pack on one rank.
        tokens: tokens of the pack.
        degree: ranks of the group, >= 1.
        crosses_nodes: whether the group's ranks lie on more than one node.
        heads_degree: ranks of a set that splits the heads; it divides the degree, and is 1 without `profile.heads`.
        sets_cross_nodes: whether a set's ranks lie on more than one node.

    The order of the operations here and in what it calls is part of the definition: the planner's kernels repeat it bit
    by bit, and plan hashes depend on the last bit.
    """
    c = profile.coefficients
    d = np.asarray(degree, dtype=np.float64)
    attention = attention_part(
        profile, attention_seconds=attention_seconds, tokens=tokens, degree=d, heads_degree=heads_degree
    )
    place = {"tokens": tokens, "degree": d, "crosses_nodes": crosses_nodes, "heads_degree": heads_degree}
    ring, home = ring_seconds(profile, **place), last_hop_seconds(profile, **place)
    other = c.microbatch_seconds + np.asarray(linear_seconds) / d
    seconds = overlapped_seconds(other, attention, ring, c.exposed_ring_share, home)
    if profile.heads is None:
        return seconds
    return seconds + exchange_seconds(
        profile, tokens=tokens, degree=d, heads_degree=heads_degree, sets_cross_nodes=sets_cross_nodes
    )


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
