"""Pipeline settings that a cost profile lacks, derived from model and cluster if known.

Forward and backward split a block's seconds by their matrix products. The loss head gets its share of the model's
matrix parameters (22 % of Qwen3-1.7B's, 8 % of Qwen3-8B's). A stage sends hidden states, sharded by tensor parallelism,
over the slower of the profile's links, since Megatron places stages as far apart as it can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recompute_levels import RecomputeLevel, seconds_by_stage
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.activations import kept_bytes, plain_loss_bytes
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec, known_model
from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.recipe import Recipe


def pipeline_of(profile: CostProfile, ranks: JobRanks, recipe: Recipe | None, *, tokens: int = 0) -> Pipeline | None:
    """Return the pipeline of a rank, or None without pipeline parallelism.

    Args:
        profile: source of model, cluster and bandwidths, and of the recipe if `recipe` is None.
        ranks: source of stages and virtual stages.
        recipe: recipe of the plan.
        tokens: token budget, for as-needed recomputation by stage.

    Raises:
        UsageError: there are more blocks than layers.
    """
    if ranks.pipeline_parallel == 1:
        return None
    recipe = recipe or profile.recipe or Recipe()
    recomputes = recipe.recomputes_matrices
    spec = known_model(profile.model)
    if spec is None:
        # A backward has twice the matrix products of a forward, plus a forward if layers recompute.
        unknown = 1 / 4 if recomputes else 1 / 3
        return Pipeline(
            virtual_stages=ranks.virtual_stages, forward_share=1.0 if profile.phase == "forward" else unknown
        )
    blocks = ranks.pipeline_parallel * ranks.virtual_stages
    if blocks > spec.num_layers:
        raise UsageError(
            f"{ranks.pipeline_parallel} stages of {ranks.virtual_stages} blocks of layers each exceed the "
            f"{spec.num_layers} layers of {spec.name}; give fewer --virtual-stages"
        )
    sent_bytes = precision_of(recipe).activation * spec.hidden_size / ranks.tensor_parallel
    passes = 1.0 if profile.phase == "forward" else backward_of(spec, recipe).language.total(recomputes=recomputes)
    levels = profile.recompute_levels if profile.phase is None else ()
    held = _tokens_in_flight(spec, recipe, ranks, tokens, levels) if levels else []
    return Pipeline(
        virtual_stages=ranks.virtual_stages,
        recompute_seconds_per_token=seconds_by_stage(levels, held),
        forward_share=1 / passes,
        head_share=spec.embedding_parameters / spec.matrix_parameters,
        send_seconds=_message_seconds(profile.cluster),
        send_seconds_per_token=sent_bytes / min(profile.bandwidth.intra_node, profile.bandwidth.inter_node),
    )


def _tokens_in_flight(
    spec: ModelSpec, recipe: Recipe, ranks: JobRanks, tokens: int, levels: Sequence[RecomputeLevel]
) -> list[float]:
    """Return [stages] the tokens in flight with full micro-batches, times the stage's share of the layers.

    Stage s of P has 1 / P of the layers and at most P - s micro-batches in flight. The last stage also holds all
    logits, which Megatron's loss materializes.
    """
    stages, precision = ranks.pipeline_parallel, precision_of(recipe)
    held = [tokens * (stages - stage) / stages for stage in range(stages)]
    last = replace(recipe, recompute=levels[-1].recompute)
    kept = sum(count * kept_bytes(spec, kind, last, precision) for kind, count in spec.kinds.items())
    left = 1.0 - plain_loss_bytes(spec, precision) * tokens / (kept * levels[-1].tokens)
    # If the logits fill the memory, all layers recompute.
    held[-1] = held[-1] / left if left > 0 else math.inf
    return held


def with_recomputation(profile: CostProfile, pipeline: Pipeline | None) -> CostProfile:
    """Return the profile with the stages' mean recomputation added to the linear seconds."""
    if pipeline is None or not pipeline.recompute_seconds_per_token:
        return profile
    coefficients = profile.coefficients
    # `Pipeline.block_seconds` replaces the mean by each stage's own seconds.
    linear = coefficients.linear_seconds_per_token + pipeline.mean_recompute_seconds
    found = replace(profile, coefficients=replace(coefficients, linear_seconds_per_token=linear))
    return replace(found, text=dump_cost_profile(found))


def say_what_stages_recompute(profile: CostProfile, pipeline: Pipeline, assumptions: Assumptions) -> None:
    """Record the share of layers that each stage recomputes as an assumption."""
    again = pipeline.recompute_seconds_per_token
    if again:
        shares = [one / profile.recompute_levels[-1].seconds_per_token for one in again]
        assumptions.assume(
            "recomputation",
            f"{', '.join(f'{share:.0%}' for share in shares)} of the layers of each stage",
            "later stages have fewer micro-batches in flight",
        )


def _message_seconds(cluster: str) -> float:
    try:
        return load_cluster(cluster).message_seconds
    except ProfileError:
        return 0.0
