"""Memory of a rank, from figures alone: model state under ZeRO, TP and PP, and activations per token.

Symbols: t = bytes of an activation, r = bytes on the residual stream, h = hidden size, q = heads x head_dim,
k = key/value heads x head_dim, f = MLP width.

The activations are those that autograd keeps for transformers' unfused layers with fused attention (RMS norms computed
in fp32, gated MLP); a test counts them on real layers and finds the same bytes. Fused layers keep less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fcp_cli.cost.profile import Memory
from fcp_cli.errors import UsageError
from fcp_cli.models.model import ModelSpec, VisionSpec

Recompute = Literal["none", "full"]

RESERVE_FRACTION = 0.08
"""The share of a device's memory that is left to allocator, back ends, and whatever no figure counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes per parameter of weights, gradients and optimizer state, and bytes of one activation.

    `residual_bytes` are those of the residual stream, which autocast leaves in the type of the weights.
    """

    name: str
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    residual_bytes: int


# bf16: bf16 weights, fp32 gradients, fp32 master weights and two fp32 Adam moments, as Megatron-LM trains.
# amp: fp32 weights under bf16 autocast, as the bundled trainer does on accelerators. fp32: as it does on a CPU.
PRECISIONS = {
    "bf16": Precision(
        name="bf16", weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, activation_bytes=2, residual_bytes=2
    ),
    "amp": Precision(
        name="amp", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, activation_bytes=2, residual_bytes=4
    ),
    "fp32": Precision(
        name="fp32", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, activation_bytes=4, residual_bytes=4
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The cut of a job: `ranks` replicas of tensor_parallel x pipeline_parallel devices.

    Attributes:
        zero_stage: 0 keeps everything on every rank; 1 shards the optimizer over the ranks, 2 also gradients, 3 also
            weights.
        recompute: `full` keeps only each layer's input and runs its forward again in the backward.
        freeze_vision: the vision encoder and what joins it to the language model are not trained.
    """

    ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    zero_stage: int = 1
    recompute: Recompute = "none"
    freeze_vision: bool = False


def choose_zero_stage(
    spec: ModelSpec,
    precision: Precision,
    *,
    ranks: int,
    device_bytes: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Return the least ZeRO stage from 1 on whose state leaves half of the device to activations; 3 if none does."""
    for stage in (1, 2):
        parallelism = Parallelism(
            ranks=ranks, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, zero_stage=stage
        )
        if model_state(spec, precision, parallelism).total_bytes <= device_bytes / 2:
            return stage
    return 3


def check_parallelism(spec: ModelSpec, parallelism: Parallelism) -> None:
    """Reject a cut that the model does not allow.

    Raises:
        UsageError: tensor parallelism that does not divide the heads, more pipeline stages than layers, a frozen vision
            encoder where there is none.
    """
    tensor, pipeline = parallelism.tensor_parallel, parallelism.pipeline_parallel
    for figure, value in (("num_heads", spec.num_heads), ("ffn_size", spec.ffn_size)):
        if value % tensor:
            raise UsageError(f"--tensor-parallel {tensor} does not divide {figure} {value} of {spec.name}")
    if parallelism.freeze_vision and spec.vision is None:
        raise UsageError(f"--freeze-vision: {spec.name} has no vision encoder")
    if pipeline > spec.num_layers:
        raise UsageError(f"--pipeline-parallel {pipeline} exceeds the {spec.num_layers} layers of {spec.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Bytes on the fullest device of a rank."""

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gathered_bytes: float  # ZeRO-3: weights and gradients of two layers while they run

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.gathered_bytes


def model_state(spec: ModelSpec, precision: Precision, parallelism: Parallelism) -> ModelState:
    """Return the bytes of the model state on the fullest device: the pipeline stage with an embedding table."""
    parameters = device_parameters(spec, parallelism)
    trained = parameters
    if parallelism.freeze_vision:
        trained = device_parameters(replace(spec, vision=None), parallelism)
    shards, stage = parallelism.ranks, parallelism.zero_stage
    gathered = 0.0
    if stage >= 3:
        # One layer is computed while the next one's weights arrive; gradients are reduced layer by layer.
        largest = max(spec.layer_parameters, spec.embedding_parameters) / parallelism.tensor_parallel
        gathered = 2 * largest * precision.weight_bytes + largest * precision.gradient_bytes
    return ModelState(
        weight_bytes=parameters * precision.weight_bytes / (shards if stage >= 3 else 1),
        gradient_bytes=trained * precision.gradient_bytes / (shards if stage >= 2 else 1),
        optimizer_bytes=trained * precision.optimizer_bytes / (shards if stage >= 1 else 1),
        gathered_bytes=gathered,
    )


def device_parameters(spec: ModelSpec, parallelism: Parallelism) -> float:
    """Count the parameters on the fullest device of a rank; the vision tower is on the first pipeline stage."""
    stages = parallelism.pipeline_parallel
    tables = 1 if spec.tied_embeddings or stages > 1 else 2
    vision = spec.vision.parameters if spec.vision else 0
    layers = math.ceil(spec.num_layers / stages) * spec.layer_parameters
    return (layers + tables * spec.embedding_parameters + spec.hidden_size + vision) / parallelism.tensor_parallel


def layer_activation_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for one layer.

    A norm keeps its input in fp32, the normalised value, the scale and its output; attention keeps rotated queries and
    keys, values, its output and the logarithm of the softmax sum; the MLP keeps four tensors of its width.
    """
    t, r = precision.activation_bytes, precision.residual_bytes
    h, q, k = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inputs = 2 if t == r else 5  # autocast casts a norm's output for each of the matrices that read it
    norms = 2 * ((4 + r) * h + 4) + inputs * t * h
    head_norms = (4 + t) * (q + k) + 4 * (spec.num_heads + spec.num_kv_heads) if spec.qk_norm else 0
    attention = t * (q + 2 * k) + t * q + 4 * spec.num_heads
    return norms + head_norms + attention + 4 * t * spec.ffn_size


def head_activation_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token at the top: final norm, logits, their fp32 log-softmax and the two gradients of it."""
    t, r = precision.activation_bytes, precision.residual_bytes
    return (4 + r + t) * spec.hidden_size + 4 + (t + 12) * spec.vocab_size


def patch_activation_bytes(vision: VisionSpec, precision: Precision) -> int:
    """Count the bytes per patch that autograd keeps for one block of a vision encoder.

    Two layer norms keep their inputs, outputs and two statistics; attention keeps queries, keys, values, its output and
    the logarithm of the softmax sum; the MLP keeps two tensors of its width. Qwen3-VL rotates queries and keys in fp32
    and keeps no more for it; InternViT scales both residual branches.
    """
    t, r = precision.activation_bytes, precision.residual_bytes
    widths, extra = (11, 0) if vision.kind == "qwen3_vl" else (10, 4 * (r - t))
    return (widths * t + extra) * vision.hidden_size + 2 * t * vision.ffn_size + 4 * vision.num_heads + 4 * r


def vision_bytes_per_token(spec: ModelSpec, precision: Precision, parallelism: Parallelism) -> float:
    """Return the bytes that the encoder keeps for a visual token, made of merge_size^2 patches; 0 where it is frozen.

    The runtime shares a group's patches out evenly, so a rank encodes about as many as its share of visual tokens has.
    """
    vision = spec.vision
    if vision is None or parallelism.freeze_vision:
        return 0.0
    block = patch_activation_bytes(vision, precision)
    kept = vision.depth * block
    if parallelism.recompute == "full":
        kept = vision.depth * precision.residual_bytes * vision.hidden_size + block
    return float(vision.merge_size**2 * kept)


def token_bytes(spec: ModelSpec, precision: Precision, parallelism: Parallelism) -> float:
    """Return the activation bytes per token on a rank's fullest device; in a vision model those of a visual token.

    Pipeline parallelism does not lower it: the first stage has a share 1/P of the layers and P micro-batches in flight.
    """
    layer = layer_activation_bytes(spec, precision)
    kept = spec.num_layers * layer
    if parallelism.recompute == "full":
        kept = spec.num_layers * precision.residual_bytes * spec.hidden_size + layer
    head = head_activation_bytes(spec, precision) if parallelism.pipeline_parallel == 1 else 0
    vision = vision_bytes_per_token(spec, precision, parallelism)
    return (kept + head + vision + ring_buffer_bytes(spec, precision)) / parallelism.tensor_parallel


def ring_buffer_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of the ring's buffers: two for keys and values, two for their fp32 gradients."""
    return 2 * 2 * spec.num_kv_heads * spec.head_dim * (precision.activation_bytes + 4)


def precision_name(dtype: str) -> str:
    """Return the precision that the bundled trainer and the profiler run for a type: autocast for bfloat16."""
    return "fp32" if dtype == "float32" else "amp"


def estimate_memory(
    spec: ModelSpec,
    precision: Precision,
    parallelism: Parallelism,
    *,
    device_bytes: float,
    reserve_fraction: float = RESERVE_FRACTION,
) -> Memory:
    """Estimate the memory block of a cost profile; allocator and back ends get `reserve_fraction` of the device."""
    return Memory(
        bytes_per_token=token_bytes(spec, precision, parallelism),
        model_state_bytes=model_state(spec, precision, parallelism).total_bytes,
        capacity_bytes=device_bytes * (1 - reserve_fraction),
    )
