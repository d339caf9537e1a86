"""Ring attention in MindSpore, with the algorithm and layout of `runtime/ring.py`, and its communication.

MindSpore's attention on CPUs does not return log-sum-exp, so scores are computed by matrix products, one sequence at a
time. Memory is quadratic in the chunk, not in the sequence.

Shapes in this module: queries and outputs are [kv_heads, repeats, tokens, n], in which `repeats` query heads share a
key head; keys and values are stacked in a pair [2, kv_heads, tokens, head_dim]. Since not all MindSpore operations
accept empty tensors, the tensors of a member without tokens are None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import mindspore
import numpy as np
from mindspore import Tensor, _Function, communication, mint, ops
from mindspore.communication import GlobalComm

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import Hop, RingMember, Rows, ShardLayout
from fcp_cli.util.arrays import IntArray

Held: TypeAlias = Any
"""A tensor, or None if a member holds no token. (MindSpore has no types.)"""

_PRECISE = mindspore.float32  # dtype of sums over keys, and of gradients sent around the ring
_PRODUCT = ops.BatchMatMul()
_PRODUCT_TRANSPOSED = ops.BatchMatMul(transpose_b=True)
_TRANSPOSED_PRODUCT = ops.BatchMatMul(transpose_a=True)


class MindSporeRing(RingMember):
    """Ring of one micro-batch, from the view of one member.

    Attributes:
        world: all ranks of the job, for hops.
    """

    __slots__ = ("world",)

    def __init__(self, layout: ShardLayout, index: int, ranks: tuple[int, ...], world: MindSporeRanks) -> None:
        super().__init__(layout, index, ranks)
        self.world = world


def attention(q: Tensor, k: Tensor, v: Tensor, *, ring: MindSporeRing, scale: float | None = None) -> Tensor:
    """Compute causal attention over the micro-batch's pack, sharded over the ring's members.

    Forward and backward are collective over the ring. Sequences do not attend to each other. PyNative mode only.

    Args:
        q: [1, heads, tokens, head_dim], the local shard. Rows beyond `ring.tokens` are padding: they give zeros and get
            zero gradients.
        k, v: [1, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads.
        ring: the micro-batch's ring.
        scale: factor on the scores; 1 / sqrt(head_dim) by default.

    Returns:
        As q.

    Raises:
        RunError: a shape that does not fit the ring, or heads of values of another size.
    """
    ring.check_shapes(q, k, v)
    if k.shape != v.shape:
        raise RunError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} have heads of different sizes, which travel MindSpore's rings "
            "as one tensor: pad the smaller with zeros and cut the output"
        )
    ring.attention_calls += 1
    return _RingAttention.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)


class _RingAttention(_Function):  # type: ignore[misc]  # mindspore has no types
    """Autograd function of `attention`; saves its ring, since backward may run in another micro-batch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: MindSporeRing, scale: float) -> Tensor:
        out, lse = _forward(ring, _grouped(q, k, ring.tokens, factor=scale), _pair(k, v, ring.tokens), k)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return _like(out, q)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, scale, tokens = ctx.ring, ctx.scale, ctx.ring.tokens
        queries, grads = _grouped(q, k, tokens, factor=scale), _grouped(grad_out, k, tokens)
        dq, d_pair = _backward(ring, grads, queries, _pair(k, v, tokens), out, lse, k)
        if not tokens:
            return _like(None, q), _like(None, k), _like(None, v), None, None
        return _like(dq * scale, q), _like(d_pair[0], k), _like(d_pair[1], v), None, None


def _forward(ring: MindSporeRing, queries: Held, pair: Held, like: Tensor) -> tuple[Held, Held]:
    """Run all hops; return out [.., tokens, head_dim] and lse [.., tokens, 1] of this member's scaled queries."""
    out = lse = None
    pairs = _Travel(ring, like, like.dtype)
    for hop in range(ring.degree):
        if hop:
            pair = pairs.arrived()
        if hop + 1 < ring.degree:
            pairs.pass_on(pair, hop)
        works = ring.work(hop, packed=False)
        if not works:
            continue
        parts = [_attend(queries, pair, work) for work in works]
        rows = [work.q_rows for work in works]
        part = _spread([part for part, _ in parts], rows, queries.shape, 0.0)
        part_lse = _spread([part_lse for _, part_lse in parts], rows, (*queries.shape[:3], 1), -np.inf)
        out, lse = (part, part_lse) if out is None else _merge(out, lse, part, part_lse)
    return out, lse


def _backward(
    ring: MindSporeRing, grad_out: Held, queries: Held, pair: Held, out: Held, lse: Held, like: Tensor
) -> tuple[Held, Held]:
    """Return the gradients of the scaled queries and of this member's own key-value pair.

    The gradient of a pair follows it around the ring, one hop behind, back to its owner.
    """
    dq = d_pair = None
    delta = (grad_out * out).sum(axis=-1, keepdims=True) if ring.tokens else None
    pairs, d_pairs = _Travel(ring, like, like.dtype), _Travel(ring, like, _PRECISE)
    for hop in range(ring.degree):
        if hop:
            pair = pairs.arrived()
        if hop + 1 < ring.degree:
            pairs.pass_on(pair, hop)
        works = ring.work(hop, packed=False)
        shares = [_attend_back(queries, pair, grad_out, delta, lse, work) for work in works]
        if hop:
            d_pair = d_pairs.arrived()  # sum of the members before this one for the same pair
        if works:
            d_queries = _spread([share for share, _ in shares], [work.q_rows for work in works], queries.shape, 0.0)
            d_share = _spread([share for _, share in shares], [work.k_rows for work in works], pair.shape, 0.0)
            dq = d_queries if dq is None else dq + d_queries
            d_pair = d_share if d_pair is None else d_pair + d_share
        if ring.degree > 1:
            d_pairs.pass_on(d_pair, hop)
    return dq, d_pairs.arrived() if ring.degree > 1 else d_pair


class _Travel:
    """Circulates key-value pairs around the ring, to the next member per hop; members without tokens send nothing."""

    __slots__ = ("_arrival", "_dtype", "_ring", "_shape")

    def __init__(self, ring: MindSporeRing, like: Tensor, dtype: Any) -> None:
        """Start with no pair; `like` is [1, kv_heads, .., head_dim]."""
        self._ring = ring
        self._shape = (2, like.shape[1], like.shape[3])
        self._dtype = dtype
        self._arrival: PendingExchange | None = None

    def pass_on(self, pair: Held, hop: int) -> None:
        """Send the pair of `hop`, and receive the next one."""
        ring = self._ring
        two, kv_heads, head_dim = self._shape
        arriving = ring.layout.tokens(ring.source(hop + 1))
        self._arrival = ring.world.exchange(
            pair,
            ring.ranks[(ring.index + 1) % ring.degree],
            ops.zeros((two, kv_heads, arriving, head_dim), self._dtype) if arriving else None,
            ring.ranks[ring.index - 1],
            sends_first=ring.index % 2 == 0,
        )

    def arrived(self) -> Held:
        """Wait for and return the pair of the next hop."""
        assert self._arrival is not None, "nothing was passed on"
        return self._arrival.wait()


def _attend(queries: Tensor, pair: Tensor, work: Hop) -> tuple[Tensor, Tensor]:
    """Compute attention from some queries to some keys; return out and lse."""
    rows = _take(queries, work.q_rows)
    keys, values = (_flat(tensor) for tensor in _take(pair, work.k_rows))
    scores = _scores(_flat(rows), keys, work, repeats=rows.shape[1])
    largest = scores.max(axis=-1, keepdims=True)
    weights = ops.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    out = _PRODUCT(weights, values) / total
    return out.reshape(rows.shape), (largest + ops.log(total)).reshape((*rows.shape[:3], 1))


def _attend_back(
    queries: Tensor, pair: Tensor, grad_out: Tensor, delta: Tensor, lse: Tensor, work: Hop
) -> tuple[Tensor, Tensor]:
    """Return one hop's contributions to the gradients of queries and pair, given the queries' final lse."""
    rows = _take(queries, work.q_rows)
    flat = _flat(rows)
    grads, deltas, lses = (_flat(_take(tensor, work.q_rows)) for tensor in (grad_out, delta, lse))
    keys, values = (_flat(tensor) for tensor in _take(pair, work.k_rows))
    weights = ops.exp(_scores(flat, keys, work, repeats=rows.shape[1]) - lses)
    d_scores = weights * (_PRODUCT_TRANSPOSED(grads, values) - deltas)
    d_pair = ops.stack((_TRANSPOSED_PRODUCT(d_scores, flat), _TRANSPOSED_PRODUCT(weights, grads)))
    return _PRODUCT(d_scores, keys).reshape(rows.shape), d_pair


def _scores(queries: Tensor, keys: Tensor, work: Hop, *, repeats: int) -> Tensor:
    """Return scores [kv_heads, repeats * queries, keys], minus infinity where masked."""
    scores = _PRODUCT_TRANSPOSED(queries, keys)
    if not work.segments.causal:
        return scores
    future = np.triu(np.full((scores.shape[-1],) * 2, -np.inf, dtype=np.float32), k=1)
    return scores + Tensor(np.tile(future, (repeats, 1)))


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over further keys into `out` and `lse`; `part_lse` is -inf for queries that see none."""
    # No difference is inf - inf, since `lse` is finite: in the first hop, each query sees at least its own key.
    largest = ops.maximum(lse, part_lse)
    weight, part_weight = ops.exp(lse - largest), ops.exp(part_lse - largest)
    total = weight + part_weight
    return (out * weight + part * part_weight) / total, largest + ops.log(total)


def _take(tensor: Tensor, rows: Rows) -> Tensor:
    """Select tokens along the second-to-last dimension."""
    start, stop = _span(rows)
    return tensor if (start, stop) == (0, tensor.shape[-2]) else tensor[..., start:stop, :]


def _spread(parts: Sequence[Tensor], rows: Sequence[Rows], shape: tuple[int, ...], fill: float) -> Tensor:
    """Return a tensor of `shape` with the parts at their (ascending) rows, and `fill` elsewhere."""
    pieces: list[Tensor] = []
    at = 0
    for part, (start, stop) in zip(parts, map(_span, rows), strict=True):
        pieces += [_filled(shape, start - at, fill), part] if start > at else [part]
        at = stop
    if at < shape[-2]:
        pieces.append(_filled(shape, shape[-2] - at, fill))
    return pieces[0] if len(pieces) == 1 else ops.concat(pieces, axis=-2)


def _filled(shape: tuple[int, ...], tokens: int, fill: float) -> Tensor:
    return Tensor(np.full((*shape[:-2], tokens, shape[-1]), fill, dtype=np.float32))


def _span(rows: Rows) -> tuple[int, int]:
    assert rows.span is not None, "the rows of one sequence are contiguous"
    return rows.span


def _flat(tensor: Tensor) -> Tensor:
    """Reshape [kv_heads, .., tokens, n] to [kv_heads, .. * tokens, n] in float32, for matrix products."""
    precise = tensor.astype(_PRECISE)
    return precise if precise.ndim == 3 else precise.reshape((precise.shape[0], -1, precise.shape[-1]))


def _grouped(tensor: Tensor, k: Tensor, tokens: int, *, factor: float = 1.0) -> Held:
    """Reshape [1, heads, padded, n] to [kv_heads, repeats, tokens, n] in float32, times a factor."""
    if not tokens:
        return None
    kv_heads, (_, heads, padded, width) = k.shape[1], tensor.shape
    grouped = tensor.astype(_PRECISE).reshape((kv_heads, heads // kv_heads, padded, width))
    return (grouped if tokens == padded else grouped[:, :, :tokens]) * factor


def _pair(k: Tensor, v: Tensor, tokens: int) -> Held:
    """Stack two [1, kv_heads, padded, head_dim] to [2, kv_heads, tokens, head_dim]."""
    if not tokens:
        return None
    pair = ops.concat((k, v))
    return pair if tokens == k.shape[2] else pair[:, :, :tokens]


def _like(grouped: Held, batched: Tensor) -> Tensor:
    """Reshape [.., tokens, n] to the shape and dtype of `batched` [1, heads, padded, n], with zeros as padding."""
    if grouped is None:
        return ops.zeros(batched.shape, batched.dtype)
    tokens, padded = grouped.shape[-2], batched.shape[2]
    heads = grouped.reshape((1, batched.shape[1], tokens, batched.shape[3]))
    if tokens < padded:
        heads = ops.concat((heads, _filled(heads.shape, padded - tokens, 0.0)), axis=2)
    return heads.astype(batched.dtype)


# Communication: point-to-point hops, and a few small collectives over all ranks.

# One group of all ranks for hops only; any two ranks may exchange in it, so rings need no groups.
_RING_GROUP = "fcp-rings"


class PendingExchange:
    """A pending hop; keeps its tensors alive until it completes."""

    __slots__ = ("_handles", "_received", "_sent")

    def __init__(self, handles: Sequence[Any], sent: Tensor | None, received: Tensor | None) -> None:
        self._handles = handles
        self._sent = sent
        self._received = received

    def wait(self) -> Tensor | None:
        """Wait, and return the received tensor, or None."""
        for handle in self._handles:
            handle.wait()
        return self._received


class MindSporeRanks:
    """All ranks of a MindSpore job, created by `join`. Call collectives in the same order on all ranks."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(
        self, sent: Tensor | None, to: int, received: Tensor | None, source: int, *, sends_first: bool
    ) -> PendingExchange:
        """Start one hop: send a tensor to global rank `to`, and receive one from global rank `source`.

        Args:
            sent, received: contiguous tensors, or None for no message in that direction.
            sends_first: order of the two; neighbours must differ (odd members receive first), or a ring deadlocks if
                the back end's sends block until they are received.
        """
        group = _RING_GROUP
        posts = [
            (mint.distributed.isend, sent, to),
            (mint.distributed.irecv, received, source),
        ]
        ordered = posts if sends_first else posts[::-1]
        handles = [post(tensor, peer, group) for post, tensor, peer in ordered if tensor is not None]
        return PendingExchange(handles, sent, received)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)(tensor)

    def gather(self, words: IntArray) -> IntArray:
        """Return [size, words] int32: each rank's words."""
        mine = Tensor(words.astype(np.int32))
        gathered = ops.AllGather(GlobalComm.WORLD_COMM_GROUP)(mine).asnumpy()
        table: IntArray = gathered.reshape(self.size, len(words)).astype(np.int64)
        return table


def join() -> MindSporeRanks:
    """Join the job that msrun started; in msrun's scheduler process, this returns only after the job."""
    if "MS_ROLE" not in os.environ:
        raise RunError("this process is not a rank of a MindSpore job; start it with 'fcp launch --launcher msrun'")
    if not GlobalComm.INITED:
        communication.init()
    _bind_default_group()
    ranks = MindSporeRanks(communication.get_rank(), communication.get_group_size())
    if ranks.size > 1:
        communication.create_group(_RING_GROUP, list(range(ranks.size)))
        # Initialize the communicator with a collective; point-to-point calls may follow.
        ops.AllReduce(ops.ReduceOp.SUM, _RING_GROUP)(Tensor([0], mindspore.float32))
    return ranks


def _bind_default_group() -> None:
    """Work around a bug of MindSpore 2.10, in which `isend` fails on CPUs.

    At import, before the back end is known, it binds the name of HCCL's world group as a default argument, which does
    not exist on CPUs.
    """
    lookup = getattr(mint.distributed.distributed, "get_cache_group_rank", None)
    if lookup is not None and lookup.__defaults__:
        lookup.__defaults__ = (GlobalComm.WORLD_COMM_GROUP,)
