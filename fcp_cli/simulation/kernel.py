"""The longest paths of `pipeline`, compiled by numba on their first call and kept on disk. Imported only there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

from fcp_cli.arrays import FloatArray, Int32Array, IntArray

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _kernel(function: _Function) -> _Function:
    compiled: Any = njit(nogil=True)(function)
    with suppress(
        RuntimeError, AttributeError
    ):  # no folder can be written to, or nothing is compiled (NUMBA_DISABLE_JIT)
        compiled.enable_caching()
    return cast(_Function, compiled)


class Graph(NamedTuple):
    """A step of replicas with pipelines, L blocks of layers each; `operation` numbers what a micro-batch does.

    Attributes:
        stages, blocks: P, and L = P x V.
        meets: senders and receivers meet.
        rank_offsets, ranks: of the micro-batches' groups.
        place: [ranks] which micro-batch of its replica, counted from 0, each entry of `ranks` is.
        rank_first, rank_microbatches: replica r runs `rank_microbatches[rank_first[r]:rank_first[r + 1]]`, in order.
        durations: [microbatches, 2 L]. sends: [microbatches].
        first, orders, positions: with m micro-batches, device s runs `orders[first[m] + 2 m V s + k]` as its k-th;
            operation c of the j-th is the `positions[first[m] + 2 L j + c]`-th of its device.
    """

    stages: int
    blocks: int
    meets: bool
    rank_offsets: IntArray
    ranks: Int32Array
    place: IntArray
    rank_first: IntArray
    rank_microbatches: IntArray
    durations: FloatArray
    sends: FloatArray
    first: IntArray
    orders: IntArray
    positions: IntArray


@_kernel
def longest_paths(graph: Graph) -> Any:
    """Return [microbatches, 2 L] when each operation begins, and [microbatches, 2 L] what it waits for in vain."""
    per = 2 * graph.blocks
    count = len(graph.rank_offsets) - 1
    start, missing = np.zeros(count * per), np.zeros(count * per, dtype=np.int32)
    stack, top = np.empty(count * per, dtype=np.int64), 0
    for node in range(count * per):
        top = _release(node, False, graph, start, missing, stack, top)
    top = 0
    for node in range(count * per):
        if missing[node] == 0:
            stack[top] = node
            top += 1
    while top:
        top -= 1
        top = _release(stack[top], True, graph, start, missing, stack, top)
    return start.reshape((count, per)), missing.reshape((count, per))


@_kernel
def _release(node: int, is_over: bool, graph: Graph, start: FloatArray, missing: Any, stack: IntArray, top: int) -> int:
    """Tell all that wait for an operation that it is over; before the run, count only what each will wait for.

    Returns: the new height of the stack of operations that wait for nothing more.
    """
    per = 2 * graph.blocks
    i, c = node // per, node % per
    end = start[node] + graph.durations[i, c]
    sends = graph.sends[i] if _next(c, graph.blocks) // 2 != c // 2 else 0.0
    if _next(c, graph.blocks) >= 0:
        top = _tell(node - c + _next(c, graph.blocks), end + sends, is_over, start, missing, stack, top)
    sends = sends if graph.meets and _next(c, graph.blocks) >= 0 else 0.0
    for entry in range(graph.rank_offsets[i], graph.rank_offsets[i + 1]):
        rank = graph.ranks[entry]
        following = _following(rank, graph.place[entry], c, graph)
        if following < 0:
            continue
        j, what = following // per, following % per
        of = graph.rank_microbatches[graph.rank_first[rank] + j]
        before = _before(what, graph.blocks)
        receives = graph.meets and before >= 0 and before // 2 != what // 2
        late = max(sends, graph.sends[of]) if receives else sends
        top = _tell(of * per + what, end + late, is_over, start, missing, stack, top)
        if receives:  # whoever sends goes on when this device has come to receive
            sender_next = _following(rank, j, before, graph)
            if sender_next >= 0:
                then = graph.rank_microbatches[graph.rank_first[rank] + sender_next // per]
                at = then * per + sender_next % per
                top = _tell(at, end + graph.sends[of], is_over, start, missing, stack, top)
    return top


@_kernel
def _tell(node: int, earliest: float, is_over: bool, start: FloatArray, missing: Any, stack: IntArray, top: int) -> int:
    if not is_over:
        missing[node] += 1
        return top
    start[node] = max(start[node], earliest)
    missing[node] -= 1
    if missing[node] == 0:
        stack[top] = node
        top += 1
    return top


@_kernel
def _next(c: int, blocks: int) -> int:
    """Return the operation of the same micro-batch that follows; -1 after the last backward."""
    if c % 2 == 0:
        return c + 2 if c // 2 < blocks - 1 else c + 1
    return c - 2 if c > 1 else -1


@_kernel
def _before(c: int, blocks: int) -> int:
    """Return the operation of the same micro-batch before; -1 for the first forward."""
    if c % 2 == 0:
        return c - 2 if c else -1
    return c + 2 if c // 2 < blocks - 1 else c - 1


@_kernel
def _following(rank: int, j: int, c: int, graph: Graph) -> int:
    """Return what a device runs after operation c of its j-th micro-batch, as `orders` has it; -1: nothing."""
    per = 2 * graph.blocks
    m = graph.rank_first[rank + 1] - graph.rank_first[rank]
    length = m * per // graph.stages
    first = graph.first[m]
    k = graph.positions[first + j * per + c] + 1
    if k == length:
        return -1
    return int(graph.orders[first + ((c // 2) % graph.stages) * length + k])
