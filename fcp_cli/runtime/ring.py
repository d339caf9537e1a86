"""Ring attention over any ranks, any degree and any sequence lengths.

Keys and values travel around the ring, one hop per member, while every member computes with those it holds; partial
results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers"; zig-zag chunks as
in Brandon et al., "Striped Attention", and the ring-flash-attention project). In backward, keys and values travel
again and their gradients travel one hop behind, in fp32, until they are back at their owner.

Of d members, member i holds at hop h the keys and values of member (i - h) mod d:

    hop              0           1           2         ...   d - 1
    member i holds   own         of i-1      of i-2    ...   of i+1
    it sends         own         i-1's       i-2's     ...   nothing (forward), dk and dv (backward)

Shapes. T tokens of this member, H query heads, G key/value heads (H is a multiple of G), D head size, d degree:

    attention        q [1, H, T + padding, D]      k, v [1, G, T + padding, D]
    the two passes   q, out [T, H, D]              k, v [T, G, D]            lse [T, H]
    on the way       [2, T of the source, G, D]: keys and values, or dk and dv, in one message

No rank may wait for a message that another will only send after a message from it. Every member therefore issues, in
the same order, one send to the next and one receive from the previous member as *one* batch, and computes while the
batch is under way. The passes are generators that yield the handle they wait for, so the same code runs over a real
transport and, in one process, as all members in lock step.
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
from fcp_cli.runtime.recompute import attention_stage
from fcp_cli.runtime.ring_member import RingMember
from fcp_cli.runtime.rows import add, merge, take
from fcp_cli.runtime.transport import Handle, Transport, Waits, drive

if TYPE_CHECKING:
    from fcp_cli.runtime.loss import Labels
    from fcp_cli.runtime.visuals import VisualShard


class Ring(RingMember):
    """The group of one micro-batch, as one of its members sees it.

    Attributes:
        transport: carries the hops; None is enough for degree 1.
        visuals: this member's part in the pack's images and videos; None where the pack has none.
        backward_calls: how often the backward of its attention calls ran.
        backward_forbidden: why its backward must not run now, since ranks would wait for each other; "" where it may.
        encoder_calls: how often a vision encoder ran for it.
        labels: of this member's tokens, for a model that computes its loss itself; None where there are none.
    """

    __slots__ = ("backward_calls", "backward_forbidden", "encoder_calls", "labels", "transport", "visuals")

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
        self.backward_forbidden = ""
        self.encoder_calls = 0
        self.labels: Labels | None = None


current_ring: ContextVar[Ring | None] = ContextVar("current_ring", default=None)
"""The ring of the micro-batch whose forward is running; set by the session around it."""


def attention(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring | None = None, scale: float | None = None) -> Tensor:
    """Compute causal attention over the micro-batch's pack, of which each member of the ring holds a shard.

    Collective over the ring's members, and so is its backward. Every sequence attends to itself only.

    Args:
        q: [1, H, tokens, D], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond
            `ring.tokens` are padding: they give zeros and get zero gradients.
        k, v: [1, G, tokens, D]; H is a multiple of G.
        ring: the micro-batch's ring; by default the one in `current_ring`. Pass it where activations are recomputed.
        scale: factor on the scores; 1 / sqrt(D) by default.

    Returns:
        [1, H, tokens, D], in the autocast type where autocast is on, as scaled_dot_product_attention gives it.

    Raises:
        RunError: no ring, a shape that does not fit the ring, or a call inside backward without an explicit ring.
    """
    stage = attention_stage.get()
    if stage is None:
        return _attend(q, k, v, ring, scale)
    return stage.attend(lambda: _attend(q, k, v, ring, scale))


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, scale: float | None) -> Tensor:
    if ring is None:
        ring = _implicit_ring()
    if ring.backward_forbidden:  # recomputed in a backward that would only then find out, with hops under way
        raise RunError(ring.backward_forbidden)
    q, k, v = _autocast(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise RunError(f"q, k and v have different types: {q.dtype}, {k.dtype}, {v.dtype}")
    ring.check_shapes(q, k, v)
    ring.attention_calls += 1
    out: Tensor = RingAttention.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return out


class RingAttention(torch.autograd.Function):
    """`attention` as an autograd node.

    The node keeps its ring: by the time backward runs, another micro-batch may be the current one.
    """

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
        if ctx.ring.backward_forbidden:
            raise RunError(ctx.ring.backward_forbidden)
        ctx.ring.backward_calls += 1
        q, k, v, out, lse = ctx.saved_tensors
        dout, own_q, own_k, own_v = (_pack(tensor, ctx.ring.tokens) for tensor in (grad_out, q, k, v))
        grads = drive(ring_backward(ctx.ring, dout, own_q, own_k, own_v, out, lse, ctx.scale))
        dq, dk, dv = (_unpack(grad, q.shape[2]) for grad in grads)
        return dq, dk, dv, None, None


def ring_forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Waits[tuple[Tensor, Tensor]]:
    """Run the forward of one member; yield the handles it waits for.

    Args:
        ring: the member's view of the group.
        q: [T, H, D], T = ring.tokens.
        k, v: [T, G, D].
        scale: factor on the scores.

    Returns:
        out [T, H, D] in the type of q, and the final lse [T, H] in fp32 (fp64 for fp64).
    """
    kernel = select_kernel(q.device.type, q.dtype)
    if ring.degree == 1:
        return _forward_own(kernel, ring, q, k, v, scale)

    blocks = _Blocks(ring, k, v, k.dtype)
    # The own keys leave first, so that they travel while this member computes with them.
    arrival = blocks.pass_on("kv", 0)
    out, lse = _forward_own(kernel, ring, q, k, v, scale)
    out = out.to(lse.dtype)  # merging in bf16 would round once per hop
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        # Issued before the kernels of this hop: the next keys arrive in the other buffer while they run.
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
    """Run the backward of one member; yield the handles it waits for.

    Args:
        grad_out: [T, H, D].
        ring, q, k, v, scale: as given to `ring_forward`.
        out, lse: as `ring_forward` returned them. They hold the whole row, which makes each hop's share of dq, dk and
            dv exact: shares need only be added.

    Returns:
        (dq [T, H, D], dk [T, G, D], dv [T, G, D]).
    """
    kernel = select_kernel(q.device.type, q.dtype)

    def share_of_own_keys() -> tuple[Tensor, Tensor, Tensor]:
        work = ring.work(0)
        if not work:  # a member without tokens still passes the others' on
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return kernel.backward(grad_out, q, k, v, out, lse, work[0].segments, scale)

    if ring.degree == 1:
        return share_of_own_keys()

    blocks = _Blocks(ring, k, v, k.dtype)
    arrival = blocks.pass_on("kv", 0)
    dq, dk, dv = share_of_own_keys()
    dq = dq.to(lse.dtype)
    # Gradients follow their keys one hop behind: a member adds its share to what the members before it have summed,
    # and after d hops the sum is back at the keys' owner.
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
        # Only now: the sums of the members before this one travelled while the kernels ran.
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
    """Two buffers for pairs [2, T of the source, G, D]: one is sent while the next pair arrives in the other.

    They start with this member's own pair, at hop 0. Two are enough: a member waits for hop h to settle before it
    issues hop h + 1, which fills the buffer that hop h has sent.
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
        """Return the pair that this member holds at `hop`; after the last hop, its own again."""
        tokens = self._ring.layout.tokens(self._ring.source(hop))
        return self._buffers[hop % 2][: 2 * tokens * self._shape.numel()].view(2, tokens, *self._shape)

    def pass_on(self, kind: str, hop: int) -> Handle | None:
        """Send the pair of `hop` to the next member and receive the pair of the hop after.

        An empty pair is not sent: both ends know from the layout, and some back ends cannot send nothing.
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
    """Attend to the member's own keys: the only causal call, and the only one that every row takes part in."""
    work = ring.work(0)
    if not work:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    return kernel.forward(q, k, v, work[0].segments, scale)


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
            "attention was called outside a micro-batch: pass ring=microbatch.ring, or call the model inside the "
            "micro-batch's context"
        )
    return ring


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention of PyTorch, which leaves fp64 alone."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
