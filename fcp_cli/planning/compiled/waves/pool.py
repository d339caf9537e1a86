"""The sequences of a step that no wave has taken yet."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import kernel
from fcp_cli.planning.compiled.alone import work_in_rings
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.room_tree import most_work


class Pool(NamedTuple):
    """The sequences that a wave may take, those that it leaves, and notes on them. All are [sequences].

    Attributes:
        waiting: the first `count` are still to be planned, by falling work.
        left_over: those that the wave filled last leaves; long ones, then others, each by falling work.
        small: those that a single rank could run; scratch of a wave.
        kept: sequences that the best wave so far leaves.
        shortest: seconds of each sequence by itself on its best degree; 0 until computed.
        least: rank-seconds of each sequence in the narrowest ring that holds it, `work_in_rings`.
        most: [tokens] see `room_tree.most_work`.
        thin: [1] least linear work of a token of any sequence.
        density: greatest work of a token of each sequence and those of less work.
    """

    waiting: IntArray
    left_over: IntArray
    small: IntArray
    kept: IntArray
    shortest: FloatArray
    least: FloatArray
    most: FloatArray
    thin: FloatArray
    density: FloatArray


@kernel
def make_pool(sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make a pool in which all sequences wait."""
    n, thin = len(sequences.work), np.full(1, np.inf)
    density = np.zeros(n)
    # From the lightest on, so that entry i covers all sequences of less work.
    for i in range(n - 1, -1, -1):
        thin[0] = min(thin[0], sequences.linear[i] / sequences.tokens[i])
        density[i] = max(sequences.work[i] / sequences.tokens[i], density[i + 1] if i + 1 < n else 0.0)
    return Pool(
        np.arange(n),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n),
        work_in_rings(np.inf, sequences, inputs),
        most_work(sequences, inputs),
        thin,
        density,
    )
