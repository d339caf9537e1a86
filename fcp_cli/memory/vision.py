"""Kept and working bytes of a vision encoder per visual token."""

from __future__ import annotations

from fcp_cli.memory.precision import Precision
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe


def patch_bytes(vision: VisionSpec, precision: Precision) -> int:
    """Return the bytes per patch that autograd keeps for one block of a vision encoder.

    Two layer norms keep their inputs, outputs and two statistics. Attention keeps queries, keys, values, its output and
    the log-sum-exp. The MLP keeps two tensors of its width. Qwen3-VL's fp32 rotation keeps nothing more, and InternViT
    scales both residual branches. Qwen2.5-VL has the norms and gated MLP of a language model, but a residual stream in
    the type of the activations; its windows keep as much as full attention.
    """
    t, r = precision.activation, precision.residual
    if vision.kind == "qwen2_5_vl":
        of_width = (11 if t == r else 12) * t + 8
        return of_width * vision.hidden_size + 4 * t * vision.ffn_size + 4 * vision.num_heads + 8
    if vision.kind == "gemma4":
        # Four norms and the query and key norms keep two fp32 tensors each, the value norm one; plus the inputs of
        # matrices, which autocast casts once per matrix.
        of_width = 52 + (6 if t == r else 9) * t
        return of_width * vision.hidden_size + 4 * t * vision.ffn_size + 28 * vision.num_heads + 32
    widths, extra = (11, 0) if vision.kind == "qwen3_vl" else (10 if vision.kind == "internvit" else 8, 4 * (r - t))
    return (widths * t + extra) * vision.hidden_size + 2 * t * vision.ffn_size + 4 * vision.num_heads + 4 * r


def vision_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the bytes that the encoder keeps per visual token (merge_size^2 patches); 0 if it is frozen.

    The runtime distributes a group's patches evenly, so a rank encodes about as many as its visual tokens have.
    """
    vision = spec.vision
    if vision is None or not backward_of(spec, recipe).vision.inputs:
        return 0.0
    each = precision.residual * vision.hidden_size if recipe.recomputes_layers else patch_bytes(vision, precision)
    return float(vision.merge_size**2 * vision.depth * each)


def vision_block_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the working bytes per visual token of an encoder block, on top of its kept activations."""
    vision = spec.vision
    if vision is None:
        return 0.0
    keeps_nothing = recipe.recomputes_layers or not backward_of(spec, recipe).vision.inputs
    again = patch_bytes(vision, precision) if keeps_nothing else 0
    factors = 2 if vision.has_gated_mlp else 1  # a gated product has the gradients of two factors
    gradients = precision.residual * vision.hidden_size + factors * precision.activation * vision.ffn_size
    return float(vision.merge_size**2 * (again + gradients))
