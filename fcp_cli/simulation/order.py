"""Schedule of forwards and backwards on each device of a pipeline: 1F1B, plain or interleaved.

As in Megatron's `pipeline_parallel/schedules.py`: device s runs min(P - 1 - s, m) warm-up forwards, then alternates one
forward and one backward, then runs the remaining backwards. In the interleaved schedule a device holds V chunks of
layers, runs P micro-batches through each in turn, and has min(2 (P - 1 - s) + (V - 1) P, mV) warm-up forwards.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fcp_cli.arrays import Int32Array, IntArray

FORWARD, BACKWARD = 0, 1


def operation(layer_block: int, kind: int) -> int:
    """Return the index of an operation of a micro-batch: 2 per block of layers, for P x V blocks."""
    return 2 * layer_block + kind


@lru_cache(maxsize=4096)
def device_order(stages: int, chunks: int, microbatches: int) -> IntArray:
    """Return [stages, 2 * microbatches * chunks] the operations of each device, in execution order.

    An entry is j * 2PV + `operation` for the j-th micro-batch of the replica. Block c * P + s is on device s.

    Args:
        stages: P, pipeline stages of a replica.
        chunks: V, blocks of layers per stage; 1 is plain 1F1B.
        microbatches: m, number of micro-batches of the replica.
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
    """Return (micro-batch, chunk) of a device's `turn`-th forward or backward: P micro-batches per chunk in turn."""
    if chunks == 1:
        return turn, 0
    round_, within = divmod(turn, stages * chunks)
    size = min(stages, microbatches - round_ * stages)  # the last round may be partial
    chunk, offset = divmod(within, size)
    return round_ * stages + offset, chunk


@lru_cache(maxsize=64)
def following_operations(stages: int, chunks: int) -> tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return [2PV] the next operation of the same micro-batch (-1: none), and [2PV] whether that needs a send."""
    blocks = stages * chunks
    forwards, backwards = range(0, 2 * blocks, 2), range(2 * blocks - 1, 0, -2)
    path = [*forwards, *backwards]
    following = np.full(2 * blocks, -1, dtype=np.int64)
    following[path[:-1]] = path[1:]
    return following, (following >= 0) & (following // 2 != np.arange(2 * blocks) // 2)


@lru_cache(maxsize=4096)
def turns_of(stages: int, chunks: int, microbatches: int) -> Int32Array:
    """Return [microbatches * 2PV, 6] the successors of each operation of a replica.

    Row j * 2PV + c describes operation c of the j-th micro-batch:
        0, 1: next operation on the same device, and its micro-batch; -1: none.
        2: whether that next operation receives a message.
        3, 4: operation that the sender of the message runs next, and its micro-batch; -1: none.
        5: number of dependencies of this operation from the device order, including blocking sends of plain 1F1B.
    """
    order = device_order(stages, chunks, microbatches)
    per = 2 * stages * chunks
    follows, is_sent = following_operations(stages, chunks)
    after = np.full(microbatches * per, -1, dtype=np.int64)
    after[order[:, :-1]] = order[:, 1:]
    preceding = np.full(per, -1, dtype=np.int64)  # sender of the message that each receives
    preceding[follows[is_sent]] = np.flatnonzero(is_sent)
    turns = np.full((len(after), 6), -1, dtype=np.int32)
    turns[:, 2], turns[:, 5] = 0, 0
    has = np.flatnonzero(after >= 0)
    then = after[has]
    turns[has, 0], turns[has, 1] = then % per, then // per
    turns[then, 5] = 1
    receives = preceding[then % per] >= 0
    turns[has, 2] = receives
    has, then = has[receives], then[receives]
    freed = after[then - then % per + preceding[then % per]]
    known = freed >= 0
    turns[has[known], 3], turns[has[known], 4] = freed[known] % per, freed[known] // per
    if chunks == 1:
        np.add.at(turns[:, 5], freed[known], 1)
    return turns
