"""Computes coefficients from the figures of a model and a cluster, where nothing can be measured (`--analytic`).

Operations of a forward pass: 2 per matrix entry and token; causal attention 2 H D per layer and pair of tokens (half of
the 4 H D of a full mask). A backward pass costs twice the matrices and, since it computes the scores again, 2.5 times
the attention. Recomputing activations adds one more forward.
A vision encoder attends without a mask, 4 h per block and pair of patches; frozen, it runs its forward alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile
from fcp_cli.models.cluster import ClusterSpec
from fcp_cli.models.memory import (
    RESERVE_FRACTION,
    Parallelism,
    Precision,
    check_parallelism,
    estimate_memory,
    vision_bytes_per_token,
)
from fcp_cli.models.model import ModelSpec

MATRIX_PASSES = 3.0  # forward 1, backward 2
ATTENTION_PASSES = 3.5  # forward 1, backward 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operations of one forward pass of the whole model on one device."""

    linear_per_token: float  # matrices of the layers and the output layer
    attention_per_token2: float  # causal
    vision_per_patch: float = 0.0
    vision_per_patch2: float = 0.0  # full mask within one image or frame

    @property
    def break_even_tokens(self) -> float:
        """Length at which attention has as many operations as the matrices."""
        return self.linear_per_token / self.attention_per_token2


def forward_operations(spec: ModelSpec) -> Operations:
    """Count the operations of one forward pass, with the output layer: it is 22 % of the matrices of Qwen3-1.7B."""
    vision = spec.vision
    return Operations(
        linear_per_token=2.0 * (spec.num_layers * spec.layer_matrix_parameters + spec.embedding_parameters),
        attention_per_token2=2.0 * spec.num_layers * spec.num_heads * spec.head_dim,
        vision_per_patch=2.0 * (vision.block_parameters + vision.projector_parameters / vision.merge_size**2)
        if vision
        else 0.0,
        vision_per_patch2=4.0 * vision.depth * vision.hidden_size if vision else 0.0,
    )


def ring_bytes_per_token(spec: ModelSpec, *, kv_bytes: int, gradient_bytes: int, recompute: bool = False) -> float:
    """Return the bytes that a token sends around a ring: K/V forward, K/V and dK/dV backward, all layers.

    Args:
        kv_bytes: of one element of K or V on the wire.
        gradient_bytes: of one element of dK or dV on the wire.
        recompute: the forward ring runs once more in the backward.
    """
    elements = 2.0 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return elements * ((3 if recompute else 2) * kv_bytes + gradient_bytes)


def messages_per_hop(spec: ModelSpec, *, recompute: bool = False) -> int:
    """Return how many messages one micro-batch sends over one hop of its ring, all layers.

    K/V travel forward and backward, dK/dV backward; recomputing runs the forward's ring once more.
    """
    return spec.num_layers * (4 if recompute else 3)


def analytic_profile(
    spec: ModelSpec,
    cluster: ClusterSpec,
    *,
    precision: Precision,
    parallelism: Parallelism,
    reserve_fraction: float = RESERVE_FRACTION,
) -> CostProfile:
    """Compute a cost profile of origin `analytic`; its measurement block holds every assumption.

    Raises:
        UsageError: the model cannot be cut as `parallelism` asks.
    """
    check_parallelism(spec, parallelism)
    recompute = parallelism.recompute == "full"
    operations = forward_operations(spec)
    devices = parallelism.tensor_parallel * parallelism.pipeline_parallel
    matrix_rate = cluster.peak_flops * cluster.linear_efficiency * devices
    attention_rate = cluster.peak_flops * cluster.attention_efficiency * devices
    matrix_passes, attention_passes = MATRIX_PASSES + recompute, ATTENTION_PASSES + recompute
    vision_passes = (1.0, 1.0) if parallelism.freeze_vision else (matrix_passes, attention_passes)
    ring_bytes = ring_bytes_per_token(
        spec,
        kv_bytes=precision.activation_bytes,
        gradient_bytes=4,  # the runtime's rings sum dK and dV in fp32
        recompute=recompute,
    )
    return CostProfile(
        model=spec.name,
        cluster=cluster.name,
        origin="analytic",
        coefficients=Coefficients(
            attention_seconds_per_token2=attention_passes * operations.attention_per_token2 / attention_rate,
            linear_seconds_per_token=matrix_passes * operations.linear_per_token / matrix_rate,
            ring_bytes_per_token=ring_bytes / devices,
            microbatch_seconds=cluster.microbatch_seconds,
            ring_hop_seconds=messages_per_hop(spec, recompute=recompute)
            * cluster.message_seconds
            / parallelism.pipeline_parallel,
            vision_seconds_per_patch=vision_passes[0] * operations.vision_per_patch / matrix_rate,
            vision_seconds_per_patch2=vision_passes[1] * operations.vision_per_patch2 / attention_rate,
        ),
        bandwidth=Bandwidth(
            intra_node=cluster.intra_node_bytes_per_second,
            inter_node=cluster.inter_node_bytes_per_second,
        ),
        memory=estimate_memory(
            spec,
            precision,
            parallelism,
            device_bytes=cluster.memory_bytes,
            reserve_fraction=reserve_fraction,
        ),
        measurement=_assumptions(spec, cluster, operations, precision, parallelism, reserve_fraction),
    )


def _assumptions(
    spec: ModelSpec,
    cluster: ClusterSpec,
    operations: Operations,
    precision: Precision,
    parallelism: Parallelism,
    reserve_fraction: float,
) -> dict[str, Any]:
    vision = {}
    if spec.vision is not None:
        vision = {
            "forward_operations_per_patch": operations.vision_per_patch,
            "forward_operations_per_patch2": operations.vision_per_patch2,
            "freeze_vision": parallelism.freeze_vision,
            "vision_bytes_per_token": vision_bytes_per_token(spec, precision, parallelism),
        }
    return {
        "method": "analytic: nothing was measured",
        "device": cluster.device,
        "peak_flops": cluster.peak_flops,
        "linear_efficiency": cluster.linear_efficiency,
        "attention_efficiency": cluster.attention_efficiency,
        "forward_operations_per_token": operations.linear_per_token,
        "forward_attention_operations_per_token2": operations.attention_per_token2,
        **vision,
        "parameters": spec.parameters,
        "precision": precision.name,
        "ranks": parallelism.ranks,
        "tensor_parallel": parallelism.tensor_parallel,
        "pipeline_parallel": parallelism.pipeline_parallel,
        "zero_stage": parallelism.zero_stage,
        "recompute": parallelism.recompute,
        "memory_reserve_fraction": reserve_fraction,
        "cluster_sources": dict(cluster.sources),
    }
