"""Layers with a state of fixed size, over a ring's shards: linear attention and state spaces.

Each head of such a layer carries a state S [Dk, Dv] along a sequence. A token's update of the state is affine, and so
is a whole chunk's: S <- A S + B. The output at a token is z_t plus a readout of its chunk's initial state. A
`StateRule` computes A, B, z and the readout by one call of an unmodified kernel, before the initial states are known.
`linear_states` then provides these, and the readouts are added. On a ring of one, the rule runs on whole sequences.

With Ulysses, the members of a Ulysses group exchange tokens for heads of all inputs of a rule, as in attention
(`shared_heads`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.shared_heads import Swapped, UlyssesExchange
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.recomputation.recompute import staged_call
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.states.linear_convolution import begin_layer
from fcp_cli.runtime.states.linear_states import states_at_chunks

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
    for group in _alike(lengths, block):
        parts = (
            pad_sequence([tensor[0, ends[run] - lengths[run] : ends[run]] for run in group], batch_first=True)
            for tensor in tokens
        )
        out, left = batch(tuple(parts))
        for place, run in enumerate(group):
            outs[run], lefts[run] = out[place, : lengths[run]], left[place]
    return torch.cat(outs).unsqueeze(0), torch.stack(lefts)


def _alike(lengths: tuple[int, ...], block: int) -> list[list[int]]:
    """Group runs by their number of blocks."""
    groups: dict[int, list[int]] = {}
    for run, length in enumerate(lengths):
        groups.setdefault(-(-length // block), []).append(run)
    return list(groups.values())


def _compute(rule: StateRule, tokens: Tokens, ring: Ring) -> Tensor:
    _check_heads(rule, tokens, ring)
    held, (batch, given) = ring.tokens, tokens[0].shape[:2]
    begin_layer(ring, batch, given)
    padding = given - held
    if ring.degree == 1:
        out = rule.alone(tokens, (*ring.layout.lengths, *([padding] if padding else [])))
    else:
        out = _in_set(rule, _rows(tokens, 0, held), ring)
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
    keys, values, shared = tokens[1].shape[2], tokens[2].shape[2], ring.heads_degree
    if values % shared or (keys % shared and shared % keys):
        raise RunError(
            f"the plan shares heads among {shared} ranks, which {rule.heads_said.format(keys=keys, values=values)} "
            "cannot be; plan with 'fcp plan --attention ring'"
        )


def _in_set(rule: StateRule, own: Tokens, ring: Ring) -> Tensor:
    """Return a member's outputs [1, T, H, Dv] of the rule, without padding, with head exchange if there is Ulysses."""
    if ring.heads_degree == 1:
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
