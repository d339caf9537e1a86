"""Runs a step of replicas with pipelines, event by event, exactly.

Each replica runs its micro-batches in its own order through P stages (`order`). A forward waits for that of the block
before, a backward for that of the block after, each sent on in `send_seconds`; a device does one thing at a time; and a
ring's forward or backward begins on a block when all its replicas have reached it there. So when an operation begins is
the longest path to it through a graph without time in it, and where the graph has a circle, the replicas wait for each
other for ever.

Plain 1F1B sends as Megatron does: sender and receiver meet, and both block until the message is through. The
interleaved schedule sends in the background.
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
    """The micro-batches of a step on replicas with pipelines.

    Attributes:
        stages, chunks: P devices of a replica, and V blocks of layers on each; L = P x V.
        num_ranks: replicas.
        rank_offsets, ranks: micro-batch i runs on the replicas `ranks[rank_offsets[i]:rank_offsets[i + 1]]`.
        forward_seconds, backward_seconds: [microbatches, L] of each block.
        send_seconds: [microbatches] from one block to the next, or back.
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
    """When everything happens.

    Attributes:
        forward_start, backward_start: [microbatches, L] seconds from the start of the step.
        makespan_seconds: when the last operation ends; infinite where replicas wait for each other for ever.
        stuck: micro-batches that never end; empty if none waits for ever.
    """

    forward_start: FloatArray
    backward_start: FloatArray
    makespan_seconds: float
    stuck: IntArray


def run(pipelines: Pipelines) -> Run:
    """Run a step."""
    from fcp_cli.simulation.kernel import longest_paths  # compiled by numba, which takes a while to load

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
    """Return the end of a step; infinite where replicas wait for each other for ever, or it takes more than `limit`."""
    from fcp_cli.simulation.kernel import seconds_of

    return float(seconds_of(graph_of(pipelines), limit))


def better_places(pipelines: Pipelines, *, reach: int, most_runs: int) -> IntArray:
    """Let micro-batches on the critical path change places with their neighbours while that ends the step sooner.

    Args:
        pipelines: a step of waves, in each of which every replica runs one micro-batch, in this order.
        reach: how many waves away a neighbour may be.
        most_runs: the most runs of the step, in all.

    Returns:
        [microbatches] the wave of each.
    """
    from fcp_cli.simulation import kernel

    waves = len(pipelines.ranks) // pipelines.num_ranks
    return np.asarray(kernel.better_places(graph_of(pipelines), pipelines.ranks, waves, reach, most_runs))


def graph_of(pipelines: Pipelines) -> Graph:
    """Lay a step out as the compiled simulation reads it."""
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
    """Return the turns of replicas with each of these numbers of micro-batches, and the row where each begins."""
    tables = [turns_of(stages, chunks, m) for m in counts]
    first = np.full(counts[-1] + 1, -1, dtype=np.int64)
    first[list(counts)] = np.cumsum([0, *map(len, tables[:-1])])
    return first, np.concatenate(tables)
