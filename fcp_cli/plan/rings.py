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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, permutations, product
from typing import Any, Final

import numpy as np

from fcp_cli.plan.setup import PlanSetup, held_tokens
from fcp_cli.plan.step import RingGroup, StepPlan
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.words import counted


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


# Peers of the ranks of a plan: the other ranks that each rank ever exchanges attention messages with.
#
# NCCL and HCCL open a connection at the first message of a pair of ranks and keep its buffers on both devices.

BYTES_PER_PEER: Final = 500_000_000
"""Device memory of a connection to one more rank: NVIDIA/nccl#1685 measured 1.06 GB before and 4.34 GB after the first
messages to 7 peers on H100, 0.47 GB each. HCCL connects at first contact, too; it is assumed to need as much."""


@dataclass(slots=True, kw_only=True)
class PeerCount:
    """Running count of the pairs of ranks that exchange messages in the steps passed to `add`.

    Ring neighbours follow `ring_order`. The count is a lower bound for frameworks with one communicator per group
    (Transformer Engine), which open a connection per group for the same pair.

    Attributes:
        num_ranks, ranks_per_node: of the plan.
        new_pairs: pairs first seen in each step, one entry per step added.
    """

    num_ranks: int
    ranks_per_node: int
    new_pairs: list[int] = field(default_factory=list)
    _pairs: set[tuple[int, int]] = field(default_factory=set)
    _groups: set[RingGroup] = field(default_factory=set)

    def add(self, step: StepPlan) -> None:
        """Add the pairs of a step."""
        before = len(self._pairs)
        self.add_groups(step.ring_groups())
        self.new_pairs.append(len(self._pairs) - before)

    def add_groups(self, groups: Iterable[RingGroup]) -> None:
        """Add the pairs of groups from `StepPlan.ring_groups` without attributing them to a step."""
        for group in groups:
            if group not in self._groups:
                self._groups.add(group)
                self._pairs.update(ring_pairs(group.ranks, self.ranks_per_node, group.heads_degree))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs so far, ascending, lower rank first in each."""
        return sorted(self._pairs)

    @property
    def per_rank(self) -> IntArray:
        """[num_ranks] number of peers of each rank."""
        return np.bincount(np.array(list(self._pairs), dtype=np.int64).ravel(), minlength=self.num_ranks)

    @property
    def mean(self) -> float:
        return 2.0 * len(self._pairs) / self.num_ranks

    @property
    def most(self) -> int:
        """Most peers of any rank."""
        return int(self.per_rank.max())

    @property
    def most_bytes(self) -> int:
        """Device memory of the peer connections of the rank with most peers, in bytes."""
        return self.most * BYTES_PER_PEER

    def means(self) -> list[float]:
        """Return [steps] the mean number of peers per rank after each step."""
        means: list[float] = (2.0 * np.cumsum(self.new_pairs) / self.num_ranks).tolist()
        return means

    def to_json(self) -> Mapping[str, Any]:
        """Return JSON values, with the mean after 1, 2, 4, ... and all steps to show whether peers still grow."""
        means = self.means()
        steps = sorted({min(1 << power, len(means)) for power in range(len(means).bit_length() + 1)} - {0})
        return {
            "peers_mean": self.mean,
            "peers_most": self.most,
            "peers_most_bytes": self.most_bytes,
            "peers_mean_after_steps": {str(step): means[step - 1] for step in steps},
        }


# Validates the layout of a step of a plan: ranks, token budget and waves, independent of times.


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A violated rule of the format at `step` and `order`; None if it concerns the whole plan or the whole step."""

    message: str
    step: int | None = None
    order: int | None = None

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        where += "" if self.order is None else f"order {self.order}: "
        return where + self.message


def check_layout(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check ranks, token budget, Ulysses degrees and waves of a step, but not its times."""
    rank_findings = list(check_ranks(step, setup))
    yield from rank_findings
    yield from _check_budget(step, setup)
    if (broken := broken_heads(step)) is not None:
        yield broken
    if not rank_findings:
        yield from _check_waves(step, setup)


def check_ranks(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check that the ranks of every row are ascending and in range, that every rank has a row, and idle rows."""
    if (broken := broken_ranks(step, setup.num_ranks)) is not None:
        yield broken
        return
    absent = np.flatnonzero(np.bincount(step.ranks, minlength=setup.num_ranks) == 0)
    if len(absent):
        message = f"rank {absent[0]} has no row ({len(absent)} ranks have none); an idle rank needs an idle row"
        yield BrokenRule(step=step.step, message=message)
    odd = step.is_idle & ((step.degrees != 1) | (step.seconds != 0))
    if odd.any():
        yield BrokenRule(
            step=step.step, order=first_of(odd), message="an idle row has one rank and takes no time; this one does not"
        )


def broken_ranks(step: StepPlan, num_ranks: int) -> BrokenRule | None:
    """Return the first row whose ranks are empty, out of range or not ascending, or None."""
    if (step.degrees < 1).any():
        return BrokenRule(step=step.step, order=first_of(step.degrees < 1), message="no ranks")
    outside = (step.ranks < 0) | (step.ranks >= num_ranks)
    if outside.any():
        at = first_of(outside)
        message = f"rank {step.ranks[at]} of a job of {num_ranks}"
        return BrokenRule(step=step.step, order=row_of_rank(step, at), message=message)
    falls = step.ranks[1:] <= step.ranks[:-1]
    falls[step.rank_offsets[1:-1] - 1] = False  # ranks need not ascend across rows
    if falls.any():
        at = first_of(falls)
        message = f"its ranks do not ascend: {step.ranks[at + 1]} follows {step.ranks[at]}"
        return BrokenRule(step=step.step, order=row_of_rank(step, at), message=message)
    return None


def row_of_rank(step: StepPlan, at: int) -> int:
    """Return the row that owns entry `at` of the step's flat ranks."""
    return int(np.searchsorted(step.rank_offsets, at, side="right")) - 1


def _check_budget(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    room = setup.tokens_per_rank * step.degrees
    held = held_tokens(step, setup.padding_multiple)
    for order in np.flatnonzero(held > room)[:1].tolist():
        tokens, ranks = counted(held[order], "token"), counted(step.degrees[order], "rank")
        padded = "" if setup.padding_multiple is None else ", with padding,"
        message = f"{tokens}{padded} on {ranks}, where {room[order]:,} fit"
        yield BrokenRule(step=step.step, order=order, message=message)


def broken_heads(step: StepPlan) -> BrokenRule | None:
    """Return the first row whose Ulysses degree does not divide its degree, or None."""
    if step.heads_degree is None:
        return None
    heads, degrees = step.heads_degree, step.degrees
    wrong = (heads < 1) | (degrees % np.maximum(heads, 1) != 0)
    if not wrong.any():
        return None
    order = first_of(wrong)
    message = f"a heads degree of {heads[order]} does not divide the degree {degrees[order]}"
    return BrokenRule(step=step.step, order=order, message=message)


def _check_waves(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check waves: -1 under `iteration`; under `microbatch` numbered from 0, each using every rank once."""
    if setup.sync == "iteration":
        if (step.wave != -1).any():
            order = first_of(step.wave != -1)
            yield BrokenRule(
                step=step.step, order=order, message=f"wave {step.wave[order]} under sync iteration, not -1"
            )
        rows = np.bincount(step.ranks, minlength=setup.num_ranks)
        needless = step.is_idle & (rows[step.ranks[step.rank_offsets[:-1]]] > 1)
        for order in np.flatnonzero(needless)[:1].tolist():
            rank = step.ranks[step.rank_offsets[order]]
            yield BrokenRule(step=step.step, order=order, message=f"an idle row for rank {rank}, which has other rows")
        return
    rises = step.wave[1:] - step.wave[:-1]
    if step.wave[0] != 0 or ((rises != 0) & (rises != 1)).any():
        yield BrokenRule(step=step.step, message="waves do not count up from 0")
        return
    waves = int(step.wave[-1]) + 1
    if setup.pipeline is not None and setup.pipeline.missing_waves(waves, setup.pipeline_parallel):
        message = (
            f"{counted(waves, 'wave')}, not a multiple of the {setup.pipeline_parallel} stages, with virtual stages"
        )
        yield BrokenRule(step=step.step, message=message)
    # Occurrences of each (wave, rank), flattened as wave * num_ranks + rank.
    uses = np.bincount(
        np.repeat(step.wave.astype(np.int64), step.degrees) * setup.num_ranks + step.ranks,
        minlength=waves * setup.num_ranks,
    )
    for at in np.flatnonzero(uses != 1)[:1].tolist():
        wave, rank = divmod(at, setup.num_ranks)
        yield BrokenRule(step=step.step, message=f"wave {wave} uses rank {rank} {uses[at]} times, not once")


def first_of(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """Return the index of the first set entry of a mask."""
    return int(np.flatnonzero(mask)[0])
