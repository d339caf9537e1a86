"""`magi-attention`: equally many chunks of a pack on each rank, with keys fetched from other ranks, from MagiAttention.

Written from the published code (SandAI-org/MagiAttention at 2c641357, May 2026). A pack is cut into chunks of 512
tokens. The default `MinHeapDispatchAlg` takes chunks by falling area of the mask, and gives each to the rank with the
least area so far among those below their share of chunks. A rank computes all layers of its chunks, and fetches all
keys before them, each once. Priced by `spread_attention`. Choices that the paper leaves open favour it:

- The degree (any divisor of the ranks) is the fastest over a sample of the plan's steps. The packs of its groups have
  similar work (`wlb_llm`).
- Nothing is padded: the last chunk of a pack may be short (uneven shards, since 1.1).
- Keys are fetched in one stage, so a chunk with remote keys runs a single further kernel.
- Areas are those of full causal attention; the seconds of sliding windows are spread evenly over a sequence.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.strategies.spread_attention import SpreadAttention, tuned
from fcp_cli.util.arrays import FloatArray, IntArray

_CHUNK_TOKENS: Final = 512


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy with the fastest degree over a sample of the steps; see `tuned` for errors."""
    return tuned("magi-attention", batches, _rank_seconds, chunk_tokens=_CHUNK_TOKENS)


class Pieces(NamedTuple):
    """Parts of sequences between the cuts of a pack, in its order.

    Attributes:
        chunk: [pieces] chunk of each piece.
        sequence: [pieces] index of its sequence in the micro-batch.
        start, end: [pieces] token range in that sequence.
    """

    chunk: IntArray
    sequence: IntArray
    start: IntArray
    end: IntArray


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [degree] the seconds of a micro-batch on each rank."""
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
    alone = held[of, rank] == reach[rank, of]  # the rank holds all keys that it needs of the sequence
    c = spread.problem.profile.coefficients
    attention += tokens * ~alone * c.chunk_seconds_per_token
    linear = np.bincount(rank, tokens * (work.linear_seconds / work.tokens)[of], degree)
    messages = spread.message_seconds(keys, kept=False)
    engine = np.maximum(np.bincount(rank, attention, degree), messages)
    return np.asarray(c.microbatch_seconds + linear + engine, dtype=np.float64)


def cut(lengths: IntArray, chunk_tokens: int) -> Pieces:
    """Cut a pack of back-to-back sequences into chunks; the last may be short."""
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends, np.arange(chunk_tokens, ends[-1], chunk_tokens))
    starts = np.concatenate(([0], cuts[:-1]))
    sequence = np.searchsorted(ends, starts, side="right")
    first = (ends - lengths)[sequence]
    return Pieces(starts // chunk_tokens, sequence, starts - first, cuts - first)


def dispatched(areas: list[float], ranks: int) -> IntArray:
    """Return [chunks] the rank of each chunk: largest area first, each to the least loaded rank that is not full."""
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
