"""The formula of a group's seconds: plain arithmetic, on floats in the compiled search and on arrays in pricing.

`cost.model` calls these functions with numpy arrays, which broadcast; `planning.compiled.core` compiles the very same
functions for floats. Both round alike, so plans, prices and checks agree in every bit. Two rules keep them compilable
and array-ready: no function calls another one of this file, and no branches: choices are minima, maxima and positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fcp_cli.arrays import FloatArray

Number: TypeAlias = Any  # a float or an integer, or an array of them


class UnitPrices(NamedTuple):
    """Coefficients of a cost profile, by bandwidth where they are bytes: [2] inside a node, and across nodes.

    Attributes:
        beta: fixed seconds of a micro-batch.
        exposed: share of a ring's seconds that attention cannot hide.
        chunk: seconds that attention takes longer in a ring, per token and hop.
        ring: [2] seconds in which a ring moves one token by one hop.
        hop: fixed seconds of a hop.
        home: [2] seconds of a token in a ring's last hop, which nothing hides; part of `ring`.
        home_hop: fixed seconds of that hop.
        reach: tokens before its own that a token attends to in layers with halos; 0: rings carry all layers.
        halo: [2] seconds in which a token of a halo travels by one hop.
        halo_message: fixed seconds of a halo's message.
        key_value_heads: how many key/value heads ranks share before they hold copies; infinite if the profile prices
            no heads.
        exchange, key_value_exchange: [2] seconds in which all other ranks' share of a token is exchanged for heads.
        exchange_message: fixed seconds per other rank of the exchange.
        again: [3, 2] seconds per token of a rank, and seconds to subtract, of each line whose maximum, 0 included, is
            the time of recomputation as needed.
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


class GroupTerms(NamedTuple):
    """Seconds on a group, each as seconds per token of a pack and fixed seconds.

    Attributes:
        chunk: seconds of attention in a ring, beyond that of attention on one rank.
        ring, hops: those of the ring, last hop included.
        home, home_hop: those of its last hop.
        exchange, messages: the exchange of tokens for heads, and its messages.
        halo: the seconds of each token of a halo.
        sets: members of the ring, each of which is a set of ranks that share heads.
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


class PackParts(NamedTuple):
    """Seconds of a pack on its group, in parts that `overlapped_seconds` joins.

    Attributes:
        other: seconds that overlap with nothing: fixed, linear, and exchanges for heads.
        attention: seconds that attention computes, while the ring may travel.
        hidden: seconds of the ring's messages that overlap with attention: the longer of the two counts.
        exposed: seconds of the ring's messages that always add to the total.
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
        heads_degree: ranks of each set that shares heads; it divides the degree.
        crosses_nodes: 1 if the group's ranks lie on more than one node, else 0.
        sets_cross_nodes: 1 if a set's ranks do, else 0.
        prices: the prices of the profile.
    """
    sets = degree / heads_degree
    hops = sets - 1.0
    has_ring = np.minimum(hops, 1.0)  # 0 or 1
    copies = np.maximum(1.0, heads_degree / prices.key_value_heads)  # ranks of a set that hold the same key/value head
    # Of a token's exchange each rank keeps its own part: (u - 1) / u of it travels.
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
    )


def pack_parts(
    attention: Number, linear: Number, tokens: Number, degree: Number, terms: GroupTerms, prices: UnitPrices
) -> PackParts:
    """Return the parts of a pack's seconds.

    Args:
        attention: seconds of attention on one rank.
        linear: all other seconds on one rank, which hide no ring.
        tokens: the tokens of the pack.
        degree, terms: the degree and terms of the group.
        prices: the prices of the profile.
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
    """Return the seconds of a pack, halos and recomputation aside: attention runs while its ring travels."""
    return parts.other + np.maximum(parts.attention, parts.hidden) + parts.exposed


def recomputation_seconds(tokens: Number, degree: Number, prices: UnitPrices) -> Number:
    """Return the seconds in which a pack's ranks recompute as much as their tokens need: convex in these.

    Args:
        tokens: the tokens of the pack.
        degree: the degree of the group.
        prices: the prices of the profile.
    """
    held, again = tokens / degree, prices.again
    first = np.maximum(0.0, again[0, 0] * held - again[0, 1])
    second = np.maximum(again[1, 0] * held - again[1, 1], again[2, 0] * held - again[2, 1])
    return np.maximum(first, second)


def halo_messages(sets: Number, shortest_tokens: Number, reach: Number) -> Number:
    """Return how many rounds of messages a halo takes, up the ring and down it; 0 if the ring has one member.

    A halo is the tokens before a chunk that the chunk looks back at. The shorter the chunks, the more members it spans,
    and each round brings the tokens of one member.

    Args:
        sets: members of the ring, each a set of ranks that share heads.
        shortest_tokens: the tokens of the shortest sequence of the pack.
        reach: how many tokens back a token looks; see `UnitPrices`.
    """
    # A chunk has shortest / (2 sets) tokens, and each round brings those of one.
    rounds = np.ceil(2.0 * sets * reach / shortest_tokens)
    return np.minimum(2.0 * rounds, sets + 1.0) * np.minimum(sets - 1.0, 1.0)


def halo_seconds(halo_tokens: Number, messages: Number, terms: GroupTerms, prices: UnitPrices) -> Number:
    """Return the seconds in which a pack's halos travel.

    Args:
        halo_tokens: summed over the pack's sequences.
        messages: see `halo_messages`.
        terms: the terms of the group.
        prices: the prices of the profile.
    """
    return terms.halo * halo_tokens + prices.halo_message * messages
