"""Which bin has room for a sequence: a tree over the free seconds and tokens of all bins."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences

# 512 kB at most: for larger budgets an entry stands for several numbers of tokens.
_MOST_ENTRIES = 1 << 16  # of the table of `most_work`


class Tree(NamedTuple):
    """A heap-shaped tree of maxima over bins: free seconds, and free tokens. Leaf b is node len // 2 + b.

    The number of leaves is a power of two, at least that of bins; leaves beyond the bins have no room, so that no
    search returns them.
    """

    seconds: FloatArray
    tokens: IntArray


@kernel
def make_tree(bins: int) -> Any:
    """Make a tree whose bins all have no room."""
    # A power of two: leaf b is then node size + b, and parents are a shift away.
    size = 1
    while size < bins:
        size *= 2
    # Node 0 stays unused: with the root at 1, the children of node k are 2 k and 2 k + 1.
    return Tree(np.full(2 * size, -np.inf), np.full(2 * size, -1, dtype=np.int64))


@leaf
def set_room(tree: Tree, leaf: int, seconds: float, tokens: int) -> None:
    """Enter the free seconds and tokens of a bin."""
    node = (len(tree.seconds) >> 1) + leaf
    tree.seconds[node] = seconds
    tree.tokens[node] = tokens
    node >>= 1
    while node >= 1:
        left = 2 * node
        most_seconds = max(tree.seconds[left], tree.seconds[left + 1])
        most_tokens = max(tree.tokens[left], tree.tokens[left + 1])
        if tree.seconds[node] == most_seconds and tree.tokens[node] == most_tokens:
            break  # nothing changes above, either
        tree.seconds[node] = most_seconds
        tree.tokens[node] = most_tokens
        node >>= 1


@kernel
def most_work(sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [tokens // `_tokens_of_entry` + 1] the most work of a sequence of up to so many tokens."""
    unit = _tokens_of_entry(inputs)
    most = np.zeros(inputs.tokens_per_rank // unit + 1)
    for i in range(len(sequences.work)):
        if sequences.tokens[i] <= inputs.tokens_per_rank:
            # An entry holds the most of all its numbers of tokens: a bin may seem to have room, never to lack it.
            entry = sequences.tokens[i] // unit
            most[entry] = max(most[entry], sequences.work[i])
    # "Up to": a sequence with fewer tokens may have more work, as with images or a full mask.
    for entry in range(1, len(most)):
        most[entry] = max(most[entry], most[entry - 1])
    return most


@inlined
def _tokens_of_entry(inputs: PlannerInputs) -> int:
    return int(inputs.tokens_per_rank // _MOST_ENTRIES + 1)


@inlined
def usable_seconds(seconds: float, tokens: int, most: FloatArray, inputs: PlannerInputs) -> float:
    """Return the free seconds of a bin without those that no sequence within its free tokens could fill.

    With these in a `Tree`, `first_with_room` finds the same bin, but no longer visits the many bins that have seconds
    and hardly any tokens: a search for it grew with the number of bins.
    """
    if tokens < 0:
        return -np.inf
    if tokens > inputs.tokens_per_rank:  # room for a sequence that no single rank holds
        return seconds
    return float(min(seconds, most[min(tokens, inputs.tokens_per_rank) // _tokens_of_entry(inputs)]))


@leaf
def first_with_room(tree: Tree, seconds: float, tokens: int, start: int) -> int:
    """Return the first bin from `start` on that has both the seconds and the tokens, or NONE."""
    size = len(tree.seconds) >> 1
    if start >= size or tree.seconds[1] < seconds or tree.tokens[1] < tokens:
        return NONE
    # From a leaf the walk only goes up and right, so that bins before `start` are never met.
    node = size + start if start else 1
    # A node may have the seconds in one bin and the tokens in another: then the walk continues behind it.
    while True:
        if tree.seconds[node] >= seconds and tree.tokens[node] >= tokens:
            if node >= size:
                return node - size
            node = 2 * node
            continue
        while node & 1:  # the last of its parent: everything below that has been seen
            node >>= 1
        # Past the root, 1: nothing lies to the right.
        if node == 0:
            return NONE
        node += 1


@leaf
def roomiest(tree: Tree) -> int:
    """Return the first bin with the most seconds left."""
    size = len(tree.seconds) >> 1
    node = 1
    while node < size:
        # Ties go left, to the first bin, as a scan of all bins would have it.
        node = 2 * node if tree.seconds[2 * node] >= tree.seconds[2 * node + 1] else 2 * node + 1
    return node - size


@kernel
def dealt(work: FloatArray, ranks: IntArray) -> IntArray:
    """Deal sequences, given by falling work, to parts of these ranks; return [sequences] the part of each.

    Each goes to the part with the least work a rank so far.
    """
    part_of, held, tree = np.empty(len(work), dtype=np.int64), np.zeros(len(ranks)), make_tree(len(ranks))
    for part in range(len(ranks)):
        set_room(tree, part, 0.0, 0)
    for i in range(len(work)):
        part = roomiest(tree)
        part_of[i] = part
        held[part] += work[i]
        # Negated, since the tree finds the most. Leaves beyond the parts have -inf, so none of them wins.
        set_room(tree, part, -held[part] / ranks[part], 0)
    return part_of
