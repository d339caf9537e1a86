"""Predicted seconds of a pack on a group of degree d (Eq. 8-10 of the FCP paper with the degree made explicit).

attention = sum_k (1 + eta_k) (alpha1 length_k^2 + alphaw pairs_k) / d + chunk_seconds_per_token * tokens * (r - 1) / d
linear    = sum_k alpha2 length_k / d + vision_k / d
ring      = 0 if r = 1 else alpha3 c * tokens * (r - 1) / d / bandwidth + ring_hop_seconds * (r - 1) + last_hop_seconds
home      = 0 if r = 1 else last_hop_bytes_per_token c * tokens / d / bandwidth + last_hop_seconds
exposed   = s (ring - home) + home,     s = exposed_ring_share
exchange  = (q + c k) * tokens / d * (u - 1) / u / (share bandwidth) + exchange_seconds * (u - 1)
T         = microbatch_seconds + linear + max(attention, ring - exposed) + exposed + exchange

This is the clock of a device. A profile with host_microbatch_seconds has a second one, the host's, which issues the
operations and messages of a pack whatever its length. A pack takes max(T, H), with

H         = host_microbatch_seconds + host_hop_seconds * (r - 1) + host_exchange_seconds * (u - 1)
            + (host_last_hop_seconds if r > 1) + host_halo_message_seconds * m

It is the upper side: hosts run some ten layers ahead, so a short pack behind a long one is partly hidden. Tensor
parallelism divides T but not H, pipeline stages divide both.

A sequence of L tokens has pairs = L^2 - max(L - w, 0)^2 within windows of w tokens, in the units of alpha1. If the
profile has halo_bytes_per_token b, rings only carry the layers without windows, and layers with windows add

windows   = sum_k (1 + eta_k) alphaw pairs_k / d
halos     = 0 if r = 1 else b c * sum_k min(length_k, 2 (w - 1)) * (r - 1)/d / bandwidth + halo_message_seconds * m
m         = min(2 R, r + 1),     R = ceil(2 r (w - 1) / the least length)

A ring member receives 2 (r - 1)/r (w - 1) rows of a sequence on average if its chunks, each 1 / (2 r) of the sequence,
are that long, and never more than in a full ring. Rows further away than a chunk arrive in R rounds of two messages, of
which no member takes part in more than r + 1. Halos are never hidden: no kernel of other layers runs meanwhile, and
window attention is too short to hide much.

If a profile has recompute_levels, each rank recomputes as much as its tokens t = sum_k length_k / d need, which adds

again     = max(0, max_j (a_j t - f_j)),     a_j T_j - f_j = s_j T_j,  a_j T_(j+1) - f_j = s_(j+1) T_(j+1)

with T_j the tokens that a rank holds if all layers recompute at level j, and s_j the extra seconds per token. Between
T_j and T_(j+1) the smallest share of layers at level j + 1 that fits is used. Kept bytes are linear in the share, so
the recomputed tokens, share times t, are linear in t, and so are the seconds.

The degree is d = u r with the Ulysses degree u: each Ulysses group of u ranks splits the heads, and r of them form a
ring. q and k are the exchange's bytes per token of queries and of keys. c = max(1, u / key_value_heads) counts the
copies of a key/value head if there are fewer of them than ranks. With s = 0, the default, attention may hide all of the
ring but `home`, 0 unless a profile prices an exposed last hop; with s = 1 it hides nothing. Exchanges are never hidden.
The second term of attention is the cost of a ring's r - 1 further kernels on shorter chunks, and of merging
their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fcp_cli.cost import formula
from fcp_cli.cost.formula import GroupTerms, PackParts, UnitPrices
from fcp_cli.cost.levels import recomputation_lines
from fcp_cli.cost.profile import Coefficients, CostProfile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.util.arrays import FloatArray, IntArray

Index: TypeAlias = IntArray | int | slice | tuple[slice | EllipsisType | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowWork:
    """Single-rank work of sequences (or packs) in layers with windows, not divided by the degree.

    Attributes:
        seconds: [n] attention seconds, alphaw (1 + eta) pairs.
        halo_tokens: [n] int64, tokens of the halos, summed over sequences.
        shortest_tokens: [n] int64, tokens of the shortest sequence.
    """

    seconds: FloatArray
    halo_tokens: IntArray
    shortest_tokens: IntArray

    def take(self, index: Index) -> WindowWork:
        """Return the work of the indexed sequences."""
        return WindowWork(
            seconds=self.seconds[index],
            halo_tokens=self.halo_tokens[index],
            shortest_tokens=self.shortest_tokens[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Single-rank seconds of sequences (or packs), not divided by the degree.

    Attributes:
        attention_seconds: [n] alpha1 (1 + eta) length^2, plus window attention if `windows` is None.
        linear_seconds: [n] alpha2 length plus the vision encoder's terms.
        tokens: [n] int64.
        windows: work of layers with a halo exchange, or None if the profile has none.
    """

    attention_seconds: FloatArray
    linear_seconds: FloatArray
    tokens: IntArray
    windows: WindowWork | None = None

    @property
    def unhidden_seconds(self) -> FloatArray:
        """Seconds that overlap with no ring: linear ones, and window attention with a halo exchange."""
        return self.linear_seconds if self.windows is None else self.linear_seconds + self.windows.seconds

    @property
    def total_seconds(self) -> FloatArray:
        return self.attention_seconds + self.unhidden_seconds

    def take(self, index: Index) -> Work:
        """Return the work of the indexed sequences."""
        return Work(
            attention_seconds=self.attention_seconds[index],
            linear_seconds=self.linear_seconds[index],
            tokens=self.tokens[index],
            windows=self.windows and self.windows.take(index),
        )

    def packed(self, first: IntArray) -> Work:
        """Sum the work of concatenated packs with starts `first`; no pack may be empty."""
        # For an empty slice `reduceat` returns the next value, not 0.
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
    """Combine works of one profile, applying `join` (`np.concatenate` or a way to stack) to each array."""
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
    """Return the single-rank work of every sequence of a table."""
    work = causal_work(table.length_tokens, profile.coefficients)
    attention, windows = work.attention_seconds, work.windows
    if table.eta is not None:
        attention = attention * (1.0 + table.eta)
        windows = windows and replace(windows, seconds=windows.seconds * (1.0 + table.eta))
    linear = _with_vision(work.linear_seconds, table, profile)
    return Work(attention_seconds=attention, linear_seconds=linear, tokens=table.length_tokens, windows=windows)


def causal_work(length_tokens: IntArray, coefficients: Coefficients) -> Work:
    """Return the single-rank work of causal text sequences."""
    length = length_tokens.astype(np.float64)
    return Work(
        # Window attention with a halo exchange overlaps with no ring, so `windows` counts it.
        attention_seconds=attention_seconds(
            replace(coefficients, window_seconds_per_token2=0.0) if coefficients.halo_bytes_per_token else coefficients,
            length,
        ),
        linear_seconds=coefficients.linear_seconds_per_token * length,
        tokens=length_tokens,
        windows=window_work(length_tokens, coefficients) if coefficients.halo_bytes_per_token else None,
    )


def window_work(length_tokens: IntArray, coefficients: Coefficients) -> WindowWork:
    """Return the work of causal sequences in layers with a halo exchange."""
    pairs = windowed_pairs(length_tokens.astype(np.float64), coefficients.window_tokens)
    return WindowWork(
        seconds=coefficients.window_seconds_per_token2 * pairs,
        halo_tokens=np.minimum(length_tokens, 2 * reach_tokens(coefficients)),
        shortest_tokens=length_tokens,
    )


def token_in_window_seconds(coefficients: Coefficients) -> float:
    """Return the window attention seconds of one more token of a causal sequence longer than the window."""
    return 2.0 * coefficients.window_seconds_per_token2 * coefficients.window_tokens


def reach_tokens(coefficients: Coefficients) -> int:
    """Return the number of earlier tokens that a token attends to in a layer with a window."""
    return max(int(coefficients.window_tokens) - 1, 0)


def attention_seconds(coefficients: Coefficients, lengths: FloatArray) -> FloatArray:
    """Return the single-rank attention seconds of causal sequences, including window attention."""
    seconds = coefficients.attention_seconds_per_token2 * lengths * lengths
    if coefficients.window_seconds_per_token2:
        pairs = windowed_pairs(lengths, coefficients.window_tokens)
        seconds = seconds + coefficients.window_seconds_per_token2 * pairs
    return seconds


def windowed_pairs(lengths: FloatArray, window_tokens: float) -> FloatArray:
    """Return twice the token pairs within a window for each causal sequence; L^2 if the window holds all L tokens."""
    return lengths * lengths - np.square(np.maximum(lengths - window_tokens, 0.0))


def vision_seconds(table: LengthTable, profile: CostProfile) -> FloatArray:
    """Return [n] the single-rank vision encoder seconds of each sequence."""
    return _with_vision(np.zeros(len(table)), table, profile)


def _with_vision(seconds: FloatArray, table: LengthTable, profile: CostProfile) -> FloatArray:
    c = profile.coefficients
    if table.vision_patches is not None:
        seconds = seconds + c.vision_seconds_per_patch * table.vision_patches
    if table.vision_patch_pairs is not None:
        seconds = seconds + c.vision_seconds_per_patch2 * table.vision_patch_pairs
    return seconds


def encoder_seconds(work: Work, profile: CostProfile) -> FloatArray:
    """Return the vision encoder's part of the linear seconds."""
    # For text the difference is rounding error, which may be negative.
    return np.maximum(work.linear_seconds - profile.coefficients.linear_seconds_per_token * work.tokens, 0.0)


def unit_prices(profile: CostProfile) -> UnitPrices:
    """Return the coefficients of a profile in seconds, with bytes divided by the bandwidths."""
    c, heads = profile.coefficients, profile.heads
    bandwidth = np.array([profile.bandwidth.intra_node, profile.bandwidth.inter_node])
    exchange = key_value_exchange = np.zeros(2)
    if heads is not None:
        exchange = heads.exchange_bytes_per_token / (bandwidth * heads.bandwidth_share)
        key_value_exchange = heads.key_value_exchange_bytes_per_token / (bandwidth * heads.bandwidth_share)
    return UnitPrices(
        beta=c.microbatch_seconds,
        exposed=c.exposed_ring_share,
        chunk=c.chunk_seconds_per_token,
        ring=c.ring_bytes_per_token / bandwidth,
        hop=c.ring_hop_seconds,
        home=c.last_hop_bytes_per_token / bandwidth,
        home_hop=c.last_hop_seconds,
        reach=reach_tokens(c) if c.halo_bytes_per_token else 0,
        halo=c.halo_bytes_per_token / bandwidth,
        halo_message=c.halo_message_seconds,
        key_value_heads=np.inf if heads is None else float(heads.key_value_heads),
        exchange=exchange,
        key_value_exchange=key_value_exchange,
        exchange_message=0.0 if heads is None else heads.exchange_seconds,
        again=recomputation_lines(profile.priced_levels),
        host=c.host_microbatch_seconds,
        host_hop=c.host_hop_seconds,
        host_home=c.host_last_hop_seconds,
        host_exchange=0.0 if heads is None else heads.host_exchange_seconds,
        host_halo=c.host_halo_message_seconds,
    )


def group_terms(
    profile: CostProfile,
    *,
    degree: npt.ArrayLike,
    crosses_nodes: npt.ArrayLike,
    heads_degree: npt.ArrayLike = 1,
    sets_cross_nodes: npt.ArrayLike = False,
) -> GroupTerms:
    """Return `formula.group_terms` of groups; all arguments broadcast.

    Args:
        profile: coefficients and bandwidths.
        degree: ranks of the group, >= 1.
        crosses_nodes: whether the group spans nodes.
        heads_degree: Ulysses degree, a divisor of `degree`; 1 without `profile.heads`.
        sets_cross_nodes: whether a Ulysses group spans nodes.
    """
    return formula.group_terms(
        np.asarray(degree, dtype=np.float64),
        np.asarray(heads_degree, dtype=np.float64),
        # Indices into the [2] prices: inside a node, across nodes.
        np.asarray(crosses_nodes, dtype=np.int64),
        np.asarray(sets_cross_nodes, dtype=np.int64),
        unit_prices(profile),
    )


def pack_parts(profile: CostProfile, work: Work, *, degree: npt.ArrayLike, **place: npt.ArrayLike) -> PackParts:
    """Return the parts of the seconds of packs on groups without halos; arguments as in `group_seconds`."""
    d = np.asarray(degree, dtype=np.float64)
    terms = group_terms(profile, degree=d, **place)
    attention, linear = work.attention_seconds, work.unhidden_seconds
    return formula.pack_parts(attention, linear, work.tokens, d, terms, unit_prices(profile))


def group_seconds(profile: CostProfile, work: Work, *, degree: npt.ArrayLike, **place: npt.ArrayLike) -> FloatArray:
    """Predict the seconds of packs on groups, the longer of both clocks; all arguments broadcast.

    Args:
        profile: coefficients and bandwidths.
        work: single-rank work of the packs.
        degree: ranks of the group, >= 1.
        place: `crosses_nodes`, `heads_degree` and `sets_cross_nodes`; see `group_terms`.
    """
    return np.maximum(*clocks(profile, work, degree=degree, **place))


def clocks(
    profile: CostProfile, work: Work, *, degree: npt.ArrayLike, **place: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of packs on their devices, and those in which their hosts issue them (0: not priced).

    Arguments as in `group_seconds`.
    """
    terms, messages = group_terms(profile, degree=degree, **place), 0.0
    seconds = formula.overlapped_seconds(pack_parts(profile, work, degree=degree, **place))
    if profile.priced_levels:
        seconds = seconds + recomputation_seconds(profile, work.tokens, degree=degree)
    if work.windows is not None:
        seconds = seconds + halo_seconds(profile, work.windows, terms)
        messages = formula.halo_messages(terms.sets, work.windows.shortest_tokens, reach_tokens(profile.coefficients))
    host = formula.host_seconds(messages, terms, unit_prices(profile))
    return np.asarray(seconds, dtype=np.float64), np.asarray(host, dtype=np.float64)


def recomputation_seconds(profile: CostProfile, tokens: npt.ArrayLike, *, degree: npt.ArrayLike) -> FloatArray:
    """Predict the as-needed recomputation seconds of packs; 0 if the profile has no levels."""
    d = np.asarray(degree, dtype=np.float64)
    return np.asarray(formula.recomputation_seconds(np.asarray(tokens), d, unit_prices(profile)), dtype=np.float64)


def halo_seconds(profile: CostProfile, windows: WindowWork, terms: GroupTerms) -> FloatArray:
    """Predict the halo exchange seconds of packs on groups; 0 without a ring."""
    prices = unit_prices(profile)
    messages = formula.halo_messages(terms.sets, windows.shortest_tokens, prices.reach)
    return np.asarray(formula.halo_seconds(windows.halo_tokens, messages, terms, prices))


# Cost of offloading activations to host memory, with copies overlapped by the layers' computation.

PCIE_BYTES_PER_SECOND: Final = 25e9
"""Bandwidth of one direction of a PCIe 4.0 x16 link with page-locked memory; 5.0 has twice that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCost:
    """Offload cost of a micro-batch on one rank.

    Attributes:
        moved_bytes: bytes copied in both directions.
        copy_seconds: copy seconds in both directions.
        visible_seconds: extra seconds of the micro-batch.
    """

    moved_bytes: float
    copy_seconds: float
    visible_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """Copy seconds that overlap with computation."""
        return self.copy_seconds - self.visible_seconds


def offload_cost(
    *,
    input_bytes: float,
    layers: int,
    forward_seconds: float,
    backward_seconds: float,
    bytes_per_second: float = PCIE_BYTES_PER_SECOND,
) -> OffloadCost:
    """Return the cost of offloading the inputs of a micro-batch's recomputed layers.

    In forward a layer's input is copied out while the layer computes. In backward the input of the layer below is
    prefetched on a separate stream. The last layer's input is copied out, too, but also stays on the device. Copies are
    free if a layer computes longer than its input is copied.

    Args:
        input_bytes: bytes of one layer's input: tokens of the rank x hidden size x bytes per element.
        layers: number of recomputed layers.
        forward_seconds: forward seconds of one layer.
        backward_seconds: backward seconds of one layer, including its recomputation.
        bytes_per_second: this rank's share of the link to the host, in one direction.
    """
    returning = max(layers - 1, 0)
    copy = input_bytes / bytes_per_second
    waits = layers * max(copy - forward_seconds, 0.0) + returning * max(copy - backward_seconds, 0.0)
    copies = layers + returning
    return OffloadCost(moved_bytes=copies * input_bytes, copy_seconds=copies * copy, visible_seconds=waits)


def profiled_offload_cost(
    profile: CostProfile,
    *,
    tokens: int,
    layers: int,
    input_bytes_per_token: float,
    bytes_per_second: float = PCIE_BYTES_PER_SECOND,
) -> OffloadCost:
    """Return `offload_cost` of a micro-batch with layer times from a cost profile.

    The forward is a fourth of a recomputed layer's time, since backward repeats it and computes two products for each
    of its own. Ignoring attention is conservative: it makes layers longer and hides copies better.

    Args:
        profile: cost profile of all layers with recomputation.
        tokens: tokens of the rank in the micro-batch.
        layers: number of layers of the model.
        input_bytes_per_token: bytes per token of a layer's input.
        bytes_per_second: see `offload_cost`.
    """
    layer_seconds = profile.coefficients.linear_seconds_per_token * tokens / layers
    return offload_cost(
        input_bytes=tokens * input_bytes_per_token,
        layers=layers,
        forward_seconds=layer_seconds / 4,
        backward_seconds=layer_seconds * 3 / 4,
        bytes_per_second=bytes_per_second,
    )
