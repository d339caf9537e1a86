"""Forward and backward of attention on any group, for every layout.

Keys and values travel around a ring (`ring_passes`). Sliding-window attention needs no ring: each chunk receives the
rows before it (`windows`). Learned sinks are added once all keys of a row are merged. With a Ulysses degree above 1
(`shared_heads`), the members of each Ulysses group exchange tokens for heads. Members with the same index in all
Ulysses groups then run a ring for their heads.

A sink is a learned logit per head in the softmax's denominator, without key and value, which kernels need not support.
With logit s of a head, and lse and out over its keys only,

    lse' = logaddexp(lse, s),    out' = out exp(lse - lse'),

and a backward given lse' and out' computes with the weights P' = exp(scores - lse') and sum(dout out') of each row, so
that dq, dk and dv are exact. The gradient of s is that of a key with weight exp(s - lse') and value zero: - exp(s -
lse') sum(dout out'), summed over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fcp_cli.runtime.communication.shared_heads import of_products, row_products
from fcp_cli.runtime.communication.transport import Waits
from fcp_cli.runtime.ring_attention.ring import AttentionSpec, Ring, SavedForBackward
from fcp_cli.runtime.ring_attention.ring_passes import ring_backward, ring_forward
from fcp_cli.runtime.ring_attention.windows import fits_in, window_backward, window_forward


def group_forward(
    member: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Waits[tuple[Tensor, SavedForBackward]]:
    """Run the forward of one member of any group; yield the handles to wait for.

    Args:
        member: the member's view of the group.
        q, k, v: [T, H, D], [T, G, D] and [T, G, Dv], T = member.tokens.
        spec: settings of the layer's attention.
        sinks: [H] learned logit per head, or None.

    Returns:
        out [T, H, Dv] in the type of q, and the tensors to save for `group_backward`.
    """
    if member.heads_degree == 1:
        out, lse = yield from _forward(member, q, k, v, spec, sinks)
        return out, SavedForBackward(q, k, v, out, lse)
    exchange, heads = member.head_exchange(), q.shape[1]
    q, k, v = yield from exchange.to_heads("heads", q, k, v)
    own_sinks = None if sinks is None else member.own_heads(sinks)
    out, lse = yield from _forward(member.ring_of_head_group(), q, k, v, spec, own_sinks)
    (own,) = yield from exchange.to_tokens("tokens", out, heads=(heads,))
    return own, SavedForBackward(q, k, v, own, lse)


def _forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Waits[tuple[Tensor, Tensor]]:
    if spec.window is None or fits_in(spec.window, ring.ring_layout):
        out, lse = yield from ring_forward(ring, q, k, v, spec)
    else:
        out, lse = yield from window_forward(ring, q, k, v, spec, spec.window)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


class Gradients(NamedTuple):
    """Gradients of attention: dq [T, H, D], dk [T, G, D], dv [T, G, Dv], and this member's share of dsinks [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def group_backward(
    member: Ring,
    grad_out: Tensor,
    kept: SavedForBackward,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    *,
    kv_heads: int,
) -> Waits[Gradients]:
    """Run the backward of one member of any group; yield the handles to wait for.

    Args:
        member, spec, sinks: as given to `group_forward`.
        grad_out: [T, H, Dv].
        kept: the tensors that `group_forward` returned.
        kv_heads: number of heads of the k and v given to `group_forward`.
    """
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    if member.heads_degree == 1:
        if sinks is not None and dsinks is not None:
            dsinks.copy_(sink_gradients(grad_out, kept.out, kept.lse, sinks))
        return Gradients(*(yield from _backward(member, grad_out, kept, spec)), dsinks)
    exchange, heads = member.head_exchange(), grad_out.shape[1]
    # Kernels only need row sums of grad_out * out: exchange one number per row and head instead of Dv. See
    # `shared_heads`.
    delta = row_products(grad_out, kept.out)
    (grad_out,) = yield from exchange.to_heads("heads", grad_out)
    (delta,) = yield from exchange.to_heads("delta", delta)
    kept = kept._replace(out=of_products(delta, grad_out))
    if sinks is not None and dsinks is not None:  # own heads only; the Ulysses group covers all heads
        own = sink_gradients(grad_out, kept.out, kept.lse, member.own_heads(sinks))
        member.own_heads(dsinks).copy_(own)
    grads = _backward(member.ring_of_head_group(), grad_out, kept, spec)
    # No local name keeps the sent tensors alive, so they are freed before the results are allocated.
    counts = (heads, kv_heads, kv_heads)
    dq, dk, dv = yield from exchange.to_tokens("tokens", *(yield from grads), heads=counts)
    return Gradients(dq, dk, dv, dsinks)


def _backward(
    ring: Ring, grad_out: Tensor, kept: SavedForBackward, spec: AttentionSpec
) -> Waits[tuple[Tensor, Tensor, Tensor]]:
    if spec.window is None or fits_in(spec.window, ring.ring_layout):
        return (yield from ring_backward(ring, grad_out, kept, spec))
    return (yield from window_backward(ring, grad_out, kept, spec, spec.window))


def lse_of_tokens(member: Ring, kept: SavedForBackward, *, heads: int) -> Waits[Tensor]:
    """Return the lse [T, H] of a member's own tokens, for a backward that does not save the exchanged tensors."""
    if member.heads_degree == 1:
        return kept.lse
    (lse,) = yield from member.head_exchange().to_tokens("lse", kept.lse.unsqueeze(-1), heads=(heads,))
    return lse.squeeze(-1)


def exchanged_again(member: Ring, own: SavedForBackward) -> Waits[SavedForBackward]:
    """Rebuild the tensors that `group_forward` saves from the member's own tokens, by repeating the head exchanges.

    Compiled graphs only save tensors of the member's own tokens; see `lse_of_tokens`.
    """
    if member.heads_degree == 1:
        return own
    exchange = member.head_exchange()
    q, k, v = yield from exchange.to_heads("heads", own.q, own.k, own.v)
    (lse,) = yield from exchange.to_heads("lse", own.lse.unsqueeze(-1))
    return SavedForBackward(q, k, v, own.out, lse.squeeze(-1))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] with sinks [H] in each row's softmax; may change `out` in place."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    kept = (lse - total).exp_().unsqueeze(-1)
    # In place if `out` has the type of lse; else compute in the wider type and round once.
    return (out.mul_(kept) if out.dtype == lse.dtype else (out * kept).to(out.dtype)), total


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [H] of the sinks, in the type of `lse`, from the results of `with_sinks`.

    Args:
        grad_out, out: [T, H, D].
        lse: [T, H].
        sinks: [H].
    """
    delta = (grad_out.to(lse.dtype) * out).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp_() * delta).sum(0)
