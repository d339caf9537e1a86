"""Exact simulation of a step on replicas with pipelines, and the order of forwards and backwards on their devices.

Each replica runs its micro-batches in its own order through P stages (`device_order`). A forward depends on the forward
of the previous block and a backward on the backward of the next one, each plus `send_seconds`. A device runs one
operation at a time. A ring's operation on a block starts once all its replicas have reached it. The start of an
operation is thus the longest path to it in a static dependency graph, and a cycle in the graph is a deadlock of
replicas.

Plain 1F1B has blocking sends, as in Megatron: sender and receiver both wait until the message is transferred. The
interleaved schedule overlaps sends with computation.

The order on a device is that of Megatron's `pipeline_parallel/schedules.py`: device s runs min(P - 1 - s, m) warm-up
forwards, then alternates one forward and one backward, then runs the remaining backwards. In the interleaved schedule a
device holds V chunks of layers, runs P micro-batches through each in turn, and has min(2 (P - 1 - s) + (V - 1) P, mV)
warm-up forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray

if TYPE_CHECKING:
    from fcp_cli.plan.simulation.kernel import Graph


FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelines:
    """Micro-batches of a step on replicas with pipelines.

    Attributes:
        stages, chunks: P stages of a replica, and V blocks of layers on each; L = P x V.
        num_ranks: number of replicas.
        rank_offsets, ranks: micro-batch i runs on the replicas `ranks[rank_offsets[i]:rank_offsets[i + 1]]`.
        forward_seconds, backward_seconds: [microbatches, L] seconds of each block.
        send_seconds: [microbatches] seconds of a message between adjacent blocks.
    """

    stages: int
    chunks: int
    num_ranks: int
    rank_offsets: IntArray
    ranks: Int32Array
    forward_seconds: FloatArray
    backward_seconds: FloatArray
    send_seconds: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Simulated timeline of a step.

    Attributes:
        forward_start, backward_start: [microbatches, L] seconds from the start of the step.
        makespan_seconds: end of the last operation; infinite on a deadlock.
        stuck: deadlocked micro-batches, or empty.
    """

    forward_start: FloatArray
    backward_start: FloatArray
    makespan_seconds: float
    stuck: IntArray


def run(pipelines: Pipelines) -> Run:
    """Simulate a step."""
    from fcp_cli.plan.simulation.kernel import longest_paths  # lazy: numba is slow to import

    graph = graph_of(pipelines)
    paths = longest_paths(graph, np.inf)
    start, missing = paths.start.reshape(graph.durations.shape), paths.missing.reshape(graph.durations.shape)
    stuck = np.flatnonzero(missing.any(axis=1))
    return Run(
        forward_start=start[:, 0::2],
        backward_start=start[:, 1::2],
        makespan_seconds=np.inf if len(stuck) else float((start + graph.durations).max()),
        stuck=stuck,
    )


def makespan_seconds(pipelines: Pipelines, limit: float = np.inf) -> float:
    """Return the end of a step; infinite on a deadlock or beyond `limit`, which stops the simulation early."""
    from fcp_cli.plan.simulation.kernel import seconds_of

    return float(seconds_of(graph_of(pipelines), limit))


def better_places(pipelines: Pipelines, *, reach: int, most_runs: int) -> IntArray:
    """Reorder micro-batches by local search: swap those on the critical path with neighbours while the step shortens.

    Args:
        pipelines: step of waves in order, with one micro-batch of every replica in each.
        reach: largest distance of a swap, in waves.
        most_runs: limit of simulated candidates.

    Returns:
        [microbatches] the new wave of each.
    """
    from fcp_cli.plan.simulation import kernel

    waves = len(pipelines.ranks) // pipelines.num_ranks
    return np.asarray(kernel.better_places(graph_of(pipelines), waves, reach, most_runs))


def graph_of(pipelines: Pipelines) -> Graph:
    """Return a step in the form of the compiled simulation."""
    from fcp_cli.plan.simulation.kernel import Graph

    p = pipelines
    count = len(p.rank_offsets) - 1
    microbatch_of = np.repeat(np.arange(count), np.diff(p.rank_offsets))
    by_rank = np.argsort(p.ranks, kind="stable")
    counts = np.bincount(p.ranks, minlength=p.num_ranks)
    rank_first = np.concatenate(([0], np.cumsum(counts)))
    place = np.empty(len(p.ranks), dtype=np.int64)
    place[by_rank] = np.arange(len(p.ranks)) - np.repeat(rank_first[:-1], counts)
    first, turns = _turns(p.stages, p.chunks, tuple(np.unique(counts).tolist()))
    following, is_sent = following_operations(p.stages, p.chunks)
    durations = np.empty((count, len(following)))
    durations[:, 0::2], durations[:, 1::2] = p.forward_seconds, p.backward_seconds
    left = np.empty_like(durations)
    path = np.concatenate((np.arange(0, len(following), 2), np.arange(len(following) - 1, 0, -2)))[::-1]
    left[:, path] = np.cumsum(durations[:, path], axis=1)
    return Graph(
        rank_offsets=p.rank_offsets,
        ranks=p.ranks.astype(np.int32),
        base=first[counts[p.ranks]] + place * len(following),
        rank_first=rank_first[p.ranks],
        rank_microbatches=microbatch_of[by_rank],
        durations=durations,
        left=left,
        sends=p.send_seconds,
        following=following,
        is_sent=is_sent,
        meets=p.chunks == 1,
        turns=turns,
    )


@lru_cache(maxsize=256)
def _turns(stages: int, chunks: int, counts: tuple[int, ...]) -> tuple[IntArray, Int32Array]:
    """Return the first row for each number of micro-batches, and the concatenated `turns_of` of all of `counts`."""
    tables = [turns_of(stages, chunks, m) for m in counts]
    first = np.full(counts[-1] + 1, -1, dtype=np.int64)
    first[list(counts)] = np.cumsum([0, *map(len, tables[:-1])])
    return first, np.concatenate(tables)


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
