"""Activation memory per token: tensors that autograd keeps, and the working memory of the current layer.

Symbols: t = bytes of an activation, r = bytes on the residual stream, h = hidden size, q = heads x head_dim,
k = key/value heads x head_dim, f = MLP width, V = vocabulary. Functions that depend on the kind of layer take a `kind`.

The activations are those that autograd keeps for transformers' unfused layers with fused attention (RMS norms computed
in fp32, gated MLP). A test compares them with the bytes of real layers. Fused layers keep less.
"""

from __future__ import annotations

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.items import Precision
from fcp_cli.memory.state import backward_of
from fcp_cli.models.layers import LINEAR_CHUNK, Experts, LayerKind, Linear
from fcp_cli.models.model import ModelSpec, VisionSpec

LOGITS_BYTES = 256 << 20
"""Most bytes of a block of logits of the chunked loss, in fp32; `runtime.loss.chunked_loss` cuts the vocabulary so."""

_LABEL_BYTES = 32  # per token: label's column, whether it is in the block, log-sum-exp, share of the loss


def input_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of a micro-batch: three int64 (ids, positions, labels), RoPE tables, layer inputs."""
    sizes = {spec.heads(kind).head_dim for kind in spec.kinds if kind.attends}
    rotated = sum(sizes) if spec.latent is None else spec.latent.rotary_size
    return 3 * 8 + 2 * precision.residual * rotated + layer_input_bytes(spec, precision)


def layer_input_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of per-layer embeddings: projection input, norm, and the added embedding."""
    if spec.layer_inputs is None:
        return 0
    t, size = precision.activation, spec.layer_inputs.size
    return t * spec.hidden_size + spec.num_layers * (_norm_bytes(spec, size, t) + t * size)


def layer_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token that autograd keeps for one layer."""
    own = 0
    if spec.layer_inputs is not None:  # per-layer input: its matrices, their activation function and the norm
        t, h = precision.activation, spec.hidden_size
        own = t * h + 3 * t * spec.layer_inputs.size + _norm_bytes(spec, h, t)
    return attention_side_bytes(spec, kind, precision) + mlp_side_bytes(spec, kind, precision) + own


def _norm_bytes(spec: ModelSpec, width: int, own: int) -> int:
    """Return the bytes kept by an RMS norm with inputs of `own` bytes: fp32 input, normalized value, and scale."""
    return (4 + (4 if spec.has("fp32 norms") else own)) * width + _scale_bytes(spec)


def _scale_bytes(spec: ModelSpec) -> int:
    return 8 if spec.has("power norms") else 4


def _layer_norm_bytes(spec: ModelSpec, precision: Precision, *, readers: int) -> int:
    """Return the bytes of a branch's input norm with its output, and of its output norm if the family has one.

    Autocast casts the output once for each of the `readers` matrices.
    """
    t, r, h = precision.activation, precision.residual, spec.hidden_size
    after = _norm_bytes(spec, h, t) if spec.has("four norms") else 0
    return _norm_bytes(spec, h, r) + (1 if t == r else readers) * t * h + after


def attention_side_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token that autograd keeps for the first half of a layer: norm and attention."""
    t, of_attention = precision.activation, attention_bytes(spec, kind, precision)
    if kind.attention == "none":
        return 0
    if kind.attention == "linear":
        linear = spec.linear_figures
        # Norm per head, its gate in fp32 before and after SiLU, and their product.
        gated = (4 + 2 * t + 2 * 4 + t) * _output_size(spec, kind) + 4 * linear.value_heads
        readers = 4 if spec.has("split linear inputs") else 2
        return _layer_norm_bytes(spec, precision, readers=readers) + gated + of_attention
    if kind.attention == "mamba":
        mamba = spec.mamba_figures
        # The gated norm works in fp32: on copies of gate and state output, or if these are fp32 already, on the gate as
        # a view of the whole input projection.
        copies = 2 * 4 * mamba.width if t != 4 else t * mamba.projected_size
        gated = copies + (2 * 4 + 2 * t) * mamba.width + 4 * mamba.groups
        made = 2 * 4 * mamba.heads  # time steps before and after softplus and clamping
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
    """Return the bytes per token that attention's backward needs: q, k, v, the output, and its log-sum-exp.

    Values of latent attention are a view of a product that also holds most of the keys. Linear attention keeps the
    input and output of its convolution (before and after SiLU), decays and update strengths, and a row of a chunk's
    triangular system. State-space layers keep the same of their convolution, the states' output, and time steps with
    their sums.
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
    """Return the width of linear attention's convolution: queries, keys and values."""
    return 2 * linear.key_heads * linear.key_size + linear.value_heads * linear.value_size


def _output_size(spec: ModelSpec, kind: LayerKind) -> int:
    """Return the width of attention's output, which the layer's output matrix reads."""
    if kind.attention == "linear":
        return spec.linear_figures.value_heads * spec.linear_figures.value_size
    if kind.attention == "mamba":
        return spec.mamba_figures.width
    return spec.num_heads * spec.value_dim(kind) if kind.attends else 0


def mlp_side_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token that autograd keeps for the second half of a layer: norm and MLP, or norm, router and
    the active experts of a token. A gated MLP keeps four tensors of its width.
    """
    t, r, h, experts = precision.activation, precision.residual, spec.hidden_size, spec.experts
    products, computed = _mlp_widths(spec)
    widths = (
        products + computed if products > 1 else computed
    )  # the activation function of an ungated MLP saves its result only
    if kind.mlp == "none":
        return 0
    if experts is None or not kind.has_experts:
        return _layer_norm_bytes(spec, precision, readers=products) + widths * t * spec.dense_width(kind)
    # Grouped matrix products ignore autocast and run in the type of the weights. Each expert keeps two tensors of the
    # layer's width, and its first product and the results computed from it.
    wide = experts.latent_size or h
    of_experts = experts.active * r * (2 * wide + (7 if spec.has("expert biases") else widths) * experts.ffn_size)
    shared = widths * t * experts.shared_ffn_size + (t * h + t if spec.has("shared gate") else 0)
    if experts.latent_size is not None:
        shared += t * wide  # the sum of experts, before its projection to the full width
    if spec.has("norms of experts"):  # norms of both branches' outputs and of the experts' input
        shared += 3 * _norm_bytes(spec, h, t)
    readers = 1 + (products if experts.shared_ffn_size else 0)
    norm = _layer_norm_bytes(spec, precision, readers=readers)
    return norm + _router_bytes(spec, experts, precision) + of_experts + shared


def _mlp_widths(spec: ModelSpec) -> tuple[int, int]:
    """Return the counts of tensors of MLP width: outputs of the first matrices, and results computed from them."""
    return (1, 2) if spec.has("plain mlp") else (2, 2)


def _router_bytes(spec: ModelSpec, experts: Experts, precision: Precision) -> int:
    """Return a router's bytes per token: fp32 scores, weights before and after normalization, int64 sort indices."""
    r = precision.residual
    if spec.has("expert biases"):  # selects before normalizing, and indexes the biases of each selected expert
        return experts.active * (2 * r + 5 * 8)
    scores = 4 * experts.count + 4
    if spec.has("norms of experts"):  # weightless norm, two scales, and expert weights
        own = (4 + 2 * precision.activation) * spec.hidden_size + _scale_bytes(spec)
        return scores + own + experts.active * (4 + r + 5 * 8)
    if not spec.has("sigmoid router"):
        return scores + experts.active * (4 + r + 4 * 8)
    wide = 0
    if r != 4 and not spec.has(
        "16-bit router"
    ):  # scores in fp32; only the copy is kept unless a shared expert reads the input
        wide = (4 if experts.shared_ffn_size else 4 - precision.activation) * spec.hidden_size
    return scores + wide + experts.active * (4 + 4 + 4 * 8)


def kept_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Return the bytes per token of one layer that stay on the device from its forward to its backward."""
    if not recipe.recomputes_layers:
        return layer_bytes(spec, kind, precision) - recomputed_bytes(spec, kind, recipe, precision)
    inputs = 0 if recipe.offload == "activations" else precision.residual * spec.hidden_size
    return inputs + _saved_bytes(spec, kind, recipe, precision) + _extra_product_bytes(spec, kind, recipe, precision)


def _saved_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Return the bytes per token of autograd's tensors that a recomputed layer keeps: attention's, and products."""
    if recipe.recompute == "full":
        return 0
    attention = attention_bytes(spec, kind, precision)
    return attention + (mlp_product_bytes(spec, kind, precision) if recipe.recompute == "elementwise" else 0)


def mlp_product_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token of the MLP's matrix products that its backward reads: all but the last.

    Experts also keep the last, which the gradients of their routing weights need.
    """
    t, experts, (products, _) = precision.activation, spec.experts, _mlp_widths(spec)
    if experts is None or not kind.has_experts:
        return products * t * spec.dense_width(kind) if kind.mlp != "none" else 0
    wide = experts.latent_size or spec.hidden_size
    routed = experts.active * precision.residual * (wide + products * experts.ffn_size)
    return routed + products * t * experts.shared_ffn_size


def _activation_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token of an MLP's elementwise results, and of tokens copied to experts."""
    t, experts, (_, computed) = precision.activation, spec.experts, _mlp_widths(spec)
    if experts is None or not kind.has_experts:
        return computed * t * spec.dense_width(kind) if kind.mlp != "none" else 0
    widths, wide = 5 if spec.has("expert biases") else computed, experts.latent_size or spec.hidden_size
    routed = experts.active * precision.residual * (wide + widths * experts.ffn_size)
    return routed + computed * t * experts.shared_ffn_size


def _extra_product_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Return the bytes per token of kept products that only recomputation reads, not backward.

    These are the outputs of attention's matrices except the values, of a router, and of a shared expert's last matrix.
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
    """Return the bytes per token that the current layer recomputes before its backward."""
    if recipe.recompute == "none":
        return 0
    if recipe.recompute == "activation":
        return _activation_bytes(spec, kind, precision)
    kept = _saved_bytes(spec, kind, recipe, precision)
    if precision.residual == 4 and recipe.offload == "none":
        kept += 4 * spec.hidden_size  # the first norm saves the layer's fp32 input itself, without a cast
    return layer_bytes(spec, kind, precision) - kept


def mlp_backward_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the peak bytes per token of an MLP's backward on top of the layer's activations.

    Alive are the gradient of the residual stream, and those of the two factors of the gated product, which is freed.
    Experts have the latter for each active expert of a token, plus the gradient of its output.
    """
    t, r, experts = precision.activation, precision.residual, spec.experts
    if experts is None or not kind.has_experts:
        return r * spec.hidden_size + (2 * t * spec.dense_width(kind) if kind.mlp != "none" else 0)
    return r * spec.hidden_size + experts.active * r * (spec.hidden_size + 2 * experts.ffn_size)


def attention_backward_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision, *, in_rings: bool) -> int:
    """Return the bytes per token of attention's backward on top of the activations of the layer's first half.

    Counts the gradients of the residual stream, the output, q, k and v. A ring adds the fp32 sum of dq, and the rows of
    q, the output and its gradient that a hop gathers.
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
    """Return the bytes per token of a layer's replicated keys and values, on top of the rank's own share.

    Args:
        spec, kind, precision: describe the layer.
        copies: copies of each key/value head within a Ulysses group; 1 if there are enough heads.
    """
    if not kind.attends:
        return 0.0
    return precision.activation * (copies - 1) * (spec.key_size(kind) + spec.value_size(kind))


def received_bytes(spec: ModelSpec, kind: LayerKind, recipe: Recipe, precision: Precision) -> int:
    """Return the bytes per token of keys and values that a ring saves besides the layer's own, which stay as well.

    A ring saves the pair of the previous member in place of the own one, which is freed unless something else needs it:
    an earlier layer whose keys and values this one reuses, or recomputation, whose kept products include the values.
    """
    if not kind.attends:
        return 0
    own = spec.key_size(kind) if kind.reuses else 0
    values = spec.value_size(kind) if kind.reuses or recipe.recompute == "elementwise" else 0
    return precision.activation * (own + values)


def exchanged_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the extra bytes per token of attention's backward under Ulysses.

    These are the gradient of the exchanged output, and a placeholder of the same size.
    """
    return 2 * precision.activation * _output_size(spec, kind) if kind.attends else 0


def state_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> tuple[float, float]:
    """Return the bytes (per sequence, per token) that a state layer keeps in a ring, beyond `attention_bytes`.

    Both are 0 for layers without states. A ring member holds two chunks of each sequence.

    Linear attention: per chunk the kernel's initial state [0 | I], the matrix A, and the state received from other
    members (see `runtime.recurrent`); per token the extra columns next to the values, and the
    contribution of the received state.

    State-space layers: per chunk the received state; per token the vectors that read it and the time steps (copies of
    those in a kernel's batches), and the factor of each head.
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
    """Return the bytes per token of ring buffers: two for keys and values, two for their fp32 gradients."""
    return 0 if kind.attention == "window" else _buffer_bytes(spec, kind, precision)


def halo_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    """Return the bytes per token of the rows of a window layer's single call, its gradients and their fp32 sums.

    Halos are not counted: they are short if a rank holds many tokens.
    """
    return _buffer_bytes(spec, kind, precision) if kind.attention == "window" else 0


def _buffer_bytes(spec: ModelSpec, kind: LayerKind, precision: Precision) -> int:
    if not kind.attends:
        return 0
    return 2 * (spec.key_size(kind) + spec.value_size(kind)) * (precision.activation + 4)


def layer_forward_bytes(spec: ModelSpec, precision: Precision, *, in_rings: bool) -> int:
    """Return an upper bound of the bytes per token of a layer in a forward-only pass.

    One half of a layer runs at a time, on top of the residual stream. It holds at most as much as autograd would keep,
    and in a ring also the fp32 sum of partial results.
    """
    halves = [
        max(
            attention_side_bytes(spec, kind, precision) + (4 * spec.query_size(kind) if in_rings else 0),
            mlp_side_bytes(spec, kind, precision),
        )
        for kind in spec.kinds
    ]
    return precision.residual * spec.hidden_size + max(halves)


def saved_pair_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of the keys and values that a ring's forward saves."""
    attending = [spec.key_size(kind) + spec.value_size(kind) for kind in spec.kinds if kind.attends]
    return max(attending, default=0) * precision.activation


def final_norm_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token that autograd keeps for the final norm and its output."""
    return _norm_bytes(spec, spec.hidden_size, precision.residual) + precision.activation * spec.hidden_size


def plain_loss_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Return the bytes per token of a loss over all logits: their log-softmax, and gradients before and after it."""
    return 3 * precision.loss * spec.vocab_size


def chunked_loss_bytes(spec: ModelSpec, precision: Precision) -> tuple[float, float, float]:
    """Return (bytes per token, logit bytes per token, limit of logit bytes) of the chunked loss.

    The gradient of the hidden states is accumulated in fp32. A block of logits exists in fp32 and briefly also in the
    type of the matrix product.
    """
    t, wide = precision.activation, precision.loss
    both = wide + (t if t != wide else 0)
    return wide * spec.hidden_size + _LABEL_BYTES, both * spec.vocab_size, LOGITS_BYTES * both / 4


# Kept and working bytes of a vision encoder per visual token.


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
