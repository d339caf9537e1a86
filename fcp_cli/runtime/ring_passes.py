"""Forward and backward of attention around a ring: the calls and messages of each member, hop by hop.

Keys and values travel around the ring, one hop per member, while every member attends to those it holds. Partial
results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers"; zig-zag chunks as in
Brandon et al., "Striped Attention", and the ring-flash-attention project). In backward, keys and values travel again.
Their gradients follow in the same messages, one hop behind, until they reach their owner, which adds its own share.

Of d members, member i holds at hop h the keys and values of member (i - h) mod d. Forward runs hops 0 to d - 1, and
backward hops 1 to d:

    hop                   0      1        2               3               ...   d - 1            d
    member i holds        own    of i-1   of i-2          of i-3          ...   of i+1           own
    it sends, forward     own    i-1's    i-2's           i-3's           ...
              backward           i-1's    i-2's, d(i-1)   i-3's, d(i-2)   ...   i+1's, d(i+2)    d(i+1)

d(j) denotes the gradients of member j's keys and values, summed over members j+1 to i. A member saves the pair that it
received first, of member i-1, and not its own, which comes around the ring. So backward ends with its own pair, and the
last message, gradients on their way home, is in flight while a kernel runs, like all others.

To avoid deadlock, every member issues one send to the next and one receive from the previous member as *one* batch, in
the same order on all members, and computes while the batch is in flight. The passes are generators that yield the
handle to wait for, so the same code runs over a real transport and, in one process, as all members in lockstep.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from fcp_cli.runtime.kernels import AttentionKernel, capped_kernel, lse_dtype, select_kernel
from fcp_cli.runtime.kernels.select import ChosenKernel, SparingKernel
from fcp_cli.runtime.layout import Hop, Rows
from fcp_cli.runtime.ring import AttentionSpec, Ring, SavedForBackward
from fcp_cli.runtime.rows import Pair, add, add_pair, merge, put, take, take_pair, take_with_lse
from fcp_cli.runtime.transport import Handle, Waits


def ring_forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Waits[SavedForBackward]:
    """Run the forward of one member; yield the handles to wait for.

    Args:
        ring: the member's view of a ring.
        q: [T, H, D], T = ring.tokens.
        k, v: [T, G, D] and [T, G, Dv].
        spec: settings of the layer's attention, without a window.

    Returns:
        q, the keys and values of the previous member (at degree 1 the member's own), out in the type of q, and the
        final lse in fp32 (fp64 for fp64).
    """
    kernel, scale = kernel_of(ring, q, spec), spec.scale
    if ring.degree == 1:
        out, lse = _forward_own(kernel, ring, q, k, v, scale)
        return SavedForBackward(q, k, v, out.to(q.dtype), lse)

    messages = _Messages(ring, k, v)
    # Send the own keys first, so that they travel while this member attends to them.
    arrival = messages.pass_on(0)
    out, lse = _forward_own(kernel, ring, q, k, v, scale)
    outputs, queries = _Outputs(ring, out, lse.dtype), _Gathered(q)
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        # Issue before this hop's kernels, so that the next keys arrive in the other buffer while they run.
        arrival = messages.pass_on(hop)
        keys, places = messages.keys(hop), outputs.places(hop)
        for work in ring.work(hop, packed=kernel.packed):
            (rows,) = queries.at(work.q_rows)
            part, part_lse = kernel.forward(rows, *take_pair(keys, work.k_rows), work.segments, scale)
            merge(*places, lse, work.q_rows, part, part_lse)
    messages.give_back()
    k, v = messages.keys(1)
    return SavedForBackward(q, k, v, out.to(q.dtype), lse)


def ring_backward(
    ring: Ring,
    grad_out: Tensor,
    kept: SavedForBackward,
    spec: AttentionSpec,
) -> Waits[tuple[Tensor, Tensor, Tensor]]:
    """Run the backward of one member; yield the handles to wait for.

    Args:
        grad_out: [T, H, Dv].
        ring, spec: as given to `ring_forward`.
        kept: as returned by `ring_forward`. As out and lse cover whole rows, each hop's dq, dk and dv are exact shares
            that only need to be added.

    Returns:
        (dq [T, H, D], dk [T, G, D], dv [T, G, Dv]).
    """
    q, k, v, out, lse = kept
    kernel, scale = kernel_of(ring, q, spec), spec.scale
    if ring.degree == 1:
        dq, dk, dv = _backward_own(kernel, ring, grad_out, kept, scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    messages = _Messages(ring, k, v, lse.dtype if ring.grad_dtype == "fp32" else k.dtype)
    sum_of_dq, own_rows = _QueryGradients(q, lse.dtype), _Gathered(grad_out, q, out, lse)
    arrival: Handle | None = None
    shares: list[tuple[Hop, Tensor, Tensor]] = []  # of the previous hop
    for hop in range(1, ring.degree):
        yield from _settle(arrival)
        # Before message `hop` leaves, since it carries the gradient sums for the pair of hop - 1.
        messages.add(hop - 1, shares)
        arrival = messages.pass_on(hop)
        shares, keys = [], messages.keys(hop)
        for work in ring.work(hop, packed=kernel.packed):
            dos, qs, outs, lses = own_rows.at(work.q_rows)
            ks, vs = take_pair(keys, work.k_rows)
            dq_share, dk_share, dv_share = kernel.backward(dos, qs, ks, vs, outs, lses, work.segments, scale)
            sum_of_dq.add(work.q_rows, dq_share)
            shares.append((work, dk_share, dv_share))
    yield from _settle(arrival)
    messages.add(ring.degree - 1, shares)
    del shares, own_rows  # not needed by the own pair's call, which has all rows
    # Gradients only, home to their owner, while this member attends to its own pair.
    arrival = messages.pass_on(ring.degree)
    k, v = messages.keys(ring.degree)
    dq, dk, dv = _backward_own(kernel, ring, grad_out, SavedForBackward(q, k, v, out, lse), scale)
    dq = sum_of_dq.total(dq)
    yield from _settle(arrival)
    for own, arrived in zip((dk, dv), messages.gradients(ring.degree), strict=True):
        own.add_(arrived)  # summed in the wider type, and rounded once
    messages.give_back()
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def first_hop(ring: Ring, k: Tensor, v: Tensor) -> Waits[tuple[Tensor, Tensor]]:
    """Return the keys and values that `ring_forward` saves, which no kernel hides; yield the handles to wait for.

    For a backward that has saved the member's own.
    """
    if ring.degree == 1:
        return k, v
    messages = _Messages(ring, k, v)
    yield from _settle(messages.pass_on(0))
    messages.give_back()
    first, second = messages.keys(1)
    return first, second


def kernel_of(ring: Ring, q: Tensor, spec: AttentionSpec) -> AttentionKernel:
    """Return the attention kernel for a layer's settings and the device and type of its queries."""
    if spec.softcap is None:
        kernel = select_kernel(q.device.type, q.dtype)
        return SparingKernel(kernel) if ring.degree > 1 and isinstance(kernel, ChosenKernel) else kernel
    return capped_kernel(q.device.type, q.dtype, spec.softcap)


class _Messages:
    """Messages of a pass in two buffers: one is sent while the next message arrives in the other.

    Message h, which a member sends at hop h, holds the keys and values of that hop, followed in memory by the gradient
    sums for those of hop h - 1. The next member needs both at its next hop, so a message is updated in place and sent
    on. Sums start at hop 1, since their owner adds its own share at the end.

    Keys come first, then values, whose heads may have another size: separate blocks need no padding. If the sizes are
    equal, the two blocks are one [2, tokens, G, D].

    Two buffers are enough: a member waits for message h - 1 to complete before it issues message h, and message h + 1
    arrives in the buffer that message h - 1 was sent from. The rank's pool lends them until `give_back`. Message 1 of a
    forward is saved for backward, so it has memory of its own.
    """

    __slots__ = ("_buffers", "_grad_dtype", "_last_keys", "_lent", "_ring", "_saved", "_shapes")

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, grad_dtype: torch.dtype | None = None) -> None:
        """Copy the first pair into the first message.

        Args:
            ring: the member's view of a ring.
            k, v: of the member itself in forward, of the previous member in backward.
            grad_dtype: data type in which backward sends gradients; None in forward, which sends none.
        """
        self._ring = ring
        self._shapes = k.shape[1:], v.shape[1:]
        self._grad_dtype = grad_dtype
        first = 0 if grad_dtype is None else 1
        self._last_keys = ring.degree - 1 + first  # hop in which a pass needs its last pair
        # Every member's pair passes through, so the buffers must fit the largest.
        size = self._numel(ring.layout.most_tokens)
        if grad_dtype is not None:
            size += size * grad_dtype.itemsize // k.dtype.itemsize
        # Buffers have the keys' data type; gradients are accessed through a view.
        num_bytes = size * k.dtype.itemsize
        self._lent = [ring.context.buffers.lend(num_bytes, k.device) for _ in range(2)]
        self._buffers = tuple(buffer[:num_bytes].view(k.dtype) for buffer in self._lent)
        self._saved = k.new_empty(self._numel(self._tokens(1))) if grad_dtype is None else None
        pair = self.keys(first)
        pair[0].copy_(k)
        pair[1].copy_(v)

    def give_back(self) -> None:
        """Return the buffers to the pool, after the last wait; they must not be used any more."""
        self._ring.context.buffers.take_back(*self._lent)

    def keys(self, hop: int) -> Pair:
        """Return the keys and values that this member holds at `hop`."""
        return self._pair(self._buffer(hop), self._tokens(hop))

    def gradients(self, hop: int) -> Pair:
        """Return the gradient sums for the pair of `hop`; message `hop` + 1 carries them."""
        return self._pair(self._flat_gradients(hop), self._tokens(hop))

    def add(self, hop: int, shares: Sequence[tuple[Hop, Tensor, Tensor]]) -> None:
        """Add a member's own shares to the gradient sums for the pair of `hop`; at hop 1, zero the sums first."""
        if hop == 0:  # before the first hop of backward
            return
        if hop == 1:
            self._flat_gradients(hop).zero_()
        sums = self.gradients(hop)
        for work, dk, dv in shares:
            add_pair(sums, work.k_rows, dk, dv)

    def pass_on(self, hop: int) -> Handle | None:
        """Send message `hop` to the next member and receive message `hop` + 1; return None if both are empty."""
        ring = self._ring
        has_keys, has_gradients = hop < self._last_keys, self._grad_dtype is not None and hop > 1
        kind = "+".join(kind for kind, travels in (("kv", has_keys), ("dkv", has_gradients)) if travels)
        send, receive = (self._part(hop + i, has_keys, has_gradients) for i in (0, 1))
        return ring.channel.start(kind, send, ring.index + 1, receive, ring.index - 1)

    def _flat_gradients(self, hop: int) -> Tensor:
        assert self._grad_dtype is not None
        start, stop = self._span(hop + 1)[1:]
        return self._buffer(hop + 1)[start:stop].view(self._grad_dtype)

    def _buffer(self, message: int) -> Tensor:
        return self._buffers[message % 2] if message != 1 or self._saved is None else self._saved

    def _pair(self, flat: Tensor, tokens: int) -> Pair:
        """View the beginning of a message, or of its gradients, as a pair for keys and values."""
        first, second = ((tokens, *shape) for shape in self._shapes)
        middle, stop = (tokens * sum(shape.numel() for shape in self._shapes[:count]) for count in (1, 2))
        if first == second:
            return flat[:stop].view(2, *first)
        return flat[:middle].view(first), flat[middle:stop].view(second)

    def _part(self, message: int, has_keys: bool, has_gradients: bool) -> Tensor:
        """Return the part of a message to send, flat and in the keys' data type."""
        start, middle, stop = self._span(message)
        return self._buffer(message)[start if has_keys else middle : stop if has_gradients else middle]

    def _span(self, message: int) -> tuple[int, int, int]:
        """Return the start of a message's keys, and the start and end of its gradients, in elements."""
        middle = self._numel(self._tokens(message))
        if self._grad_dtype is None or not message:
            return 0, middle, middle
        size = self._numel(self._tokens(message - 1)) * self._grad_dtype.itemsize // self._buffers[0].dtype.itemsize
        return 0, middle, middle + size

    def _tokens(self, hop: int) -> int:
        return self._ring.layout.tokens(self._ring.source(hop))

    def _numel(self, tokens: int) -> int:
        """Return the number of elements of a pair, rounded up to even to align gradients of twice the element size."""
        elements = tokens * sum(shape.numel() for shape in self._shapes)
        return elements + elements % 2


class _Outputs:
    """Running output of a member's own rows while later hops are merged in; complete in `result` at the end.

    Merging in bf16 would round once per hop, so 16-bit results are merged in the type of lse. The first merge reads
    `result`, and the last merge of each row writes it, so that no separate conversion is needed. This works because the
    rows of a hop take part in all hops before it: hops of earlier members, which come first, read all rows, and those
    of later members read the backs. Under non-causal masks this does not hold: `result` then has the type of lse from
    the start, and the caller converts it at the end.
    """

    __slots__ = ("_precise", "_result", "_ring")

    def __init__(self, ring: Ring, result: Tensor, dtype: torch.dtype) -> None:
        self._ring, self._result = ring, result
        # With two members a single merge reads and writes `result`, so there is no intermediate to keep precise.
        needs_precise = result.dtype != dtype and ring.degree > 2
        self._precise = result.new_empty(result.shape, dtype=dtype) if needs_precise else result

    def places(self, hop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input and output tensors of the merge at `hop`, and a second output or None."""
        source = self._result if hop == 1 else self._precise
        if hop == self._ring.degree - 1:
            return source, self._result, None
        # Hop `index` brings the keys of member 0, the last hop in which this member's fronts take part.
        is_last_of_fronts = hop == self._ring.index and self._precise is not self._result
        return source, self._precise, self._result if is_last_of_fronts else None


class _QueryGradients:
    """Running sum of a member's query gradients over the hops of backward.

    The first share is the sum, of its rows only: all rows, or the backs, which are the rows of all hops of member 0 but
    the last. From the second share on, the sum has the type of lse, since 16-bit sums would be rounded once per hop.
    """

    __slots__ = ("_dtype", "_queries", "_rows", "_sum")

    def __init__(self, queries: Tensor, dtype: torch.dtype) -> None:
        self._queries, self._dtype = queries, dtype
        self._sum: Tensor | None = None
        self._rows = Rows((0, queries.shape[0]))

    def add(self, rows: Rows, share: Tensor) -> None:
        """Add the share of one kernel call."""
        if self._sum is None:
            self._sum, self._rows = share, rows
            return
        is_same = rows is self._rows or (rows.span is not None and rows.span == self._rows.span)
        if not is_same and not self._has_all:  # calls of single sequences, or of a mask
            total = self._queries.new_zeros(self._queries.shape, dtype=self._dtype)
            put(total, self._rows, self._sum)
            self._sum, self._rows = total, Rows((0, self._queries.shape[0]))
        source = self._sum
        if source.dtype != self._dtype:
            self._sum = source.new_empty(source.shape, dtype=self._dtype) if is_same else source.to(self._dtype)
            source = source if is_same else self._sum
        add(source, self._sum, Rows((0, source.shape[0])) if is_same else rows, share)

    def total(self, last: Tensor) -> Tensor:
        """Add the sum to the last share, which has all rows, and return it in the type of the queries."""
        if self._sum is not None:
            add(last, last, self._rows, self._sum)
        return last.to(self._queries.dtype)

    @property
    def _has_all(self) -> bool:
        return self._rows.span == (0, self._queries.shape[0])


class _Gathered:
    """Gathered rows of a member's own tensors. All hops of later members read the same rows: gathered once."""

    __slots__ = ("_rows", "_taken", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._rows: Rows | None = None
        self._taken: tuple[Tensor, ...] = ()

    def at(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the rows of every tensor."""
        # By identity, since the layout returns one object for all these hops. A span is a free view.
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
    """Attend to the member's own keys: one causal call for all rows, plus further calls if there are masks.

    Under masks the result is in the type of lse, in which calls and hops are merged.
    """
    works = _own_work(kernel, ring)
    if not works:
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    if _is_whole(works):
        out, lse = kernel.forward(q, k, v, works[0].segments, scale)
        return out.to(lse.dtype) if ring.layout.masks else out, lse
    # An lse of -inf has weight 0 in the first merge.
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=lse_dtype(q.dtype))
    out = lse.new_zeros(*q.shape[:2], v.shape[2])
    for work in works:
        part, part_lse = kernel.forward(
            take(q, work.q_rows), take(k, work.k_rows), take(v, work.k_rows), work.segments, scale
        )
        merge(out, out, None, lse, work.q_rows, part, part_lse)
    return out, lse


def _backward_own(
    kernel: AttentionKernel, ring: Ring, grad_out: Tensor, kept: SavedForBackward, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a member's shares (dq, dk, dv) for its own keys; under masks in the type of lse."""
    q, k, v, out, lse = kept
    works = _own_work(kernel, ring)
    if not works:  # a member without tokens still forwards those of others
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if _is_whole(works):
        own = kernel.backward(grad_out, q, k, v, out, lse, works[0].segments, scale)
        return (own[0].to(lse.dtype), own[1], own[2]) if ring.layout.masks else own
    dq, dk, dv = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v))
    for work in works:
        dos, qs, outs, lses = take_with_lse((grad_out, q, out), lse, work.q_rows)
        ks, vs = take(k, work.k_rows), take(v, work.k_rows)
        shares = kernel.backward(dos, qs, ks, vs, outs, lses, work.segments, scale)
        for total, rows, share in zip((dq, dk, dv), (work.q_rows, work.k_rows, work.k_rows), shares, strict=True):
            add(total, total, rows, share)
    return dq, dk, dv


def _own_work(kernel: AttentionKernel, ring: Ring) -> tuple[Hop, ...]:
    """Return the kernel calls with a member's own keys; without masks a single one over all rows in place."""
    return ring.work(0, packed=kernel.packed or not ring.layout.masks)


def _is_whole(works: tuple[Hop, ...]) -> bool:
    """Return whether a single call takes all rows in place."""
    return len(works) == 1 and works[0].q_rows.span is not None and works[0].k_rows.span is not None
