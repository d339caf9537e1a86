"""Index-free shuffling: a keyed permutation that is evaluated at any position in constant time and memory.

A Feistel network permutes the smallest power of four that covers all rows. Values beyond the rows are permuted again
until they fall inside (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). The
result is a permutation for every key, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray

_ROUNDS: Final = 8
# Multipliers of the splitmix64 finalizer, in which every output bit depends on all input bits.
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permuted(positions: IntArray, rows: int, key: Sequence[int]) -> IntArray:
    """Return [n] the rows at these positions of the keyed permutation of `rows` rows.

    Args:
        positions: [n] positions, 0 to rows - 1.
        rows: number of rows.
        key: integers such as seed and epoch; every key gives another permutation.
    """
    round_keys = np.random.SeedSequence(list(key), spawn_key=(2,)).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    half_bits = max(1, -(-max(rows - 1, 1).bit_length() // 2))
    values = _encrypted(positions.astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(values >= rows)
    while len(outside):
        values[outside] = _encrypted(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= rows]
    return values.astype(np.int64)


def _encrypted(
    values: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        mixed = right + key  # uint64 addition wraps around
        for amount, factor in zip((30, 27), _MIX, strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(amount))) * factor
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    encrypted: npt.NDArray[np.uint64] = (left << shift) | right
    return encrypted
