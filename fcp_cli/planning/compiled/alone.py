"""Least seconds of isolated sequences, each on its best degree: no schedule can beat them."""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel
from fcp_cli.planning.compiled.core import UNPLACED, PlannerInputs, Sequences, faster_tier, pack_seconds, sequence_load


@inlined
def at_best(degree: int, inputs: PlannerInputs) -> int:
    """Return the cheapest `across` of a group of this degree."""
    # A bound must hold for every place; a group that fits into a node is cheapest inside it, unless bytes travel faster
    # across nodes.
    return UNPLACED if degree > inputs.ranks_per_node or faster_tier(inputs) else 0


@inlined
def alone_at_best(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i by itself on a group of this degree, placed at best, without further padding."""
    return pack_seconds(sequence_load(i, sequences, inputs), degree, at_best(degree, inputs), inputs)


@kernel
def alone_by_degree(i: int, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [num_ranks + 1] the least seconds of sequence i on each degree; infinite if it does not fit."""
    seconds = np.full(inputs.num_ranks + 1, np.inf)
    lowest = max(1, (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    # Degrees that cannot hold the sequence stay infinite, so callers need no test.
    for degree in range(lowest, inputs.num_ranks + 1):
        seconds[degree] = alone_at_best(i, degree, sequences, inputs)
    return seconds


@kernel
def least_alone(members: IntArray, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [members] the seconds of each of these sequences on the degree that suits it best.

    Args:
        members: positions of sequences.
        speeds: [num_ranks] of the ranks, the quickest first: a group is as fast as its slowest.
        sequences, inputs: the sequences and inputs of `members`.
    """
    least = np.full(len(members), np.inf)
    for k in range(len(members)):
        least[k] = _least(members[k], 0.0, speeds, sequences, inputs)
    return least


@kernel
def longest_alone(speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the most that any sequence takes on the degree that suits it best; the arguments are `least_alone`'s."""
    longest, heaviest = 0.0, int(np.argmax(sequences.work))
    for k in range(-1, len(sequences.tokens)):
        # The heaviest first: those that have no more of anything take no longer, and are most of all.
        i = heaviest if k < 0 else k
        if k < 0 or not _is_within(i, heaviest, sequences, inputs):
            # `longest` is enough for the next sequence: it can only raise the maximum by taking more.
            longest = max(longest, _least(i, longest, speeds, sequences, inputs))
    return longest


@inlined
def _is_within(i: int, other: int, sequences: Sequences, inputs: PlannerInputs) -> bool:
    """Return whether a sequence has no more work and tokens than another one, and no halo messages."""
    lighter = sequences.attention[i] <= sequences.attention[other] and sequences.linear[i] <= sequences.linear[other]
    shorter = sequences.tokens[i] <= sequences.tokens[other]
    # A shorter sequence has shorter chunks, over which the same halo may take more rounds of messages.
    return bool(lighter and shorter and (not inputs.prices.reach or sequences.tokens[i] == sequences.tokens[other]))


@kernel
def _least(i: int, enough: float, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least seconds of a sequence, or some that are no more than `enough`."""
    least = np.inf
    lowest = max(1, (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    # Every degree: the seconds jump at the degree at which groups cross nodes, so the first minimum need not be the
    # least.
    for degree in range(lowest, inputs.num_ranks + 1):
        # Of any `degree` ranks the slowest is at best the degree-th quickest of all.
        least = min(least, alone_at_best(i, degree, sequences, inputs) / speeds[degree - 1])
        if least <= enough:  # the maximum over sequences asks for no more
            break
    return float(least)


@kernel
def traffic_seconds(degree: int, sets: int, inputs: PlannerInputs) -> float:
    """Return the rank-seconds of ring traffic per token on a group of this degree whose ring has so many sets."""
    return least_of_tiers(inputs.prices.ring, degree, inputs) * (sets - 1)


@inlined
def home_seconds(degree: int, inputs: PlannerInputs) -> float:
    """Return the part of `traffic_seconds` that nothing hides, if there is a ring."""
    return least_of_tiers(inputs.prices.home, degree, inputs)


@inlined
def least_of_tiers(prices: FloatArray, degree: int, inputs: PlannerInputs) -> float:
    """Return the price across nodes if a group of this degree must lie across them, else the less of both."""
    return float(prices[1] if degree > inputs.ranks_per_node else min(prices[0], prices[1]))


@kernel
def work_in_rings(longest_wave: float, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [sequences] rank-seconds that each adds to any pack that holds it and ends within `longest_wave` seconds.

    Its work, and, if it needs a ring of d ranks or more, t (k (d - 1) + e (c_d (d - 1) - g_d) + g_d): see
    `_least_area`. Costs that a pack pays once are not in it, nor is a ring if sets of ranks may share heads.
    """
    least = np.zeros(len(sequences.work))
    for i in range(len(least)):
        least[i] = sequences.work[i]
        # If sets may share heads, a ring of fewer sets costs less, so that nothing is certain.
        if len(inputs.splits.heads):
            continue
        degree = (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
        # The narrowest that ends in time: what is added below grows with the degree, so no pack adds less.
        while degree < inputs.num_ranks and alone_at_best(i, degree, sequences, inputs) > longest_wave:
            degree += 1
        if degree > 1:
            home = home_seconds(degree, inputs)
            exposed = inputs.prices.exposed * (traffic_seconds(degree, degree, inputs) - home) + home
            least[i] += (inputs.prices.chunk * (degree - 1) + exposed) * sequences.tokens[i]
    return least
