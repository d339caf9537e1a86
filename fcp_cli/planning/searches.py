"""Candidates for a step: the loop over them with its stop rule, and the compiled searches that most of them run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.compiled import timelines
from fcp_cli.planning.compiled import waves as wave_searches
from fcp_cli.planning.compiled.certificate import work_in_rings
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.ring_placement import Rings
from fcp_cli.planning.compiled.room_tree import dealt
from fcp_cli.planning.compiled.single_rank_packs import CLOSED, SingleRankPacks
from fcp_cli.planning.kernel_inputs import with_recomputation
from fcp_cli.planning.problem import Assignment
from fcp_cli.util.arrays import FloatArray, IntArray

# Effort limits are counts, not seconds, so that results do not depend on the machine's speed.
_EFFORT = wave_searches.Effort(tries=24, fills=16)  # candidate targets per wave
_PAIR_EFFORT = wave_searches.Effort(tries=12, fills=6)  # the same for each wave of a replanned pair
_WAVES_PER_PART = 24  # fewest per part, estimated from tokens; shorter steps are not cut
NOWHERE = wave_searches.Places(*[np.empty(0, dtype=np.int64)] * 5)
NOBODY = wave_searches.Leader(np.empty(0), np.empty(0, dtype=np.int64))
_PATIENCE = 32  # consecutive pairs of waves without a gain before regrouping stops
_EXCHANGES = 300_000  # pairs of sequences compared per round of balancing; more for more than 1,024 sequences

CLOSE_ENOUGH: Final = 0.005
"""Gap to the proven bound above which optional candidates are tried."""


class Found(NamedTuple):
    """The fastest assignment so far.

    Attributes:
        assignment: the assignment, or None.
        seconds: its predicted makespan; infinite if there is none.
        name: name of the candidate that found it.
    """

    assignment: Assignment | None = None
    seconds: float = np.inf
    name: str = ""


NOTHING = Found()


class Candidate(NamedTuple):
    """One way to plan a step.

    Attributes:
        name: the name in explanations.
        assign: takes the fastest answer so far; returns another one, or None if it found none that may be faster.
        above_gap: gap to the bound above which the candidate is tried; None: always.
    """

    name: str
    assign: Callable[[Found], Assignment | None]
    above_gap: float | None = None


def best_of(
    candidates: Iterable[Candidate],
    price: Callable[[Assignment], float],
    bound_seconds: Callable[[], float],
    found: Found = NOTHING,
) -> Found:
    """Run the candidates in order and return the fastest answer, on ties the first.

    Args:
        candidates: candidates, made lazily.
        price: returns the predicted makespan of an assignment.
        bound_seconds: returns the proven lower bound of the step; called at most once, by the first optional candidate.
        found: the answer to start from.
    """
    bound: float | None = None
    for candidate in candidates:
        if candidate.above_gap is not None:
            bound = bound_seconds() if bound is None else bound
            if found.seconds <= bound * (1.0 + candidate.above_gap):
                continue
        other = candidate.assign(found)
        if other is not None and (seconds := price(other)) < found.seconds:
            found = Found(other, seconds, candidate.name)
    return found


def assign_waves(
    order: IntArray, sequences: Sequences, inputs: PlannerInputs, limit_seconds: float = np.inf
) -> Assignment | None:
    """Plan waves; return None if they would take `limit_seconds` or longer.

    The search scans all waiting sequences for every wave, so its time grows with the square of the number of waves.
    A step of very many waves is therefore planned in parts, each replanning the last wave of the part before.

    Args:
        order: [sequences] position in the batch of each sequence.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.
        limit_seconds: makespan to beat.
    """
    found, held, waves = [], np.empty(0, dtype=np.int64), 0
    done, work = 0.0, float(sequences.work.sum())  # seconds of planned waves; work still to plan
    parts = wave_parts(sequences, inputs)
    alike = rank_parts(sequences, inputs) if len(parts) == 1 else []
    if alike:
        return _waves_in_parts(alike, order, limit_seconds)
    # With several parts, only their sum can be compared with the limit (below).
    limit = limit_seconds if len(parts) == 1 else np.inf
    for number, part in enumerate(parts, 1):
        # Positions are by falling work, the order that the search expects.
        members = np.sort(np.concatenate((held, part)))
        own = some_of(sequences, members)
        is_last = number == len(parts)
        seconds, one = wave_searches.planned(0, limit, _EFFORT, is_last, NOBODY, NOWHERE, own, inputs)
        if seconds >= limit:
            return None
        held = members[one.group_of < 0]
        assert one.left == len(held) and (one.left == 0 or not is_last), "the last wave does not take every sequence"
        found.append((members, one, waves))
        waves += len(one.targets)
        done += float(one.targets.sum())
        work -= float(own.work[one.group_of >= 0].sum())
        # The remaining work takes at least its even share per rank.
        if done + work / inputs.num_ranks >= limit_seconds:
            return None
    firsts = np.cumsum([0, *(len(one.wave) for _, one, _ in found)])
    group_of = np.empty(len(order), dtype=np.int64)
    for (members, one, _), first in zip(found, firsts, strict=False):
        taken = one.group_of >= 0
        group_of[members[taken]] = one.group_of[taken] + first
    wave = np.concatenate([one.wave + before for _, one, before in found])
    degree = np.concatenate([one.degree for _, one, _ in found])
    first_rank = np.concatenate([one.first for _, one, _ in found])
    return gather(order, Groups(group_of, wave, degree, first_rank, np.zeros(len(wave))))


def _waves_in_parts(parts: list[RankPart], order: IntArray, limit_seconds: float) -> Assignment | None:
    """Plan the waves of the first part, and those of the others by its targets; None if that fails."""
    own, inputs = parts[0].sequences, parts[0].inputs
    seconds, first = wave_searches.planned(0, limit_seconds, _EFFORT, True, NOBODY, NOWHERE, own, inputs)
    if seconds >= limit_seconds:
        return None
    found, leader = [first], wave_searches.Leader(first.targets, first.widths)
    for part in parts[1:]:
        ranks, own = part.inputs, part.sequences
        found.append(wave_searches.planned(0, np.inf, _EFFORT, True, leader, NOWHERE, own, ranks)[1])
        # Not equivalent after all: sequences are left over.
        if found[-1].left:
            return None
    groups = [Groups(one.group_of, one.wave, one.degree, one.first, np.zeros(len(one.wave))) for one in found]
    return gather(order, joined(parts, groups))


def regrouped(
    assignment: Assignment, order: IntArray, sequences: Sequences, inputs: PlannerInputs
) -> Assignment | None:
    """Replan pairs of waves of a step; return None if that gains nothing.

    Args:
        assignment: the step, on groups of neighbouring ranks.
        order: [sequences] position in the batch of each sequence.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.
    """
    n, waves = len(order), int(assignment.wave.max()) + 1
    group = np.empty(n, dtype=np.int64)  # of each sequence, by falling work
    # `argsort(order)` is the inverse of `order`: position in the batch -> position by falling work.
    group[np.argsort(order)[assignment.members]] = np.repeat(
        np.arange(len(assignment.wave)), np.diff(assignment.member_offsets)
    )
    places = wave_searches.Places(
        wave=assignment.wave[group].astype(np.int64),
        degree=np.diff(assignment.rank_offsets)[group],
        first=assignment.ranks[assignment.rank_offsets[group]].astype(np.int64),
        head=np.empty(waves, dtype=np.int64),
        after=np.empty(n, dtype=np.int64),
    )
    gained, _none = wave_searches.planned(_PATIENCE, np.inf, _PAIR_EFFORT, True, NOBODY, places, sequences, inputs)
    if not gained > 0.0:
        return None
    # (wave, first rank) identifies a group.
    key = places.wave * inputs.num_ranks + places.first
    _keys, firsts, group_of = np.unique(key, return_index=True, return_inverse=True)
    wave, degree, first = places.wave[firsts], places.degree[firsts], places.first[firsts]
    return gather(order, Groups(group_of, wave, degree, first, np.zeros(len(firsts))))


def wave_parts(sequences: Sequences, inputs: PlannerInputs) -> list[IntArray]:
    """Cut a step, sorted by falling work, into parts of a few dozen waves and similar work.

    The heaviest sequences, half of the work, are cut into runs, so that sequences of equal duration stay together.
    The rest is dealt in turn, so that all parts can fill their waves.
    """
    n, count = len(sequences.work), int(sequences.tokens.sum()) // (inputs.num_ranks * inputs.tokens_per_rank)
    count //= _WAVES_PER_PART
    if count < 2:
        return [np.arange(n)]
    done = np.cumsum(sequences.work)
    # 2 x count, since the runs cover half of the work; 1e-300 guards a step without work.
    part = np.minimum((2 * count * done / max(done[-1], 1e-300)).astype(np.int64), count - 1)
    light = np.flatnonzero(done > 0.5 * done[-1])
    part[light] = np.arange(len(light)) % count
    return [np.flatnonzero(part == number) for number in range(count)]


def assign_timelines(
    lower: float, order: IntArray, sequences: Sequences, inputs: PlannerInputs, limit_seconds: float = np.inf
) -> Assignment | None:
    """Plan timelines, for targets from `lower` seconds on; return None if they would take `limit_seconds` or longer.

    On very many ranks only the first of several equivalent parts is searched; the others follow its target.
    """
    sequences = with_recomputation(sequences, inputs)
    parts = rank_parts(sequences, inputs)
    own, ranks = (parts[0].sequences, parts[0].inputs) if parts else (sequences, inputs)
    exchanges = _EXCHANGES * (1 if len(own.work) <= 1024 else len(own.work) // 64)
    rings, singles, target, end = timelines.schedule(lower, limit_seconds, (0.0, 0.0), exchanges, own, ranks)
    if not target:
        return None
    found = [_timeline_groups(rings, singles, ranks)]
    for part in parts[1:]:
        leader = target, end
        rings, singles, _, _ = timelines.schedule(lower, np.inf, leader, exchanges, part.sequences, part.inputs)
        found.append(_timeline_groups(rings, singles, part.inputs))
    return gather(order, joined(parts, found) if parts else found[0])


def _timeline_groups(rings: Rings, singles: SingleRankPacks, inputs: PlannerInputs) -> Groups:
    """Return the rings and the open slots of single ranks as groups."""
    count, gaps = int(rings.placed[0]), int(rings.gaps[0])
    slots = singles.slot_tokens.shape[1]
    bins, slot = np.nonzero(singles.slot_tokens[: inputs.num_ranks + gaps] != CLOSED)
    group_of_slot = np.full((inputs.num_ranks + gaps, slots), -1)
    group_of_slot[bins, slot] = count + np.arange(len(bins))
    in_slot = singles.bin_of >= 0
    group_of = -2 - singles.bin_of  # sequences that share a ring's pack store -2 - ring
    group_of[in_slot] = group_of_slot[singles.bin_of[in_slot], singles.slot_of[in_slot]]
    group_of[rings.sequence[:count]] = np.arange(count)
    bin_rank = np.concatenate((np.arange(inputs.num_ranks), rings.gap_rank[:gaps]))
    bin_start = np.concatenate((rings.free, rings.gap_start[:gaps]))
    return Groups(
        group_of=group_of,
        wave=np.full(count + len(bins), -1),
        degree=np.concatenate((rings.degree[:count], np.ones(len(bins), dtype=np.int64))),
        first_rank=np.concatenate((rings.first[:count], bin_rank[bins])),
        # By planned start. Packs of one bin share a key and stay in slot order, which is good enough.
        key=np.concatenate((rings.start[:count], bin_start[bins])),
    )


def gather(order: IntArray, groups: Groups) -> Assignment:
    """Return groups as an Assignment, by (wave, key, heaviest sequence first), without empty groups.

    `order` is [sequences] the position in the batch of each sequence.
    """
    group_of, wave, degree, first_rank, key = groups
    sizes = np.bincount(group_of, minlength=len(wave))
    firsts = np.full(len(wave), len(order))
    # Positions are by falling work: the first of a group is its heaviest sequence.
    np.minimum.at(firsts, group_of, np.arange(len(order)))
    by = np.lexsort((firsts, key, wave))
    by = by[sizes[by] > 0]
    place = np.full(len(wave), -1)
    place[by] = np.arange(len(by))
    # Stable, so that a group's sequences stay by falling work.
    members = np.argsort(place[group_of], kind="stable")
    rank_offsets = offsets_of(degree[by])
    ranks = np.repeat(first_rank[by] - rank_offsets[:-1], degree[by]) + np.arange(rank_offsets[-1])
    wave = wave[by]
    if wave[0] >= 0:  # from 0 without gaps
        wave = np.cumsum(np.diff(wave, prepend=wave[:1]) > 0)
    return Assignment(
        wave=wave.astype(np.int32),
        rank_offsets=rank_offsets,
        ranks=ranks.astype(np.int32),
        member_offsets=offsets_of(sizes[by]),
        members=order[members],
    )


# Equivalent parts of a step on very many ranks, so that a search of one part serves all.
#
# Sequences are dealt by falling work, each to the part with the least work per rank so far. With thousands of
# sequences, all parts get equal work and similar lengths. Only the first part, which has the longest sequence, is
# searched; the others follow the targets that it found. Planning time then grows with the number of sequences instead
# of sequences x ranks, and most sequences are visited a few times instead of dozens.

_PART_RANKS = 8192  # fewest per part: no ring is wider than its part, and few wide ones fit side by side in small parts
_UNLIKE = 1e-3  # relative excess over the mean work above which parts are not equivalent


class RankPart(NamedTuple):
    """Neighbouring ranks of whole nodes, from rank `first` on, and the sequences dealt to them.

    `members` are the positions of its sequences in the whole step.
    """

    first: int
    members: IntArray
    sequences: Sequences
    inputs: PlannerInputs


class Groups(NamedTuple):
    """Groups of neighbouring ranks with their packs.

    Attributes:
        group_of: [sequences] group of each sequence.
        wave, degree, first_rank: [groups].
        key: [groups] sort key within a wave.
    """

    group_of: IntArray
    wave: IntArray
    degree: IntArray
    first_rank: IntArray
    key: FloatArray


def has_parts(inputs: PlannerInputs) -> bool:
    """Return whether there are enough ranks for two parts, and no catalogue of groups that a cut could split."""
    enough = inputs.num_ranks >= 2 * _PART_RANKS >= 2 * inputs.ranks_per_node
    return enough and not len(inputs.group_first)


def rank_parts(sequences: Sequences, inputs: PlannerInputs) -> list[RankPart]:
    """Cut a step, sorted by falling work, into equivalent parts; return [] if it cannot be cut.

    It cannot if `has_parts` is false, if there are fewer sequences than ranks, if the longest sequence does not fit
    into a part, or if a few sequences hold so much work that the parts would differ.
    """
    if not has_parts(inputs) or len(sequences.work) < inputs.num_ranks:
        return []
    count, per_node = inputs.num_ranks // _PART_RANKS, inputs.ranks_per_node
    # Parts begin at node boundaries, so that a group crosses the same nodes in its part as in the step.
    firsts = np.arange(count) * (inputs.num_ranks // per_node) // count * per_node
    ranks = np.diff(firsts, append=inputs.num_ranks)
    if int(sequences.tokens.max()) > int(ranks.min()) * inputs.tokens_per_rank:
        return []
    # With the rank-seconds that rings add.
    work = work_in_rings(np.inf, sequences, inputs)
    part_of = dealt(work, ranks)
    share = np.bincount(part_of, weights=work, minlength=count) / ranks
    if share.max() > (1.0 + _UNLIKE) * share.mean():
        return []
    # Stable, so that the sequences of a part stay sorted by falling work.
    by_part = np.argsort(part_of, kind="stable")
    cuts = np.cumsum(np.bincount(part_of, minlength=count))[:-1]
    return [
        RankPart(
            first=int(first),
            members=members,
            sequences=some_of(sequences, members),
            # The tables of ways are indexed by degree, so those for more ranks remain valid.
            inputs=inputs._replace(num_ranks=int(own)),
        )
        for first, own, members in zip(firsts, ranks, np.split(by_part, cuts), strict=True)
    ]


def some_of(sequences: Sequences, members: IntArray) -> Sequences:
    """Return the sequences at these positions."""
    return Sequences(
        attention=sequences.attention[members],
        linear=sequences.linear[members],
        work=sequences.work[members],
        tokens=sequences.tokens[members],
    )


def joined(parts: list[RankPart], found: list[Groups]) -> Groups:
    """Join the groups of all parts into those of the step."""
    before = np.cumsum([0, *(len(one.wave) for one in found)])
    group_of = np.empty(sum(len(part.members) for part in parts), dtype=np.int64)
    for part, one, first in zip(parts, found, before, strict=False):
        group_of[part.members] = one.group_of + first
    return Groups(
        group_of=group_of,
        wave=np.concatenate([one.wave for one in found]),
        degree=np.concatenate([one.degree for one in found]),
        first_rank=np.concatenate([one.first_rank + part.first for part, one in zip(parts, found, strict=True)]),
        key=np.concatenate([one.key for one in found]),
    )
