"""Equivalent parts of a step on very many ranks, so that a search of one part serves all.

Sequences are dealt by falling work, each to the part with the least work per rank so far. With thousands of sequences,
all parts get equal work and similar lengths. Only the first part, which has the longest sequence, is searched; the
others follow the targets that it found. Planning time then grows with the number of sequences instead of sequences x
ranks, and most sequences are visited a few times instead of dozens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.planning.compiled.alone import work_in_rings
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.room_tree import dealt

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
