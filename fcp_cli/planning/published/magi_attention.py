"""`magi-attention`: chunks of a pack, equally many on each rank, keys fetched from their ranks, from MagiAttention.

Written from the published code (SandAI-org/MagiAttention at 2c641357, May 2026): a pack is cut into chunks of 512
tokens; `MinHeapDispatchAlg`, its default, gives each chunk, largest area of the mask first, to the rank with the least
area so far that has fewer than its share of chunks. A rank computes all layers of its chunks, and fetches the keys
before them, each once. It is priced as `spread_attention` says. Choices that the paper leaves open favour it:

- The degree (any divisor of the ranks) is the quickest over a sample of the plan's steps; packs of its groups have
  about as much work (`wlb_llm`).
- Nothing is padded: the last chunk of a pack may be short (uneven shards, since 1.1).
- Keys are fetched in one stage, so that chunks with keys elsewhere run one kernel more.
- Areas are of full causal attention; windows' seconds are spread evenly over a sequence.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import Work
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.published.spread_attention import SpreadAttention, tuned

_CHUNK_TOKENS: Final = 512


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy with the degree that is quickest over a sample of the steps; see `tuned` for errors."""
    return tuned("magi-attention", batches, _rank_seconds, chunk_tokens=_CHUNK_TOKENS)


class Pieces(NamedTuple):
    """Parts of sequences in chunks of a pack, in its order.

    Attributes:
        chunk: [pieces] that a piece is in.
        sequence: [pieces] index into the micro-batch.
        start, end: [pieces] tokens of that sequence.
    """

    chunk: IntArray
    sequence: IntArray
    start: IntArray
    end: IntArray


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [degree] the seconds of one micro-batch."""
    degree, pieces = spread.degree, cut(work.tokens, _CHUNK_TOKENS)
    tokens, of = pieces.end - pieces.start, pieces.sequence
    area = pieces.end.astype(np.float64) ** 2 - pieces.start.astype(np.float64) ** 2
    attention = work.attention_seconds[of] * area / work.tokens[of].astype(np.float64) ** 2
    if work.windows is not None:
        attention += work.windows.seconds[of] * tokens / work.tokens[of]
    rank = dispatched(np.bincount(pieces.chunk, area).tolist(), degree)[pieces.chunk]
    reach = np.zeros((degree, len(work.tokens)), dtype=np.int64)
    np.maximum.at(reach, (rank, of), pieces.end)
    before = [tokens * (pieces.end <= reach[to, of]) for to in range(degree)]
    keys = np.array([np.bincount(rank, mine, degree) for mine in before], dtype=np.float64)
    held = np.zeros((len(work.tokens), degree))
    np.add.at(held, (of, rank), tokens)
    alone = held[of, rank] == reach[rank, of]  # all keys that this rank needs of the sequence are its own
    c = spread.problem.profile.coefficients
    attention += tokens * ~alone * c.chunk_seconds_per_token
    linear = np.bincount(rank, tokens * (work.linear_seconds / work.tokens)[of], degree)
    messages = spread.message_seconds(keys, kept=False)
    engine = np.maximum(np.bincount(rank, attention, degree), messages)
    return np.asarray(c.microbatch_seconds + linear + engine, dtype=np.float64)


def cut(lengths: IntArray, chunk_tokens: int) -> Pieces:
    """Cut a pack, its sequences back to back, into chunks; the last may be short."""
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends, np.arange(chunk_tokens, ends[-1], chunk_tokens))
    starts = np.concatenate(([0], cuts[:-1]))
    sequence = np.searchsorted(ends, starts, side="right")
    first = (ends - lengths)[sequence]
    return Pieces(starts // chunk_tokens, sequence, starts - first, cuts - first)


def dispatched(areas: list[float], ranks: int) -> IntArray:
    """Return [chunks] the rank of each chunk: largest first, to the least area among ranks that are not full."""
    most = -(-len(areas) // ranks)
    heap = [(0.0, rank) for rank in range(ranks)]
    count = [0] * ranks
    found = np.zeros(len(areas), dtype=np.int64)
    for chunk in sorted(range(len(areas)), key=areas.__getitem__)[::-1]:
        area, rank = heapq.heappop(heap)
        found[chunk] = rank
        count[rank] += 1
        if count[rank] < most:
            heapq.heappush(heap, (area + areas[chunk], rank))
    return found
