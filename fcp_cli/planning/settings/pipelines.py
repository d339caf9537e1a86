"""Figures of the pipelines' timeline that a cost profile lacks, from model and cluster if known.

Forward and backward share a block's seconds as its matrices do; the loss head has their share of the model's matrices
(22 % of Qwen3-1.7B's, 8 % of Qwen3-8B's). A stage hands on a token's hidden state, which tensor parallelism shares out,
over the slower of the cluster's links, since Megatron lays stages as far apart as it can.
"""

from __future__ import annotations

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import known_model
from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.recipe import Recipe


def pipeline_of(profile: CostProfile, ranks: JobRanks, recipe: Recipe | None) -> Pipeline | None:
    """Return the pipeline of each rank; None if a rank has no stages.

    Args:
        profile: gives model, cluster and bandwidths, and the recipe if none is given.
        ranks: gives stages and virtual stages.
        recipe: the recipe that is planned for.
    """
    if ranks.pipeline_parallel == 1:
        return None
    recipe = recipe or profile.recipe or Recipe()
    recomputes = recipe.recomputes_matrices
    spec = known_model(profile.model)
    if spec is None:
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
    return Pipeline(
        virtual_stages=ranks.virtual_stages,
        forward_share=1 / passes,
        head_share=spec.embedding_parameters / spec.matrix_parameters,
        send_seconds=_message_seconds(profile.cluster),
        send_seconds_per_token=sent_bytes / min(profile.bandwidth.intra_node, profile.bandwidth.inter_node),
    )


def _message_seconds(cluster: str) -> float:
    try:
        return load_cluster(cluster).message_seconds
    except ProfileError:
        return 0.0
