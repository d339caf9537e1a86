"""Segment tree over the free seconds and tokens of bins, which finds a bin with room for a sequence.

`usable_seconds` caps the seconds of a bin at what a sequence within its free tokens could use, which keeps searches
short. `dealt` deals sequences to parts by the same tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

# Limits the table of `most_work` to 512 kB: under larger budgets an entry covers several numbers of tokens.
_MOST_ENTRIES = 1 << 16


class Tree(NamedTuple):
    """Heap-shaped tree of maxima over bins: free seconds and free tokens. The leaf of bin b is node len // 2 + b.

    The number of leaves is a power of two; leaves beyond the bins have no room, so no search returns them.
    """

    seconds: FloatArray
    tokens: IntArray


@kernel
def make_tree(bins: int) -> Any:
    """Make a tree whose bins have no room yet."""
    # A power of two, so that node >> 1 is the parent.
    size = 1
    while size < bins:
        size *= 2
    # The root is node 1, so the children of node k are 2 k and 2 k + 1; node 0 is unused.
    return Tree(np.full(2 * size, -np.inf), np.full(2 * size, -1, dtype=np.int64))


@leaf
def set_room(tree: Tree, leaf: int, seconds: float, tokens: int) -> None:
    """Set the free seconds and tokens of a bin."""
    node = (len(tree.seconds) >> 1) + leaf
    tree.seconds[node] = seconds
    tree.tokens[node] = tokens
    node >>= 1
    while node >= 1:
        left = 2 * node
        most_seconds = max(tree.seconds[left], tree.seconds[left + 1])
        most_tokens = max(tree.tokens[left], tree.tokens[left + 1])
        if tree.seconds[node] == most_seconds and tree.tokens[node] == most_tokens:
            break  # no ancestor changes
        tree.seconds[node] = most_seconds
        tree.tokens[node] = most_tokens
        node >>= 1


@leaf
def first_with_room(tree: Tree, seconds: float, tokens: int, start: int) -> int:
    """Return the first bin from `start` on with at least `seconds` and `tokens` free, or NONE."""
    size = len(tree.seconds) >> 1
    if start >= size or tree.seconds[1] < seconds or tree.tokens[1] < tokens:
        return NONE
    # From a leaf the walk only goes up and right, so bins before `start` are never visited.
    node = size + start if start else 1
    # A node may have the seconds in one bin and the tokens in another; then the walk continues to its right.
    while True:
        if tree.seconds[node] >= seconds and tree.tokens[node] >= tokens:
            if node >= size:
                return node - size
            node = 2 * node
            continue
        while node & 1:  # a right child: its parent is done, too
            node >>= 1
        # Went up past the root: nothing is left to the right.
        if node == 0:
            return NONE
        node += 1


@leaf
def roomiest(tree: Tree) -> int:
    """Return the bin with the most free seconds; the first on ties."""
    size = len(tree.seconds) >> 1
    node = 1
    while node < size:
        node = 2 * node if tree.seconds[2 * node] >= tree.seconds[2 * node + 1] else 2 * node + 1
    return node - size


@inlined
def usable_seconds(seconds: float, tokens: int, most: FloatArray, inputs: PlannerInputs) -> float:
    """Return the free seconds of a bin that a sequence within its free tokens could use.

    With these in a `Tree`, `first_with_room` finds the same bin but skips the many bins that have seconds and hardly
    any tokens; otherwise its time grows with the number of bins.
    """
    if tokens < 0:
        return -np.inf
    if tokens > inputs.tokens_per_rank:  # the table only covers sequences that fit into a single rank
        return seconds
    return float(min(seconds, most[min(tokens, inputs.tokens_per_rank) // _tokens_of_entry(inputs)]))


@kernel
def most_work(sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [budget // `_tokens_of_entry` + 1] the most work of any sequence with at most that many tokens."""
    unit = _tokens_of_entry(inputs)
    most = np.zeros(inputs.tokens_per_rank // unit + 1)
    for i in range(len(sequences.work)):
        if sequences.tokens[i] <= inputs.tokens_per_rank:
            # The maximum over all token counts of an entry: room may be overestimated, never underestimated.
            entry = sequences.tokens[i] // unit
            most[entry] = max(most[entry], sequences.work[i])
    # A running maximum: shorter sequences may have more work, e.g. with images or a full mask.
    for entry in range(1, len(most)):
        most[entry] = max(most[entry], most[entry - 1])
    return most


@inlined
def _tokens_of_entry(inputs: PlannerInputs) -> int:
    return int(inputs.tokens_per_rank // _MOST_ENTRIES + 1)


@kernel
def dealt(work: FloatArray, ranks: IntArray) -> IntArray:
    """Return [sequences] the part of each, given parts with these numbers of ranks and the work in falling order.

    Each sequence goes to the part with the least work per rank so far.
    """
    part_of, held, tree = np.empty(len(work), dtype=np.int64), np.zeros(len(ranks)), make_tree(len(ranks))
    for part in range(len(ranks)):
        set_room(tree, part, 0.0, 0)
    for i in range(len(work)):
        part = roomiest(tree)
        part_of[i] = part
        held[part] += work[i]
        # Negated, since the tree finds the maximum; unused leaves are -inf and never win.
        set_room(tree, part, -held[part] / ranks[part], 0)
    return part_of
