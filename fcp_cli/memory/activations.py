"""What a rank holds for each token: what autograd keeps, and what the layer at work takes beside it.

Symbols: t = bytes of an activation, r = bytes on the residual stream, h = hidden size, q = heads x head_dim,
k = key/value heads x head_dim, f = MLP width, V = vocabulary.

The activations are those that autograd keeps for transformers' unfused layers with fused attention (RMS norms computed
in fp32, gated MLP); a test counts them on real layers and finds the same bytes. Fused layers keep less.
"""

from __future__ import annotations

from fcp_cli.memory.precision import Precision
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe

LOGITS_BYTES = 256 << 20
"""Most bytes of a block of logits of the chunked loss, in fp32; `runtime.chunked_loss` cuts the vocabulary so."""

_LABEL_BYTES = 32  # per token: label's column, whether it is in the block, log-sum-exp, share of the loss


def input_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of a micro-batch itself: three int64 of ids, positions and labels, and the rotation."""
    return 3 * 8 + 2 * precision.residual * spec.head_dim


def layer_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for one layer."""
    return attention_side_bytes(spec, precision) + mlp_side_bytes(spec, precision)


def attention_side_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for the first half of a layer: norm and attention.

    A norm keeps its input in fp32, the normalised value, the scale and its output, under autocast once for each of the
    matrices that read it; attention keeps rotated queries and keys, values, its output and its log-sum-exp.
    """
    t, r = precision.activation, precision.residual
    h, q, k = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm = (4 + r) * h + 4 + (1 if t == r else 3) * t * h
    head_norms = (4 + t) * (q + k) + 4 * (spec.num_heads + spec.num_kv_heads) if spec.qk_norm else 0
    return norm + head_norms + attention_bytes(spec, precision)


def attention_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of what attention's backward needs: q, k, v, the output, and its log-sum-exp."""
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return precision.activation * (2 * q + 2 * k) + 4 * spec.num_heads


def mlp_side_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for the second half of a layer: norm and MLP, which keeps four
    tensors of its width.
    """
    t, r, h = precision.activation, precision.residual, spec.hidden_size
    return (4 + r) * h + 4 + (1 if t == r else 2) * t * h + 4 * t * spec.ffn_size


def kept_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that stay on the device for one layer from its forward to its backward."""
    if recipe.recompute == "none":
        return layer_bytes(spec, precision)
    inputs = 0 if recipe.offload == "activations" else precision.residual * spec.hidden_size
    return inputs + (attention_bytes(spec, precision) if recipe.recompute == "selective" else 0)


def recomputed_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that the layer at work computes again before its backward."""
    if recipe.recompute == "none":
        return 0
    kept = attention_bytes(spec, precision) if recipe.recompute == "selective" else 0
    if precision.residual == 4 and recipe.offload == "none":
        kept += 4 * spec.hidden_size  # the first norm works on the layer's input itself, which needs no cast
    return layer_bytes(spec, precision) - kept


def mlp_backward_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that a layer's backward takes beside its activations, where that is the most.

    The gradient of the residual stream waits; that of the MLP's product has become those of its two factors, as wide
    each, and the product itself is gone.
    """
    return precision.residual * spec.hidden_size + 2 * precision.activation * spec.ffn_size


def attention_backward_bytes(spec: ModelSpec, precision: Precision, *, in_rings: bool) -> int:
    """Count the bytes per token of attention's backward beside the activations of the layer's first half.

    The gradients of the output, of q, k and v. In a ring, also the sum of dq in fp32, and what a hop gathers: its rows
    of q, of the output and of the output's gradient.
    """
    t, q, k = precision.activation, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    alone = precision.residual * spec.hidden_size + t * (2 * q + 2 * k)
    return alone + (4 * q + 3 * t * q if in_rings else 0)


def ring_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of the ring's buffers: two for keys and values, two for their fp32 gradients."""
    return 2 * 2 * spec.num_kv_heads * spec.head_dim * (precision.activation + 4)


def final_norm_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps of the last layer's output and its norm."""
    return (4 + precision.residual + precision.activation) * spec.hidden_size + 4


def plain_loss_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of a loss over whole logits: their log-softmax, and the gradients on both its sides."""
    return 3 * precision.loss * spec.vocab_size


def chunked_loss_bytes(spec: ModelSpec, precision: Precision) -> tuple[float, float, float]:
    """Return the bytes per token of the chunked loss, those of its logits, and the most that its logits take.

    The gradient of the hidden states is summed in fp32. A block of logits exists in fp32, and for a moment in the type
    of the product beside it.
    """
    t, wide = precision.activation, precision.loss
    both = wide + (t if t != wide else 0)
    return wide * spec.hidden_size + _LABEL_BYTES, both * spec.vocab_size, LOGITS_BYTES * both / 4


def patch_bytes(vision: VisionSpec, precision: Precision) -> int:
    """Count the bytes per patch that autograd keeps for one block of a vision encoder.

    Two layer norms keep their inputs, outputs and two statistics; attention keeps queries, keys, values, its output and
    the logarithm of the softmax sum; the MLP keeps two tensors of its width. Qwen3-VL rotates queries and keys in fp32
    and keeps no more for it; InternViT scales both residual branches. Qwen2.5-VL's norms and gated MLP are those of a
    language model, but its residual stream is of the activations' type; windows keep what whole attention keeps.
    """
    t, r = precision.activation, precision.residual
    if vision.kind == "qwen2_5_vl":
        of_width = (11 if t == r else 12) * t + 8
        return of_width * vision.hidden_size + 4 * t * vision.ffn_size + 4 * vision.num_heads + 8
    widths, extra = (11, 0) if vision.kind == "qwen3_vl" else (10, 4 * (r - t))
    return (widths * t + extra) * vision.hidden_size + 2 * t * vision.ffn_size + 4 * vision.num_heads + 4 * r


def vision_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the bytes that the encoder keeps for a visual token, made of merge_size^2 patches; 0 where it is frozen.

    The runtime shares a group's patches out evenly, so a rank encodes about as many as its share of visual tokens has.
    """
    vision = spec.vision
    if vision is None or not backward_of(spec, recipe).vision.inputs:
        return 0.0
    each = precision.residual * vision.hidden_size if recipe.recompute != "none" else patch_bytes(vision, precision)
    return float(vision.merge_size**2 * vision.depth * each)


def vision_block_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the bytes per visual token of a block at work in the encoder, beside what it keeps."""
    vision = spec.vision
    if vision is None:
        return 0.0
    keeps_nothing = recipe.recompute != "none" or not backward_of(spec, recipe).vision.inputs
    again = patch_bytes(vision, precision) if keeps_nothing else 0
    factors = 2 if vision.kind == "qwen2_5_vl" else 1  # of the product that a gated MLP makes
    gradients = precision.residual * vision.hidden_size + factors * precision.activation * vision.ffn_size
    return float(vision.merge_size**2 * (again + gradients))
