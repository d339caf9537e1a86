"""`megatron-any-degree`: Megatron-LM's packing scheduler with degrees that are not rounded (NVIDIA/Megatron-LM#6801).

The pull request's description and tests were read; its scheduler's code was in no copy. They say: a sequence
needs as many ranks as hold it, five or three as well as four, groups are contiguous, and sequences for which powers of
two leave no room, as three that need three of eight ranks, still fall back to one group of all. They do not say which
wider degrees a sequence is offered, and how groups grow into ranks that stay empty. Two readings, the quicker kept for
every step: the degree that is needed and its doublings, as before the change, or every degree from it on.

The order of ranks in a ring, which bounds the peers of a rank by four, is that of every plan (`plan/ring_order.py`).
"""

from __future__ import annotations

from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.published.megatron_packing import Degrees, MegatronPacking, doubled
from fcp_cli.planning.published.megatron_rounds import ranks_needed


def make_solver(batches: GlobalBatches) -> MegatronAnyDegree:
    """Make the solver for these batches."""
    return MegatronAnyDegree(batches.problem)


def _next(degree: int) -> int:
    return degree + 1


DOUBLINGS = Degrees(ranks_needed, doubled)
EVERY = Degrees(ranks_needed, _next)


class MegatronAnyDegree(MegatronPacking):
    name = "megatron-any-degree"
    degrees = (DOUBLINGS, EVERY)

    def _needed(self, length_tokens: int, max_tokens_per_rank: int) -> int:
        return ranks_needed(length_tokens, max_tokens_per_rank)
