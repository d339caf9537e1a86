"""Compiled longest paths of `pipeline`, and local search along the critical path.

Imported by `pipeline` only, and lazily, since numba is slow to import.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.util.compiling import kernel, leaf


class Graph(NamedTuple):
    """Dependency graph of a step on replicas with pipelines of L blocks; operations are numbered as by
    `pipeline.operation`.

    An entry is a (micro-batch, replica) pair, ordered as in the micro-batches' groups.

    Attributes:
        rank_offsets: [microbatches + 1] offsets of the entries of each micro-batch.
        ranks: [entries] the replica.
        base: [entries] first row in `turns` of the micro-batch's operations on the replica.
        rank_first: [entries] offset of the replica's micro-batches in `rank_microbatches`.
        rank_microbatches: micro-batches of each replica in execution order, concatenated.
        durations: [microbatches, 2 L] seconds of each operation.
        left: [microbatches, 2 L] least seconds from the start of an operation to the end of its micro-batch.
        sends: [microbatches] seconds of a message.
        following: [2 L] next operation of the same micro-batch; -1 after the last backward.
        is_sent: [2 L] whether the result is sent to another device.
        meets: whether sends block sender and receiver.
        turns: [rows, 6] see `pipeline.turns_of`.
    """

    rank_offsets: IntArray
    ranks: Int32Array
    base: IntArray
    rank_first: IntArray
    rank_microbatches: IntArray
    durations: FloatArray
    left: FloatArray
    sends: FloatArray
    following: IntArray
    is_sent: Any
    meets: bool
    turns: Int32Array


class Paths(NamedTuple):
    """Longest paths to the operations of a step; an operation is an index i * 2 L + c.

    Attributes:
        start: [microbatches x 2 L] start of each operation.
        missing: number of its unmet dependencies; 0 unless there is a deadlock.
        cause: its last dependency, or -1 without any.
        ready: operations whose dependencies are met, a stack.
        height: [1] height of the stack.
    """

    start: FloatArray
    missing: Int32Array
    cause: Int32Array
    ready: Int32Array
    height: IntArray


@kernel
def longest_paths(graph: Graph, limit: float) -> Any:
    """Return the longest paths to all operations.

    If the step must exceed `limit`, the simulation stops and sets the start of the current operation to infinity.
    """
    rank_offsets, base, rank_first, turns = graph.rank_offsets, graph.base, graph.rank_first, graph.turns
    following, is_sent, durations = graph.following, graph.is_sent, graph.durations
    per, count = len(following), len(rank_offsets) - 1
    paths = Paths(
        np.zeros(count * per),
        _dependencies(graph),
        np.full(count * per, -1, dtype=np.int32),
        np.empty(count * per, dtype=np.int32),
        np.zeros(1, dtype=np.int64),
    )
    start, ready, height = paths.start, paths.ready, paths.height
    for node in range(count * per):
        if paths.missing[node] == 0:
            ready[height[0]] = node
            height[0] += 1
    while height[0]:
        height[0] -= 1
        node = ready[height[0]]
        i = node // per
        c = node - i * per
        if start[node] + graph.left[i, c] > limit:
            start[node] = np.inf
            break
        end = start[node] + durations[i, c]
        sends = graph.sends[i] if is_sent[c] else 0.0
        if following[c] >= 0:
            _tell(node - c + following[c], end + sends, node, paths)
        if not graph.meets:
            sends = 0.0
        for entry in range(rank_offsets[i], rank_offsets[i + 1]):
            row, first = base[entry] + c, rank_first[entry]
            if turns[row, 0] < 0:
                continue
            of = graph.rank_microbatches[first + turns[row, 1]]
            late = sends
            if graph.meets and turns[row, 2]:
                late = max(sends, graph.sends[of])
                if turns[row, 3] >= 0:  # a blocked sender continues once this device has received
                    then = graph.rank_microbatches[first + turns[row, 4]]
                    _tell(then * per + turns[row, 3], end + graph.sends[of], node, paths)
            _tell(of * per + turns[row, 0], end + late, node, paths)
    return paths


@leaf
def _tell(node: int, earliest: float, by: int, paths: Paths) -> None:
    """Meet one dependency of an operation, which is ready once none is missing."""
    if earliest > paths.start[node]:
        paths.start[node] = earliest
        paths.cause[node] = by
    paths.missing[node] -= 1
    if paths.missing[node] == 0:
        paths.ready[paths.height[0]] = node
        paths.height[0] += 1


@kernel
def _dependencies(graph: Graph) -> Int32Array:
    """Return [microbatches x 2 L] the number of dependencies of each operation."""
    per, count = len(graph.following), len(graph.rank_offsets) - 1
    missing = np.zeros(count * per, dtype=np.int32)
    for i in range(count):
        for c in range(per):
            if graph.following[c] >= 0:
                missing[i * per + graph.following[c]] += 1
        for entry in range(graph.rank_offsets[i], graph.rank_offsets[i + 1]):
            for c in range(per):
                missing[i * per + c] += graph.turns[graph.base[entry] + c, 5]
    return missing


@kernel
def seconds_of(graph: Graph, limit: float) -> float:
    """Return the end of a step; infinite on a deadlock or beyond `limit`."""
    per = len(graph.following)
    paths = longest_paths(graph, limit)
    last = 0.0
    for node in range(len(paths.start)):
        if paths.missing[node]:
            return np.inf
        last = max(last, paths.start[node] + graph.durations[node // per, node % per])
    return last


@kernel
def better_places(graph: Graph, waves: int, reach: int, most_runs: int) -> Any:
    """Swap micro-batches on the critical path with neighbours while that shortens the step.

    Every replica runs one micro-batch per wave. Micro-batches of the two waves that share replicas are swapped
    together, which preserves this.

    Args:
        graph: dependency graph; `base` and `rank_microbatches` are modified in place.
        waves: number of waves.
        reach: largest distance of a swap, in waves.
        most_runs: limit of simulated candidates.

    Returns:
        [microbatches] the new wave of each.
    """
    per = len(graph.following)
    path = np.empty(len(graph.rank_offsets) - 1, dtype=np.int64)
    seconds, length = _critical(graph, np.inf, path)
    runs, at = 1, 0
    while at < length * 2 * reach and runs < most_runs:
        row = path[at // (2 * reach)]
        away = at % (2 * reach)
        away = away // 2 + 1 if away % 2 == 0 else -(away // 2) - 1
        at += 1
        here = graph.base[graph.rank_offsets[row]] // per
        there = here + away
        if there < 0 or there >= waves:
            continue
        _swap(row, here, there, waves, graph)
        enough = seconds * (1.0 - 1e-9)
        found, _length = _critical(graph, enough, path[:0])
        runs += 1
        if found < enough:
            seconds, length = _critical(graph, np.inf, path)
            at = 0
        else:
            _swap(row, here, there, waves, graph)  # back
    return graph.base[graph.rank_offsets[:-1]] // per


@kernel
def _critical(graph: Graph, limit: float, path: IntArray) -> Any:
    """Return seconds and critical path length of a step; write the path's micro-batches to `path`, last first."""
    per = len(graph.following)
    paths = longest_paths(graph, limit)
    seconds, last = 0.0, 0
    for node in range(len(paths.start)):
        end = paths.start[node] + graph.durations[node // per, node % per]
        if end > seconds:
            seconds, last = end, node
    length = 0
    while last >= 0 and length < len(path):
        row = last // per
        is_known = False
        for at in range(length):
            is_known = is_known or path[at] == row
        if not is_known:
            path[length] = row
            length += 1
        last = paths.cause[last]
    return seconds, length


@kernel
def _swap(row: int, here: int, there: int, waves: int, graph: Graph) -> None:
    """Swap a micro-batch's replica between two waves, with all replicas transitively connected to it by rings there."""
    per, replicas = len(graph.following), len(graph.rank_microbatches) // waves
    queue, is_known = np.empty(replicas, dtype=np.int64), np.zeros(replicas, dtype=np.bool_)
    queue[0], size, at = graph.ranks[graph.rank_offsets[row]], 1, 0
    is_known[queue[0]] = True
    while at < size:
        first = queue[at] * waves
        at += 1
        for place in (here, there):
            met = graph.rank_microbatches[first + place]
            for entry in range(graph.rank_offsets[met], graph.rank_offsets[met + 1]):
                if not is_known[graph.ranks[entry]]:
                    is_known[graph.ranks[entry]] = True
                    queue[size] = graph.ranks[entry]
                    size += 1
    for at in range(size):
        first = queue[at] * waves
        one, other = graph.rank_microbatches[first + here], graph.rank_microbatches[first + there]
        graph.rank_microbatches[first + here], graph.rank_microbatches[first + there] = other, one
        for entry in range(graph.rank_offsets[one], graph.rank_offsets[one + 1]):
            graph.base[entry] = there * per
        for entry in range(graph.rank_offsets[other], graph.rank_offsets[other + 1]):
            graph.base[entry] = here * per
