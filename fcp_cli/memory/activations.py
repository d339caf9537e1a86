"""Activation memory per token: tensors that autograd keeps, and the working memory of the current layer.

Symbols: t = bytes of an activation, r = bytes on the residual stream, h = hidden size, q = heads x head_dim,
k = key/value heads x head_dim, f = MLP width, V = vocabulary. Figures that differ between kinds of layers take the
kind.

The activations are those that autograd keeps for transformers' unfused layers with fused attention (RMS norms computed
in fp32, gated MLP); a test counts them on real layers and finds the same bytes. Fused layers keep less.
"""

from __future__ import annotations

from fcp_cli.memory.precision import Precision
from fcp_cli.models.figures import LINEAR_CHUNK, Experts, LayerKind, Linear
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe

LOGITS_BYTES = 256 << 20
"""Most bytes of a block of logits of the chunked loss, in fp32; `runtime.loss.chunked_loss` cuts the vocabulary so."""

_LABEL_BYTES = 32  # per token: label's column, whether it is in the block, log-sum-exp, share of the loss


def input_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of a micro-batch itself: three int64 of ids, positions and labels, and the rotation."""
    sizes = {spec.heads(kind).head_dim for kind in spec.kinds if kind.attends}
    rotated = sum(sizes) if spec.latent is None else spec.latent.rotary_size
    return 3 * 8 + 2 * precision.residual * rotated + layer_input_bytes(spec, precision)


def layer_input_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of the layers' own embeddings: the input of their matrix, a norm and what is added."""
    if spec.layer_inputs is None:
        return 0
    t, size = precision.activation, spec.layer_inputs.size
    return t * spec.hidden_size + spec.num_layers * (_norm_bytes(spec, size, t) + t * size)


def layer_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for one layer of a kind."""
    own = 0
    if spec.layer_inputs is not None:  # its matrices, their activation function and the norm
        t, h = precision.activation, spec.hidden_size
        own = t * h + 3 * t * spec.layer_inputs.size + _norm_bytes(spec, h, t)
    return attention_side_bytes(spec, kind, precision) + mlp_side_bytes(spec, kind, precision) + own


def _norm_bytes(spec: ModelSpec, width: int, own: int) -> int:
    """Count the bytes that an RMS norm of an input of `own` bytes keeps: fp32 input, normalised value, and scale."""
    return (4 + (4 if spec.has("fp32 norms") else own)) * width + _scale_bytes(spec)


def _scale_bytes(spec: ModelSpec) -> int:
    return 8 if spec.has("power norms") else 4


def _layer_norm_bytes(spec: ModelSpec, precision: Precision, *, readers: int) -> int:
    """Count a layer's norm with its output, under autocast once for each of the matrices that read it, and the norm of
    the branch's output, if the family has one.
    """
    t, r, h = precision.activation, precision.residual, spec.hidden_size
    after = _norm_bytes(spec, h, t) if spec.has("four norms") else 0
    return _norm_bytes(spec, h, r) + (1 if t == r else readers) * t * h + after


def attention_side_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for the first half of a layer: norm and attention."""
    t, of_attention = precision.activation, attention_bytes(spec, kind, precision)
    if kind.attention == "none":
        return 0
    if kind.attention == "linear":
        linear = spec.linear_figures
        # A norm over each head, its gate in fp32 before and after SiLU, and their product.
        gated = (4 + 2 * t + 2 * 4 + t) * _output_size(spec, kind) + 4 * linear.value_heads
        readers = 4 if spec.has("split linear inputs") else 2
        return _layer_norm_bytes(spec, precision, readers=readers) + gated + of_attention
    if kind.attention == "mamba":
        mamba = spec.mamba_figures
        # The gated norm works in fp32 on copies of the gate and of the states' output, or on these: then the
        # gate is a part of the product that all is made of.
        copies = 2 * 4 * mamba.width if t != 4 else t * mamba.projected_size
        gated = copies + (2 * 4 + 2 * t) * mamba.width + 4 * mamba.groups
        made = 2 * 4 * mamba.heads  # time steps, as they become positive and bounded
        return _layer_norm_bytes(spec, precision, readers=1) + made + gated + of_attention
    if kind.attention == "latent":
        latent = spec.latent_figures
        ranks = [rank for rank in (latent.query_rank, latent.key_value_rank) if rank is not None]
        made = sum(_norm_bytes(spec, rank, t) + t * rank for rank in ranks)
        return _layer_norm_bytes(spec, precision, readers=2) + made + of_attention
    q, k = spec.query_size(kind), 0 if kind.reuses else spec.key_size(kind)
    own, key_heads = 4 if spec.has("fp32 norms") else t, 0 if kind.reuses else spec.heads(kind).num_kv_heads
    scales = 2 if spec.has("wide qk norm") else spec.num_heads + key_heads
    head_norms = (4 + own) * (q + k) + _scale_bytes(spec) * scales if spec.qk_norm else 0
    if spec.has("value norm"):
        head_norms += 4 * k + _scale_bytes(spec) * key_heads
    gate = 2 * t * q if spec.has("query gate") else 0  # its sigmoid, and the gated output
    return _layer_norm_bytes(spec, precision, readers=3) + head_norms + gate + of_attention


def attention_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token that attention's backward needs: q, k, v, the output, and its log-sum-exp.

    Values of latent attention are a part of a product that holds most of the keys, too. Linear attention keeps what its
    convolution takes and gives, before and after SiLU, decays and strengths of its updates, and a row of a chunk's
    triangular system; state spaces keep the same of their convolution, the states' output, and the time steps
    and their sums.
    """
    t = precision.activation
    if kind.attention == "linear":
        linear = spec.linear_figures
        of_heads = (3 * 4 + t + t * LINEAR_CHUNK) * linear.value_heads + 2 * 4 * linear.key_heads
        return 3 * t * _mixed_size(linear) + of_heads
    if kind.attention == "mamba":
        mamba = spec.mamba_figures
        return t * (3 * mamba.mixed_size + mamba.width) + 2 * 4 * mamba.heads
    if kind.attention == "none":
        return 0
    q, out = spec.query_size(kind), _output_size(spec, kind)
    if kind.attention == "latent":
        product = out + q - spec.num_heads * spec.latent_figures.rotary_size
        return t * (2 * q + product + out) + 4 * spec.num_heads
    own = 0 if kind.reuses else spec.key_size(kind) + spec.value_size(kind)
    return t * (q + out + own) + 4 * spec.num_heads


def _mixed_size(linear: Linear) -> int:
    """Return the width of queries, keys and values that the convolution of linear attention mixes."""
    return 2 * linear.key_heads * linear.key_size + linear.value_heads * linear.value_size


def _output_size(spec: ModelSpec, kind: LayerKind) -> int:
    """Return the width of attention's output, the input of the layer's output matrix."""
    if kind.attention == "linear":
        return spec.linear_figures.value_heads * spec.linear_figures.value_size
    if kind.attention == "mamba":
        return spec.mamba_figures.width
    return spec.num_heads * spec.value_dim(kind) if kind.attends else 0


def mlp_side_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps for the second half of a layer: norm and MLP, which keeps four
    tensors of its width, or router and experts, which keep theirs for each that a token goes to.
    """
    t, r, h, experts = precision.activation, precision.residual, spec.hidden_size, spec.experts
    products, computed = _mlp_widths(spec)
    widths = products + computed if products > 1 else computed  # the function of an MLP without a gate keeps its result
    if kind.mlp == "none":
        return 0
    if experts is None or not kind.has_experts:
        return _layer_norm_bytes(spec, precision, readers=products) + widths * t * spec.dense_width(kind)
    # Grouped products know no autocast: they work in the type of the weights. Two tensors of the layer's width, and of
    # the experts' the first product and what is computed from it.
    wide = experts.latent_size or h
    of_experts = experts.active * r * (2 * wide + (7 if spec.has("expert biases") else widths) * experts.ffn_size)
    shared = widths * t * experts.shared_ffn_size + (t * h + t if spec.has("shared gate") else 0)
    if experts.latent_size is not None:
        shared += t * wide  # the sum of experts, which becomes wide again
    if spec.has("norms of experts"):  # of both branches' outputs, and of the experts' input
        shared += 3 * _norm_bytes(spec, h, t)
    readers = 1 + (products if experts.shared_ffn_size else 0)
    norm = _layer_norm_bytes(spec, precision, readers=readers)
    return norm + _router_bytes(spec, experts, precision) + of_experts + shared


def _mlp_widths(spec: ModelSpec) -> tuple[int, int]:
    """Return the tensors of an MLP's width that its first matrices make, and that are computed from them."""
    return (1, 2) if spec.has("plain mlp") else (2, 2)


def _router_bytes(spec: ModelSpec, experts: Experts, precision: Precision) -> int:
    """Count a router's bytes: scores in fp32, weights before and after they are normalised, and the places (int64)
    to which tokens were sorted.
    """
    r = precision.residual
    if spec.has("expert biases"):  # chooses before it normalises, and each place takes the biases of its expert
        return experts.active * (2 * r + 5 * 8)
    scores = 4 * experts.count + 4
    if spec.has("norms of experts"):  # a norm without a weight, two scales, and the weights of experts
        own = (4 + 2 * precision.activation) * spec.hidden_size + _scale_bytes(spec)
        return scores + own + experts.active * (4 + r + 5 * 8)
    if not spec.has("sigmoid router"):
        return scores + experts.active * (4 + r + 4 * 8)
    wide = 0
    if r != 4 and not spec.has("16-bit router"):  # it scores in fp32; a copy alone is kept if no MLP reads its input
        wide = (4 if experts.shared_ffn_size else 4 - precision.activation) * spec.hidden_size
    return scores + wide + experts.active * (4 + 4 + 4 * 8)


def kept_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that stay on the device for one layer from its forward to its backward."""
    if not recipe.recomputes_layers:
        return layer_bytes(spec, kind, precision) - recomputed_bytes(spec, kind, recipe, precision)
    inputs = 0 if recipe.offload == "activations" else precision.residual * spec.hidden_size
    return inputs + _saved_bytes(spec, kind, recipe, precision) + _extra_product_bytes(spec, kind, recipe, precision)


def _saved_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that a recomputed layer keeps of what autograd would: attention's, and products."""
    if recipe.recompute == "full":
        return 0
    attention = attention_bytes(spec, kind, precision)
    return attention + (mlp_product_bytes(spec, kind, precision) if recipe.recompute == "elementwise" else 0)


def mlp_product_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token of the MLP's products that its backward reads: all but that of its last matrix.

    Of experts that one, too, since the gradients of their weights need it.
    """
    t, experts, (products, _) = precision.activation, spec.experts, _mlp_widths(spec)
    if experts is None or not kind.has_experts:
        return products * t * spec.dense_width(kind) if kind.mlp != "none" else 0
    wide = experts.latent_size or spec.hidden_size
    routed = experts.active * precision.residual * (wide + products * experts.ffn_size)
    return routed + products * t * experts.shared_ffn_size


def _activation_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token of what an MLP computes between its matrices, and of tokens copied for experts."""
    t, experts, (_, computed) = precision.activation, spec.experts, _mlp_widths(spec)
    if experts is None or not kind.has_experts:
        return computed * t * spec.dense_width(kind) if kind.mlp != "none" else 0
    widths, wide = 5 if spec.has("expert biases") else computed, experts.latent_size or spec.hidden_size
    routed = experts.active * precision.residual * (wide + widths * experts.ffn_size)
    return routed + computed * t * experts.shared_ffn_size


def _extra_product_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token of kept products that no backward reads, but the recomputation of what they become.

    Those of attention's own matrices but the values', and of a router; a shared expert's last output; of adapters as
    much as their matrices make.
    """
    if recipe.recompute != "elementwise":
        return 0
    t, h, experts = precision.activation, spec.hidden_size, spec.experts
    made = 0
    if kind.attends:
        made = spec.query_size(kind) * (2 if spec.has("query gate") else 1)
        made += 0 if kind.reuses else spec.key_size(kind)
    if kind.attention == "linear":
        made = _mixed_size(spec.linear_figures) + _output_size(spec, kind)
    elif kind.attention == "mamba":
        made = spec.mamba_figures.projected_size
    elif kind.attention == "latent":
        latent = spec.latent_figures
        made += sum(rank for rank in (latent.query_rank, latent.key_value_rank) if rank is not None)
    of_experts = 0
    if experts is not None and kind.has_experts:
        of_experts = 4 * experts.count + (t * (h + 1) if experts.shared_ffn_size else 0)
    return t * (made + h) + of_experts


def recomputed_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Count the bytes per token that the layer at work computes again before its backward."""
    if recipe.recompute == "none":
        return 0
    if recipe.recompute == "activation":
        return _activation_bytes(spec, kind, precision)
    kept = _saved_bytes(spec, kind, recipe, precision)
    if precision.residual == 4 and recipe.offload == "none":
        kept += 4 * spec.hidden_size  # the first norm works on the layer's input itself, which needs no cast
    return layer_bytes(spec, kind, precision) - kept


def mlp_backward_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token of a layer's backward on top of its activations, at its peak.

    The gradient of the residual stream waits; that of the MLP's product has become those of its two factors, as wide
    each, and the product itself is gone. Of experts the same is there for each that a token goes to, and the gradient
    of their outputs.
    """
    t, r, experts = precision.activation, precision.residual, spec.experts
    if experts is None or not kind.has_experts:
        return r * spec.hidden_size + (2 * t * spec.dense_width(kind) if kind.mlp != "none" else 0)
    return r * spec.hidden_size + experts.active * r * (spec.hidden_size + 2 * experts.ffn_size)


def attention_backward_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision, *, in_rings: bool) -> int:
    """Count the bytes per token of attention's backward on top of the activations of the layer's first half.

    The gradients of the output, of q, k and v. In a ring, also the sum of dq in fp32, and what a hop gathers: its rows
    of q, of the output and of the output's gradient.
    """
    t, out = precision.activation, _output_size(spec, kind)
    if kind.attention == "linear":
        return precision.residual * spec.hidden_size + t * (out + _mixed_size(spec.linear_figures))
    if kind.attention == "mamba":
        return precision.residual * spec.hidden_size + t * (out + spec.mamba_figures.projected_size)
    if kind.attention == "none":
        return precision.residual * spec.hidden_size
    q = spec.query_size(kind)
    alone = precision.residual * spec.hidden_size + t * (q + out + spec.key_size(kind) + spec.value_size(kind))
    return alone + (4 * q + t * (q + 2 * out) if in_rings else 0)


def replicated_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision, copies: float) -> float:
    """Count the bytes per token of keys and values that a rank keeps of a layer on top of its own share.

    Args:
        spec, kind, precision: describe the layer.
        copies: ranks that have the same heads, where more ranks share heads than there are of keys and values.
    """
    if not kind.attends:
        return 0.0
    return precision.activation * (copies - 1) * (spec.key_size(kind) + spec.value_size(kind))


def exchanged_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Count the bytes per token that attention's backward takes more where ranks share heads.

    The gradient of the output, and its placeholder, of the exchanged tokens and heads.
    """
    return 2 * precision.activation * _output_size(spec, kind) if kind.attends else 0


def state_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> tuple[float, float]:
    """Return the bytes that a layer with states keeps in a ring, beyond `attention_bytes`: per sequence, per token.

    Both are 0 for layers without states. A member holds two chunks of each sequence.

    Linear attention. Per chunk: the state [0 | I] that its kernel begins with, the matrix A, and the state that
    arrives from other members (see `runtime.states.linear_attention`). Per token: the columns beside its values, and
    what it reads of the state that arrives.

    State spaces. Per chunk: the state that arrives. Per token: the vectors that read it and the time steps (both as
    copies beside those in a kernel's batches), and the factor by which each head reads.
    """
    if kind.attention == "mamba":
        mamba = spec.mamba_figures
        of_token = precision.activation * mamba.groups * mamba.state_size + 2 * 4 * mamba.heads
        return 2.0 * 4 * mamba.width * mamba.state_size, 1.0 * of_token
    if kind.attention != "linear":
        return 0.0, 0.0
    linear = spec.linear_figures
    of_chunk = 4 * linear.value_heads * linear.key_size * 2 * (linear.key_size + linear.value_size)
    return 2.0 * of_chunk, 1.0 * (precision.activation + 4) * linear.value_heads * linear.key_size


def ring_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token of the ring's buffers: two for keys and values, two for their fp32 gradients.

    Layers with windows take as many in addition to their halos, which are short where a rank holds much: the rows of
    their one call, its gradients, and the sums of these in fp32.
    """
    if not kind.attends:
        return 0
    return 2 * (spec.key_size(kind) + spec.value_size(kind)) * (precision.activation + 4)


def layer_forward_bytes(spec: ModelSpec, precision: Precision, *, in_rings: bool) -> int:
    """Count the bytes per token of a layer's forward that no backward follows, at most.

    One half of a layer is at work at a time, on top of the residual stream; it holds no more than autograd would keep
    of it, and in a ring the sum of results in fp32.
    """
    halves = [
        max(
            attention_side_bytes(spec, kind, precision) + (4 * spec.query_size(kind) if in_rings else 0),
            mlp_side_bytes(spec, kind, precision),
        )
        for kind in spec.kinds
    ]
    return precision.residual * spec.hidden_size + max(halves)


def forward_ring_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of the buffers of a ring without a backward: two for keys and values."""
    attending = [spec.key_size(kind) + spec.value_size(kind) for kind in spec.kinds if kind.attends]
    return 2 * max(attending, default=0) * precision.activation


def final_norm_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token that autograd keeps of the last layer's output and its norm."""
    return _norm_bytes(spec, spec.hidden_size, precision.residual) + precision.activation * spec.hidden_size


def plain_loss_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Count the bytes per token of a loss over whole logits: their log-softmax, and the gradients on both its sides."""
    return 3 * precision.loss * spec.vocab_size


def chunked_loss_bytes(spec: ModelSpec, precision: Precision) -> tuple[float, float, float]:
    """Return the bytes per token of the chunked loss, those of its logits, and the most that its logits take.

    The gradient of the hidden states is summed in fp32. A block of logits exists in fp32, and for a moment in the type
    of the product next to it.
    """
    t, wide = precision.activation, precision.loss
    both = wide + (t if t != wide else 0)
    return wide * spec.hidden_size + _LABEL_BYTES, both * spec.vocab_size, LOGITS_BYTES * both / 4
