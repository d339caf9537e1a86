"""A step of pipelines as rectangles: every forward and backward of every stage, a rank's stages below each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.pipeline import Pipeline
from fcp_cli.plan.pricing import Prices, step_prices
from fcp_cli.plan.refits import refitted
from fcp_cli.plan.step import StepPlan
from fcp_cli.report.ranks_shown import RanksShown


def stage_bars(
    step: StepPlan, shown: RanksShown, metadata: PlanMetadata, pipeline: Pipeline
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the columns of `page_data.bars_of` for pipelines: a rank's row is cut in P, one part for each stage.

    What lengths do not explain of a micro-batch's seconds counts as the encoder's, on the first stage.
    """
    stages, prices = metadata.pipeline_parallel, _prices(step, metadata)
    run = pipeline.run(step.rank_offsets, step.ranks, prices, stages=stages, num_ranks=metadata.num_ranks)
    seconds = pipeline.block_seconds(prices, stages)
    rows = np.repeat(np.arange(len(step)), step.degrees)
    wanted = shown.are_shown(step.ranks.astype(np.int64)) & (step.tokens[rows] > 0)
    rows, ranks = rows[wanted], shown.rows(step.ranks.astype(np.int64)[wanted])
    blocks = run.forward_start.shape[1]
    row, block = np.repeat(rows, blocks), np.tile(np.arange(blocks), len(rows))
    top = np.repeat(ranks, blocks) + (block % stages) / stages
    starts = (run.forward_start[row, block], run.backward_start[row, block])
    both = [np.concatenate(pair) for pair in ((row, row), (top, top), starts)]
    lasts = np.concatenate((seconds[0][row, block], seconds[1][row, block]))
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
        profile=refitted(profile, metadata.refit_at(step.step)),
        ranks_per_node=metadata.ranks_per_node,
        padding_multiple=metadata.padding_multiple,
        rank_speeds=metadata.speeds_at(step.step),
    )
    encoder = np.maximum(step.seconds - found.seconds, 0.0)
    return found._replace(seconds=step.seconds, encoder_seconds=encoder)
