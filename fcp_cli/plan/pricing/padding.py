"""Padding: the length of a sequence on a ring of equal chunks, as Transformer Engine and MindSpeed cut it.

This is the definition; the planner's kernels repeat it, and a test holds the two equal bit by bit.

On d ranks a sequence is cut into 2 d chunks. Chunks are equally long where its length is a multiple of 2 d; under
sequence parallelism each rank's share must also divide over the devices of its tensor parallelism. A plan has
one number for it, the padding multiple: on d ranks a sequence counts as rounded up to a multiple of d times it.

Since a rank's share of a sequence is then a multiple of the padding multiple, and never grows with the degree:
a pack that fits d ranks fits any more, and a token budget may be rounded down to such a multiple without loss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.plan.step import StepPlan, offsets_of

_CHUNKS_PER_RANK = 2  # one from the front of the sequence and one from its back


def padding_multiple(tensor_parallel: int = 1) -> int:
    """Return the tokens that a rank's share of a sequence must be a multiple of.

    Args:
        tensor_parallel: devices over which sequence parallelism divides the share; 1 without it.
    """
    return _CHUNKS_PER_RANK * tensor_parallel


def padded_tokens(length_tokens: npt.ArrayLike, degree: npt.ArrayLike, multiple: int | None) -> IntArray:
    """Return lengths with padding; the arguments broadcast.

    Args:
        length_tokens: the lengths of sequences.
        degree: the degree of the ring that each runs on.
        multiple: the padding multiple, or None: nothing is padded.
    """
    lengths = np.asarray(length_tokens, dtype=np.int64)
    if multiple is None:
        return lengths
    unit = multiple * np.asarray(degree, dtype=np.int64)
    return np.asarray(-(-lengths // unit) * unit, dtype=np.int64)


def padded_lengths(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [sequences] the lengths of a step, in its order, with padding."""
    return padded_tokens(step.lengths, np.repeat(step.degrees, np.diff(step.sequence_offsets)), multiple)


def held_tokens(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [microbatches] the tokens that the ranks of each micro-batch hold together, with padding."""
    if multiple is None:
        return step.tokens
    return np.diff(offsets_of(padded_lengths(step, multiple))[step.sequence_offsets])
