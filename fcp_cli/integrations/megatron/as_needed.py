"""As-needed recomputation for a GPTModel: each micro-batch recomputes as few layers as its tokens per rank allow.

Megatron's own `recompute_num_layers` recomputes whole layers including their rings, so all ranks of a ring would have
to recompute the same layers. Here, fcp's checkpoint wraps each layer and saves the output of attention, so nothing is
communicated again, and every rank chooses by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from fcp_cli.cost.recompute_levels import RecomputeLevel
from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.checks import balances_experts, is_sharded, predicts_several
from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.runtime.recomputation.as_needed import LayerLevels


def recompute_as_needed(
    chunk: Any, model: Any, levels: Sequence[RecomputeLevel], pipeline: Pipeline | None, stage: int
) -> None:
    """Hook each layer of a model to choose its recomputation level per call.

    Args:
        chunk: model in Megatron's wrappers.
        model: model inside the wrappers, already hooked.
        levels, pipeline: recomputation levels and pipeline of the plan.
        stage: pipeline stage of this process.

    Raises:
        RunError: a setting of the job prevents recomputing single layers.
    """
    reason = next((reason for is_refused, reason in _refusals(chunk, model) if is_refused), None)
    if reason is not None:
        raise RunError(f"the plan recomputes layers as needed, but {reason}, or plan with --recompute selective")
    config, layers = model.config, model.decoder.layers
    # Levels count all tokens of a rank, of which a process holds a fraction under sequence parallelism.
    rows = config.tensor_model_parallel_size if config.sequence_parallel else 1
    share = None
    if pipeline is not None:
        again = pipeline.recompute_seconds_per_token
        share = again[stage] / levels[-1].seconds_per_token if again else 1.0
    chosen = LayerLevels(levels, layers=len(layers), tokens_per_row=rows, share=share)
    for index, layer in enumerate(layers):
        layer.forward = partial(_forward, chosen, index, layer.forward)
        chosen.recompute_activation(layer.mlp)


def _forward(
    chosen: LayerLevels, index: int, layer: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer; Megatron passes hidden_states by name, `LayerLevels.run` takes it by position."""
    return chosen.run(index, layer, hidden_states, *args, **kwargs)


def _refusals(chunk: Any, model: Any) -> Iterable[tuple[bool, str]]:
    """Yield (is refused, message) for each setting that contradicts the plan."""
    config = model.config
    granularity = config.recompute_granularity
    yield granularity is not None, f"the job recomputes them by itself; drop --recompute-granularity {granularity}"
    yield not isinstance(model, GPTModel), f"a {type(model).__name__} has other layers; train a GPTModel"
    yield predicts_several(config), "the model has layers of multi-token prediction, too; drop --mtp-num-layers"
    yield is_sharded(chunk), "Megatron-FSDP gathers weights layer by layer; drop --use-megatron-fsdp"
    yield bool(config.hidden_dropout), f"hidden dropout is {config.hidden_dropout}; add --hidden-dropout 0"
    # These communicate within the layer, so their ranks would have to recompute the same layers.
    yield config.expert_model_parallel_size > 1, "ranks share experts; drop --expert-model-parallel-size"
    yield balances_experts(config), "the router has a loss; drop --moe-aux-loss-coeff and --moe-z-loss-coeff"
    yield (
        config.cpu_offloading or bool(getattr(config, "fine_grained_activation_offloading", False)),
        "the job offloads activations; drop --cpu-offloading-num-layers and --fine-grained-activation-offloading",
    )
