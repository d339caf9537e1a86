"""Pipeline settings of a plan that the cost profile lacks, and block times for the timeline.

A profile's seconds of a micro-batch are the mean over a replica's devices. Blocks of layers take equally long, except
that the last also runs the loss head and the first the vision encoder, which the mean spreads over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.simulation.pipeline import Pipelines, Run, run
from fcp_cli.validation import NonNegative, Share, StageCount


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The pipelines of a plan.

    Attributes:
        virtual_stages: blocks of layers per device; 1 is plain 1F1B, more is the interleaved schedule.
        forward_share: forward share of a block's seconds; the backward with its recomputation takes the rest.
        head_share: share of the loss head in the seconds of the language model's matrices.
        recompute_seconds_per_token: [stages] recomputation seconds per token of a rank, if stages differ; the profile's
            seconds of a micro-batch include their mean.
        send_seconds, send_seconds_per_token: latency of a message between blocks, and its time per token of a rank.
    """

    virtual_stages: StageCount = 1
    forward_share: Share
    head_share: Share = 0.0
    send_seconds: NonNegative = 0.0
    send_seconds_per_token: NonNegative = 0.0
    recompute_seconds_per_token: tuple[NonNegative, ...] = ()

    @property
    def mean_recompute_seconds(self) -> float:
        """Mean recomputation seconds of a stage per token of a rank."""
        again = self.recompute_seconds_per_token
        return sum(again) / len(again) if again else 0.0

    def missing_waves(self, waves: int, stages: int) -> int:
        """Return the idle waves to append, since Megatron only interleaves multiples of `stages` micro-batches."""
        return -waves % stages if self.virtual_stages > 1 else 0

    def run(self, rank_offsets: IntArray, ranks: Int32Array, prices: Prices, *, stages: int, num_ranks: int) -> Run:
        """Simulate a step of priced micro-batches on replicas with `stages` pipeline stages."""
        return run(self.laid_out(rank_offsets, ranks, prices, stages=stages, num_ranks=num_ranks))

    def laid_out(
        self, rank_offsets: IntArray, ranks: Int32Array, prices: Prices, *, stages: int, num_ranks: int
    ) -> Pipelines:
        """Return the simulation input of `run`."""
        forward, backward, sends = self.block_seconds(prices, stages)
        return Pipelines(
            stages=stages,
            chunks=self.virtual_stages,
            num_ranks=num_ranks,
            rank_offsets=rank_offsets,
            ranks=ranks,
            forward_seconds=forward,
            backward_seconds=backward,
            send_seconds=sends,
        )

    def block_seconds(self, prices: Prices, stages: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return [microbatches, blocks] forward and backward seconds, and [microbatches] seconds of a message."""
        assert prices.encoder_seconds is not None and prices.language_seconds is not None, (
            "an encoder is no wave's here"
        )
        assert prices.rank_tokens is not None
        head = self.head_share * prices.language_seconds
        again = self.mean_recompute_seconds * prices.rank_tokens
        # Evenly spread part; encoder, head and recomputation are assigned to single blocks below.
        even = np.maximum(prices.seconds - prices.encoder_seconds - head - again, 0.0) / self.virtual_stages
        blocks = np.repeat(even[:, None], stages * self.virtual_stages, axis=1)
        # Times `stages`: the profile's seconds are a mean over devices, but one device does all of this.
        blocks[:, 0] += stages * prices.encoder_seconds
        blocks[:, -1] += stages * head
        sends = self.send_seconds + self.send_seconds_per_token * prices.rank_tokens
        backward = (1.0 - self.forward_share) * blocks
        if self.recompute_seconds_per_token:
            backward += np.outer(prices.rank_tokens, self.recompute_seconds_per_token)
        return self.forward_share * blocks, backward, sends
