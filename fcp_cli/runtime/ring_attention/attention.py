"""Ring attention over any ranks, any degree and any sequence lengths.

The members of a micro-batch's group run the two passes of `passes` on its `Ring`.

Shapes, with T tokens of this member, H query heads, G key/value heads (H is a multiple of G), head size D and degree d:

    attention        q [1, H, T + padding, D]      k, v [1, G, T + padding, D]
    the two passes   q, out [T, H, D]              k, v [T, G, D]            lse [T, H]
    messages         [2, T of the source, G, D]: keys and values; then dk and dv of another source, in one message

Heads of v and out may have a size other than D (latent attention).

With Ulysses degree u, kernels and messages have the tokens of all u members, H / u query heads, and max(1, G / u)
key/value heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fcp_cli.runtime.communication.transport import drive
from fcp_cli.runtime.recomputation.recompute import attention_stage
from fcp_cli.runtime.ring_attention.compiled import attend_compiled
from fcp_cli.runtime.ring_attention.passes import group_backward, group_forward
from fcp_cli.runtime.ring_attention.ring import AttentionSpec, Ring, SavedForBackward, implicit_ring, runs_outside
from fcp_cli.runtime.ring_attention.rows import pack, unpack


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute causal attention over the micro-batch's pack, which is sharded over the ring's members.

    Collective over the ring's members, and so is its backward. Tokens attend within their own sequence only.

    Args:
        q: [1, H, tokens, D], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond `ring.tokens`
            are padding: their output and gradients are zero.
        k, v: [1, G, tokens, D]; H is a multiple of G. The heads of v may have another size, Dv.
        ring: the micro-batch's ring; defaults to `current_ring`. Pass it if activations are recomputed.
        scale: factor on the scores; defaults to 1 / sqrt(D).
        window: tokens that a token attends to, itself included, or None for all before it. The same on all members.
        sinks: [H] learned logit per head that only enters the softmax's denominator, or None. Its gradient covers the
            member's own tokens, like that of any weight.
        softcap: maps scores s to softcap * tanh(s / softcap), as in Gemma 2; None disables it. Computed by plain matrix
            products on the CPU, and elsewhere in fp32 and fp64.

    Returns:
        [1, H, tokens, Dv]; in the autocast type under autocast, as from scaled_dot_product_attention.

    Raises:
        RunError: no ring, a shape that does not fit the ring, or a call inside backward without an explicit ring.
    """
    spec = AttentionSpec(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    # Autocast has no rule for our operator, so cast its inputs explicitly, inside the graph.
    if torch.compiler.is_compiling():
        q, k, v = _autocast(q, k, v)
        return attend_compiled(q, k, v, ring, spec, sinks)
    stage = attention_stage.get()
    if stage is None:  # as `staged_call` does, but a plain forward enters no other file here
        return _attend(q, k, v, ring, spec, sinks)
    return stage.attend(lambda: _attend(q, k, v, ring, spec, sinks))


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    if ring is None:
        if runs_outside.get():
            return _attention_outside(q, k, v, spec, sinks)
        ring = implicit_ring()
    q, k, v = _autocast(q, k, v)
    ring.check_call(q, k, v, spec.window, sinks)
    out: Tensor = RingAttention.apply(q, k, v, sinks, ring, spec)  # type: ignore[no-untyped-call]
    return out


class RingAttention(torch.autograd.Function):
    """`attention` as an autograd node.

    The node keeps its ring, since another micro-batch may be current when backward runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ring: Ring,
        spec: AttentionSpec,
    ) -> Tensor:
        own = (pack(q, ring.tokens), pack(k, ring.tokens), pack(v, ring.tokens))
        out, kept = drive(group_forward(ring, *own, spec, sinks))
        ctx.ring, ctx.spec, ctx.padded, ctx.kv_heads = ring, spec, q.shape[2], k.shape[1]
        # Not as attributes: saved-tensor hooks (checkpointing, offloading) only see saved tensors.
        ctx.save_for_backward(*kept, sinks)
        return unpack(out, q.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ring.begin_backward()
        *kept, sinks = ctx.saved_tensors
        packed = pack(grad_out, ctx.ring.tokens)
        grads = drive(group_backward(ctx.ring, packed, SavedForBackward(*kept), ctx.spec, sinks, kv_heads=ctx.kv_heads))
        return *(unpack(grad, ctx.padded) for grad in grads[:3]), grads.sinks, None, None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for PyTorch's attention: fp64 is never cast."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _attention_outside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Attend outside a plan: q [B, H, tokens, D], k and v [B, G, tokens, D] of whole sequences.

    Windows and sinks become a mask for PyTorch's attention, so memory grows with the square of the tokens.
    """
    scale, window, softcap = spec
    if window is None and sinks is None and softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    tokens = q.shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril_()
    if window is not None:
        # Query i keeps the keys from i - window + 1 on.
        seen.triu_(1 - window)
    mask = torch.zeros(tokens, tokens, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
    if softcap is not None:
        return _capped(q, k, v, mask, scale, softcap, sinks)
    if sinks is not None:  # a key of zeros whose mask value is the sink's logit
        k, v = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
        column = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        mask = torch.cat((mask.expand(len(sinks), -1, -1), column), dim=-1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend with soft-capped scores, by plain matrix products."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    # Drop the sink's column: it has a weight, but no value.
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights @ v
