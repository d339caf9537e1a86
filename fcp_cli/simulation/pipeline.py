"""Runs a step of replicas with pipelines, event by event, exactly.

Each replica runs its micro-batches in its own order through P stages (`order`). A forward waits for that of the block
before, a backward for that of the block after, each sent on in `send_seconds`; a device does one thing at a time; and a
ring's forward or backward begins on a block when all its replicas have reached it there. So when an operation begins is
the longest path to it through a graph without time in it, and where the graph has a circle, the replicas wait for each
other for ever.

Plain 1F1B sends as Megatron does: sender and receiver meet, and neither goes on before the message is through. The
interleaved schedule sends in the background.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.simulation.order import device_order

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
        stuck: micro-batches that never end; empty where none waits for ever.
    """

    forward_start: FloatArray
    backward_start: FloatArray
    makespan_seconds: float
    stuck: IntArray


def run(pipelines: Pipelines) -> Run:
    """Run a step."""
    from fcp_cli.simulation.kernel import longest_paths  # compiled by numba, which takes a while to load

    graph = graph_of(pipelines)
    start, missing = longest_paths(graph)
    stuck = np.flatnonzero(missing.any(axis=1))
    return Run(
        forward_start=start[:, 0::2],
        backward_start=start[:, 1::2],
        makespan_seconds=np.inf if len(stuck) else float((start + graph.durations).max()),
        stuck=stuck,
    )


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
    first, orders, positions = orders_of(p.stages, p.chunks, counts)
    durations = np.stack((p.forward_seconds, p.backward_seconds), axis=2).reshape(count, -1)
    return Graph(
        stages=p.stages,
        blocks=p.stages * p.chunks,
        meets=p.chunks == 1,
        rank_offsets=p.rank_offsets,
        ranks=p.ranks,
        place=place,
        rank_first=rank_first,
        rank_microbatches=microbatch_of[by_rank],
        durations=durations,
        sends=p.send_seconds,
        first=first,
        orders=orders,
        positions=positions,
    )


def orders_of(stages: int, chunks: int, counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the orders of devices for all the numbers of micro-batches in `counts`, as `kernel.Graph` has them."""
    first = np.full(int(counts.max(initial=0)) + 1, -1, dtype=np.int64)
    orders, positions, at = [], [], 0
    for m in np.unique(counts).tolist():
        order = device_order(stages, chunks, m)
        position = np.empty(order.size, dtype=np.int64)
        position[order] = np.arange(order.shape[1])
        first[m] = at
        at += order.size
        orders.append(order.ravel())
        positions.append(position)
    return first, np.concatenate(orders), np.concatenate(positions)
