"""Ring attention over any ranks, any degree and any sequence lengths.

Keys and values travel around the ring, one hop per member, while every member computes with those it holds; partial
results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers"; zig-zag chunks as
in Brandon et al., "Striped Attention", and the ring-flash-attention project). In backward, keys and values travel
again, and their gradients in the same messages, one hop behind, until they are back at their owner, which adds its own
share.

Of d members, member i holds at hop h the keys and values of member (i - h) mod d:

    hop                   0      1        2               3               ...   d - 1       (end)
    member i holds        own    of i-1   of i-2          of i-3          ...   of i+1
    it sends, forward     own    i-1's    i-2's           i-3's           ...
              backward    own    i-1's    i-2's, d(i-1)   i-3's, d(i-2)   ...   d(i+2)      d(i+1)

where d(j) are the gradients of member j's keys and values, summed over members j+1 to i.

Shapes. T tokens of this member, H query heads, G key/value heads (H is a multiple of G), D head size, d degree:

    attention        q [1, H, T + padding, D]      k, v [1, G, T + padding, D]
    the two passes   q, out [T, H, D]              k, v [T, G, D]            lse [T, H]
    on the way       [2, T of the source, G, D]: keys and values; then dk and dv of another source, in one message

No rank may wait for a message that another will only send after a message from it. Every member therefore issues, in
the same order, one send to the next and one receive from the previous member as *one* batch, and computes while the
batch is under way. The passes are generators that yield the handle they wait for, so the same code runs over a real
transport and, in one process, as all members in lock step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.runtime.grad_ring import GradRingDtype
from fcp_cli.runtime.kernels import AttentionKernel, lse_dtype, select_kernel
from fcp_cli.runtime.layout import Hop, Rows, ShardLayout
from fcp_cli.runtime.recompute import attention_stage
from fcp_cli.runtime.ring_member import RingMember
from fcp_cli.runtime.rows import add, add_pair, merge, take, take_pair, take_with_lse
from fcp_cli.runtime.transport import Handle, Transport, Waits, drive

if TYPE_CHECKING:
    from fcp_cli.runtime.embedding_cache import EmbeddingCache
    from fcp_cli.runtime.encoder_rank import EncoderAhead
    from fcp_cli.runtime.loss import Labels
    from fcp_cli.runtime.visuals import VisualShard


_handles = count()
_rings: WeakValueDictionary[int, Ring] = WeakValueDictionary()


class Ring(RingMember):
    """The group of one micro-batch, as one of its members sees it.

    Attributes:
        transport: carries the hops; None is enough for degree 1.
        visuals: this member's part in the pack's images and videos; None where the pack has none.
        encoder_ahead: encodes on a rank that does nothing else; None on others.
        embedding_cache: keeps what a frozen vision encoder computes for them; None where nothing does.
        grad_dtype: in which gradients of keys and values travel; see `GradRingDtype`.
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
        "grad_dtype",
        "handle",
        "labels",
        "loss_missing",
        "model_tokens",
        "most_backwards",
        "most_forwards",
        "place",
        "transport",
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
        super().__init__(layout, index, ranks)
        assert len(ranks) == 1 or transport is not None, "a ring of several members needs a transport"
        self.transport = transport
        self.visuals = visuals
        self.embedding_cache = embedding_cache
        self.encoder_ahead = encoder_ahead
        self.grad_dtype = grad_dtype
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
    if torch.compiler.is_compiling():
        return _attend_compiled(q, k, v, ring, scale)
    stage = attention_stage.get()
    if stage is None:
        return _attend(q, k, v, ring, scale)
    return stage.attend(lambda: _attend(q, k, v, ring, scale))


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, scale: float | None) -> Tensor:
    if ring is None:
        if runs_outside.get():
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        ring = _implicit_ring()
    q, k, v = _autocast(q, k, v)
    _checked_ring(ring, q, k, v).attention_calls += 1
    out: Tensor = RingAttention.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return out


def _checked_ring(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Ring:
    """Return the ring, if it can run and the tensors fit it."""
    if ring.backward_forbidden:  # recomputed in a backward that would only then find out, with hops under way
        raise RunError(ring.backward_forbidden)
    if not q.dtype == k.dtype == v.dtype:
        raise RunError(f"q, k and v have different types: {q.dtype}, {k.dtype}, {v.dtype}")
    ring.check_shapes(q, k, v)
    if torch._C._current_graph_task_id() == -1:  # else it is computed again inside backward
        ring.forward_calls += 1
        _require_expected(ring, ring.forward_calls, ring.most_forwards, "forward")
    elif ring.begin_pass is not None:
        ring.begin_pass("recomputed forward", ring.attention_calls)
    if ring.model_tokens not in (None, q.shape[2]):
        raise RunError(
            f"{ring.place}: the model was called with {q.shape[2]} tokens, but its shard of the micro-batch has "
            f"{ring.model_tokens}: give it the micro-batch's own, and evaluate or generate in 'with fcp.outside():'"
        )
    return ring


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
        q, k, v, out, lse = ctx.saved_tensors
        packed = [_pack(tensor, ctx.ring.tokens) for tensor in (grad_out, q, k, v)]
        return *_backward(ctx.ring, [*packed, out], lse, ctx.scale, q.shape[2]), None, None


def _backward(
    ring: Ring, packed: list[Tensor], lse: Tensor, scale: float, padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward, given the packed gradient of out, q, k, v and out; return gradients [1, .., padded, D]."""
    if ring.backward_forbidden or ring.loss_missing:
        raise RunError(ring.backward_forbidden or ring.loss_missing)
    ring.backward_calls += 1
    _require_expected(ring, ring.backward_calls, ring.most_backwards, "backward")
    grad_out, q, k, v, out = packed
    dq, dk, dv = drive(ring_backward(ring, grad_out, q, k, v, out, lse, scale))
    return _unpack(dq, padded), _unpack(dk, padded), _unpack(dv, padded)


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


def _attend_compiled(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, scale: float | None) -> Tensor:
    """Do what `attention` does, for a trace by torch.compile, which must look neither into a ring nor into its hops.

    The ring is given by its handle, a tensor, so that a graph serves all rings. A ring lives as long as its step.
    """
    q, k, v = _autocast(q, k, v)
    handle = _CURRENT if ring is None else ring.handle
    out: Tensor = _attention_operator(q, k, v, handle, q.shape[-1] ** -0.5 if scale is None else scale)[0]
    return out


@torch.library.custom_op("fcp::attention", mutates_args=())
def _attention_operator(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output like q, lse [padded, H], and the handle of the ring that it ran on."""
    number = int(handle)
    ring = _checked_ring(_implicit_ring() if number < 0 else _ring_of(number), q, k, v)
    ring.attention_calls += 1
    tokens, padded = ring.tokens, q.shape[2]
    out, lse = drive(ring_forward(ring, _pack(q, tokens), _pack(k, tokens), _pack(v, tokens), scale))
    full_lse = lse.new_zeros(padded, q.shape[1])
    full_lse[:tokens] = lse
    return _unpack(out, padded), full_lse, ring.handle.clone()


@torch.library.custom_op("fcp::attention_backward", mutates_args=())
def _attention_backward_operator(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _ring_of(int(handle))
    packed = [_pack(tensor, ring.tokens) for tensor in (grad_out, q, k, v, out)]
    return _backward(ring, packed, lse[: ring.tokens], scale, q.shape[2])


@_attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    _, heads, padded, _ = q.shape
    return _like_packed(q), q.new_empty(padded, heads, dtype=lse_dtype(q.dtype)), torch.empty_like(handle)


@_attention_backward_operator.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_packed(q), _like_packed(k), _like_packed(v)


def _like_packed(batched: Tensor) -> Tensor:
    """Return an empty [1, H, padded, D] that lies in memory as what `_unpack` returns."""
    _, heads, padded, head_dim = batched.shape
    return batched.new_empty(padded, heads, head_dim).transpose(0, 1).unsqueeze(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, handle = ctx.saved_tensors
    dq, dk, dv = _attention_backward_operator(grad_out, q, k, v, out, lse, handle, ctx.scale)
    return dq, dk, dv, None, None


_attention_operator.register_autograd(_differentiate, setup_context=_keep)


def _ring_of(number: int) -> Ring:
    ring = _rings.get(number)
    if ring is None:
        raise RunError("backward of a compiled model ran after its step had ended, and its ring with it")
    return ring


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

    messages = _Messages(ring, k, v)
    # The own keys leave first, so that they travel while this member computes with them.
    arrival = messages.pass_on(0)
    out, lse = _forward_own(kernel, ring, q, k, v, scale)
    sums, queries = _Sums(ring, out, lse.dtype), _Gathered(q)
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        # Issued before the kernels of this hop: the next keys arrive in the other buffer while they run.
        arrival = messages.pass_on(hop)
        keys, places = messages.keys(hop), sums.places(hop)
        for work in ring.work(hop, packed=kernel.packed):
            (rows,) = queries.at(work.q_rows)
            part, part_lse = kernel.forward(rows, *take_pair(keys, work.k_rows), work.segments, scale)
            merge(*places, lse, work.q_rows, part, part_lse)
    return out, lse


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

    messages = _Messages(ring, k, v, lse.dtype if ring.grad_dtype == "fp32" else k.dtype)
    arrival = messages.pass_on(0)
    dq, dk, dv = share_of_own_keys()
    sums, own_rows = _Sums(ring, dq, lse.dtype), _Gathered(grad_out, q, out, lse)
    shares: list[tuple[Hop, Tensor, Tensor]] = []  # of the hop before
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        messages.add(hop - 1, shares)
        arrival = messages.pass_on(hop)
        shares, keys, places = [], messages.keys(hop), sums.places(hop)
        for work in ring.work(hop, packed=kernel.packed):
            dos, qs, outs, lses = own_rows.at(work.q_rows)
            ks, vs = take_pair(keys, work.k_rows)
            dq_share, dk_share, dv_share = kernel.backward(dos, qs, ks, vs, outs, lses, work.segments, scale)
            add(*places, work.q_rows, dq_share)
            shares.append((work, dk_share, dv_share))
    yield from _settle(arrival)
    messages.add(ring.degree - 1, shares)
    yield from _settle(messages.pass_on(ring.degree))
    for own, arrived in zip((dk, dv), messages.gradients(ring.degree), strict=True):
        own.add_(arrived)  # summed in the wider type, and rounded once
    return dq, dk, dv


class _Messages:
    """What travels around the ring, in two buffers: one is sent while the next message arrives in the other.

    Message h, which a member sends at hop h, is the keys and values that it holds at that hop and, behind them in the
    same memory, the sums for the gradients of those of the hop before. Both belong to members that the next one meets
    at its next hop and at that hop, so what has arrived is changed in place and sent on as it is. Keys are not sent
    home, and sums begin at hop 1: their owner adds its own share in the end.

    Two buffers are enough: a member waits for message h - 1 to settle before it issues message h, while the next one
    arrives in the buffer that message h - 1 was sent from.
    """

    __slots__ = ("_buffers", "_grad_dtype", "_ring", "_shape")

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, grad_dtype: torch.dtype | None = None) -> None:
        """Start with the member's own pair; without `grad_dtype` gradients do not travel."""
        self._ring = ring
        self._shape = k.shape[1:]
        self._grad_dtype = grad_dtype
        size = self._numel(ring.layout.most_tokens)
        if grad_dtype is not None:
            size += size * grad_dtype.itemsize // k.dtype.itemsize
        # Elements of the keys' type, whatever they hold: gradients are read through a view.
        self._buffers = (k.new_empty(size), k.new_empty(size))
        own = self.keys(0)
        own[0].copy_(k)
        own[1].copy_(v)

    def keys(self, hop: int) -> Tensor:
        """Return [2, tokens, G, D] the keys and values that this member holds at `hop`."""
        tokens = self._tokens(hop)
        return self._buffers[hop % 2][: self._numel(tokens)].view(2, tokens, *self._shape)

    def gradients(self, hop: int) -> Tensor:
        """Return [2, tokens, G, D] the sums for the pair of `hop`, which are in the message after."""
        assert self._grad_dtype is not None
        start, stop = self._span(hop + 1)[1:]
        tokens = self._tokens(hop)
        return self._buffers[(hop + 1) % 2][start:stop].view(self._grad_dtype).view(2, tokens, *self._shape)

    def add(self, hop: int, shares: Sequence[tuple[Hop, Tensor, Tensor]]) -> None:
        """Add a member's own shares to the sums for the pair of `hop`; the first member begins them."""
        if hop == 0:
            return
        sums = self.gradients(hop)
        if hop == 1:
            sums.zero_()
        for work, dk, dv in shares:
            add_pair(sums, work.k_rows, dk, dv)

    def pass_on(self, hop: int) -> Handle | None:
        """Send message `hop` to the next member and receive the next one; None where both are empty.

        An empty message is not sent: both ends know from the layout, and some back ends cannot send nothing.
        """
        ring = self._ring
        has_keys, has_gradients = hop + 1 < ring.degree, self._grad_dtype is not None and hop > 1
        kind = "+".join(kind for kind, travels in (("kv", has_keys), ("dkv", has_gradients)) if travels)
        send, receive = (self._part(hop + i, has_keys, has_gradients) for i in (0, 1))
        if not send.numel() and not receive.numel():
            return None
        assert ring.transport is not None
        return ring.transport.start(
            kind,
            send if send.numel() else None,
            ring.ranks[(ring.index + 1) % ring.degree],
            receive if receive.numel() else None,
            ring.ranks[ring.index - 1],
        )

    def _part(self, message: int, has_keys: bool, has_gradients: bool) -> Tensor:
        """Return the part of a message that travels; it is flat, and in the type of the keys."""
        start, middle, stop = self._span(message)
        return self._buffers[message % 2][start if has_keys else middle : stop if has_gradients else middle]

    def _span(self, message: int) -> tuple[int, int, int]:
        """Return where the keys of a message start, where its gradients do, and where these stop, in elements."""
        middle = self._numel(self._tokens(message))
        if self._grad_dtype is None or not message:
            return 0, middle, middle
        size = self._numel(self._tokens(message - 1)) * self._grad_dtype.itemsize // self._buffers[0].dtype.itemsize
        return 0, middle, middle + size

    def _tokens(self, hop: int) -> int:
        return self._ring.layout.tokens(self._ring.source(hop))

    def _numel(self, tokens: int) -> int:
        return 2 * tokens * self._shape.numel()


class _Sums:
    """Results of a member's own rows while shares of further hops are folded in; they are in `result` in the end.

    Folding in bf16 would round once per hop, so 16-bit results are folded in the type of lse. The first fold reads
    `result`, and the last one that a row takes part in writes it, so that nothing is converted on its own. Rows that
    take part in a hop take part in all hops before it: those of earlier members come first, which meet all rows, then
    those of later ones, which meet the backs.
    """

    __slots__ = ("_precise", "_result", "_ring")

    def __init__(self, ring: Ring, result: Tensor, dtype: torch.dtype) -> None:
        self._ring, self._result = ring, result
        needs_precise = result.dtype != dtype and ring.degree > 2
        self._precise = result.new_empty(result.shape, dtype=dtype) if needs_precise else result

    def places(self, hop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what a fold of `hop` reads, what it writes, and what it writes beside that."""
        source = self._result if hop == 1 else self._precise
        if hop == self._ring.degree - 1:
            return source, self._result, None
        is_last_of_fronts = hop == self._ring.index and self._precise is not self._result
        return source, self._precise, self._result if is_last_of_fronts else None


class _Gathered:
    """Rows of a member's own tensors. All hops of later members meet the same rows, which are gathered once."""

    __slots__ = ("_rows", "_taken", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._rows: Rows | None = None
        self._taken: tuple[Tensor, ...] = ()

    def at(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the rows of every tensor."""
        if rows.span is not None or rows is not self._rows:
            self._taken = self._take(rows)
            self._rows = rows
        return self._taken

    def _take(self, rows: Rows) -> tuple[Tensor, ...]:
        if len(self._tensors) == 1:
            return (take(self._tensors[0], rows),)
        first, second, third, lse = self._tensors
        return take_with_lse((first, second, third), lse, rows)


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
