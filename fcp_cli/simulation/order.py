"""The order in which each device of a pipeline runs forwards and backwards: 1F1B, plain or interleaved.

As Megatron's schedules have it (`pipeline_parallel/schedules.py`): device s runs min(P - 1 - s, m) forwards ahead, then
one forward and one backward in turn, then the backwards that are left. Interleaved, a device holds V chunks of layers,
goes through them P micro-batches at a time, and runs min(2 (P - 1 - s) + (V - 1) P, mV) forwards ahead.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fcp_cli.arrays import IntArray

FORWARD, BACKWARD = 0, 1


def operation(layer_block: int, kind: int) -> int:
    """Number an operation of a micro-batch: 2 per block of layers, of which a pipeline has P x V."""
    return 2 * layer_block + kind


@lru_cache(maxsize=4096)
def device_order(stages: int, chunks: int, microbatches: int) -> IntArray:
    """Return [stages, 2 * microbatches * chunks] what each device runs, in order.

    An entry is j * 2PV + `operation`: of the j-th micro-batch of the replica. Block c * P + s lies on device s.

    Args:
        stages: P, devices of a replica's pipeline.
        chunks: V, blocks of layers on each of them; 1 is plain 1F1B.
        microbatches: m, of the replica.
    """
    per = 2 * stages * chunks
    total = microbatches * chunks
    rows = np.zeros((stages, 2 * total), dtype=np.int64)
    for stage in range(stages):
        ahead = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
        ahead = min(ahead, total)
        kinds = [FORWARD] * ahead + [FORWARD, BACKWARD] * (total - ahead) + [BACKWARD] * ahead
        done = [0, 0]
        for at, kind in enumerate(kinds):
            microbatch, chunk = _turn(done[kind], stages, chunks, microbatches)
            done[kind] += 1
            block = (chunk if kind == FORWARD else chunks - 1 - chunk) * stages + stage
            rows[stage, at] = microbatch * per + operation(block, kind)
    return rows


def _turn(turn: int, stages: int, chunks: int, microbatches: int) -> tuple[int, int]:
    """Return micro-batch and chunk of a device's `turn`: P micro-batches pass a chunk before the next chunk's turn."""
    if chunks == 1:
        return turn, 0
    round_, within = divmod(turn, stages * chunks)
    size = min(stages, microbatches - round_ * stages)  # of the last round, fewer may be left
    chunk, offset = divmod(within, size)
    return round_ * stages + offset, chunk
