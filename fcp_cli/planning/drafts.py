"""Helpers of published strategies: micro-batches as plain lists, solvers made of a function, choice of the fastest."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import padded_tokens
from fcp_cli.plan.step import level_waves, offsets_of
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, spread_steps
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.util.arrays import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSolver:
    """A solver made of a function of the batch and the problem; see `problem.Solver`."""

    name: str
    problem: Problem
    rule: Callable[[Batch, Problem], Assignment]
    options: Mapping[str, Any] = field(default_factory=dict)

    def assign(self, batch: Batch) -> Assignment:
        """Plan one step."""
        return self.rule(batch, self.problem)

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of the step."""
        return makespan_seconds(self.assign(batch), batch, self.problem)


class _Timed(Protocol):
    def seconds(self, batch: Batch) -> float: ...


Packs: TypeAlias = Sequence[tuple[int, Sequence[int] | IntArray]]  # packs of a wave: (degree, members)
_Strategy = TypeVar("_Strategy", bound=_Timed)


def quickest_solver(solvers: Iterable[_Strategy], batches: GlobalBatches, *, steps: int = 4) -> _Strategy:
    """Return the solver with the least time over `steps` evenly spaced steps; the first on ties."""
    sample = [batches.batch(step) for step in spread_steps(len(batches), steps)]
    return min(solvers, key=lambda one: sum(map(one.seconds, sample)))


@dataclass(frozen=True, slots=True)
class Draft:
    """A micro-batch: its ranks, ascending, and its members as positions in the batch."""

    ranks: Sequence[int]
    members: Sequence[int] | IntArray


def assignment_of(drafts: Sequence[Draft], sync: Sync) -> Assignment:
    """Return an assignment in the order of the drafts; under `microbatch`, each in the first wave with free ranks."""
    return assign_waves(drafts, level_waves(draft.ranks for draft in drafts), sync)


def assign_waves(drafts: Sequence[Draft], waves: Sequence[int], sync: Sync) -> Assignment:
    """Return an assignment in the order of the drafts; under `microbatch` by these waves, from 0 without gaps."""
    if sync == "iteration":
        waves = [-1] * len(drafts)
    order = sorted(range(len(drafts)), key=waves.__getitem__)
    drafts = [drafts[i] for i in order]
    return Assignment(
        wave=np.array(sorted(waves), dtype=np.int32),
        rank_offsets=offsets_of([len(draft.ranks) for draft in drafts]),
        ranks=np.array([rank for draft in drafts for rank in draft.ranks], dtype=np.int32),
        member_offsets=offsets_of([len(draft.members) for draft in drafts]),
        members=np.array([member for draft in drafts for member in draft.members], dtype=np.int64),
    )


def place_waves(waves: Iterable[Packs], problem: Problem) -> Assignment:
    """Place the groups of each wave on disjoint ranks, inside a node if they fit.

    Every wave fills ranks from 0 on. Under `iteration` that does not balance the ranks' loads over the step; to do so,
    choose ranks and use `assignment_of`.
    """
    drafts, of_wave = [], []
    for wave, packs in enumerate(waves):
        offsets, ranks = place_groups(
            [degree for degree, _ in packs], num_ranks=problem.num_ranks, ranks_per_node=problem.ranks_per_node
        )
        groups = np.split(ranks, offsets[1:-1])
        drafts += [Draft(group.tolist(), members) for group, (_, members) in zip(groups, packs, strict=True)]
        of_wave += [wave] * len(packs)
    return assign_waves(drafts, of_wave, problem.sync)


def quickest(candidates: Iterable[Assignment], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate with the smallest makespan; the first on ties."""
    return min(candidates, key=lambda assignment: makespan_seconds(assignment, batch, problem))


def require_power_of_two(name: str, longest_tokens: int, problem: Problem) -> None:
    """Raise PlanError if a sequence needs more ranks than the largest power of two up to `num_ranks`."""
    largest = 1 << (problem.num_ranks.bit_length() - 1)
    held = largest * problem.tokens_per_rank
    if longest_tokens > held:
        raise PlanError(
            f"{name} cannot plan a sequence of {longest_tokens} tokens: its degrees are powers of two, and "
            f"{largest} ranks of {problem.tokens_per_rank} tokens hold {held}"
        )


def packs_of(members: Sequence[int], batch: Batch, problem: Problem, degree: int = 1) -> list[list[int]]:
    """Pack some of a batch's sequences first-fit decreasing, up to the budget of a group of `degree` ranks."""
    if not members:
        return []
    tokens = work_on(batch.work, degree, problem).tokens[members]
    pack_of = first_fit_decreasing(tokens, degree * problem.tokens_per_rank).tolist()
    packs: list[list[int]] = [[] for _ in range(max(pack_of) + 1)]
    for member, pack in zip(members, pack_of, strict=True):
        packs[pack].append(member)
    return packs


def shard_sizes(tokens_per_rank: int) -> list[int]:
    """Return the shard sizes that a strategy may tune: the token budget and its half, quarter and eighth."""
    return [size for size in (tokens_per_rank >> shift for shift in range(4)) if size]


# Packing by tokens: the classic bin-packing heuristics, in plain Python.


def min_degrees(tokens: IntArray, tokens_per_rank: int) -> IntArray:
    """Return the fewest ranks that hold each number of tokens (d_min of the papers), at least 1."""
    return np.maximum(1, -(-tokens // tokens_per_rank))


def first_fit_decreasing(tokens: IntArray, group_tokens: int) -> IntArray:
    """Pack like `first_fit`, but longest first."""
    order = np.argsort(-tokens, kind="stable")
    pack_of = np.empty(len(tokens), dtype=np.int64)
    pack_of[order] = first_fit(tokens[order], group_tokens)
    return pack_of


def first_fit(tokens: IntArray, group_tokens: int) -> IntArray:
    """Pack in the order given, each into the first pack with room.

    Args:
        tokens: [n] tokens of each sequence, at most `group_tokens`.
        group_tokens: token budget of a pack's group.

    Returns:
        [n] the pack of each sequence, counted from 0.
    """
    pack_of = np.empty(len(tokens), dtype=np.int64)
    free = np.full(len(tokens), group_tokens, dtype=np.int64)
    for i, size in enumerate(tokens.tolist()):
        pack = int(np.argmax(free >= size))
        pack_of[i] = pack
        free[pack] -= size
    return pack_of


def best_fit_decreasing(
    tokens: IntArray, tokens_per_rank: int, *, padding_multiple: int | None = None
) -> tuple[IntArray, IntArray]:
    """Pack longest first, each into the fullest pack with room, else into a new pack of its d_min ranks.

    This is stage 1 of the FCP paper (section 4.4): a new pack has room for d_min * tokens_per_rank tokens. In a pack of
    d ranks, sequences are padded for degree d. The free room is always a multiple of that padding, so padding never
    makes a sequence too long.

    Returns:
        [n] the pack of each sequence, and [packs] the fewest ranks of each pack.
    """
    pack_of = np.empty(len(tokens), dtype=np.int64)
    degree_of = min_degrees(tokens, tokens_per_rank)
    free: list[int] = []  # ascending; `packs` holds the pack of each entry
    packs: list[int] = []
    degrees: list[int] = []
    for i in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[i])
        at = bisect_left(free, size)
        if at < len(free):
            left, pack = free.pop(at), packs.pop(at)
        else:
            left, pack = int(degree_of[i]) * tokens_per_rank, len(degrees)
            degrees.append(int(degree_of[i]))
        left -= size if padding_multiple is None else int(padded_tokens(size, degrees[pack], padding_multiple))
        pack_of[i] = pack
        at = bisect_left(free, left)
        free.insert(at, left)
        packs.insert(at, pack)
    return pack_of, np.array(degrees, dtype=np.int64)


def spread_evenly(tokens: IntArray, packs: int) -> IntArray:
    """Pack longest first, each into the pack with the fewest tokens so far; return [n] the pack of each."""
    pack_of = np.empty(len(tokens), dtype=np.int64)
    heap = [(0, pack) for pack in range(packs)]
    for i in np.argsort(-tokens, kind="stable").tolist():
        held, pack = heap[0]
        pack_of[i] = pack
        heapq.heapreplace(heap, (held + int(tokens[i]), pack))
    return pack_of


def members_by_pack(pack_of: IntArray, packs: int) -> tuple[IntArray, IntArray]:
    """Return offsets [packs + 1] and members [n]: pack p holds `members[offsets[p]:offsets[p + 1]]`, ascending."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(pack_of, minlength=packs))))
    return offsets, np.argsort(pack_of, kind="stable")


# Placement of a wave's groups on ranks: inside a node if a group fits, else on whole nodes.
#
# First-fit decreasing over nodes. Ranks of a node are taken from the left, so groups of powers of two are aligned and
# the same groups recur in many waves, which limits the number of distinct process groups.


def place_groups(degrees: IntArray | list[int], *, num_ranks: int, ranks_per_node: int) -> tuple[IntArray, Int32Array]:
    """Place groups on disjoint ranks.

    Args:
        degrees: [groups] ranks of each group; at most `num_ranks` in total.
        num_ranks, ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.

    Returns:
        rank_offsets [groups + 1] and ranks: group i has `ranks[rank_offsets[i]:rank_offsets[i + 1]]`, ascending.
    """
    wanted = np.asarray(degrees, dtype=np.int64)
    assert wanted.sum() <= num_ranks, "groups of one wave need more ranks than there are"
    nodes = _Nodes(num_ranks, ranks_per_node)
    placed: dict[int, list[int]] = {}
    by_degree = np.argsort(-wanted, kind="stable").tolist()
    large = [i for i in by_degree if wanted[i] > ranks_per_node]
    small = [i for i in by_degree if wanted[i] <= ranks_per_node]
    unplaced: list[int] = []
    for i in large:
        if ranks := nodes.take_whole_nodes(int(wanted[i])):
            placed[i] = ranks
        else:
            unplaced.append(i)
    node, last_degree = 0, 0
    for i in small:
        degree = int(wanted[i])
        # Nodes without room for this degree have none for the next group of the same degree: continue from there.
        node = nodes.first_with(degree, node if degree == last_degree else 0)
        last_degree = degree
        if ranks := nodes.take(node, degree):
            placed[i] = ranks
        else:
            unplaced.append(i)
    for i in unplaced:
        placed[i] = nodes.take_anywhere(int(wanted[i]))
    all_ranks = [rank for i in range(len(wanted)) for rank in placed[i]]
    return offsets_of(wanted), np.array(all_ranks, dtype=np.int32)


class _Nodes:
    """Free ranks of each node, always its last ones."""

    def __init__(self, num_ranks: int, ranks_per_node: int) -> None:
        first = range(0, num_ranks, ranks_per_node)
        self._next = list(first)
        self._stop = [min(rank + ranks_per_node, num_ranks) for rank in first]
        self._ranks_per_node = ranks_per_node
        self._untouched = 0  # first of the nodes that are entirely free

    def free(self, node: int) -> int:
        return self._stop[node] - self._next[node]

    def first_with(self, degree: int, start: int) -> int:
        """Return the first node from `start` on with `degree` free ranks, or the number of nodes if there is none."""
        for node in range(start, len(self._next)):
            if self.free(node) >= degree:
                return node
        return len(self._next)

    def take(self, node: int, degree: int) -> list[int]:
        """Take the next `degree` ranks of a node; none if `node` is the number of nodes."""
        if node == len(self._next):
            return []
        first = self._next[node]
        self._next[node] = first + degree
        return list(range(first, first + degree))

    def take_whole_nodes(self, degree: int) -> list[int]:
        """Take contiguous ranks from the start of an entirely free node; none if the free nodes do not suffice."""
        first_node, nodes = self._untouched, -(-degree // self._ranks_per_node)
        if first_node + nodes > len(self._next) or self._stop[first_node + nodes - 1] < self._next[first_node] + degree:
            return []
        self._untouched += nodes
        ranks: list[int] = []
        for node in range(first_node, first_node + nodes):
            ranks += self.take(node, min(self.free(node), degree - len(ranks)))
        return ranks

    def take_anywhere(self, degree: int) -> list[int]:
        """Take any free ranks, on as few nodes as possible, for a group that no longer fits better."""
        ranks: list[int] = []
        for node in sorted(range(len(self._next)), key=lambda node: (-self.free(node), node)):
            ranks += self.take(node, min(self.free(node), degree - len(ranks)))
            if len(ranks) == degree:
                break
        return sorted(ranks)


# The largest differencing method of Karmarkar and Karp (1982) for any number of parts.

_Part: TypeAlias = tuple[float, list[int]]  # weight, items


def partition(weights: Sequence[float], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Split items into parts so that the heaviest part is as light as the heuristic finds.

    Args:
        weights: weight of each item, >= 0.
        parts: number of parts, >= 1.
        equal_counts: keep the item counts of any two parts within one of each other.

    Returns:
        The items of each part, heaviest part first; parts beyond the number of items are empty.
    """
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    at_once = parts if equal_counts else 1
    # A partial answer lists its non-empty parts, heaviest first. With `equal_counts` it starts with an item in each.
    answers = [[(weights[i], [i]) for i in order[first : first + at_once]] for first in range(0, len(order), at_once)]
    heap = [(-_spread(answer, parts), serial, answer) for serial, answer in enumerate(answers)]
    heapq.heapify(heap)
    for serial in range(len(heap), 2 * len(heap) - 1):
        widest, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merge(widest, second, parts)
        heapq.heappush(heap, (-_spread(merged, parts), serial, merged))
    filled = [items for _weight, items in heap[0][2]] if heap else []
    return filled + [[] for _ in range(parts - len(filled))]


def _spread(answer: Sequence[_Part], parts: int) -> float:
    return answer[0][0] - (answer[-1][0] if len(answer) == parts else 0.0)


def _merge(a: Sequence[_Part], b: Sequence[_Part], parts: int) -> list[_Part]:
    """Merge two partial answers: the heaviest part of one with the lightest of the other, and so on.

    Parts that an answer does not list are empty, so the heaviest ones of the other may stay alone.
    """
    alone_a, alone_b = max(parts - len(b), 0), max(parts - len(a), 0)
    joined = [*a[:alone_a], *b[:alone_b]]
    for one, other in zip(a[alone_a:], reversed(b[alone_b:]), strict=True):
        joined.append((one[0] + other[0], one[1] + other[1]))
    return sorted(joined, key=lambda part: -part[0])
