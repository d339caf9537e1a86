"""Ring attention over any ranks, any degree and any sequence lengths.

Keys and values travel around the ring, one hop per member, while every member computes with those it holds; partial
results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers"; zig-zag chunks as
in Brandon et al., "Striped Attention", and the ring-flash-attention project). In backward, keys and values travel
again and their gradients travel one hop behind, in fp32, until they arrive at home.

The two passes are generators that yield where they wait, so the same code runs over a real transport and, in one
process, as all members in lock step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels import AttentionKernel, lse_dtype, select_kernel
from fcp_cli.runtime.layout import ShardLayout
from fcp_cli.runtime.ring_member import RingMember
from fcp_cli.runtime.rows import add, merge, take
from fcp_cli.runtime.transport import Handle, Transport, Waits, drive

if TYPE_CHECKING:
    from fcp_cli.runtime.visuals import VisualShard


class Ring(RingMember):
    """The group of one micro-batch, as one of its members sees it.

    Attributes:
        transport: carries the hops; None is enough for degree 1.
        visuals: this member's part in the pack's images and videos; None where the pack has none.
        backward_calls: how often the backward of its attention calls ran.
        not_yet: why its backward must not run now, since ranks would wait for each other; "" where it may.
        encoder_calls: how often a vision encoder ran for it.
    """

    __slots__ = ("backward_calls", "encoder_calls", "not_yet", "transport", "visuals")

    def __init__(
        self,
        layout: ShardLayout,
        index: int = 0,
        ranks: tuple[int, ...] = (0,),
        transport: Transport | None = None,
        visuals: VisualShard | None = None,
    ) -> None:
        super().__init__(layout, index, ranks)
        assert len(ranks) == 1 or transport is not None, "a ring of several members needs a transport"
        self.transport = transport
        self.visuals = visuals
        self.backward_calls = 0
        self.not_yet = ""
        self.encoder_calls = 0


current_ring: ContextVar[Ring | None] = ContextVar("current_ring", default=None)
"""The ring of the micro-batch whose forward is running; set by the session around it."""


def attention(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring | None = None, scale: float | None = None) -> Tensor:
    """Causal attention over the micro-batch's pack, of which each member of the ring holds a shard.

    Collective over the ring's members, and so is its backward. Every sequence attends to itself only.

    Args:
        q: [1, heads, tokens, head_dim], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond
            `ring.tokens` are padding: they give zeros and get zero gradients.
        k, v: [1, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads.
        ring: the micro-batch's ring; by default the one in `current_ring`. Pass it where activations are recomputed.
        scale: factor on the scores; 1 / sqrt(head_dim) by default.

    Returns:
        As q. Computed in the autocast type where autocast is on, as scaled_dot_product_attention is.

    Raises:
        RunError: no ring, a shape that does not fit the ring, or a call inside backward without an explicit ring.
    """
    if ring is None:
        ring = _implicit_ring()
    q, k, v = _autocast(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise RunError(f"q, k and v have different types: {q.dtype}, {k.dtype}, {v.dtype}")
    ring.check_shapes(q, k, v)
    ring.attention_calls += 1
    out: Tensor = RingAttention.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return out


class RingAttention(torch.autograd.Function):
    """`attention` as an autograd node. The ring is kept in the node: backward never asks what the current ring is."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float) -> Tensor:
        tokens = ring.tokens
        out, lse = drive(ring_forward(ring, _pack(q, tokens), _pack(k, tokens), _pack(v, tokens), scale))
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return _unpack(out, q.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ring.not_yet:
            raise RunError(ctx.ring.not_yet)
        ctx.ring.backward_calls += 1
        q, k, v, out, lse = ctx.saved_tensors
        tokens, padded = ctx.ring.tokens, q.shape[2]
        grads = drive(
            ring_backward(
                ctx.ring,
                _pack(grad_out, tokens),
                _pack(q, tokens),
                _pack(k, tokens),
                _pack(v, tokens),
                out,
                lse,
                ctx.scale,
            )
        )
        dq, dk, dv = (_unpack(grad, padded) for grad in grads)
        return dq, dk, dv, None, None


def ring_forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Waits[tuple[Tensor, Tensor]]:
    """Forward of one member; yields what it waits for.

    Args:
        ring: the member's view of the group.
        q: [ring.tokens, heads, head_dim].
        k, v: [ring.tokens, kv_heads, head_dim].
        scale: factor on the scores.

    Returns:
        out, as q, and the final lse [ring.tokens, heads] in fp32 (fp64 for fp64).
    """
    kernel = select_kernel(q.device.type, q.dtype)
    if ring.degree == 1:
        return _forward_own(kernel, ring, q, k, v, scale)

    blocks = _Blocks(ring, k, v, k.dtype)
    arrival = blocks.pass_on("kv", 0)
    out, lse = _forward_own(kernel, ring, q, k, v, scale)
    out = out.to(lse.dtype)
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        arrival = blocks.pass_on("kv", hop) if hop + 1 < ring.degree else None
        keys, values = blocks.at(hop)
        for work in ring.work(hop, packed=kernel.packed):
            ks, vs = (take(tensor, work.k_rows) for tensor in (keys, values))
            part, part_lse = kernel.forward(take(q, work.q_rows), ks, vs, work.segments, scale)
            merge(out, lse, work.q_rows, part, part_lse)
    return out.to(q.dtype), lse


def ring_backward(
    ring: Ring, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Waits[tuple[Tensor, Tensor, Tensor]]:
    """Backward of one member; yields what it waits for.

    Args:
        grad_out: [ring.tokens, heads, head_dim].
        ring, q, k, v, scale: as given to `ring_forward`.
        out, lse: as it returned them.

    Returns:
        (dq, dk, dv), as q, k and v.
    """
    kernel = select_kernel(q.device.type, q.dtype)
    if ring.degree == 1:
        return _backward_own(kernel, ring, grad_out, q, k, v, out, lse, scale)

    blocks = _Blocks(ring, k, v, k.dtype)
    arrival = blocks.pass_on("kv", 0)
    dq, dk, dv = _backward_own(kernel, ring, grad_out, q, k, v, out, lse, scale)
    dq = dq.to(lse.dtype)
    grads = _Blocks(ring, dk, dv, lse.dtype)
    grad_arrival = grads.pass_on("dkv", 0)
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        arrival = blocks.pass_on("kv", hop) if hop + 1 < ring.degree else None
        works, shares = ring.work(hop, packed=kernel.packed), []
        keys, values = blocks.at(hop)
        for work in works:
            dos, qs, outs, lses = (take(tensor, work.q_rows) for tensor in (grad_out, q, out, lse))
            ks, vs = (take(tensor, work.k_rows) for tensor in (keys, values))
            shares.append(kernel.backward(dos, qs, ks, vs, outs, lses, work.segments, scale))
        # What the members before this one have summed for the same block.
        yield from _settle(grad_arrival)
        dk, dv = grads.at(hop)
        for work, (dq_share, dk_share, dv_share) in zip(works, shares, strict=True):
            add(dq, work.q_rows, dq_share)
            add(dk, work.k_rows, dk_share)
            add(dv, work.k_rows, dv_share)
        grad_arrival = grads.pass_on("dkv", hop)
    yield from _settle(grad_arrival)
    dk, dv = grads.at(ring.degree)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Blocks:
    """Two buffers for pairs [2, tokens, kv_heads, head_dim]: one is sent while the next pair arrives in the other.

    Starts with this member's own pair, at hop 0.
    """

    __slots__ = ("_buffers", "_ring", "_shape")

    def __init__(self, ring: Ring, first: Tensor, second: Tensor, dtype: torch.dtype) -> None:
        self._ring = ring
        self._shape = first.shape[1:]
        size = 2 * ring.layout.most_tokens * self._shape.numel()
        self._buffers = (first.new_empty(size, dtype=dtype), first.new_empty(size, dtype=dtype))
        own = self.at(0)
        own[0].copy_(first)
        own[1].copy_(second)

    def at(self, hop: int) -> Tensor:
        """The pair that this member holds at `hop`; after the last hop, its own again."""
        tokens = self._ring.layout.tokens(self._ring.source(hop))
        return self._buffers[hop % 2][: 2 * tokens * self._shape.numel()].view(2, tokens, *self._shape)

    def pass_on(self, kind: str, hop: int) -> Handle | None:
        """Send the pair of `hop` to the next member and receive the pair of the hop after.

        An empty pair is not sent; both ends know from the layout.
        """
        send, receive = self.at(hop), self.at(hop + 1)
        if not send.numel() and not receive.numel():
            return None
        ring = self._ring
        assert ring.transport is not None
        return ring.transport.start(
            kind,
            send if send.numel() else None,
            ring.ranks[(ring.index + 1) % ring.degree],
            receive if receive.numel() else None,
            ring.ranks[ring.index - 1],
        )


def _settle(handle: Handle | None) -> Generator[Handle, None, None]:
    if handle is not None:
        yield handle


def _forward_own(
    kernel: AttentionKernel, ring: Ring, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the member's own keys: the only causal call, and the only one that every row takes part in."""
    work = ring.work(0)
    if not work:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    return kernel.forward(q, k, v, work[0].segments, scale)


def _backward_own(
    kernel: AttentionKernel,
    ring: Ring,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    work = ring.work(0)
    if not work:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return kernel.backward(grad_out, q, k, v, out, lse, work[0].segments, scale)


def _pack(batched: Tensor, tokens: int) -> Tensor:
    """[1, heads, padded, head_dim] -> view [tokens, heads, head_dim], last dimension contiguous."""
    packed = batched[0].transpose(0, 1)[:tokens]
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _unpack(packed: Tensor, padded: int) -> Tensor:
    """[tokens, heads, head_dim] -> [1, heads, padded, head_dim], zeros in the padding."""
    if packed.shape[0] < padded:
        full = packed.new_zeros(padded, *packed.shape[1:])
        full[: packed.shape[0]] = packed
        packed = full
    return packed.transpose(0, 1).unsqueeze(0)


def _implicit_ring() -> Ring:
    if torch._C._current_graph_task_id() != -1:
        raise RunError(
            "attention was called inside backward (activation recomputation) without its ring: another micro-batch "
            "may be current by now, so pass ring=microbatch.ring to the attention call"
        )
    ring = current_ring.get()
    if ring is None:
        raise RunError(
            "attention was called outside a micro-batch: pass ring=microbatch.ring, or call the model inside the "
            "micro-batch's context"
        )
    return ring


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
