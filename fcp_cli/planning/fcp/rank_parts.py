"""Cuts a step on very many ranks into parts that are alike, so that a search of one serves all.

Sequences are dealt by falling work, each to the part with the least work a rank so far: of thousands, parts get the
same work and similar lengths. Only the first part, which has the longest sequence, is searched; the others follow the
targets that it found. So the time of a step grows with its sequences and not with their product with the ranks, in
which searches for a place end up, and most sequences are passed a few times instead of dozens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.planning.compiled.alone import work_in_rings
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.room_tree import dealt

_PART_RANKS = 8192  # at least: rings are no wider than a part, and on fewer ranks few wide ones fit side by side
_UNLIKE = 1e-3  # relative; parts whose work differs by more from the mean are not alike


class RankPart(NamedTuple):
    """Neighbouring ranks of whole nodes, from rank `first` on, and the sequences that were dealt to them.

    `members` are the sequences' positions in the whole step.
    """

    first: int
    members: IntArray
    sequences: Sequences
    inputs: PlannerInputs


class Groups(NamedTuple):
    """Groups of neighbouring ranks with their packs.

    Attributes:
        group_of: [sequences] group of each.
        wave, degree, first_rank: [groups].
        key: [groups] by which the groups of a wave are ordered.
    """

    group_of: IntArray
    wave: IntArray
    degree: IntArray
    first_rank: IntArray
    key: FloatArray


def has_parts(inputs: PlannerInputs) -> bool:
    """Return whether there are ranks for two parts, between which groups may be cut."""
    enough = inputs.num_ranks >= 2 * _PART_RANKS >= 2 * inputs.ranks_per_node
    return enough and not len(inputs.group_first)


def rank_parts(sequences: Sequences, inputs: PlannerInputs) -> list[RankPart]:
    """Cut a step, by falling work, into parts that are alike; return none if there are too few ranks for two.

    None either if groups come from a catalogue, or if a few sequences hold so much work that parts would differ.
    """
    if not has_parts(inputs) or len(sequences.work) < inputs.num_ranks:
        return []
    count, per_node = inputs.num_ranks // _PART_RANKS, inputs.ranks_per_node
    # Parts begin at nodes, so that a group lies in its part as it would lie among all ranks.
    firsts = np.arange(count) * (inputs.num_ranks // per_node) // count * per_node
    ranks = np.diff(firsts, append=inputs.num_ranks)
    if int(sequences.tokens.max()) > int(ranks.min()) * inputs.tokens_per_rank:
        return []
    # What rings add loads their part, too.
    work = work_in_rings(np.inf, sequences, inputs)
    part_of = dealt(work, ranks)
    share = np.bincount(part_of, weights=work, minlength=count) / ranks
    if share.max() > (1.0 + _UNLIKE) * share.mean():
        return []
    # Stable: within its part each sequence keeps its place by falling work.
    by_part = np.argsort(part_of, kind="stable")
    cuts = np.cumsum(np.bincount(part_of, minlength=count))[:-1]
    return [
        RankPart(
            first=int(first),
            members=members,
            sequences=some_of(sequences, members),
            # Tables of ways are by degree, so those of more ranks serve, too.
            inputs=inputs._replace(num_ranks=int(own)),
        )
        for first, own, members in zip(firsts, ranks, np.split(by_part, cuts), strict=True)
    ]


def some_of(sequences: Sequences, members: IntArray) -> Sequences:
    """Return some of the sequences."""
    return Sequences(
        attention=sequences.attention[members],
        linear=sequences.linear[members],
        work=sequences.work[members],
        tokens=sequences.tokens[members],
    )


def joined(parts: list[RankPart], found: list[Groups]) -> Groups:
    """Return the groups of all parts as those of one step."""
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
