"""What a rank holds for each token: what autograd keeps, and what the layer at work takes beside it.

Symbols: t = bytes of an activation, r = bytes on the residual stream, h = hidden size, q = heads x head_dim,
k = key/value heads x head_dim, f = MLP width, V = vocabulary.

The activations are those that autograd keeps for transformers' unfused layers with fused attention (RMS norms computed
in fp32, gated MLP); a test counts them on real layers and finds the same bytes. Fused layers keep less.
"""

from __future__ import annotations

from fcp_cli.memory.precision import Precision
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe

LOSS_CHUNK_TOKENS = 1024  # of the chunked loss


def layer_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for one layer.

    A norm keeps its input in fp32, the normalised value, the scale and its output; attention keeps rotated queries and
    keys, values, its output and the logarithm of the softmax sum; the MLP keeps four tensors of its width.
    """
    t, r = precision.activation, precision.residual
    h, q, k = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inputs = 2 if t == r else 5  # autocast casts a norm's output for each of the matrices that read it
    norms = 2 * ((4 + r) * h + 4) + inputs * t * h
    head_norms = (4 + t) * (q + k) + 4 * (spec.num_heads + spec.num_kv_heads) if spec.qk_norm else 0
    return norms + head_norms + attention_bytes(spec, precision) + 4 * t * spec.ffn_size


def attention_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of what attention's backward needs: q, k, v, the output, and its log-sum-exp."""
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return precision.activation * (2 * q + 2 * k) + 4 * spec.num_heads


def kept_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that stay on the device for one layer from its forward to its backward."""
    if recipe.recompute == "none":
        return layer_bytes(spec, precision)
    inputs = 0 if recipe.offload == "activations" else precision.residual * spec.hidden_size
    return inputs + (attention_bytes(spec, precision) if recipe.recompute == "selective" else 0)


def layer_working_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token of one layer in its backward, beside what it kept: where that is the most.

    Recomputed activations, the gradient of the residual stream, and two gradients of the MLP's width.
    """
    again = layer_bytes(spec, precision) if recipe.recompute != "none" else 0
    return again + precision.residual * spec.hidden_size + 2 * precision.activation * spec.ffn_size


def ring_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of the ring's buffers: two for keys and values, two for their fp32 gradients."""
    return 2 * 2 * spec.num_kv_heads * spec.head_dim * (precision.activation + 4)


def loss_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> tuple[float, float]:
    """Return (fixed bytes, bytes per token) at the top: final norm, logits, log-softmax and its gradients."""
    t, r, h = precision.activation, precision.residual, spec.hidden_size
    norm = (4 + r + t) * h + 4
    logits = (t + 3 * precision.loss) * spec.vocab_size
    if recipe.loss == "plain":
        return 0.0, norm + logits
    # The hidden states' gradient is made with the loss, chunk by chunk.
    return LOSS_CHUNK_TOKENS * logits, norm + t * h


def patch_bytes(vision: VisionSpec, precision: Precision) -> int:
    """Count the bytes per patch that autograd keeps for one block of a vision encoder.

    Two layer norms keep their inputs, outputs and two statistics; attention keeps queries, keys, values, its output and
    the logarithm of the softmax sum; the MLP keeps two tensors of its width. Qwen3-VL rotates queries and keys in fp32
    and keeps no more for it; InternViT scales both residual branches.
    """
    t, r = precision.activation, precision.residual
    widths, extra = (11, 0) if vision.kind == "qwen3_vl" else (10, 4 * (r - t))
    return (widths * t + extra) * vision.hidden_size + 2 * t * vision.ffn_size + 4 * vision.num_heads + 4 * r


def vision_bytes(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Return the bytes that the encoder keeps for a visual token, made of merge_size^2 patches; 0 where it is frozen.

    The runtime shares a group's patches out evenly, so a rank encodes about as many as its share of visual tokens has.
    """
    vision = spec.vision
    if vision is None or recipe.freeze_vision:
        return 0.0
    block = patch_bytes(vision, precision)
    kept = vision.depth * block
    if recipe.recompute != "none":
        kept = vision.depth * precision.residual * vision.hidden_size
    return float(vision.merge_size**2 * kept)
