"""Ring attention over any ranks, any degree and any sequence lengths.

Each micro-batch has its `Ring`, on which the members of its group run the two passes of `passes`.

Shapes. T tokens of this member, H query heads, G key/value heads (H is a multiple of G), D head size, d degree:

    attention        q [1, H, T + padding, D]      k, v [1, G, T + padding, D]
    the two passes   q, out [T, H, D]              k, v [T, G, D]            lse [T, H]
    on the way       [2, T of the source, G, D]: keys and values; then dk and dv of another source, in one message

Heads of values, and with them those of `out`, may have another size than D (latent attention).

Where u members share the heads, the last two have the tokens of all u, H / u query heads, and G / u key/value heads or
one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.errors import RunError
from fcp_cli.runtime.agreement.grad_ring import GradRingDtype
from fcp_cli.runtime.communication.transport import Transport, drive
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.layouts.layout import ShardLayout
from fcp_cli.runtime.recomputation.recompute import attention_stage
from fcp_cli.runtime.ring_attention.group_member import AttentionSpec, GroupMember, SavedForBackward
from fcp_cli.runtime.ring_attention.outside_attention import attention_outside
from fcp_cli.runtime.ring_attention.passes import (
    exchanged_again,
    group_backward,
    group_forward,
    lse_of_tokens,
)

if TYPE_CHECKING:
    from fcp_cli.runtime.loss.token_loss import Labels
    from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache
    from fcp_cli.runtime.pictures.encoder_rank import EncoderAhead
    from fcp_cli.runtime.pictures.visuals import VisualShard


_handles = count()
_rings: WeakValueDictionary[int, Ring] = WeakValueDictionary()


class Ring(GroupMember):
    """The group of one micro-batch, as one of its members sees it.

    Attributes:
        visuals: this member's part in the pack's images and videos; None where the pack has none.
        encoder_ahead: encodes on a rank that does nothing else; None on others.
        embedding_cache: keeps what a frozen vision encoder computes for them; None where nothing does.
        backward_calls: how often the backward of its attention calls ran.
        backward_forbidden: why its backward must not run now, since ranks would wait for each other; "" where it may.
        loss_missing: why its backward must not run before that of a loss which the micro-batch made; "" where it may.
        forward_calls: how often attention ran on it, leaving out what backward computes again.
        most_forwards, most_backwards: how often either ran on a ring before, where the loop is to run them as often on
            every one; 0: any number.
        begin_pass: compares a pass that begins, and its number, with those of other ranks; None where these are known.
        encoder_calls: how often a vision encoder ran for it.
        model_tokens: that the model is called with, padding included; None where any number of at least `tokens` is.
        place: step, micro-batch and rank, for messages; "" where there is no step.
        labels: of this member's tokens, for a model that computes its loss itself; None where there are none.
        handle: 0-d int64, stands for the ring in compiled graphs.
    """

    __slots__ = (
        "__weakref__",
        "backward_calls",
        "backward_forbidden",
        "begin_pass",
        "embedding_cache",
        "encoder_ahead",
        "encoder_calls",
        "forward_calls",
        "handle",
        "labels",
        "loss_missing",
        "model_tokens",
        "most_backwards",
        "most_forwards",
        "place",
        "visuals",
    )

    def __init__(
        self,
        layout: ShardLayout,
        index: int = 0,
        ranks: tuple[int, ...] = (0,),
        transport: Transport | None = None,
        visuals: VisualShard | None = None,
        embedding_cache: EmbeddingCache | None = None,
        encoder_ahead: EncoderAhead | None = None,
        grad_dtype: GradRingDtype = "fp32",
    ) -> None:
        super().__init__(layout, index, ranks, transport, grad_dtype)
        self.visuals = visuals
        self.embedding_cache = embedding_cache
        self.encoder_ahead = encoder_ahead
        self.backward_calls = 0
        self.backward_forbidden = ""
        self.loss_missing = ""
        self.begin_pass: Callable[[str, int], None] | None = None
        self.forward_calls = self.most_forwards = self.most_backwards = 0
        self.model_tokens: int | None = None
        self.place = ""
        self.encoder_calls = 0
        self.labels: Labels | None = None
        number = next(_handles)
        _rings[number] = self
        self.handle = torch.tensor(number, device="cpu")


current_ring: ContextVar[Ring | None] = ContextVar("current_ring", default=None)
"""The ring of the micro-batch whose forward is running; set by the session around it."""

runs_outside: ContextVar[bool] = ContextVar("runs_outside", default=False)
"""Whether attention without a ring attends over the whole batch that it is given; set by `outside.outside`."""


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
    """Compute causal attention over the micro-batch's pack, of which each member of the ring holds a shard.

    Collective over the ring's members, and so is its backward. Every sequence attends to itself only.

    Args:
        q: [1, H, tokens, D], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond
            `ring.tokens` are padding: they give zeros and get zero gradients.
        k, v: [1, G, tokens, D]; H is a multiple of G. The heads of v may have another size, Dv.
        ring: the micro-batch's ring; by default the one in `current_ring`. Pass it where activations are recomputed.
        scale: factor on the scores; 1 / sqrt(D) by default.
        window: tokens that a token attends to, itself among them; None for all before it. The same on all members.
        sinks: [H] a learned logit for each head, which takes its part of the softmax and adds nothing; None for none.
            Its gradient is of the member's own tokens, like that of any weight.
        softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2; None: they stay. Plain matrix products
            compute it, on the CPU, and in fp32 and fp64 elsewhere.

    Returns:
        [1, H, tokens, Dv], in the autocast type where autocast is on, as scaled_dot_product_attention gives it.

    Raises:
        RunError: no ring, a shape that does not fit the ring, or a call inside backward without an explicit ring.
    """
    spec = AttentionSpec(q.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    if torch.compiler.is_compiling():
        return _attend_compiled(q, k, v, ring, spec, sinks)
    stage = attention_stage.get()
    if stage is None:
        return _attend(q, k, v, ring, spec, sinks)
    return stage.attend(lambda: _attend(q, k, v, ring, spec, sinks))


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    if ring is None:
        if runs_outside.get():
            return attention_outside(q, k, v, spec, sinks)
        ring = _implicit_ring()
    q, k, v = _autocast(q, k, v)
    _checked_ring(ring, q, k, v, spec.window, sinks).attention_calls += 1
    out: Tensor = RingAttention.apply(q, k, v, sinks, ring, spec)  # type: ignore[no-untyped-call]
    return out


def _checked_ring(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Ring:
    """Return the ring, if it can run and the tensors fit it."""
    if window is not None and window < 1:
        raise RunError(f"attention was given window={window}; a token attends to itself at least, so 1 or more")
    if window is not None and not all(mask.has_windows for mask in ring.layout.masks):
        raise RunError(
            f"{ring.place}: attention in windows of {window} tokens is for sequences in the order of their tokens, but "
            "some of the micro-batch have masks of chunk pairs; train them with a model without windows"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise RunError(
            f"sinks of shape {tuple(sinks.shape)} do not fit the {q.shape[1]} query heads: give one for each"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise RunError(f"q, k and v have different types: {q.dtype}, {k.dtype}, {v.dtype}")
    ring.check_shapes(q, k, v)
    begin_forward(ring, q.shape[2])
    return ring


def begin_forward(ring: Ring, tokens: int) -> None:
    """Count a forward of a layer that mixes tokens; raise RunError where it must not run.

    Args:
        ring: of the micro-batch.
        tokens: that the layer was called with, padding included.
    """
    if ring.backward_forbidden:  # recomputed in a backward that would only then find out, with hops under way
        raise RunError(ring.backward_forbidden)
    if torch._C._current_graph_task_id() == -1:  # else it is computed again inside backward
        ring.forward_calls += 1
        _require_expected(ring, ring.forward_calls, ring.most_forwards, "forward")
    elif ring.begin_pass is not None:
        ring.begin_pass("recomputed forward", ring.attention_calls)
    if ring.model_tokens not in (None, tokens):
        raise RunError(
            f"{ring.place}: the model was called with {tokens} tokens, but its shard of the micro-batch has "
            f"{ring.model_tokens}: give it the micro-batch's own, and evaluate or generate in 'with fcp.outside():'"
        )


class RingAttention(torch.autograd.Function):
    """`attention` as an autograd node.

    The node keeps its ring: by the time backward runs, another micro-batch may be the current one.
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
        own = (_pack(q, ring.tokens), _pack(k, ring.tokens), _pack(v, ring.tokens))
        out, kept = drive(group_forward(ring, *own, spec, sinks))
        ctx.ring, ctx.spec, ctx.padded, ctx.kv_heads = ring, spec, q.shape[2], k.shape[1]
        ctx.save_for_backward(*kept, sinks)
        return _unpack(out, q.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        begin_backward(ctx.ring)
        *kept, sinks = ctx.saved_tensors
        packed = _pack(grad_out, ctx.ring.tokens)
        grads = drive(group_backward(ctx.ring, packed, SavedForBackward(*kept), ctx.spec, sinks, kv_heads=ctx.kv_heads))
        return *(_unpack(grad, ctx.padded) for grad in grads[:3]), grads.sinks, None, None


def begin_backward(ring: Ring) -> None:
    """Count a backward; raise RunError where it must not run."""
    if ring.backward_forbidden or ring.loss_missing:
        raise RunError(ring.backward_forbidden or ring.loss_missing)
    ring.backward_calls += 1
    _require_expected(ring, ring.backward_calls, ring.most_backwards, "backward")


def _require_expected(ring: Ring, calls: int, most: int, what: str) -> None:
    """Raise RunError if a rank runs a pass more often than on rings before: the other members would not answer."""
    if most and calls > most and ring.degree > 1:
        raise RunError(
            f"{ring.place}: the {what} of attention runs more often than in the micro-batches before ({most} times), "
            "and the other ranks of its ring may not run it: run the model equally often in each micro-batch on every "
            "rank, and what only some need in 'with fcp.outside():'"
        )
    if ring.begin_pass is not None:
        ring.begin_pass(what, calls)


_CURRENT = torch.tensor(
    -1, device="cpu"
)  # the handle that stands for the ring which is current when a compiled graph runs


def _attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Do what `attention` does, for a trace by torch.compile, which must look neither into a ring nor into its hops.

    The ring is given by its handle, a tensor, so that a graph serves all rings. A ring lives as long as its step.
    """
    q, k, v = _autocast(q, k, v)
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
    """Return the output like q, lse [padded, H], and the handle of the ring that it ran on."""
    number = int(handle)
    ring = _checked_ring(_implicit_ring() if number < 0 else _ring_of(number), q, k, v, window, sinks)
    ring.attention_calls += 1
    tokens, padded = ring.tokens, q.shape[2]
    own = (_pack(q, tokens), _pack(k, tokens), _pack(v, tokens))
    out, kept = drive(group_forward(ring, *own, AttentionSpec(scale, window, softcap), sinks))
    full_lse = kept.lse.new_zeros(padded, q.shape[1])
    full_lse[:tokens] = drive(lse_of_tokens(ring, kept, heads=q.shape[1]))
    return _unpack(out.contiguous(), padded), full_lse, ring.handle.clone()


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
    """Return the gradients of q, k, v and sinks, that of sinks empty where there are none."""
    ring = _ring_of(int(handle))
    begin_backward(ring)
    tokens = ring.tokens
    own = SavedForBackward(_pack(q, tokens), _pack(k, tokens), _pack(v, tokens), _pack(out, tokens), lse[:tokens])
    # What a graph keeps has sizes of its own; those of what a set exchanges follow from the ring.
    kept, grad = drive(exchanged_again(ring, own)), _pack(grad_out, tokens)
    spec = AttentionSpec(scale, window, softcap)
    grads = drive(group_backward(ring, grad, kept, spec, sinks, kv_heads=k.shape[1]))
    dq, dk, dv = (_unpack(grad.contiguous(), q.shape[2]) for grad in grads[:3])
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
    """Return an empty [1, H, padded, D] that lies in memory as `_unpack` returns what is contiguous.

    Kernels may answer in the order of what they are given: rotations of a part of each head put heads first.
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


def _ring_of(number: int) -> Ring:
    ring = _rings.get(number)
    if ring is None:
        raise RunError("backward of a compiled model ran after its step had ended, and its ring with it")
    return ring


def _pack(batched: Tensor, tokens: int) -> Tensor:
    """View [1, H, padded, D] as [tokens, H, D], last dimension contiguous as the kernels want it."""
    packed = batched[0].transpose(0, 1)[:tokens]
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _unpack(packed: Tensor, padded: int) -> Tensor:
    """Turn [tokens, H, D] into [1, H, padded, D], zeros in the padding."""
    if packed.shape[0] < padded:
        full = packed.new_zeros(padded, *packed.shape[1:])
        full[: packed.shape[0]] = packed
        packed = full
    return packed.transpose(0, 1).unsqueeze(0)


def _implicit_ring() -> Ring:
    """Return the ring of the current micro-batch, which only a forward may rely on."""
    # Recomputed forwards run inside backward; in a pipeline another micro-batch may be current by then, and attention
    # on its ring would give wrong numbers without a word.
    if torch._C._current_graph_task_id() != -1:
        raise RunError(
            "attention was called inside backward (activation recomputation) without its ring: another micro-batch "
            "may be current by now, so pass ring=microbatch.ring to the attention call"
        )
    ring = current_ring.get()
    if ring is None:
        raise RunError(
            "attention was called outside a micro-batch: pass ring=microbatch.ring, call the model in the loop over a "
            "step, or, to evaluate or generate, in 'with fcp.outside():'"
        )
    return ring


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention of PyTorch, which leaves fp64 alone."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
