"""Draws a pipelined step: a rectangle per forward and backward pass of each stage; a rank's row is split by stage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import refitted
from fcp_cli.plan.pricing.packs import step_prices
from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.plan.step import StepPlan
from fcp_cli.report.ranks_shown import RanksShown


class StageTimes(NamedTuple):
    """Start and duration of each micro-batch in each block of layers, in seconds: [micro-batches, blocks].

    With P stages, block b is on stage b % P.
    """

    forward_start: FloatArray
    backward_start: FloatArray
    forward_seconds: FloatArray
    backward_seconds: FloatArray


def stage_times(step: StepPlan, metadata: PlanMetadata, pipeline: Pipeline) -> StageTimes:
    """Simulate a pipelined step as planned; seconds not explained by lengths count as encoder time."""
    stages, prices = metadata.pipeline_parallel, _prices(step, metadata)
    run = pipeline.run(step.rank_offsets, step.ranks, prices, stages=stages, num_ranks=metadata.num_ranks)
    forward, backward, _sends = pipeline.block_seconds(prices, stages)
    return StageTimes(run.forward_start, run.backward_start, forward, backward)


def step_seconds_with(step: StepPlan, order: int, seconds: float, metadata: PlanMetadata, pipeline: Pipeline) -> float:
    """Return the duration of a pipelined step if one micro-batch took `seconds`."""
    prices = _prices(step, metadata)
    ends = []
    for factor in (1.0, seconds / float(step.seconds[order])):
        scale = np.ones(len(step))
        scale[order] = factor
        changed = Prices(prices.seconds * scale, *(None if part is None else part * scale for part in prices[1:3]))
        changed = changed._replace(rank_tokens=prices.rank_tokens)
        run = pipeline.run(
            step.rank_offsets, step.ranks, changed, stages=metadata.pipeline_parallel, num_ranks=metadata.num_ranks
        )
        ends.append(run.makespan_seconds)
    return step.makespan_seconds + ends[1] - ends[0]


def stage_bars(
    step: StepPlan, shown: RanksShown, metadata: PlanMetadata, pipeline: Pipeline
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the columns of `page_data.bars_of` with pipeline stages: each rank's row is split into P parts."""
    stages = metadata.pipeline_parallel
    times = stage_times(step, metadata, pipeline)
    rows = np.repeat(np.arange(len(step)), step.degrees)
    wanted = shown.are_shown(step.ranks.astype(np.int64)) & (step.tokens[rows] > 0)
    rows, ranks = rows[wanted], shown.rows(step.ranks.astype(np.int64)[wanted])
    blocks = times.forward_start.shape[1]
    row, block = np.repeat(rows, blocks), np.tile(np.arange(blocks), len(rows))
    top = np.repeat(ranks, blocks) + (block % stages) / stages
    starts = (times.forward_start[row, block], times.backward_start[row, block])
    both = [np.concatenate(pair) for pair in ((row, row), (top, top), starts)]
    lasts = np.concatenate((times.forward_seconds[row, block], times.backward_seconds[row, block]))
    return {
        "step": np.full(len(both[0]), step.step),
        "order": both[0],
        "degree": step.degrees[both[0]],
        "tokens": step.tokens[both[0]],
        "rank": both[1],
        "top": both[1] + 1 / stages,
        "start": both[2],
        "end": both[2] + lasts,
    }


def _prices(step: StepPlan, metadata: PlanMetadata) -> Prices:
    profile = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
    found = step_prices(
        step,
        metadata,
        profile=refitted(profile, metadata.refit_at(step.step)),
        rank_speeds=metadata.speeds_at(step.step),
    )
    encoder = np.maximum(step.seconds - found.seconds, 0.0)
    return found._replace(seconds=step.seconds, encoder_seconds=encoder)
