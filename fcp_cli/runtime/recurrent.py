"""Layers with a state of fixed size, over a ring's shards: linear attention, state spaces, short convolutions.

Each head of such a layer carries a state S [Dk, Dv] along a sequence. A token's update of the state is affine, and so
is a whole chunk's: S <- A S + B. The output at a token is z_t plus a readout of its chunk's initial state. A
`StateRule` computes A, B, z and the readout by one call of an unmodified kernel, before the initial states are known.
`states_at_chunks` then provides these, and the readouts are added. On a ring of one, the rule runs on whole sequences.

With Ulysses, the members of a Ulysses group exchange tokens for heads of all inputs of a rule, as in attention
(`UlyssesExchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import Route, Swapped, UlyssesExchange, exchange, route
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layout import CACHED_LAYOUTS, ShardLayout
from fcp_cli.runtime.recompute import staged_call
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.transport import Waits, drive
from fcp_cli.util.arrays import IntArray

Tokens: TypeAlias = tuple[Tensor, ...]
"""Inputs of a rule for consecutive tokens: queries and keys [1, T, G, Dk], values [1, T, H, Dv], H a multiple of G,
then the rule's further inputs per token and head, [1, T, H] each."""

Batch: TypeAlias = Callable[[Tokens], tuple[Tensor, Tensor]]
"""Returns outputs [N, T, H, Dv] and final states [N, H, ...] of sequences [N, T, ...]."""


class Chunks(NamedTuple):
    """Results of a rule for runs of tokens with unknown initial states.

    Attributes:
        out: [1, T, H, Dv] outputs from empty initial states.
        reads: [T, ...] each, inputs of `StateRule.read`.
        transitions: A of each run, [runs, H, Dk, Dk] or scalars [runs, H, 1, 1].
        updates: B of each run, [runs, H, Dk, Dv].
    """

    out: Tensor
    reads: Tokens
    transitions: Tensor
    updates: Tensor


class StateRule(Protocol):
    """Recurrence of one kind of layer."""

    @property
    def heads_said(self) -> str:
        """Description of the heads for messages, with format fields `keys` and `values`."""
        ...

    def of_heads(self, member: Ring) -> StateRule:
        """Return the rule for a member's heads."""
        ...

    def alone(self, tokens: Tokens, lengths: tuple[int, ...]) -> Tensor:
        """Return the outputs [1, T, H, Dv] of whole non-empty sequences."""
        ...

    def in_chunks(self, tokens: Tokens, lengths: tuple[int, ...]) -> Chunks:
        """Compute one or more non-empty runs of tokens without their initial states."""
        ...

    def read(self, reads: Tokens, state: Tensor) -> Tensor:
        """Return the readout [T, H, Dv] of a run's initial state [H, Dk, Dv] at each of its tokens."""
        ...

    def idle(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return A and B of a run without tokens, which leaves the state unchanged."""
        ...


def run_rule(rule: StateRule, tokens: Tokens, ring: Ring) -> Tensor:
    """Compute a rule over the micro-batch's pack, which is sharded over the ring's members.

    Collective over the ring's members, and so is its backward. Every sequence starts with an empty state.

    Args:
        rule: rule of the layer.
        tokens: the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond `ring.tokens` are padding,
            computed as a separate sequence.
        ring: the micro-batch's ring.

    Returns:
        [1, tokens, H, Dv], like the values.
    """
    return staged_call(lambda: _compute(rule, tokens, ring))


def in_batches(tokens: Tokens, lengths: tuple[int, ...], block: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a rule on runs of tokens, batching those with the same number of blocks.

    Args:
        tokens: all runs, concatenated. Padding is harmless, since a token of zeros leaves the state unchanged.
        lengths: tokens of each run.
        block: number of tokens to which the rule pads.
        batch: the rule.

    Returns:
        Outputs [1, T, H, Dv] and final states [runs, ...].
    """
    if len(lengths) == 1:
        return batch(tokens)
    outs: list[Tensor] = [tokens[0]] * len(lengths)  # placeholders, since groups finish out of order
    lefts = list(outs)
    ends = np.cumsum(lengths)
    groups: dict[int, list[int]] = {}
    for run, length in enumerate(lengths):
        groups.setdefault(-(-length // block), []).append(run)
    for group in groups.values():
        parts = (
            pad_sequence([tensor[0, ends[run] - lengths[run] : ends[run]] for run in group], batch_first=True)
            for tensor in tokens
        )
        out, left = batch(tuple(parts))
        for place, run in enumerate(group):
            outs[run], lefts[run] = out[place, : lengths[run]], left[place]
    return torch.cat(outs).unsqueeze(0), torch.stack(lefts)


def _compute(rule: StateRule, tokens: Tokens, ring: Ring) -> Tensor:
    _check_heads(rule, tokens, ring)
    held, (batch, given) = ring.tokens, tokens[0].shape[:2]
    begin_layer(ring, batch, given)
    padding = given - held
    if ring.degree == 1:
        out = rule.alone(tokens, (*ring.layout.lengths, *([padding] if padding else [])))
    else:
        out = _of_group(rule, _rows(tokens, 0, held), ring)
        out = torch.cat((out, rule.alone(_rows(tokens, held, given), (padding,))), dim=1) if padding else out
    counted: Tensor = _Counted.apply(out, ring)  # type: ignore[no-untyped-call]
    return counted


def _rows(tokens: Tokens, start: int, stop: int) -> Tokens:
    return tuple(tensor[:, start:stop] for tensor in tokens)


class _Counted(torch.autograd.Function):
    """Identity whose backward, the first of the layer's, is counted."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ring.begin_backward()
        return grad, None


def _check_heads(rule: StateRule, tokens: Tokens, ring: Ring) -> None:
    keys, values, shared = tokens[1].shape[2], tokens[2].shape[2], ring.ulysses_degree
    if values % shared or (keys % shared and shared % keys):
        raise RunError(
            f"the plan shares heads among {shared} ranks, which {rule.heads_said.format(keys=keys, values=values)} "
            "cannot be; plan with 'fcp plan --attention ring'"
        )


def _of_group(rule: StateRule, own: Tokens, ring: Ring) -> Tensor:
    """Return a member's outputs [1, T, H, Dv] of the rule, without padding, with head exchange if there is Ulysses."""
    if ring.ulysses_degree == 1:
        return _around_ring(rule, own, ring)
    exchange, heads = ring.head_exchange(), own[2].shape[2]
    out = _around_ring(rule.of_heads(ring), _of_heads(own, exchange), ring.ring_of_head_group())
    (back,) = Swapped.apply(exchange, (heads,), out[0])  # type: ignore[no-untyped-call]
    own_out: Tensor = back.unsqueeze(0)
    return own_out


def _of_heads(own: Tokens, exchange: UlyssesExchange) -> Tokens:
    """Exchange tokens for heads, with one message per data type."""
    found = list(own)
    for dtype in dict.fromkeys(tensor.dtype for tensor in own):
        places = [place for place, tensor in enumerate(own) if tensor.dtype == dtype]
        sent = [own[place][0] if own[place].dim() == 4 else own[place][0].unsqueeze(-1) for place in places]
        swapped = Swapped.apply(exchange, None, *sent)  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, swapped, strict=True):
            found[place] = (tensor if own[place].dim() == 4 else tensor.squeeze(-1)).unsqueeze(0)
    return tuple(found)


def _around_ring(rule: StateRule, held: Tokens, member: Ring) -> Tensor:
    """Compute the rule on a member's shard of a ring of degree > 1, whose runs alternate front and back."""
    sizes = member.ring_layout.runs(member.index).sizes
    live, value = np.flatnonzero(sizes), held[2]
    if not live.size:  # very short sequences: the member only forwards states
        passed = [part.expand(len(sizes), -1, -1, -1) for part in rule.idle(held)]
        # The empty sum keeps both ends in the graph, since backward must forward gradients here, too.
        states = _arriving(passed[0], passed[1] + value.sum().to(passed[1].dtype), member)
        return value + states.sum().to(value.dtype)
    lengths = tuple(sizes[live].tolist())
    chunks = rule.in_chunks(held, lengths)
    left = [chunks.transitions, chunks.updates]
    if live.size < sizes.size:
        places = to_device(torch.from_numpy(live), value.device)
        passed = [part.expand(len(sizes), -1, -1, -1) for part in rule.idle(held)]
        left = [every.to(of.dtype).index_copy(0, places, of) for every, of in zip(passed, left, strict=True)]
    states = _arriving(left[0], left[1], member)
    reads = zip(*(torch.split_with_sizes(part, lengths) for part in chunks.reads), strict=True)
    # Runs alternate between the front and the back of each sequence.
    added = [rule.read(read, states[run % 2, run // 2]) for read, run in zip(reads, live.tolist(), strict=True)]
    return (chunks.out + torch.cat(added)).to(value.dtype)


def _arriving(transitions: Tensor, updates: Tensor, member: Ring) -> Tensor:
    """Return the initial states of chunks [2, sequences, H, Dk, Dv] from A and B, which alternate front and back."""
    of_chunks = (part.view(-1, 2, *part.shape[1:]).transpose(0, 1) for part in (transitions, updates))
    return states_at_chunks(member, *of_chunks)


# Pass the states of recurrent layers along the chunks of a ring's sequences, in token order.
#
# A chunk's update of a head's state S [Dk, Dv] is affine: its final state is A S + B, with A [Dk, Dk] the product of
# its tokens' transitions (a scalar for state spaces) and B its final state from an empty one. The initial state of
# chunk j of 2d is the final state of chunk j - 1. Of d members, member r holds chunks r and 2d - 1 - r, so the state
# travels up the ring and back down:
#
#     member           0       1      ...    d - 1
#     chunks up        0   ->  1  ->  ...  -> d - 1
#     chunks down    2d-1  <- 2d-2 <- ...  <-   d        chunks d - 1 and d are on the same member
#
# Gradients travel the same way with A transposed: the gradient of a chunk's initial state is A^T times that of its
# final state. Each member sends at most two states a pass, at any degree; an all-gather of all A and B would send 4
# (d - 1) times as much. To hide the latency of 2 (d - 1) sequential messages, a state is cut into pieces, and a
# member forwards one while it receives the next.

PIECE_BYTES = 1 << 19
"""Most bytes of a message, unless a head's state is larger: its transfer takes about as long as its latency."""


def states_at_chunks(member: Ring, transitions: Tensor, updates: Tensor) -> Tensor:
    """Return the initial state of each chunk of a member. Collective over the members, and so is its backward.

    Args:
        member: this member's view of the ring.
        transitions: A of the front and back of each sequence: [2, sequences, H, Dk, Dk], or [2, sequences, H, 1, 1]
            scalars.
        updates: B, [2, sequences, H, Dk, Dv].

    Returns:
        [2, sequences, H, Dk, Dv]
    """
    states: Tensor = _States.apply(transitions, updates, member)  # type: ignore[no-untyped-call]
    return states


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transitions: Tensor, updates: Tensor, member: Ring) -> Tensor:
        states = drive(carry(member, "state", transitions, updates))
        ctx.member = member
        ctx.save_for_backward(transitions.contiguous(), states)  # a view would keep its whole base alive
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transitions, states = ctx.saved_tensors
        # Gradients go the opposite way, on which fronts and backs swap places.
        left = drive(carry(ctx.member, "dstate", transitions.flip(0).mT, grad.flip(0))).flip(0)
        is_number = transitions.shape[-1] == 1
        of_transitions = (left * states).sum((-2, -1), keepdim=True) if is_number else left @ states.mT
        return of_transitions, left, None


def carry(member: Ring, kind: str, transitions: Tensor, updates: Tensor) -> Waits[Tensor]:
    """Pass states up the ring through each member's first chunks, then down through its second; yield the handles.

    Args:
        member: the member's view of the ring.
        kind: message name for records.
        transitions: [2, sequences, H, Dk, Dk], or [2, sequences, H, 1, 1]
        updates: [2, sequences, H, Dk, Dv]

    Returns:
        Incoming state of each chunk, [2, sequences, H, Dk, Dv]; zeros for the first chunk of a sequence.
    """
    arriving = torch.zeros_like(updates, memory_format=torch.contiguous_format)
    flat = arriving.flatten(1, 2)
    before, after = member.index - 1, member.index + 1
    is_first, is_last = before < 0, after == member.degree

    def outgoing(part: int) -> Callable[[slice], Tensor]:
        """Return a function that computes a slice of the outgoing state of the member's first or second chunks."""
        times, plus = transitions[part].flatten(0, 1), updates[part].flatten(0, 1)
        if times.shape[-1] == 1:
            return lambda piece: torch.addcmul(plus[piece], times[piece], flat[part, piece])
        return lambda piece: torch.baddbmm(plus[piece], times[piece], flat[part, piece])

    pieces = _pieces(flat[0])
    up, down = (None if is_first else flat[0]), (None if is_last else flat[1])
    yield from _relay(member, kind, pieces, _Direction(up, before, outgoing(0), None if is_last else after))
    if is_last:
        # Chunks d - 1 and d are both on the last member: the state needs no message.
        flat[1].copy_(outgoing(0)(slice(None)))
    yield from _relay(member, kind, pieces, _Direction(down, after, outgoing(1), None if is_first else before))
    return arriving


@dataclass(frozen=True, slots=True)
class _Direction:
    """One of the two directions in which states pass through a member.

    Attributes:
        arriving: [sequences * H, Dk, Dv] buffer for the states from member `source`, or None if none arrive.
        source: index of the sending member.
        outgoing: returns a slice of the outgoing state.
        to: index of the receiving member, or None if there is none.
    """

    arriving: Tensor | None
    source: int
    outgoing: Callable[[slice], Tensor]
    to: int | None


def _relay(member: Ring, kind: str, pieces: list[slice], direction: _Direction) -> Waits[None]:
    """Receive slices, and forward each after its update while the next one arrives."""
    # At an end of the ring nothing is sent, but `start` needs an index: use the member's own.
    to = member.index if direction.to is None else direction.to
    sent = None
    # One extra iteration, since each sends the slice that the previous one computed.
    for piece in (*pieces, None):
        receive = None if piece is None or direction.arriving is None else direction.arriving[piece]
        if (handle := member.channel.start(kind, sent, to, receive, direction.source)) is not None:
            yield handle
        sent = None if piece is None or direction.to is None else direction.outgoing(piece)


def _pieces(states: Tensor) -> list[slice]:
    """Cut [heads, Dk, Dv] into runs of heads, the same on all members."""
    heads, each = len(states), states[0].numel() * states.element_size()
    width = max(1, PIECE_BYTES // each)
    return [slice(start, min(start + width, heads)) for start in range(0, heads, width)]


# Short causal convolutions over a ring's shards, which precede the states of linear attention and state spaces.
#
# A convolution of kernel K needs K - 1 rows before each run of consecutive tokens: rows of the same sequence, on
# whichever member has them; zeros if it has fewer. They arrive by an `exchange`, whose backward sends the gradients
# the other way. Runs are then concatenated, each after the rows before it, so that one call of an unmodified kernel
# computes all of them and none sees another.


class _DeviceIndices(NamedTuple):
    """The three index arrays of `_Halo` as tensors of one device."""

    sent_rows: Tensor
    gather_index: Tensor
    own_positions: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Halo:
    """Rows that one member sends and receives, and the layout of its kernel input.

    Attributes:
        route: route of the rows before runs.
        sent_rows: [n] own rows that runs of any member need before them, in the order of the route.
        gather_index: [m] rows of the kernel's input, as indices into: own rows, received rows, and a row of zeros.
        own_positions: [own rows] positions of the own rows in the kernel's input.
        memo: the three arrays as tensors, once per device.
    """

    route: Route
    sent_rows: IntArray
    gather_index: IntArray
    own_positions: IntArray
    memo: dict[torch.device, _DeviceIndices] = field(default_factory=dict, repr=False)

    def on_device(self, device: torch.device) -> _DeviceIndices:
        if device not in self.memo:
            arrays = (self.sent_rows, self.gather_index, self.own_positions)
            self.memo[device] = _DeviceIndices(*(to_device(torch.from_numpy(array), device) for array in arrays))
        return self.memo[device]


def short_convolution(convolve: Callable[[Tensor], Tensor], rows: Tensor, kernel_size: int, ring: Ring) -> Tensor:
    """Convolve the micro-batch's sequences, which are sharded over the ring's members.

    Collective over the ring's members, and so is its backward. Sequences are padded with zeros on the left.

    Args:
        convolve: causal convolution from [1, channels, n] to the same shape, for any n.
        rows: [1, channels, tokens], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond
            `ring.tokens` are padding, convolved as a separate sequence.
        kernel_size: kernel size of the convolution.
        ring: the micro-batch's ring.

    Returns:
        [1, channels, tokens]
    """
    return staged_call(lambda: _convolve_chunks(convolve, rows, kernel_size, ring))


def _convolve_chunks(convolve: Callable[[Tensor], Tensor], rows: Tensor, kernel_size: int, ring: Ring) -> Tensor:
    batch, _, tokens = rows.shape
    begin_layer(ring, batch, tokens)
    halo = _halo_of(ring.layout, ring.index, ring.ranks, kernel_size - 1, tokens - ring.tokens)
    sent_rows, gather_index, own_positions = halo.on_device(rows.device)
    own_rows = rows[0].transpose(0, 1)
    received_rows = exchange(own_rows.index_select(0, sent_rows), halo.route, ring.transport)
    candidates = torch.cat((own_rows, received_rows, own_rows.new_zeros(1, own_rows.shape[1])))
    out = convolve(candidates.index_select(0, gather_index).transpose(0, 1).unsqueeze(0))
    return out[0].transpose(0, 1).index_select(0, own_positions).transpose(0, 1).unsqueeze(0)


def begin_layer(ring: Ring, batch: int, tokens: int) -> None:
    """Count a forward of a stateful layer; raise RunError if its input does not fit the ring or the pack has masks."""
    if batch != 1 or tokens < ring.tokens:
        raise RunError(
            f"a layer that keeps a state was given a batch of {batch} with {tokens} tokens, but rank "
            f"{ring.ranks[ring.index]} holds {ring.tokens} tokens of this micro-batch: feed the model the "
            "micro-batch's own shard"
        )
    if ring.layout.masks:
        raise RunError(
            f"{ring.place}: the pack has masks, and linear attention and state spaces are causal; "
            "plan from a manifest without masks, or train a model without such layers"
        )
    ring.begin_forward(tokens)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _halo_of(layout: ShardLayout, index: int, ranks: tuple[int, ...], reach: int, padding: int) -> _Halo:
    """Return the `reach` rows before each run of one member; every member computes the same from the layout alone."""
    owners, shard_positions = _owners_and_positions(layout)
    lengths = np.asarray(layout.lengths, dtype=np.int64)
    sequence_starts = np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each row of the pack
    needed = [_rows_before_runs(layout.index(member), sequence_starts, reach) for member in range(layout.degree)]
    consumers = np.repeat(np.arange(layout.degree), [(rows >= 0).sum() for rows in needed])
    exchanged_rows = np.concatenate([rows[rows >= 0] for rows in needed]).astype(np.int64)
    producers = owners[exchanged_rows]
    own_pack_rows, rows_before = layout.index(index), needed[index]
    num_own, num_received = own_pack_rows.size + padding, int((rows_before >= 0).sum())
    zeros_index = num_own + num_received
    laid_before = np.full(rows_before.size, zeros_index)
    laid_before[rows_before >= 0] = num_own + np.arange(num_received)
    starts = _run_starts(own_pack_rows, sequence_starts)
    if padding:
        starts, laid_before = np.append(starts, own_pack_rows.size), np.append(laid_before, [zeros_index] * reach)
    gather_index, own_positions = _lay_out(starts, laid_before.reshape(len(starts), reach), num_own)
    return _Halo(
        route=route(producers, consumers, ranks=ranks, index=index),
        sent_rows=shard_positions[exchanged_rows[producers == index]],
        gather_index=gather_index,
        own_positions=own_positions,
    )


def _owners_and_positions(layout: ShardLayout) -> tuple[IntArray, IntArray]:
    """Return the owner of each row of the pack, and the row's position in the owner's shard."""
    owners, shard_positions = np.empty((2, sum(layout.lengths)), dtype=np.int64)
    for member in range(layout.degree):
        rows = layout.index(member)
        owners[rows], shard_positions[rows] = member, np.arange(rows.size)
    return owners, shard_positions


def _run_starts(rows: IntArray, sequence_starts: IntArray) -> IntArray:
    """Return the starts of runs among rows of the pack: runs are consecutive rows of a sequence."""
    continues = (np.diff(rows) == 1) & (np.diff(sequence_starts[rows]) == 0)
    return np.flatnonzero(np.concatenate((np.ones(min(1, rows.size), dtype=bool), ~continues)))


def _rows_before_runs(rows: IntArray, sequence_starts: IntArray, reach: int) -> IntArray:
    """Return [runs * reach] the rows of the pack before each run of a member, -1 if its sequence has none."""
    run_starts = rows[_run_starts(rows, sequence_starts)]
    pack_rows_before = run_starts[:, None] + np.arange(-reach, 0)
    return np.where(pack_rows_before >= sequence_starts[run_starts][:, None], pack_rows_before, -1).ravel()


def _lay_out(starts: IntArray, laid_before: IntArray, num_own: int) -> tuple[IntArray, IntArray]:
    """Concatenate runs, each after the rows before it.

    Args:
        starts: [runs] starts of runs among the own rows.
        laid_before: [runs, reach] indices of the rows before each run.
        num_own: number of own rows.

    Returns:
        `gather_index` and `own_positions` of `_Halo`.
    """
    runs, reach = laid_before.shape
    # Each row is shifted by `reach` for its own run and for every earlier one.
    own_positions = np.arange(num_own) + reach * np.searchsorted(starts, np.arange(num_own), side="right")
    gather_index = np.empty(num_own + laid_before.size, dtype=np.int64)
    gather_index[own_positions] = np.arange(num_own)
    gather_index[(starts + reach * np.arange(runs))[:, None] + np.arange(reach)] = laid_before
    return gather_index, own_positions


# Linear attention with the gated delta rule, a `StateRule`.
#
# The rule updates a state S [Dk, Dv] per head for each token t (Yang et al., "Gated Delta Networks"):
#
#     S <- e^(g_t) (I - b_t k_t k_t^T) S + b_t k_t v_t^T             o_t = q_t^T S / sqrt(Dk)
#
# Each update is affine in S, so a whole chunk is affine in its initial state S: its outputs are o_t = r_t S + z_t,
# and its final state is A S + B. One call of an unmodified kernel gives all four: with values [v | 0] of size Dv + Dk
# and initial state [0 | I], outputs are [z | r] and the final state is [B | A].

_BLOCK = 64  # tokens to which the PyTorch implementation pads


class DeltaTokens(NamedTuple):
    """Inputs of the rule over consecutive tokens.

    Attributes:
        query, key: [1, T, G, Dk]
        value: [1, T, H, Dv]; H is a multiple of G.
        decay: [1, T, H] logarithm of the state's decay (g).
        strength: [1, T, H] fraction of the value to write (b).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """Kernel of the gated delta rule.

    Attributes:
        call: function with the signature that `fla` and transformers share.
        takes_packs: whether the kernel supports packed sequences (`cu_seqlens`).
        options: keyword arguments of `call`.
        heads_said: format of its heads in messages; see `StateRule`.
    """

    call: Callable[..., tuple[Tensor, Tensor | None]]
    takes_packs: bool
    options: dict[str, Any]
    heads_said: str = "the {keys} key heads and {values} value heads of linear attention"

    def of_heads(self, member: Ring) -> DeltaRule:
        return self

    def alone(self, tokens: Tokens, lengths: tuple[int, ...]) -> Tensor:
        return self._runs(tokens, lengths)[0]

    def in_chunks(self, tokens: Tokens, lengths: tuple[int, ...]) -> Chunks:
        query, key, value, decay, strength = tokens
        size, width = key.shape[-1], value.shape[-1]
        extended = torch.cat((value, value.new_zeros(*value.shape[:-1], size)), dim=-1)
        identity, nothing = self.idle(tokens)
        starts = torch.cat((nothing, identity), dim=-1)
        out, left = self._runs((query, key, extended, decay, strength), lengths, starts)
        return Chunks(out[..., :width], (out[0, ..., width:],), left[..., width:], left[..., :width])

    def read(self, reads: Tokens, state: Tensor) -> Tensor:
        return (reads[0].to(state.dtype).transpose(0, 1) @ state).transpose(0, 1)

    def idle(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        _, key, value, *_ = tokens
        heads, size, dtype = value.shape[2], key.shape[-1], lse_dtype(value.dtype)
        identity = torch.eye(size, dtype=dtype, device=value.device).expand(heads, -1, -1)
        return identity, identity.new_zeros(heads, size, value.shape[-1])

    def _runs(self, tokens: Tokens, lengths: tuple[int, ...], starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the kernel on runs of tokens, all with initial state `starts` [H, Dk, Dv]; None is an empty state."""

        # A pack is a batch of one, but needs an initial state for each of its `runs`.
        def batch(some: Tokens, **more: Any) -> tuple[Tensor, Tensor]:
            query, key, value, decay, strength = some
            out, left = self.call(
                query,
                key,
                value,
                g=decay,
                beta=strength,
                initial_state=None if starts is None else starts.expand(more.pop("runs", len(value)), *starts.shape),
                output_final_state=True,
                **self.options,
                **more,
            )
            assert left is not None
            return out, left

        if self.takes_packs and len(lengths) > 1:
            return batch(tokens, runs=len(lengths), cu_seqlens=_boundaries(lengths, tokens[2].device))
        return in_batches(tokens, lengths, _BLOCK, batch)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the boundaries (`cu_seqlens`) of runs. One tensor for all layers: kernels cache plans by identity."""
    return to_device(torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cpu"), device)


# State spaces (Mamba-2), a `StateRule`.
#
# A head updates a state S [N, P] for each token t of time step d_t (Dao and Gu, "Transformers are SSMs"):
#
#     S <- e^(d_t A) S + d_t b_t x_t^T               y_t = S^T c_t + D x_t
#
# A < 0 and D are scalars per head. A run of tokens with time steps of sum s therefore multiplies its initial state by
# e^(s A), and its t-th token reads it by e^(s_t A) c_t. One call of an unmodified kernel with empty initial states
# gives the rest, at the cost of a single rank.


class ScanTokens(NamedTuple):
    """Inputs of a scan over consecutive tokens.

    Attributes:
        c, b: [1, T, G, N] read and write projections of the states, per group of heads.
        x: [1, T, H, P]
        step: [1, T, H] time steps, >= 0.
    """

    c: Tensor
    b: Tensor
    x: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Kernel of state spaces.

    Attributes:
        call: function with the signature that `mamba_ssm` and transformers share.
        takes_packs: whether the kernel supports packed sequences (`seq_idx`).
        decay: A, [H].
        skip: D, [H] or [H, P]; None without a skip connection.
        chunk_size: number of tokens per kernel block.
        heads_said: format of its heads in messages; see `StateRule`.
    """

    call: Callable[..., Any]
    takes_packs: bool
    decay: Tensor
    skip: Tensor | None
    chunk_size: int
    heads_said: str = "the {values} heads of state spaces in {keys} groups"

    def of_heads(self, member: Ring) -> Scan:
        skip = None if self.skip is None else member.own_heads(self.skip)
        return replace(self, decay=member.own_heads(self.decay), skip=skip)

    def alone(self, tokens: Tokens, lengths: tuple[int, ...]) -> Tensor:
        if self.takes_packs and len(lengths) > 1:
            numbers = _sequence_numbers(lengths, tokens[2].device)
            out: Tensor = self._called(tokens, seq_idx=numbers, return_final_states=False)
            return out
        return self._runs(tokens, lengths)[0]

    def in_chunks(self, tokens: Tokens, lengths: tuple[int, ...]) -> Chunks:
        c, _, _, step = tokens
        out, left = self._runs(tokens, lengths)
        parts = torch.split_with_sizes(step[0] * self.decay.to(step.dtype), lengths)
        sums = [part.cumsum(0) for part in parts]  # per run: a total over all runs would lose small values
        factors = torch.cat(sums).exp()
        whole = torch.stack([part[-1] for part in sums]).exp()
        return Chunks(out, (c[0], factors), whole[..., None, None].to(left.dtype), left)

    def read(self, reads: Tokens, state: Tensor) -> Tensor:
        read: Tensor = _Read.apply(*reads, state)  # type: ignore[no-untyped-call]
        return read

    def idle(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        _, b, x, _ = tokens
        heads, dtype = x.shape[2], lse_dtype(x.dtype)
        return x.new_ones(heads, 1, 1, dtype=dtype), x.new_zeros(heads, b.shape[-1], x.shape[-1], dtype=dtype)

    def _runs(self, tokens: Tokens, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        def batch(some: Tokens) -> tuple[Tensor, Tensor]:
            out, left = self._called(some, return_final_states=True)
            return out, left.mT

        return in_batches(tokens, lengths, self.chunk_size, batch)

    def _called(self, tokens: Tokens, **more: Any) -> Any:
        c, b, x, step = tokens
        return self.call(x, step, self.decay, b, c, chunk_size=self.chunk_size, D=self.skip, **more)


class _Read(torch.autograd.Function):
    """Readout factors * (c @ state); backward recomputes the product instead of saving a layer-wide fp32 tensor."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, factors: Tensor, state: Tensor) -> Tensor:
        ctx.save_for_backward(c, factors, state)
        return factors.to(state.dtype)[..., None] * _product(c, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, factors, state = ctx.saved_tensors
        of_factors = (grad * _product(c, state)).sum(-1)
        of_product = _by_groups(factors.to(state.dtype)[..., None] * grad, c.shape[1])
        of_c = of_product @ _columns(state, c.shape[1]).mT
        of_state = c.to(state.dtype).transpose(0, 1).mT @ of_product  # [G, N, H / G x P]
        return (
            of_c.transpose(0, 1).to(c.dtype),
            of_factors.to(factors.dtype),
            of_state.unflatten(-1, (-1, state.shape[-1])).transpose(1, 2).reshape(state.shape),
        )


def _product(c: Tensor, state: Tensor) -> Tensor:
    """Return the reads [T, H, P] of states [H, N, P] by c [T, G, N], per group of heads."""
    found = c.to(state.dtype).transpose(0, 1) @ _columns(state, c.shape[1])
    return found.transpose(0, 1).reshape(c.shape[0], len(state), -1)


def _columns(state: Tensor, groups: int) -> Tensor:
    """Return the states of each group's heads side by side, [G, N, H / G x P]."""
    return torch.unflatten(state, 0, (groups, -1)).transpose(1, 2).flatten(2)


def _by_groups(rows: Tensor, groups: int) -> Tensor:
    """Reshape [T, H, P] to [G, T, H / G x P]."""
    return torch.unflatten(rows, 1, (groups, -1)).flatten(2).transpose(0, 1)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _sequence_numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the sequence number [1, T] of each token."""
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return to_device(torch.from_numpy(numbers), device).unsqueeze(0)
