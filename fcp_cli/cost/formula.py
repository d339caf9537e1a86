"""Cost formula of a pack on a group: plain arithmetic on floats in the compiled search and on arrays in pricing.

`cost.model` calls these functions with NumPy arrays, which broadcast; `planning.compiled.core` compiles the same
functions for floats. Both round alike, so plans, prices and checks agree bitwise. Two rules keep this possible: no
function calls another one of this file, and no function branches, using minima, maxima and indices instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fcp_cli.util.arrays import FloatArray

Number: TypeAlias = Any  # a float or an integer, or an array of them


class UnitPrices(NamedTuple):
    """Coefficients of a cost profile in seconds; terms that depend on bandwidth are [2]: inside a node, across nodes.

    Attributes:
        beta: fixed seconds of a micro-batch.
        exposed: share of a ring's seconds that attention cannot hide.
        chunk: extra seconds of attention in a ring, per token and hop.
        ring: [2] seconds per token and ring hop.
        hop: latency of a ring hop.
        home: [2] seconds per token of a ring's last hop, which is never hidden; included in `ring`.
        home_hop: latency of the last hop.
        reach: earlier tokens that a token attends to in layers with a halo exchange; 0: rings carry all layers.
        halo: [2] seconds per token of a halo and hop.
        halo_message: latency of a halo message.
        key_value_heads: Ulysses degree beyond which key/value heads are replicated; infinite if the profile prices no
            heads.
        exchange, key_value_exchange: [2] seconds per token of the Ulysses exchange, before the factor (u - 1) / u.
        exchange_message: latency of the exchange per other rank.
        again: [3, 2] slope per token of a rank and seconds to subtract, for each line of as-needed recomputation; its
            time is the maximum of the lines and 0.
        host: seconds in which the host issues a micro-batch without messages; 0: not priced.
        host_hop, host_home: host seconds per ring hop, and more per ring: its last hop.
        host_exchange: host seconds of the Ulysses exchange per other rank.
        host_halo: host seconds per halo message.
    """

    beta: float
    exposed: float
    chunk: float
    ring: FloatArray
    hop: float
    home: FloatArray
    home_hop: float
    reach: int
    halo: FloatArray
    halo_message: float
    key_value_heads: float
    exchange: FloatArray
    key_value_exchange: FloatArray
    exchange_message: float
    again: FloatArray
    host: float
    host_hop: float
    host_home: float
    host_exchange: float
    host_halo: float


class GroupTerms(NamedTuple):
    """Prices on a group; pairs are (seconds per token of a pack, fixed seconds).

    Attributes:
        chunk: extra seconds of attention in a ring, per token.
        ring, hops: ring communication, including the last hop.
        home, home_hop: the last hop of the ring.
        exchange, messages: Ulysses exchange.
        halo: seconds per token of a halo.
        sets: ring degree, the number of Ulysses groups.
        host: seconds in which the host issues a micro-batch, without halos.
    """

    chunk: Number
    ring: Number
    hops: Number
    home: Number
    home_hop: Number
    exchange: Number
    messages: Number
    halo: Number
    sets: Number
    host: Number


class PackParts(NamedTuple):
    """Parts of the seconds of a pack on its group, combined by `overlapped_seconds`.

    Attributes:
        other: seconds without overlap: fixed, linear, and the Ulysses exchange.
        attention: compute seconds of attention.
        hidden: ring seconds that overlap with attention; the longer of the two counts.
        exposed: ring seconds that always add to the total.
    """

    other: Number
    attention: Number
    hidden: Number
    exposed: Number


def group_terms(
    degree: Number, heads_degree: Number, crosses_nodes: Number, sets_cross_nodes: Number, prices: UnitPrices
) -> GroupTerms:
    """Return the terms of a group.

    Args:
        degree: ranks of the group.
        heads_degree: Ulysses degree; divides the degree.
        crosses_nodes: 1 if the group spans nodes, else 0.
        sets_cross_nodes: 1 if a Ulysses group spans nodes, else 0.
        prices: unit prices of the profile.
    """
    sets = degree / heads_degree
    hops = sets - 1.0
    has_ring = np.minimum(hops, 1.0)  # 0 or 1
    copies = np.maximum(1.0, heads_degree / prices.key_value_heads)  # of a key/value head within a Ulysses group
    # A rank keeps its own part of an exchange: (u - 1) / u of the bytes are sent.
    exchanged = prices.exchange[sets_cross_nodes] + copies * prices.key_value_exchange[sets_cross_nodes]
    return GroupTerms(
        prices.chunk * hops / degree,
        prices.ring[crosses_nodes] * copies * hops / degree,
        prices.hop * hops + prices.home_hop * has_ring,
        prices.home[crosses_nodes] * copies * has_ring / degree,
        prices.home_hop * has_ring,
        exchanged * (heads_degree - 1.0) / heads_degree / degree,
        prices.exchange_message * (heads_degree - 1.0),
        prices.halo[crosses_nodes] * copies * hops / degree,
        sets,
        prices.host
        + prices.host_hop * hops
        + prices.host_home * has_ring
        + prices.host_exchange * (heads_degree - 1.0),
    )


def pack_parts(
    attention: Number, linear: Number, tokens: Number, degree: Number, terms: GroupTerms, prices: UnitPrices
) -> PackParts:
    """Return the parts of a pack's seconds.

    Args:
        attention: single-rank attention seconds.
        linear: all other single-rank seconds, which overlap with no ring.
        tokens: tokens of the pack.
        degree, terms: degree and terms of the group.
        prices: unit prices of the profile.
    """
    ring, home = terms.ring * tokens + terms.hops, terms.home * tokens + terms.home_hop
    exposed = prices.exposed * (ring - home) + home
    return PackParts(
        prices.beta + linear / degree + (terms.exchange * tokens + terms.messages),
        attention / degree + terms.chunk * tokens,
        ring - exposed,
        exposed,
    )


def overlapped_seconds(parts: PackParts) -> Number:
    """Return the seconds of a pack without halos and recomputation; attention overlaps with its ring."""
    return parts.other + np.maximum(parts.attention, parts.hidden) + parts.exposed


def recomputation_seconds(tokens: Number, degree: Number, prices: UnitPrices) -> Number:
    """Return the as-needed recomputation seconds of a pack, convex in its tokens.

    Args:
        tokens: tokens of the pack.
        degree: degree of the group.
        prices: unit prices of the profile.
    """
    held, again = tokens / degree, prices.again
    first = np.maximum(0.0, again[0, 0] * held - again[0, 1])
    second = np.maximum(again[1, 0] * held - again[1, 1], again[2, 0] * held - again[2, 1])
    return np.maximum(first, second)


def halo_messages(sets: Number, shortest_tokens: Number, reach: Number) -> Number:
    """Return the number of messages of a halo exchange, in both directions; 0 if the ring has one member.

    The halo of a chunk is the tokens before it that the chunk attends to. The shorter the chunks, the more members the
    halo spans, and each round transfers the tokens of one member.

    Args:
        sets: ring degree.
        shortest_tokens: tokens of the shortest sequence of the pack.
        reach: earlier tokens that a token attends to.
    """
    # A chunk of the shortest sequence has shortest / (2 sets) tokens; each round transfers one chunk.
    rounds = np.ceil(2.0 * sets * reach / shortest_tokens)
    return np.minimum(2.0 * rounds, sets + 1.0) * np.minimum(sets - 1.0, 1.0)


def halo_seconds(halo_tokens: Number, messages: Number, terms: GroupTerms, prices: UnitPrices) -> Number:
    """Return the halo exchange seconds of a pack.

    Args:
        halo_tokens: tokens of the halos, summed over the pack's sequences.
        messages: number of messages; see `halo_messages`.
        terms: terms of the group.
        prices: unit prices of the profile.
    """
    return terms.halo * halo_tokens + prices.halo_message * messages


def host_seconds(messages: Number, terms: GroupTerms, prices: UnitPrices) -> Number:
    """Return the seconds in which the host issues a pack; a pack takes the longer of these and its device's seconds.

    Args:
        messages: number of halo messages; see `halo_messages`.
        terms: terms of the group.
        prices: unit prices of the profile.
    """
    return terms.host + prices.host_halo * messages
