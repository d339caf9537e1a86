"""`block-fcp`: attention in blocks of sequences on any ranks, from another "FCP" (arXiv 2605.08524, MLSys 2026).

No code is public; this is based on a detailed account of the paper, not on its text. In a group of ranks, each sequence
is cut into blocks of 4,096 tokens. Blocks are sorted by the larger of their shares of all tokens and all attention,
largest first. Each goes to the rank with the least attention so far that has room for its tokens. Queries, keys and
values travel from the user's layout to the ranks of the blocks and back (the "transparent reshuffler"), and keys in
point-to-point messages to the ranks that need them. Sixteen blocks run as one kernel (the "coalescer"). Priced by
`spread_attention`. Choices that the paper leaves open favour it:

- The degree (any divisor of the ranks) is the fastest over a sample of the plan's steps; the paper shards over all.
- Either all ranks hold equally many tokens in the user's layout, so all other layers are balanced, or the data loader
  already lays tokens out by blocks, so nothing is reshuffled. The faster of both counts, for every micro-batch.
- A block pairs a head and a tail of its sequence (zig-zag), so all blocks of a sequence take equally long.
- Messages never collide at a rank: the paper's planner of congestion-free rounds counts as perfect and free, and no
  multiprocessors are reserved for copies (the paper reserves 6 or 8).
- A block for which no rank has room goes to the rank with the fewest tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.strategies.spread_attention import SpreadAttention, Tasks, attention_per_token, laid_out, tuned
from fcp_cli.util.arrays import FloatArray, IntArray

_BLOCK_TOKENS: Final = 4096
_BLOCKS_PER_KERNEL: Final = 16


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy with the fastest degree over a sample of the steps; see `tuned` for errors."""
    return tuned("block-fcp", batches, _rank_seconds, block_tokens=_BLOCK_TOKENS)


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [degree] the seconds of a micro-batch on each rank."""
    tasks, block = blocks_of(work.tokens, spread.degree)
    seconds = tasks.tokens * attention_per_token(work)[tasks.sequence]
    tokens, attention = np.zeros(block.max() + 1), np.zeros(block.max() + 1)
    np.add.at(tokens, block, tasks.tokens)
    np.add.at(attention, block, seconds)
    block_rank = placed(tokens, attention, spread.degree, spread.problem.tokens_per_rank)
    tasks.rank[:] = block_rank[block]
    blocks = -(-work.tokens // _BLOCK_TOKENS)
    further = -(-blocks // _BLOCKS_PER_KERNEL) - (blocks == 1)
    kernels = further[tasks.sequence].astype(np.float64)
    reshuffled = spread.task_seconds(tasks, work, kernels, ping_pong=False)
    tasks.home = tasks.rank
    by_blocks = spread.task_seconds(tasks, work, kernels, ping_pong=False)
    return min(reshuffled, by_blocks, key=lambda seconds: float(seconds.max()))


def blocks_of(lengths: IntArray, ranks: int) -> tuple[Tasks, IntArray]:
    """Cut sequences at block boundaries and at the boundaries of an even layout over the ranks.

    Return the tasks, and [tasks] the block of each.
    """
    even = laid_out(lengths, ranks)
    ends = np.cumsum(even.tokens)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.float64)
    inner = [start + np.arange(_BLOCK_TOKENS, n, _BLOCK_TOKENS) for start, n in zip(starts, lengths, strict=True)]
    cuts = np.union1d(ends, np.concatenate(inner))
    sizes = np.diff(cuts, prepend=0.0)
    middle = (cuts - sizes / 2)[sizes > 1e-6]
    task = np.searchsorted(ends, middle)
    sequence, home = even.sequence[task], even.home[task]
    within = ((middle - starts[sequence]) // _BLOCK_TOKENS).astype(np.int64)
    first_block = np.concatenate(([0], np.cumsum(-(-lengths // _BLOCK_TOKENS))[:-1]))
    tasks = Tasks(sequence=sequence, tokens=sizes[sizes > 1e-6], home=home, rank=home.copy())
    return tasks, np.asarray(first_block[sequence] + within)


def placed(tokens: FloatArray, attention: FloatArray, ranks: int, limit: int) -> IntArray:
    """Return [blocks] the rank of each block: largest first, each to the least attention among ranks with room.

    Args:
        tokens: [blocks] tokens.
        attention: [blocks] attention seconds.
        ranks: number of ranks in the group.
        limit: token budget of a rank.
    """
    share = np.maximum(tokens / tokens.sum(), attention / attention.sum())
    load, held = np.zeros(ranks), np.zeros(ranks)
    found = np.zeros(len(tokens), dtype=np.int64)
    for block in np.argsort(-share, kind="stable").tolist():
        room = held + tokens[block] <= limit
        rank = int(np.where(room, load, np.inf).argmin()) if room.any() else int(held.argmin())
        found[block] = rank
        load[rank] += attention[block]
        held[rank] += tokens[block]
    return found
