"""Predicted seconds of a pack on a group of degree d (Eq. 8-10 of the FCP paper with the degree written out).

attention = sum_k (1 + eta_k) (alpha1 length_k^2 + alphaw pairs_k) / d + chunk_seconds_per_token * tokens * (d - 1) / d
linear    = sum_k alpha2 length_k / d + vision_k / d
ring      = 0 if d = 1 else alpha3 * tokens * (d - 1) / d / bandwidth + ring_hop_seconds * (d - 1)
T         = microbatch_seconds + linear + max(attention, (1 - s) ring) + s ring,     s = exposed_ring_share

Of a sequence of L tokens, pairs = L^2 - max(L - w, 0)^2 lie within windows of w tokens, in the units of alpha1.

With s = 0, its default, attention may hide the whole ring; with s = 1 it hides nothing. A rank of a ring runs d - 1
kernels more over its tokens / d, on shorter chunks, and adds up what they return: hence the second term of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.profile import Coefficients, CostProfile
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
) -> FloatArray:
    """Predict the seconds of packs on groups; all arguments broadcast.

    Args:
        profile: coefficients and bandwidths.
        attention_seconds: attention work of the pack on one rank.
        linear_seconds: linear and vision work of the pack on one rank.
        tokens: tokens of the pack.
        degree: ranks of the group, >= 1.
        crosses_nodes: whether the group's ranks lie on more than one node.
    """
    c = profile.coefficients
    d = np.asarray(degree, dtype=np.float64)
    attention = attention_part(profile, attention_seconds=attention_seconds, tokens=tokens, degree=d)
    ring = ring_seconds(profile, tokens=tokens, degree=d, crosses_nodes=crosses_nodes)
    other = c.microbatch_seconds + np.asarray(linear_seconds) / d
    return overlapped_seconds(other, attention, ring, c.exposed_ring_share)


def attention_part(
    profile: CostProfile, *, attention_seconds: npt.ArrayLike, tokens: npt.ArrayLike, degree: npt.ArrayLike
) -> FloatArray:
    """Predict what attention takes of a pack on each rank of its group, chunks included. All arguments broadcast."""
    d = np.asarray(degree, dtype=np.float64)
    chunks = profile.coefficients.chunk_seconds_per_token * np.asarray(tokens) * (d - 1.0) / d
    return np.asarray(np.asarray(attention_seconds) / d + chunks)


def overlapped_seconds(
    other: FloatArray, attention: FloatArray, ring: FloatArray, exposed_ring_share: float
) -> FloatArray:
    """Add a ring to computation: attention hides all of it but the exposed share, and nothing else hides any.

    The order of the operations here and in `group_seconds` is part of the definition: the planner's kernels repeat it
    bit by bit, and plan hashes depend on the last bit.
    """
    exposed = exposed_ring_share * ring
    return np.asarray(other + np.maximum(attention, ring - exposed) + exposed, dtype=np.float64)


def ring_seconds(
    profile: CostProfile, *, tokens: npt.ArrayLike, degree: npt.ArrayLike, crosses_nodes: npt.ArrayLike
) -> FloatArray:
    """Predict the seconds of a pack's ring, hidden or not; 0 at degree 1. All arguments broadcast."""
    c = profile.coefficients
    d = np.asarray(degree, dtype=np.float64)
    bandwidth = np.where(crosses_nodes, profile.bandwidth.inter_node, profile.bandwidth.intra_node)
    hops = d - 1.0
    return np.asarray(c.ring_bytes_per_token * np.asarray(tokens) * hops / d / bandwidth + c.ring_hop_seconds * hops)
