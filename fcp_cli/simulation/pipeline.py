"""Exact simulation of a step on replicas with pipelines.

Each replica runs its micro-batches in its own order through P stages (`order`). A forward depends on the forward of the
previous block and a backward on the backward of the next one, each plus `send_seconds`. A device runs one operation at
a time. A ring's operation on a block starts once all its replicas have reached it. The start of an operation is thus
the longest path to it in a static dependency graph, and a cycle in the graph is a deadlock of replicas.

Plain 1F1B has blocking sends, as in Megatron: sender and receiver both wait until the message is transferred. The
interleaved schedule overlaps sends with computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.simulation.order import following_operations, turns_of

if TYPE_CHECKING:
    from fcp_cli.simulation.kernel import Graph


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
    from fcp_cli.simulation.kernel import longest_paths  # lazy: numba is slow to import

    graph = graph_of(pipelines)
    start, missing, _cause = longest_paths(graph, np.inf)
    start, missing = start.reshape(graph.durations.shape), missing.reshape(graph.durations.shape)
    stuck = np.flatnonzero(missing.any(axis=1))
    return Run(
        forward_start=start[:, 0::2],
        backward_start=start[:, 1::2],
        makespan_seconds=np.inf if len(stuck) else float((start + graph.durations).max()),
        stuck=stuck,
    )


def makespan_seconds(pipelines: Pipelines, limit: float = np.inf) -> float:
    """Return the end of a step; infinite on a deadlock or beyond `limit`, which stops the simulation early."""
    from fcp_cli.simulation.kernel import seconds_of

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
    from fcp_cli.simulation import kernel

    waves = len(pipelines.ranks) // pipelines.num_ranks
    return np.asarray(kernel.better_places(graph_of(pipelines), pipelines.ranks, waves, reach, most_runs))


def graph_of(pipelines: Pipelines) -> Graph:
    """Return a step in the form of the compiled simulation."""
    from fcp_cli.simulation.kernel import Graph

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
