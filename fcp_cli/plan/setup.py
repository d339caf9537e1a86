"""Settings shared by plans, planning problems and the pricing of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fcp_cli.cost.recipe import Recipe, SplitAttention
from fcp_cli.plan.simulation.pipeline import Pipelines, Run, run
from fcp_cli.plan.step import StepPlan, offsets_of
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.util.validation import Count, NonNegative, RankCount, Share, StageCount

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


# Padding of a sequence to equal ring chunks, as in Transformer Engine and MindSpeed.
#
# This is the reference; the planner's kernels reimplement it, and a test holds the two bitwise equal.
#
# On d ranks a sequence is cut into 2 d chunks, which are equal only if its length is a multiple of 2 d. Under
# sequence parallelism each rank's share must also be divisible by the tensor-parallel size. Both follow from one
# number of the plan, the padding multiple: on d ranks a sequence is padded to a multiple of d times it.
#
# A rank's share of a sequence is thus a multiple of the padding multiple and never grows with the degree. Hence a
# pack that fits d ranks also fits more, and the token budget may be rounded down to the padding multiple without
# loss.

_CHUNKS_PER_RANK = 2  # one from the front of the sequence and one from its back


def padding_multiple(tensor_parallel: int = 1) -> int:
    """Return the padding multiple of a rank's share of a sequence, in tokens.

    Args:
        tensor_parallel: tensor-parallel size under sequence parallelism; 1 without it.
    """
    return _CHUNKS_PER_RANK * tensor_parallel


def padded_tokens(length_tokens: npt.ArrayLike, degree: npt.ArrayLike, multiple: int | None) -> IntArray:
    """Return padded lengths in tokens; the arguments broadcast.

    Args:
        length_tokens: lengths of the sequences.
        degree: degree of each sequence's group.
        multiple: padding multiple, or None for no padding.
    """
    lengths = np.asarray(length_tokens, dtype=np.int64)
    if multiple is None:
        return lengths
    unit = multiple * np.asarray(degree, dtype=np.int64)
    return np.asarray(-(-lengths // unit) * unit, dtype=np.int64)


def padded_lengths(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [sequences] the padded lengths of a step, in step order."""
    return padded_tokens(step.lengths, np.repeat(step.degrees, np.diff(step.sequence_offsets)), multiple)


def held_tokens(step: StepPlan, multiple: int | None) -> IntArray:
    """Return [microbatches] the padded tokens of each micro-batch, over all its ranks."""
    if multiple is None:
        return step.tokens
    return np.diff(offsets_of(padded_lengths(step, multiple))[step.sequence_offsets])


# Rank speeds relative to the cost profile: a rank of speed 0.7 takes 1 / 0.7 of its seconds.

SLOWEST: Final = 0.01
QUICKEST: Final = 100.0
Speed = Annotated[float, Meta(ge=SLOWEST, le=QUICKEST, description=f"a number from {SLOWEST:g} to {QUICKEST:g}")]
Speeds: TypeAlias = tuple[float, ...]  # [ranks]


def named_speeds(speeds: Speeds | None) -> Mapping[str, float] | None:
    """Return the speeds other than 1 by rank number, in the form of a plan's metadata, or None if all are 1."""
    return {str(rank): speed for rank, speed in enumerate(speeds or ()) if speed != 1.0} or None


def speeds_of(named: Mapping[str, float] | None, num_ranks: int) -> Speeds | None:
    """Return [ranks] the speeds encoded by `named_speeds`, or None if all are 1; raise ValueError for unknown ranks."""
    if not named:
        return None
    speeds = [1.0] * num_ranks
    for rank, speed in named.items():
        if not (rank.isdecimal() and int(rank) < num_ranks):
            raise ValueError(f"{rank!r} is no rank of {num_ranks}")
        speeds[int(rank)] = speed
    return tuple(speeds)


def slowest_speeds(speeds: Speeds, rank_offsets: IntArray, ranks: Int32Array) -> FloatArray:
    """Return [groups] the speed of the slowest rank, which the others wait for in every ring hop."""
    return np.asarray(np.minimum.reduceat(np.array(speeds)[ranks], rank_offsets[:-1]))


def speeds_text(named: Mapping[str, float]) -> str:
    """Return a short description of rank speeds."""
    by_speed: dict[float, list[str]] = {}
    for rank, speed in named.items():
        by_speed.setdefault(speed, []).append(rank)
    shown = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks[:_SHOWN])}"
        f"{f' and {len(ranks) - _SHOWN} more' if len(ranks) > _SHOWN else ''} at {speed:g}"
        for speed, ranks in sorted(by_speed.items())
    ]
    return "; ".join(shown[:_SHOWN]) + ("; ..." if len(shown) > _SHOWN else "")


_SHOWN: Final = 4


# Predicted seconds of micro-batches; separate from the cost model, so that training does not import that.


class Prices(NamedTuple):
    """Predicted costs of micro-batches.

    Attributes:
        seconds: [microbatches] total seconds; 0 for an empty pack.
        encoder_seconds: [microbatches] part of the vision encoder; None if all ranks of a wave share it.
        language_seconds: [microbatches] part of the language model's matrices; None as above.
        rank_tokens: [microbatches] tokens of each rank of the group; None as above.
    """

    seconds: FloatArray
    encoder_seconds: FloatArray | None = None
    language_seconds: FloatArray | None = None
    rank_tokens: FloatArray | None = None

    def take(self, rows: IntArray) -> Prices:
        """Return the prices of the micro-batches `rows`, in that order."""
        return Prices(*(None if values is None else values[rows] for values in self))  # type: ignore[arg-type]

    def spread(self, working: npt.NDArray[np.bool_]) -> Prices:
        """Scatter the prices to the set entries of `working`, in order; all other entries are 0."""

        def spread(values: FloatArray) -> FloatArray:
            found = np.zeros(len(working))
            found[working] = values
            return found

        return Prices(*(None if values is None else spread(values) for values in self))  # type: ignore[arg-type]

    def at_speeds(self, speeds: Speeds | None, rank_offsets: IntArray, ranks: Int32Array) -> Prices:
        """Return the prices scaled to rank speeds; the slowest rank determines the time of a micro-batch."""
        if speeds is None:
            return self
        slowest = slowest_speeds(speeds, rank_offsets, ranks)
        encoder, language = self.encoder_seconds, self.language_seconds
        return self._replace(
            seconds=self.seconds / slowest,
            encoder_seconds=None if encoder is None else encoder / slowest,
            language_seconds=None if language is None else language / slowest,
        )


# Pipeline settings of a plan that the cost profile lacks, and block times for the timeline.
#
# A profile's seconds of a micro-batch are the mean over a replica's devices. Blocks of layers take equally long,
# except that the last also runs the loss head and the first the vision encoder, which the mean spreads over all of
# them.


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
