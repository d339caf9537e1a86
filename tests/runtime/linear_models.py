"""Tiny unmodified decoders with linear attention, and their fp32 parts in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.verification.emulation import Replayed, gradients_alone
from tests.runtime.models import SMALL_DECODER, Recomputation
from tests.runtime.models import recompute as switch_on

LINEAR: Mapping[str, Any] = {
    "vocab_size": 61,
    **SMALL_DECODER,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


_SCANS: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6}
MAMBA: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_SCANS, "attn_layer_indices": [1], "mamba_chunk_size": 8},
    "granitemoehybrid": {**_SCANS, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 16, "mamba_chunk_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "n_routed_experts": 4,
    },
    "nemotron_h, experts": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {**_SCANS, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_headdim": 16, "n_mamba_heads": 4,
        "mamba_ngroups": 2, "mamba_d_state": 6, "chunk_size": 8,
    },
}  # fmt: skip
"""Tiny figures of families whose layers have state spaces, on top of `LINEAR`."""


def _figures(kind: str) -> Mapping[str, Any]:
    if kind not in MAMBA:
        return LINEAR
    return {**{name: value for name, value in LINEAR.items() if name != "layer_types"}, **MAMBA[kind]}


def linear_model(kind: str = "qwen3_next", **changed: Any) -> Any:
    """A decoder in fp64, of equal weights at every call, with a layer of linear and one of full attention."""
    import transformers

    config = transformers.AutoConfig.for_model(kind.partition(",")[0], **{**_figures(kind), **changed})
    torch.manual_seed(0)
    family: Any = transformers.AutoModelForCausalLM
    made = family.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name and "A_log" not in name:
                parameter.normal_(std=0.3)  # else it hardly writes a state
    return made.double()


class InDouble(TorchFunctionMode):
    """Computes in fp64 what a model asks for in fp32, so that what is left of differences is its order of sums."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **kwargs)

    def _backward(self, tensors: Any, grad_tensors: Any = None, **_: Any) -> None:
        """Run backward, with layers that it computes again, in this mode, too: a mode is off in what it looks at."""
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = tuple(torch.ones_like(root) for root in roots) if grad_tensors is None else tuple(grad_tensors)
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def model_under_a_plan(recompute: Recomputation = "off", kind: str = "qwen3_next", **changed: Any) -> Any:
    """The decoder of one rank."""
    from fcp_cli.integrations.transformers import prepare

    model = linear_model(kind, **changed)
    prepare(model)
    switch_on(model, recompute)
    return model


def loss_under_a_plan(model: nn.Module) -> Callable[[LocalMicroBatch], Tensor]:
    return lambda mb: mb.loss(model(input_ids=mb.input_ids, position_ids=mb.position_ids).logits)


def linear_alone(plan: Path, fetch: Fetch, kind: str = "qwen3_next", **changed: Any) -> Replayed:
    """What one process computes in fp64 with the unmodified decoder."""
    model = linear_model(kind, **changed)
    with InDouble():
        return gradients_alone(plan, fetch, model, lambda ids, _: model(input_ids=ids, use_cache=False).logits)
