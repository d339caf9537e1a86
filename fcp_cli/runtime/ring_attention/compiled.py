"""Attention as custom operators of a compiled graph.

A graph receives its ring as a handle in a tensor, so that one graph serves all rings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fcp_cli.runtime.communication.transport import drive
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.ring_attention.passes import exchanged_again, group_backward, group_forward, lse_of_tokens
from fcp_cli.runtime.ring_attention.ring import AttentionSpec, Ring, SavedForBackward, implicit_ring, ring_of_handle
from fcp_cli.runtime.ring_attention.rows import pack, unpack

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
    # The graph saves own tokens only: their number is fixed, but that of the exchanged tensors depends on the ring.
    kept, grad = drive(exchanged_again(ring, own)), pack(grad_out, tokens)
    spec = AttentionSpec(scale, window, softcap)
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
