"""What sequences take alone at least, each on its best degree: what no schedule can beat."""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling import inlined, kernel
from fcp_cli.planning.compiled.core import AT_BEST, Machine, Sequences, pack_seconds, sequence_load


@inlined
def at_best(degree: int, machine: Machine) -> int:
    """Return `across` of a group of this degree where it costs least."""
    return AT_BEST if degree > machine.ranks_per_node or machine.inter < machine.intra else 0


@inlined
def alone_at_best(i: int, degree: int, sequences: Sequences, machine: Machine) -> float:
    """Return the seconds of sequence i alone on a group of this degree, placed at best, without more padding."""
    return pack_seconds(sequence_load(i, sequences, machine), degree, at_best(degree, machine), machine)


@kernel
def alone_by_degree(i: int, sequences: Sequences, machine: Machine) -> FloatArray:
    """Return [num_ranks + 1] the least seconds of sequence i on each degree; infinite where it does not fit."""
    seconds = np.full(machine.num_ranks + 1, np.inf)
    lowest = max(1, (sequences.tokens[i] + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    for degree in range(lowest, machine.num_ranks + 1):
        seconds[degree] = alone_at_best(i, degree, sequences, machine)
    return seconds


@kernel
def least_alone(members: IntArray, speeds: FloatArray, sequences: Sequences, machine: Machine) -> FloatArray:
    """Return [members] the seconds of each of these sequences on the degree that suits it best.

    Args:
        members: positions of sequences.
        speeds: [num_ranks] of the ranks, the quickest first: a group is as fast as its slowest.
        sequences, machine: what they are of.
    """
    least = np.full(len(members), np.inf)
    for k in range(len(members)):
        least[k] = _least(members[k], 0.0, speeds, sequences, machine)
    return least


@kernel
def longest_alone(speeds: FloatArray, sequences: Sequences, machine: Machine) -> float:
    """Return the most that any sequence takes on the degree that suits it best; the arguments are `least_alone`'s."""
    longest = 0.0
    for i in range(len(sequences.tokens)):
        longest = max(longest, _least(i, longest, speeds, sequences, machine))
    return longest


@kernel
def _least(i: int, enough: float, speeds: FloatArray, sequences: Sequences, machine: Machine) -> float:
    """Return the least seconds of a sequence, or some that are no more than `enough`."""
    least = np.inf
    lowest = max(1, (sequences.tokens[i] + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    for degree in range(lowest, machine.num_ranks + 1):
        least = min(least, alone_at_best(i, degree, sequences, machine) / speeds[degree - 1])
        if least <= enough:
            break
    return float(least)
