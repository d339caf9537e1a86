"""Settings shared by plans, planning problems and the pricing of micro-batches."""

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
    """Number of ranks, their nodes, and the devices of each.

    Attributes:
        num_ranks: number of model replicas.
        ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.
        tensor_parallel, pipeline_parallel: parallel sizes within a rank.
    """

    num_ranks: RankCount
    ranks_per_node: RankCount
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1

    @property
    def devices_per_rank(self) -> int:
        """Devices of one model replica, each with its own process."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSetup(RankShape):
    """Settings of every step of a plan.

    Attributes:
        pipeline: pipeline settings of a replica; None for one stage, or if the plan times pipelines as waves.
        sync: scope of synchronization between ranks: once per `iteration`, or after every `microbatch`.
        tokens_per_rank: token budget of a rank, after head-room.
        padding_multiple: padding multiple of `padding.padded_tokens`; None: no padding.
        attention: attention split of groups: heads only (`ulysses`) or heads and ring (`2d`), with the Ulysses degree
            in each row; None: rings only.
        encoder_balance: ranks that share the vision encoder's work: all of a `wave`; None: those of the group.
        encoder_ranks: number of encoder-only ranks, the last of the job, which run ahead of the others; or None.
        recipe: recipe assumed by token budget and times; None if the cost profile has none.
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
        """Blocks of layers per pipeline stage; 1 without a pipeline."""
        return 1 if self.pipeline is None else self.pipeline.virtual_stages
