"""Ring attention over any ranks, any degree and any sequence lengths.

The members of a micro-batch's group run `group_forward` and `group_backward` on its `Ring`.

Shapes, with T tokens of this member, H query heads, G key/value heads (H is a multiple of G), head size D and degree d:

    attention        q [1, H, T + padding, D]      k, v [1, G, T + padding, D]
    the two passes   q, out [T, H, D]              k, v [T, G, D]            lse [T, H]
    messages         [2, T of the source, G, D]: keys and values; then dk and dv of another source, in one message

Heads of v and out may have a size other than D (latent attention).

With Ulysses degree u, kernels and messages have the tokens of all u members, H / u query heads, and max(1, G / u)
key/value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fcp_cli.runtime.exchange import of_products, row_products
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.recompute import attention_stage
from fcp_cli.runtime.ring import AttentionSpec, Ring, SavedForBackward, implicit_ring, ring_of_handle, runs_outside
from fcp_cli.runtime.ring_passes import first_hop, ring_backward, ring_forward
from fcp_cli.runtime.rows import pack, unpack
from fcp_cli.runtime.transport import Waits, drive
from fcp_cli.runtime.windows import fits_in, window_backward, window_forward


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


# Forward and backward of attention on any group, for every layout.
#
# Keys and values travel around a ring (`ring_passes`). Sliding-window attention needs no ring: each chunk receives
# the rows before it (`windows`). Learned sinks are added once all keys of a row are merged. With a Ulysses degree
# above 1 (`shared_heads`), the members of each Ulysses group exchange tokens for heads. Members with the same index
# in all Ulysses groups then run a ring for their heads.
#
# A sink is a learned logit per head in the softmax's denominator, without key and value, which kernels need not
# support. With logit s of a head, and lse and out over its keys only,
#
#     lse' = logaddexp(lse, s),    out' = out exp(lse - lse'),
#
# and a backward given lse' and out' computes with the weights P' = exp(scores - lse') and sum(dout out') of each row,
# so that dq, dk and dv are exact. The gradient of s is that of a key with weight exp(s - lse') and value zero: -
# exp(s - lse') sum(dout out'), summed over rows.


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
    if member.ulysses_degree == 1:
        kept = yield from _forward(member, q, k, v, spec, sinks)
        return kept.out, kept
    exchange, ring, heads = member.head_exchange(), member.ring_of_head_group(), q.shape[1]
    q, k, v = yield from exchange.to_heads("heads", q, k, v)
    if ring.degree > 1:
        # Saving a view of what was received would also keep the own keys and values, which backward does not need.
        q = q.clone()
    own_sinks = None if sinks is None else member.own_heads(sinks)
    kept = yield from _forward(ring, q, k, v, spec, own_sinks)
    (own,) = yield from exchange.to_tokens("tokens", kept.out, heads=(heads,))
    return own, kept._replace(out=own)


def _forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Waits[SavedForBackward]:
    if (window := _halo_window(ring, spec)) is None:
        kept = yield from ring_forward(ring, q, k, v, spec)
    else:
        kept = yield from window_forward(ring, q, k, v, spec, window)
    if sinks is None:
        return kept
    out, lse = with_sinks(kept.out, kept.lse, sinks)
    return kept._replace(out=out, lse=lse)


def _halo_window(ring: Ring, spec: AttentionSpec) -> int | None:
    """Return the window of a layer that exchanges halos, or None if its keys and values travel around the ring."""
    return None if spec.window is None or fits_in(spec.window, ring.ring_layout) else spec.window


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
    if member.ulysses_degree == 1:
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
    if (window := _halo_window(ring, spec)) is None:
        return (yield from ring_backward(ring, grad_out, kept, spec))
    return (yield from window_backward(ring, grad_out, kept, spec, window))


def lse_of_tokens(member: Ring, kept: SavedForBackward, *, heads: int) -> Waits[Tensor]:
    """Return the lse [T, H] of a member's own tokens, for a backward that does not save the exchanged tensors."""
    if member.ulysses_degree == 1:
        return kept.lse
    (lse,) = yield from member.head_exchange().to_tokens("lse", kept.lse.unsqueeze(-1), heads=(heads,))
    return lse.squeeze(-1)


def received_again(member: Ring, own: SavedForBackward, spec: AttentionSpec) -> Waits[SavedForBackward]:
    """Rebuild the tensors that `group_forward` saves from the member's own tokens.

    Compiled graphs only save tensors of the member's own tokens (see `lse_of_tokens`), so the head exchanges and the
    ring's first hop are repeated.
    """
    ring, kept = member, own
    if member.ulysses_degree > 1:
        exchange, ring = member.head_exchange(), member.ring_of_head_group()
        q, k, v = yield from exchange.to_heads("heads", own.q, own.k, own.v)
        (lse,) = yield from exchange.to_heads("lse", own.lse.unsqueeze(-1))
        kept = SavedForBackward(q, k, v, own.out, lse.squeeze(-1))
    if _halo_window(ring, spec) is not None:
        return kept
    k, v = yield from first_hop(ring, kept.k, kept.v)
    return kept._replace(k=k, v=v)


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


# Attention as custom operators of a compiled graph.
#
# A graph receives its ring as a handle in a tensor, so that one graph serves all rings.

# Stands for the ring that is current when the compiled graph runs.
_CURRENT = torch.tensor(-1, device="cpu")


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Compute `attention` as one custom operator, so that torch.compile traces neither the ring nor its hops.

    A ring lives as long as its step, so backward must run within it.
    """
    handle = _CURRENT if ring is None else ring.handle
    out: Tensor = _attention_operator(q, k, v, sinks, handle, spec.scale, spec.window, spec.softcap)[0]
    return out


@torch.library.custom_op("fcp::attention", mutates_args=())
def _attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (shaped like q, with v's head size), lse [padded, H], and the handle of the ring used."""
    number = int(handle)
    ring = implicit_ring() if number < 0 else ring_of_handle(number)
    ring.check_call(q, k, v, window, sinks)
    tokens, padded = ring.tokens, q.shape[2]
    own = (pack(q, tokens), pack(k, tokens), pack(v, tokens))
    out, kept = drive(group_forward(ring, *own, AttentionSpec(scale, window, softcap), sinks))
    # Padded like q, since sizes in a graph must not depend on the ring.
    full_lse = kept.lse.new_zeros(padded, q.shape[1])
    full_lse[:tokens] = drive(lse_of_tokens(ring, kept, heads=q.shape[1]))
    # A clone, since an operator must not return one of its inputs.
    return unpack(out.contiguous(), padded), full_lse, ring.handle.clone()


@torch.library.custom_op("fcp::attention_backward", mutates_args=())
def _attention_backward_operator(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks; that of sinks is empty if there are none."""
    ring = ring_of_handle(int(handle))
    ring.begin_backward()
    tokens = ring.tokens
    own = SavedForBackward(pack(q, tokens), pack(k, tokens), pack(v, tokens), pack(out, tokens), lse[:tokens])
    spec = AttentionSpec(scale, window, softcap)
    # The graph saves own tokens only: their number is fixed, but that of the received tensors depends on the ring.
    kept, grad = drive(received_again(ring, own, spec)), pack(grad_out, tokens)
    grads = drive(group_backward(ring, grad, kept, spec, sinks, kv_heads=k.shape[1]))
    dq, dk, dv = (unpack(grad.contiguous(), q.shape[2]) for grad in grads[:3])
    # The operator's schema requires four tensors, so None becomes an empty one.
    return dq, dk, dv, q.new_empty(0) if grads.sinks is None else grads.sinks


@_attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads, padded = q.shape[1:3]
    lse = q.new_empty(padded, heads, dtype=lse_dtype(q.dtype))
    return _like_packed(q, v.shape[3]), lse, torch.empty_like(handle)


@_attention_backward_operator.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _like_packed(q), _like_packed(k), _like_packed(v), of_sinks


def _like_packed(batched: Tensor, head_dim: int | None = None) -> Tensor:
    """Return an empty [1, H, padded, D] with the strides that `unpack` gives a contiguous tensor.

    `empty_like` will not do: it keeps q's strides, which are heads-first after partial rotary embeddings.
    """
    _, heads, padded, own = batched.shape
    return batched.new_empty(padded, heads, head_dim or own).transpose(0, 1).unsqueeze(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, _, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *kept = ctx.saved_tensors
    how = ctx.scale, ctx.window, ctx.softcap
    dq, dk, dv, of_sinks = _attention_backward_operator(grad_out, q, k, v, sinks, *kept, *how)
    return dq, dk, dv, None if sinks is None else of_sinks, None, None, None, None


_attention_operator.register_autograd(_differentiate, setup_context=_keep)
