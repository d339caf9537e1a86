"""Settings that a plan, the problem it solves and the prices of its micro-batches share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.recipe import Recipe, SplitAttention
from fcp_cli.validation import Count, RankCount

Sync = Literal["iteration", "microbatch"]
EncoderBalance = Literal["wave"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """Number of ranks, and the devices of each.

    Attributes:
        num_ranks: model replicas.
        ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.
        tensor_parallel, pipeline_parallel: devices of a rank are their product.
    """

    num_ranks: RankCount
    ranks_per_node: RankCount
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1

    @property
    def devices_per_rank(self) -> int:
        """Devices, and processes, that hold one model replica together."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSetup(RankShape):
    """Settings of every step of a plan.

    Attributes:
        pipeline: timeline figures of a replica's stages; None: one stage, or a plan that took pipelines for waves.
        sync: the sync where ranks wait for each other.
        tokens_per_rank: the token budget, after head-room.
        padding_multiple: multiple that `padding.padded_tokens` pads sequences to; None: no padding.
        attention: groups may split heads: all of them nothing else (`ulysses`), or both (`2d`), as the heads degree of
            each row says; None: all groups are rings.
        encoder_balance: who shares the work of a vision encoder: all ranks of a `wave`; None: those of a ring.
        encoder_ranks: the last so many ranks run nothing but the encoder, ahead of the others; None: there are none.
        recipe: the recipe that the token budget and the times are of; None if the cost profile has none.
    """

    pipeline: Pipeline | None = None
    sync: Sync
    tokens_per_rank: Count
    padding_multiple: Count | None = None
    attention: SplitAttention | None = None
    encoder_balance: EncoderBalance | None = None
    encoder_ranks: Count | None = None
    recipe: Recipe | None = None

    @property
    def virtual_stages(self) -> int:
        """Blocks of layers on each stage of a replica's pipeline."""
        return 1 if self.pipeline is None else self.pipeline.virtual_stages
