"""The order in which the ranks of a group stand around its ring: it decides which ranks ever exchange messages.

Every pair of ranks that talks costs a connection, so the same few pairs must serve as many groups as possible, of all
degrees. The order follows from the ranks alone; every rank works it out for itself, and a resumed run has it again.

Within a node the ring is *folded*: up over every other rank and back over those between, so that neighbours are at most
two apart. All groups of contiguous ranks then need four peers per rank, whatever their degrees and wherever they begin:

    ranks 0..5     0 2 4 5 3 1 (0)        ranks 2..6     2 4 6 5 3 (2)

Across nodes the ring visits the nodes in the folded order and each of them once. It enters and leaves a node on a rail:
from a rank to the rank of the same place in the next node, whose network ports share a switch. Which rail follows from
the two nodes, so that again few pairs serve all rings. Ranks that fill no whole node are visited from the whole node
next to them. The order of Megatron-LM's pull request 6801, which bounds the peers of a rank by four, is the same idea.

Where u ranks of a group share the heads, the ring is one of *sets*: each u ranks that follow each other. Sets
stand as their first ranks do in such a ring. The ranks of one place in all sets are a ring of their own, and those of a
set meet all others of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, permutations, product


@lru_cache(maxsize=1024)
def ring_order(ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1) -> tuple[int, ...]:
    """Return the same ranks in ring order, the members of a set next to each other.

    Args:
        ranks: ascending ranks of a group.
        ranks_per_node: ranks r with equal r // ranks_per_node share a node.
        heads_degree: ranks of a set, which share the heads; divides their number.

    Returns:
        Members; the i-th is the i % heads_degree-th of its set, which is the i // heads_degree-th of the ring.
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
    """Return the pairs of ranks (lower first) that exchange messages where this group attends, each once."""
    hops = ring_hops(ranks, ranks_per_node, heads_degree)
    return list(dict.fromkeys((min(hop), max(hop)) for hop in hops))


def ring_hops(ranks: tuple[int, ...], ranks_per_node: int, heads_degree: int = 1) -> list[tuple[int, int]]:
    """Return (from, to) of the messages of this group: of every hop of its rings, and within its sets."""
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
    """Return (from, to) of the messages of layers with windows or states, not of rings.

    It goes up each ring and comes down it, and gradients go back. With `whole_heads`, some of it is sent before ranks
    have exchanged tokens for heads: the tokens before a span may then be on any member of a set.
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
    """Return the rail from each node of the tour to the next; those of one node differ.

    Nodes two apart use the second rail and the last but one in turn. Neighbours, which only meet at the ends of the
    tour, use the first and the last, which have fewer peers inside the node: the first at the left end and the last at
    the right end, so that the ranks at the outer end of either node stay adjacent for those that visit it.
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
    """Return a way over 0..count-1 from `begin` to `end` by steps of one or two wherever there is one."""
    if begin > end:
        return _path(end, begin, count)[::-1]
    low = [*range(begin, -1, -2)]
    low += [place for place in range(begin) if place not in low]
    high = [*range(end, count, 2)]
    high += [place for place in range(count - 1, end, -1) if place not in high]
    return [*low, *range(begin + 1, end), *reversed(high)]


def _visit(ring: list[int], home: int, members: list[int], ranks_per_node: int) -> None:
    """Put a node's ranks (ascending) into the ring next to a rank of the node `home`, on their rails if they can be."""
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
