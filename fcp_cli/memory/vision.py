"""Bytes that a vision encoder keeps for a visual token, and works with on top of them."""

from __future__ import annotations

from fcp_cli.memory.precision import Precision
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe


def patch_bytes(vision: VisionSpec, precision: Precision) -> int:
    """Count the bytes per patch that autograd keeps for one block of a vision encoder.

    Two layer norms keep their inputs, outputs and two statistics; attention keeps queries, keys, values, its output and
    the logarithm of the softmax sum; the MLP keeps two tensors of its width. Qwen3-VL rotates queries and keys in fp32
    and keeps no more for it; InternViT scales both residual branches. Qwen2.5-VL's norms and gated MLP are those of a
    language model, but its residual stream is of the activations' type; windows keep as much as full attention.
    """
    t, r = precision.activation, precision.residual
    if vision.kind == "qwen2_5_vl":
        of_width = (11 if t == r else 12) * t + 8
        return of_width * vision.hidden_size + 4 * t * vision.ffn_size + 4 * vision.num_heads + 8
    if vision.kind == "gemma4":
        # Four norms and those of queries and keys keep two tensors in fp32, that of values one; inputs of matrices,
        # which autocast casts once for each of them.
        of_width = 52 + (6 if t == r else 9) * t
        return of_width * vision.hidden_size + 4 * t * vision.ffn_size + 28 * vision.num_heads + 32
    widths, extra = (11, 0) if vision.kind == "qwen3_vl" else (10 if vision.kind == "internvit" else 8, 4 * (r - t))
    return (widths * t + extra) * vision.hidden_size + 2 * t * vision.ffn_size + 4 * vision.num_heads + 4 * r


def vision_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the bytes that the encoder keeps for a visual token, made of merge_size^2 patches; 0 where it is frozen.

    The runtime shares a group's patches out evenly, so a rank encodes about as many as its share of visual tokens has.
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
    factors = 2 if vision.has_gated_mlp else 1  # of the product that a gated MLP makes
    gradients = precision.residual * vision.hidden_size + factors * precision.activation * vision.ffn_size
    return float(vision.merge_size**2 * (again + gradients))
