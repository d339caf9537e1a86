"""The pool of sequences of a step that no wave has taken yet."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import kernel
from fcp_cli.planning.compiled.alone import work_in_rings
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.room_tree import most_work


class Pool(NamedTuple):
    """Sequences that a wave may take or has left, and precomputed values; arrays are [sequences] if not stated.

    Attributes:
        waiting: the first `count` entries are still to be planned, by falling work.
        left_over: sequences left by the wave filled last: long ones, then others, each by falling work.
        small: sequences that need no ring; scratch space of a wave.
        kept: sequences left by the best wave so far.
        shortest: seconds of each sequence alone on its best degree; 0 until computed.
        least: rank-seconds of each sequence in the narrowest ring that holds it; see `work_in_rings`.
        most: [tokens] see `room_tree.most_work`.
        thin: [1] least linear seconds per token of any sequence.
        density: largest work per token of this or any lighter sequence.
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
    # A running maximum from the lightest on.
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
