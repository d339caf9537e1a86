"""The longest paths of `pipeline`, and swaps along the longest of all, compiled by numba on their first call and kept.

Imported only there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.compiling.compile import kernel, leaf


class Graph(NamedTuple):
    """A step of replicas with pipelines, L blocks of layers each; `operation` numbers a micro-batch's operations.

    Attributes:
        rank_offsets: the rank offsets of the micro-batches' groups, whose members are entries.
        base: [entries] the row of `turns` at which the micro-batch's operations on that replica stand.
        rank_first: [entries] where the micro-batches of that replica begin in `rank_microbatches`, in order.
        durations: [microbatches, 2 L]. sends: [microbatches].
        left: [microbatches, 2 L] the least from the beginning of an operation to the end of its micro-batch's last.
        following: [2 L] the operation of the same micro-batch that follows; -1 after the last backward.
        is_sent: [2 L] whether its result goes to another device first.
        meets: senders and receivers meet.
        turns: [rows, 6] as `order.turns_of` has them.
    """

    rank_offsets: IntArray
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


@kernel
def longest_paths(graph: Graph, limit: float) -> Any:
    """Return for each operation, [microbatches x 2 L], its start, its idle wait, and its last dependency.

    The last is the number of an operation, i * 2 L + c; -1 if one begins at once. A step that takes more than
    `limit` is given up, with the operation that shows it begun at infinity.
    """
    rank_offsets, base, rank_first, turns = graph.rank_offsets, graph.base, graph.rank_first, graph.turns
    following, is_sent, durations = graph.following, graph.is_sent, graph.durations
    per, count = len(following), len(rank_offsets) - 1
    start, missing = np.zeros(count * per), _dependencies(graph)
    stack, top = np.empty(count * per, dtype=np.int32), 0
    cause = np.full(count * per, -1, dtype=np.int32)
    for node in range(count * per):
        if missing[node] == 0:
            stack[top] = node
            top += 1
    while top:
        top -= 1
        node = stack[top]
        i = node // per
        c = node - i * per
        if start[node] + graph.left[i, c] > limit:
            start[node] = np.inf
            break
        end = start[node] + durations[i, c]
        sends = graph.sends[i] if is_sent[c] else 0.0
        if following[c] >= 0:
            top = _tell(node - c + following[c], end + sends, node, start, missing, cause, stack, top)
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
                if turns[row, 3] >= 0:  # the sender continues once this device receives
                    then = graph.rank_microbatches[first + turns[row, 4]]
                    at = then * per + turns[row, 3]
                    top = _tell(at, end + graph.sends[of], node, start, missing, cause, stack, top)
            top = _tell(of * per + turns[row, 0], end + late, node, start, missing, cause, stack, top)
    return start, missing, cause


@kernel
def seconds_of(graph: Graph, limit: float) -> float:
    """Return the end of a step; infinite if it never ends, or takes more than `limit`."""
    per = len(graph.following)
    start, missing, _cause = longest_paths(graph, limit)
    last = 0.0
    for node in range(len(start)):
        if missing[node]:
            return np.inf
        last = max(last, start[node] + graph.durations[node // per, node % per])
    return last


@kernel
def _dependencies(graph: Graph) -> Int32Array:
    """Return [microbatches x 2 L] how many operations each waits for."""
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


@leaf
def _tell(node: int, earliest: float, by: int, start: Any, missing: Any, cause: Any, stack: Any, top: int) -> int:
    """Release the operations that wait for a finished one; return the new height of the stack of ready ones."""
    if earliest > start[node]:
        start[node] = earliest
        cause[node] = by
    missing[node] -= 1
    if missing[node] == 0:
        stack[top] = node
        top += 1
    return top


@kernel
def better_places(graph: Graph, ranks: Int32Array, waves: int, reach: int, most_runs: int) -> Any:
    """Swap micro-batches on the critical path with their neighbours while that shortens the step.

    All replicas run a micro-batch in each wave. Those of two waves that share replicas change places together, so that
    waves stay waves.

    Args:
        graph: the graph whose `base` and `rank_microbatches` are changed.
        ranks: [entries] the replica of each.
        waves: the waves that each replica runs.
        reach: how many waves away a neighbour may be.
        most_runs: the most runs of the step, in all.

    Returns: [microbatches] the wave of each.
    """
    per = len(graph.following)
    path = np.empty(len(graph.rank_offsets) - 1, dtype=np.int64)
    marks = np.zeros(len(graph.rank_microbatches) // waves, dtype=np.int64)
    seconds, length = _critical(graph, np.inf, path)
    runs, mark, at = 1, 0, 0
    while at < length * 2 * reach and runs < most_runs:
        row = path[at // (2 * reach)]
        away = at % (2 * reach)
        away = away // 2 + 1 if away % 2 == 0 else -(away // 2) - 1
        at += 1
        here = graph.base[graph.rank_offsets[row]] // per
        there = here + away
        if there < 0 or there >= waves:
            continue
        mark += 1
        _swap(graph, ranks, ranks[graph.rank_offsets[row]], here, there, waves, marks, mark)
        enough = seconds * (1.0 - 1e-9)
        found, _length = _critical(graph, enough, path[:0])
        runs += 1
        if found < enough:
            seconds, length = _critical(graph, np.inf, path)
            at = 0
        else:
            mark += 1
            _swap(graph, ranks, ranks[graph.rank_offsets[row]], here, there, waves, marks, mark)
    return graph.base[graph.rank_offsets[:-1]] // per


@kernel
def _swap(graph: Graph, ranks: Any, rank: int, here: int, there: int, waves: int, marks: Any, mark: int) -> None:
    """Let a replica's micro-batches of two waves change places, and those of all that share one with them there."""
    per = len(graph.following)
    queue = np.empty(len(marks), dtype=np.int64)
    queue[0], size, at = rank, 1, 0
    marks[rank] = mark
    while at < size:
        first = queue[at] * waves
        at += 1
        for place in (here, there):
            row = graph.rank_microbatches[first + place]
            for entry in range(graph.rank_offsets[row], graph.rank_offsets[row + 1]):
                if marks[ranks[entry]] != mark:
                    marks[ranks[entry]] = mark
                    queue[size] = ranks[entry]
                    size += 1
    for at in range(size):
        first = queue[at] * waves
        one, other = graph.rank_microbatches[first + here], graph.rank_microbatches[first + there]
        graph.rank_microbatches[first + here], graph.rank_microbatches[first + there] = other, one
        for entry in range(graph.rank_offsets[one], graph.rank_offsets[one + 1]):
            graph.base[entry] = there * per
        for entry in range(graph.rank_offsets[other], graph.rank_offsets[other + 1]):
            graph.base[entry] = here * per


@kernel
def _critical(graph: Graph, limit: float, path: IntArray) -> Any:
    """Return the seconds of a step, and how many micro-batches of its critical path are in `path`, last ones first."""
    per = len(graph.following)
    start, _missing, cause = longest_paths(graph, limit)
    seconds, last = 0.0, 0
    for node in range(len(start)):
        end = start[node] + graph.durations[node // per, node % per]
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
        last = cause[last]
    return seconds, length
