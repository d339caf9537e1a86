"""`zeppelin`: attention on a rank, a node or all nodes, by length; other layers balanced (EuroSys 2026).

No code is public; this is based on a detailed account of the paper (arXiv 2509.21841), not on its text, and the account
omits its two partitioning algorithms. All ranks are one group. Sequences fall into three zones by length: distributed
over a ring of all ranks, distributed over a ring of one node, or local to a rank, each on the ranks or node with the
least load so far. Messages between nodes are spread over all network cards of a node (its routing layer), and tokens
move between the layout of attention and an even one for all other layers (its remapping layer). Priced by
`spread_attention`. Choices that the paper leaves open favour it:

- The lengths at which zones begin are the fastest of twenty pairs, for every micro-batch.
- Other layers run on an even layout or in the layout of attention, whichever is faster including the remapping. Nothing
  hides the remapping: it waits for the output of attention, and attention waits for it.
- A hop across nodes travels at the bandwidth of all cards of the node, between two hops inside nodes.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.strategies.spread_attention import SpreadAttention, attention_per_token, tuned
from fcp_cli.util.arrays import FloatArray, IntArray


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy, with all ranks as one group; see `tuned` for errors."""
    return tuned("zeppelin", batches, _rank_seconds, degrees=[batches.problem.num_ranks])


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [ranks] the seconds of a micro-batch on each rank."""
    budget, size = spread.problem.tokens_per_rank, spread.problem.ranks_per_node
    local = [budget // share for share in (1, 2, 4, 8, 16)]
    tried = product(local, (budget, 2 * budget, size * budget // 2, size * budget))
    zones = {tuple((work.tokens > a).astype(int) + (work.tokens > b)) for a, b in tried}
    return min((_priced(spread, np.array(zone), work) for zone in sorted(zones)), key=lambda found: float(found.max()))


def _priced(spread: SpreadAttention, zone: IntArray, work: Work) -> FloatArray:
    ranks, size, c = spread.degree, spread.problem.ranks_per_node, spread.problem.profile.coefficients
    seconds = attention_per_token(work) * work.tokens
    attention = np.full(ranks, seconds[zone == 2].sum() / ranks)
    held = np.full(ranks, work.tokens[zone == 2].sum() / ranks)
    node_of = np.arange(ranks) // size
    in_node = np.zeros(node_of[-1] + 1)
    for sequence in _falling(zone == 1, seconds):
        node = int(in_node.argmin())
        in_node[node] += work.tokens[sequence]
        share = 1.0 / float((node_of == node).sum())
        attention[node_of == node] += share * seconds[sequence]
        held[node_of == node] += share * work.tokens[sequence]
    for sequence in _falling(zone == 0, seconds):
        room = held + work.tokens[sequence] <= spread.problem.tokens_per_rank
        rank = int(np.where(room, attention, np.inf).argmin()) if room.any() else int(held.argmin())
        attention[rank] += seconds[sequence]
        held[rank] += work.tokens[sequence]
    across, inside = float(work.tokens[zone == 2].sum()), in_node[node_of]
    further = across * (ranks - 1) / ranks + inside * (size - 1) / size
    attention += c.chunk_seconds_per_token * further
    rings = _ring_seconds(spread, across, inside)
    even = float(work.linear_seconds.sum()) / ranks
    uneven = held * float(work.linear_seconds.sum() / work.tokens.sum())
    engine = c.microbatch_seconds + np.maximum(attention, rings)
    kept, moved = engine + uneven, engine + even + _remapping_seconds(spread, held, node_of)
    return np.asarray(kept if kept.max() <= moved.max() else moved)


def _ring_seconds(spread: SpreadAttention, across: float, inside: FloatArray) -> FloatArray:
    """Return [ranks] the seconds of the ring over all ranks and the rings inside nodes.

    `across` is the tokens in the former, `inside` [ranks] those of each rank's node in the latter.
    """
    ranks, size, c = spread.degree, spread.problem.ranks_per_node, spread.problem.profile.coefficients
    near, far = spread.problem.profile.bandwidth.intra_node, spread.problem.profile.bandwidth.inter_node
    per_byte = 1.0 / near if ranks <= size else 1.0 / (size * far) + 2.0 / near
    seconds = c.ring_bytes_per_token * (across * (ranks - 1) / ranks * per_byte + inside * (size - 1) / size / near)
    return np.asarray(seconds + c.ring_hop_seconds * ((across > 0) * (ranks - 1) + (inside > 0) * (size - 1)))


def _remapping_seconds(spread: SpreadAttention, held: FloatArray, node_of: IntArray) -> FloatArray:
    """Return [ranks] the seconds of remapping between `held` and even tokens: those of the slowest rank, for all."""
    mean, of_nodes = float(held.mean()), np.bincount(node_of)
    far = np.abs(np.bincount(node_of, held) / of_nodes - mean)[node_of]
    near = np.maximum(0.0, np.abs(held - mean) - far)
    bandwidth = spread.problem.profile.bandwidth
    of_token = spread.heads.exchange_bytes_per_token + spread.heads.key_value_exchange_bytes_per_token
    slowest = float((near / bandwidth.intra_node + far / bandwidth.inter_node).max())
    return np.full(len(held), of_token * slowest)


def _falling(chosen: FloatArray | IntArray, seconds: FloatArray) -> list[int]:
    found = np.flatnonzero(chosen)
    return [int(i) for i in found[np.argsort(-seconds[found], kind="stable")]]
