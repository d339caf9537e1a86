"""Pipelines of a plan's replicas: figures of their timeline that the cost profile lacks.

A profile's seconds of a micro-batch are a replica's, all its devices sharing the work evenly: the mean of the seconds
that its devices compute. Blocks of layers are equally long; on the last of them comes the loss head, on the first a
vision encoder, which the profile's mean has spread over all.
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
        virtual_stages: blocks of layers on each device, whose schedule is then interleaved; 1 is plain 1F1B.
        forward_share: the forward share of the seconds of a block; the rest is its backward, with its recomputation.
        head_share: the share of the seconds of the language model's matrices, for the loss head alone.
        recompute_seconds_per_token: [stages] of the rank's tokens, for the layers that each stage recomputes, if they
            differ: the seconds of a micro-batch have their mean.
        send_seconds, send_seconds_per_token: the time of a message from one block to the next: for itself, and for
            each token of it that a rank holds.
    """

    virtual_stages: StageCount = 1
    forward_share: Share
    head_share: Share = 0.0
    send_seconds: NonNegative = 0.0
    send_seconds_per_token: NonNegative = 0.0
    recompute_seconds_per_token: tuple[NonNegative, ...] = ()

    @property
    def mean_recompute_seconds(self) -> float:
        """Seconds per token of a rank that a stage recomputes in the mean."""
        again = self.recompute_seconds_per_token
        return sum(again) / len(again) if again else 0.0

    def missing_waves(self, waves: int, stages: int) -> int:
        """Return how many idle waves must follow: Megatron interleaves whole rounds of P micro-batches alone."""
        return -waves % stages if self.virtual_stages > 1 else 0

    def run(self, rank_offsets: IntArray, ranks: Int32Array, prices: Prices, *, stages: int, num_ranks: int) -> Run:
        """Run a step of priced micro-batches on replicas of `stages` devices."""
        return run(self.laid_out(rank_offsets, ranks, prices, stages=stages, num_ranks=num_ranks))

    def laid_out(
        self, rank_offsets: IntArray, ranks: Int32Array, prices: Prices, *, stages: int, num_ranks: int
    ) -> Pipelines:
        """Return the step that `run` runs."""
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
        """Return forward and backward [microbatches, blocks] of each block, and [microbatches] of a message."""
        assert prices.encoder_seconds is not None and prices.language_seconds is not None, (
            "an encoder is no wave's here"
        )
        assert prices.rank_tokens is not None
        head = self.head_share * prices.language_seconds
        again = self.mean_recompute_seconds * prices.rank_tokens
        # What all blocks share: the encoder, the head and recomputation are given to single stages below.
        even = np.maximum(prices.seconds - prices.encoder_seconds - head - again, 0.0) / self.virtual_stages
        blocks = np.repeat(even[:, None], stages * self.virtual_stages, axis=1)
        # Times the stages: the profile's seconds are the mean over all devices, of which one does it all.
        blocks[:, 0] += stages * prices.encoder_seconds
        blocks[:, -1] += stages * head
        sends = self.send_seconds + self.send_seconds_per_token * prices.rank_tokens
        backward = (1.0 - self.forward_share) * blocks
        if self.recompute_seconds_per_token:
            backward += np.outer(prices.rank_tokens, self.recompute_seconds_per_token)
        return self.forward_share * blocks, backward, sends
