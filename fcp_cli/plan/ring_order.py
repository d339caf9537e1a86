"""Ring order of the ranks of a group, which decides which pairs of ranks ever open a connection.

Every pair of neighbours costs a connection, so the same few pairs must serve as many groups as possible, of all
degrees. The order is a function of the ranks alone: each rank computes it locally, and a resumed run gets the same.

Within a node the ring is *folded*: up over every other rank and back over those between, so that neighbours are at most
two apart. All groups of contiguous ranks then need four peers per rank, whatever their degree or first rank:

    ranks 0..5     0 2 4 5 3 1 (0)        ranks 2..6     2 4 6 5 3 (2)

Across nodes the ring visits each node once, in folded order. It crosses between nodes on a rail: from a rank to the
rank of the same local index, whose network ports share a switch. The rail is a function of the two nodes, so that again
few pairs serve all rings. Ranks of a partly used node are inserted next to a rank of the nearest whole node.
Megatron-LM's pull request 6801, which bounds the peers of a rank by four, has the same idea.

With a Ulysses degree u > 1, every u consecutive ranks form a Ulysses group, and the ring is one of Ulysses groups,
ordered by their first ranks. The i-th ranks of all Ulysses groups form one ring, and the ranks of a Ulysses group
exchange heads all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, permutations, product


@lru_cache(maxsize=1024)
def ring_order(ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1) -> tuple[int, ...]:
    """Return the ranks in ring order, with the members of a Ulysses group adjacent.

    Args:
        ranks: ascending ranks of a group.
        ranks_per_node: ranks r with equal r // ranks_per_node share a node.
        heads_degree: Ulysses degree; divides the number of ranks.

    Returns:
        The ranks; entry i is member i % heads_degree of Ulysses group i // heads_degree of the ring.
    """
    if heads_degree > 1:
        sets = {ranks[i]: ranks[i : i + heads_degree] for i in range(0, len(ranks), heads_degree)}
        return tuple(rank for first in ring_order(tuple(sets), ranks_per_node) for rank in sets[first])
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    whole = [node for node, members in nodes.items() if len(members) == ranks_per_node]
    if len(nodes) == 1 or not whole or ranks_per_node < 3:  # with two rails, folding is rail-aligned already
        return tuple(_folded(ranks))
    ring = _over_whole_nodes(whole, ranks_per_node)
    for node, members in nodes.items():
        if len(members) < ranks_per_node:
            home = min(whole, key=lambda other: (abs(other - node), other))
            _visit(ring, home, members, ranks_per_node)
    return tuple(ring)


def ring_pairs(ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1) -> list[tuple[int, int]]:
    """Return the pairs of ranks (lower first) that exchange messages in this group's attention, without duplicates."""
    hops = ring_hops(ranks, ranks_per_node, heads_degree)
    return list(dict.fromkeys((min(hop), max(hop)) for hop in hops))


def ring_hops(ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1) -> list[tuple[int, int]]:
    """Return (from, to) of this group's attention messages: ring hops, and all-to-all within Ulysses groups."""
    order = ring_order(ranks, ranks_per_node, heads_degree)
    hops: list[tuple[int, int]] = []
    for place in range(heads_degree):
        ring = order[place::heads_degree]
        if len(ring) > 1:
            hops += zip(ring, (*ring[1:], ring[0]), strict=True)
    if heads_degree > 1:
        for start in range(0, len(order), heads_degree):
            hops += permutations(order[start : start + heads_degree], 2)
    return hops


def halo_hops(
    ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1, *, whole_heads: bool = False
) -> list[tuple[int, int]]:
    """Return (from, to) of the halo exchange of layers with sliding windows or recurrent states.

    Messages run along each ring in both directions without closing it, as do their gradients. With `whole_heads`, some
    are sent before the Ulysses all-to-all, so any member of a Ulysses group may hold the tokens before a span.
    """
    order, hops = ring_order(ranks, ranks_per_node, heads_degree), set()
    for place in range(heads_degree):
        for one, other in pairwise(order[place::heads_degree]):
            hops |= {(one, other), (other, one)}
    if whole_heads and heads_degree > 1:
        sets = [order[start : start + heads_degree] for start in range(0, len(order), heads_degree)]
        for below, above in pairwise(sets):
            hops |= {pair for one, other in product(below, above) for pair in ((one, other), (other, one))}
    return sorted(hops)


def _folded(items: Sequence[int]) -> list[int]:
    return [*items[::2], *reversed(items[1::2])]


def _over_whole_nodes(nodes: list[int], ranks_per_node: int) -> list[int]:
    """Return the ring over all ranks of these nodes (ascending)."""
    if len(nodes) == 1:
        first = nodes[0] * ranks_per_node
        return _folded(range(first, first + ranks_per_node))
    tour = _folded(nodes)
    rails = _rails(nodes, tour, ranks_per_node)
    ring: list[int] = []
    for place, node in enumerate(tour):
        ring += [node * ranks_per_node + rail for rail in _path(rails[place - 1], rails[place], ranks_per_node)]
    return ring


def _rails(nodes: list[int], tour: list[int], ranks_per_node: int) -> list[int]:
    """Return the rail from each node of the tour to the next; a node enters and leaves on different rails.

    Nodes two apart alternate between the second rail and the last but one. Adjacent nodes, which the tour only joins at
    its two ends, use the first and the last rail, whose ranks have fewer peers inside the node. The first rail serves
    the left end and the last one the right end, which keeps the outer ranks adjacent for `_visit` to insert between.
    """
    last = ranks_per_node - 1
    if len(nodes) == 2:
        return [last, 0]
    inner = (1, last - 1) if last >= 3 else (0, last)
    position = {node: place for place, node in enumerate(nodes)}
    rails = [-1] * len(tour)
    links = [(place, tour[place], tour[(place + 1) % len(tour)]) for place in range(len(tour))]
    far = [abs(position[a] - position[b]) > 1 for _place, a, b in links]
    for place, a, b in sorted(links, key=lambda link: (not far[link[0]], link[0])):
        one, other = min(a, b) // 2 % 2, 1 - min(a, b) // 2 % 2
        before, after = rails[place - 1], rails[(place + 1) % len(tour)]
        wanted = (inner[one], inner[other], 0, last) if far[place] else (0, last) if nodes[0] in (a, b) else (last, 0)
        rails[place] = next(rail for rail in (*wanted, *range(ranks_per_node)) if rail not in (before, after))
    return rails


def _path(begin: int, end: int, count: int) -> list[int]:
    """Return a path over all of 0..count-1 from `begin` to `end`, by steps of one or two if there is such a path."""
    if begin > end:
        return _path(end, begin, count)[::-1]
    low = [*range(begin, -1, -2)]
    low += [place for place in range(begin) if place not in low]
    high = [*range(end, count, 2)]
    high += [place for place in range(count - 1, end, -1) if place not in high]
    return [*low, *range(begin + 1, end), *reversed(high)]


def _visit(ring: list[int], home: int, members: list[int], ranks_per_node: int) -> None:
    """Insert the ranks of a partly used node (ascending) into the ring after a rank of node `home`, on equal rails."""
    place_of_rail = {rank % ranks_per_node: place for place, rank in enumerate(members)}

    def rails(at: int) -> tuple[int, int]:
        return ring[at] % ranks_per_node, ring[(at + 1) % len(ring)] % ranks_per_node

    def cost(at: int) -> tuple[bool, int, list[int]]:
        leaves = ring[(at + 1) % len(ring)] // ranks_per_node != home
        return (
            leaves,
            -sum(rail in place_of_rail for rail in rails(at)),
            sorted(rails(at) if 0 in place_of_rail else [-rail for rail in rails(at)]),
        )

    at = min((at for at, rank in enumerate(ring) if rank // ranks_per_node == home), key=cost)
    before, after = rails(at)
    last = len(members) - 1
    begin = place_of_rail.get(before, 0 if place_of_rail.get(after) else last)
    end = place_of_rail.get(after, 0 if begin else last)
    way = members if begin == end else [members[place] for place in _path(begin, end, len(members))]
    ring[at + 1 : at + 1] = way
