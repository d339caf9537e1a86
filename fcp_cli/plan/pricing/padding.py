"""Padding of a sequence to equal ring chunks, as in Transformer Engine and MindSpeed.

This is the reference; the planner's kernels reimplement it, and a test holds the two bitwise equal.

On d ranks a sequence is cut into 2 d chunks, which are equal only if its length is a multiple of 2 d. Under sequence
parallelism each rank's share must also be divisible by the tensor-parallel size. Both follow from one number of the
plan, the padding multiple: on d ranks a sequence is padded to a multiple of d times it.

A rank's share of a sequence is thus a multiple of the padding multiple and never grows with the degree. Hence a pack
that fits d ranks also fits more, and the token budget may be rounded down to the padding multiple without loss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.plan.step import StepPlan, offsets_of

_CHUNKS_PER_RANK = 2  # one from the front of the sequence and one from its back


def padding_multiple(tensor_parallel: int = 1) -> int:
    """Return the padding multiple of a rank's share of a sequence, in tokens.

    Args:
        tensor_parallel: tensor-parallel size under sequence parallelism; 1 without it.
    """
    return _CHUNKS_PER_RANK * tensor_parallel


def padded_tokens(length_tokens: npt.ArrayLike, degree: npt.ArrayLike, multiple: int | None) -> IntArray:
    """Return padded lengths in tokens; the arguments broadcast.

    Args:
        length_tokens: lengths of the sequences.
        degree: degree of each sequence's group.
        multiple: padding multiple, or None for no padding.
    """
    lengths = np.asarray(length_tokens, dtype=np.int64)
    if multiple is None:
        return lengths
    unit = multiple * np.asarray(degree, dtype=np.int64)
    return np.asarray(-(-lengths // unit) * unit, dtype=np.int64)


def padded_lengths(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [sequences] the padded lengths of a step, in step order."""
    return padded_tokens(step.lengths, np.repeat(step.degrees, np.diff(step.sequence_offsets)), multiple)


def held_tokens(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [microbatches] the padded tokens of each micro-batch, over all its ranks."""
    if multiple is None:
        return step.tokens
    return np.diff(offsets_of(padded_lengths(step, multiple))[step.sequence_offsets])
