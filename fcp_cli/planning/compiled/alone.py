"""Least seconds of single sequences, each alone on its best degree: lower bounds of any schedule that runs them."""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel
from fcp_cli.planning.compiled.core import UNPLACED, PlannerInputs, Sequences, faster_tier, pack_seconds, sequence_load


@inlined
def at_best(degree: int, inputs: PlannerInputs) -> int:
    """Return the cheapest `across` of a group of this degree, which bounds every placement from below."""
    # A group that fits into a node is cheapest inside it, unless bytes travel faster across nodes.
    return UNPLACED if degree > inputs.ranks_per_node or faster_tier(inputs) else 0


@inlined
def alone_at_best(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i alone on a group of this degree, at the best placement, without ring padding."""
    return pack_seconds(sequence_load(i, sequences, inputs), degree, at_best(degree, inputs), inputs)


@kernel
def alone_by_degree(i: int, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [num_ranks + 1] the least seconds of sequence i alone on each degree; infinite if it does not fit."""
    seconds = np.full(inputs.num_ranks + 1, np.inf)
    lowest = max(1, (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    for degree in range(lowest, inputs.num_ranks + 1):
        seconds[degree] = alone_at_best(i, degree, sequences, inputs)
    return seconds


@kernel
def least_alone(members: IntArray, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [members] the seconds of each sequence alone on its fastest degree.

    Args:
        members: positions in `sequences`.
        speeds: [num_ranks] rank speeds, fastest first; a group is as fast as its slowest rank.
        sequences: the sequences.
        inputs: the ranks and their prices.
    """
    least = np.full(len(members), np.inf)
    for k in range(len(members)):
        least[k] = _least(members[k], 0.0, speeds, sequences, inputs)
    return least


@kernel
def longest_alone(speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the maximum of `least_alone` over all sequences."""
    longest, heaviest = 0.0, int(np.argmax(sequences.work))
    for k in range(-1, len(sequences.tokens)):
        # Start with the heaviest: most sequences have no more of anything, take no longer, and are skipped.
        i = heaviest if k < 0 else k
        if k < 0 or not _is_within(i, heaviest, sequences, inputs):
            # A sequence only matters if it takes more than `longest`, so its search may stop there.
            longest = max(longest, _least(i, longest, speeds, sequences, inputs))
    return longest


@inlined
def _is_within(i: int, other: int, sequences: Sequences, inputs: PlannerInputs) -> bool:
    """Return whether sequence i takes no longer than `other`: no more work or tokens, and no costlier halo."""
    lighter = sequences.attention[i] <= sequences.attention[other] and sequences.linear[i] <= sequences.linear[other]
    shorter = sequences.tokens[i] <= sequences.tokens[other]
    # With halos only for equal lengths: a shorter sequence has shorter chunks, which may need more halo messages.
    return bool(lighter and shorter and (not inputs.prices.reach or sequences.tokens[i] == sequences.tokens[other]))


@kernel
def _least(i: int, enough: float, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least seconds of a sequence over all degrees; stop at the first value up to `enough`."""
    least = np.inf
    lowest = max(1, (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    # Try every degree: seconds jump where groups begin to cross nodes, so a local minimum need not be the least.
    for degree in range(lowest, inputs.num_ranks + 1):
        # The slowest of any `degree` ranks is at best the degree-th fastest of all.
        least = min(least, alone_at_best(i, degree, sequences, inputs) / speeds[degree - 1])
        if least <= enough:
            break
    return float(least)


@kernel
def traffic_seconds(degree: int, sets: int, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds of ring traffic per token, for a group of this degree with `sets` sets."""
    return least_of_tiers(inputs.prices.ring, degree, inputs) * (sets - 1)


@inlined
def home_seconds(degree: int, inputs: PlannerInputs) -> float:
    """Return the part of `traffic_seconds` that is never hidden: the ring's last hop."""
    return least_of_tiers(inputs.prices.home, degree, inputs)


@inlined
def least_of_tiers(prices: FloatArray, degree: int, inputs: PlannerInputs) -> float:
    """Return the price across nodes if a group of this degree must cross them, else the smaller of both tiers."""
    return float(prices[1] if degree > inputs.ranks_per_node else min(prices[0], prices[1]))


@kernel
def work_in_rings(longest_wave: float, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [sequences] the least rank-seconds that each adds to a pack that ends within `longest_wave` seconds.

    That is its work and, if it needs a ring of at least d ranks, t (k (d - 1) + e (c_d (d - 1) - g_d) + g_d); see
    `certificate._least_area`. Costs that a pack pays once are not included, nor are rings if heads may be split.
    """
    least = np.zeros(len(sequences.work))
    for i in range(len(least)):
        least[i] = sequences.work[i]
        # With Ulysses sets, a ring of fewer sets costs less, so no ring cost is certain.
        if len(inputs.splits.heads):
            continue
        degree = (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
        # The narrowest degree that ends in time: the cost below grows with the degree, so no pack adds less.
        while degree < inputs.num_ranks and alone_at_best(i, degree, sequences, inputs) > longest_wave:
            degree += 1
        if degree > 1:
            home = home_seconds(degree, inputs)
            exposed = inputs.prices.exposed * (traffic_seconds(degree, degree, inputs) - home) + home
            least[i] += (inputs.prices.chunk * (degree - 1) + exposed) * sequences.tokens[i]
    return least
